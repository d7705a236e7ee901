"""The cache: each data set is decoded once, into a file that all processes of a machine map."""

import dataclasses
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddp_mnist.data.batches import TENSORS, ImageData
from ddp_mnist.data.decode import Preparation, decoder_digest
from ddp_mnist.data.sources import Source, find_source
from ddp_mnist.errors import DataError, StorageError, reason

CACHE_FORMAT = 4
METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order
MOVE = "use --cache-dir or DDP_MNIST_CACHE to put it elsewhere"
Log = Callable[[str], None] | None


def cache_folder(cache_dir: str | None) -> Path:
    """Return --cache-dir, else DDP_MNIST_CACHE, else ~/.cache/ddp_mnist."""
    chosen = cache_dir or os.environ.get("DDP_MNIST_CACHE") or "~/.cache/ddp_mnist"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:  # no home folder, as in some containers
        raise StorageError(f"{chosen}: {error}; {MOVE}") from error


def choose(dataset: str, cache_dir: str | None = None, log: Log = None) -> tuple[str, list[str]]:
    """Return the data set to load, and warnings about the choice.

    `auto` is mnist where it can be had, else digits. Any other name is what it says, or an error.
    """
    if dataset != "auto":
        return dataset, []
    try:
        return "mnist", load("mnist", cache_dir, log=log).warnings
    except DataError as error:
        return "digits", [
            f"MNIST could not be had: {str(error).partition(';')[0]}",
            "INSTEAD OF MNIST, this is a run on the 1,797 digits built into scikit-learn",
        ]


def load(
    dataset: str, cache_dir: str | None = None, *, refresh: bool = False, log: Log = None
) -> ImageData:
    """Return the data set from the cache; read and decode it first if it is not there.

    One process per machine decodes, under a file lock; the others wait for it and map its file.
    `refresh` reads it again although it is cached, and removes what other decoders made of it.
    `log` is called with a line when reading begins, as it can take a minute. Raise as `find_source`
    and `Source.read` do, and StorageError where the cache folder cannot be written.
    """
    source = find_source(dataset)
    stem, path = _stem_and_path(source, cache_dir)
    if not refresh and (data := _open(path, source)):
        return data
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f"{stem}.lock"):
            # Another process may have built it while this one waited for the lock.
            if not refresh and (data := _open(path, source)):
                return data
            replaced = path.exists() and not refresh
            if log:
                log(f"reading    {source.name}, decoded once into {folder}")
            for leftover in folder.glob(f"{stem}-*.tmp"):
                leftover.unlink()  # of a builder that was killed; nobody else writes now
            _build(path, source)
            if refresh:
                for other in set(folder.glob(f"{stem}-*.safetensors")) - {path}:
                    other.unlink()
            if not (data := _open(path, source)):
                raise OSError(f"{path.name} cannot be read back")
    except (OSError, SafetensorError) as error:
        why = reason(error)
        raise StorageError(f"{folder}: the cache cannot be written ({why}); {MOVE}") from error
    if replaced:
        data.warnings.append(f"{path} was damaged or out of date and was built again")
    return data


def cached(dataset: str, cache_dir: str | None = None) -> ImageData | None:
    """Return the data set if it is in the cache and whole. Raises as `find_source` does."""
    source = find_source(dataset)
    return _open(_stem_and_path(source, cache_dir)[1], source)


def _stem_and_path(source: Source, cache_dir: str | None) -> tuple[str, Path]:
    """Return the beginning of a file name that two sources never share, and the file.

    The file is this decoder's own: an edited clone shares the folder, and not the file.
    """
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name)[:60]
    place = hashlib.sha256(os.fsencode(source.place)).hexdigest()[:8]
    stem = f"{source.kind}-{readable}-{place}"
    name = f"{stem}-{CACHE_FORMAT}-{decoder_digest()}.safetensors"
    return stem, cache_folder(cache_dir) / name


def _open(path: Path, source: Source) -> ImageData | None:
    """Return the cached data set; None if it is not there, damaged, or not of these files."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[METADATA_KEY])
            # Mapped, not read: the processes of a machine share one copy in memory.
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        # 18 ms, where SHA-256 takes up to 140; a damaged cache would cost a wrong result.
        whole = about.pop("checksum") == _crc32(tensors, about)
        if not whole or about.pop("fingerprint") != source.fingerprint:
            return None
        about["preparation"] = Preparation(**about["preparation"])
        return ImageData(source.name, f"{source.kind}:{source.place}", **about, **tensors)
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _build(path: Path, source: Source) -> None:
    """Decode into a temporary name and rename it: a file under its own name is whole."""
    fingerprint, decoded = source.fingerprint, source.read()
    tensors = {
        f"{split}_{kind}": torch.from_numpy(array.copy())
        for kind, arrays in (("images", decoded.images), ("labels", decoded.labels))
        for split, array in arrays.items()
    }
    digest = hashlib.sha256(json.dumps([decoded.classes, decoded.notes]).encode())
    for part in _content(tensors):
        digest.update(part)
    about: dict[str, Any] = {
        "classes": decoded.classes,
        "preparation": dataclasses.asdict(decoded.preparation()),
        "digest": digest.hexdigest(),
        "fingerprint": fingerprint,
    }
    about["checksum"] = _crc32(tensors, about)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(about, sort_keys=True)})
        temporary.chmod(0o644)  # safetensors writes 0600; a cache may be shared by a group
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _crc32(tensors: dict[str, Tensor], about: dict[str, Any]) -> int:
    """Return a checksum of all that the file holds, which finds damage."""
    checksum = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for part in _content(tensors):
        checksum = zlib.crc32(part, checksum)
    return checksum


def _content(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    for name in TENSORS:
        yield f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode()
        yield tensors[name].numpy().data
