"""A data set as two pairs of tensors, memory-mapped from the cache, and the order it is read in."""

from __future__ import annotations

import contextlib
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
from ddp_mnist.data.decode import IMAGE_SHAPE, Decoded, Preparation, decoder_digest
from ddp_mnist.data.sources import Source, find_source
from ddp_mnist.errors import DataError, StorageError

CACHE_FORMAT = 3

METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order

SPLITS = ("train", "test")

# --- The cache


def cache_folder(cache_dir: str | None) -> Path:
    """--cache-dir, else DDP_MNIST_CACHE, else ~/.cache/ddp_mnist."""
    chosen = cache_dir or os.environ.get("DDP_MNIST_CACHE") or "~/.cache/ddp_mnist"
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:  # no home folder, as in some containers
        raise StorageError(f"{chosen}: {error}; use --cache-dir or DDP_MNIST_CACHE") from error


def silent(_line: str) -> None:
    pass


def choose(
    dataset: str, cache_dir: str | None = None, say: Callable[[str], None] = silent
) -> tuple[str, list[str]]:
    """What to load, and what a person has to be told of the choice.

    `auto` is mnist where it can be had, else digits. Any other name is what it says, or an error.
    """
    if dataset != "auto":
        return dataset, []
    try:
        return "mnist", load("mnist", cache_dir, say=say).warnings
    except DataError as error:
        return "digits", [
            f"MNIST could not be had: {str(error).partition(';')[0]}",
            "INSTEAD OF MNIST, this is a run on the 1,797 digits built into scikit-learn",
        ]


def load(
    dataset: str,
    cache_dir: str | None = None,
    *,
    refresh: bool = False,
    say: Callable[[str], None] = silent,
) -> ImageData:
    """Opens the data set from the cache; reads and decodes it first if it is not there.

    One process per machine decodes, under a file lock; the others wait for it and map its file.

    Args:
        dataset: what `choose` returned.
        cache_dir: see `cache_folder`.
        refresh: read it anew although it is cached.
        say: is told when that begins, as it can take a minute.

    Raises:
        UsageError, DataError: no such data set, or it cannot be read.
        StorageError: the cache folder cannot be written.
    """
    source = find_source(dataset)
    folder = cache_folder(cache_dir)
    fingerprint = _fingerprint(source)
    path = folder / f"{_cache_name(source)}.safetensors"
    if not refresh and (data := _open(path, source, fingerprint)):
        return data
    with _storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            # Another process may have built it while this one waited for the lock.
            if not refresh and (data := _open(path, source, fingerprint)):
                return data
            replaced = path.exists() and not refresh
            say(f"reading    {source.name}, decoded once into {folder}")
            _build(path, source, fingerprint)
            data = _open(path, source, fingerprint)
    if data is None:
        raise StorageError(
            f"{path}: what was written cannot be read back; check the disk, or use --cache-dir"
        )
    if replaced:
        data.warnings.append(f"{path} was damaged or out of date and was built anew")
    return data


def cached(dataset: str, cache_dir: str | None = None) -> ImageData | None:
    """The data set, if it is in the cache and whole. Raises as `find_source` does."""
    source = find_source(dataset)
    path = cache_folder(cache_dir) / f"{_cache_name(source)}.safetensors"
    return _open(path, source, _fingerprint(source))


def _cache_name(source: Source) -> str:
    """A file name that two sources never share, and two decoders neither: an edited clone has the
    folder in common with others, and not the file."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name)[:60]
    key = os.fsencode(source.place) + f"/{CACHE_FORMAT}/{decoder_digest()}".encode()
    return f"{source.kind}-{readable}-{hashlib.sha256(key).hexdigest()[:8]}"


def _fingerprint(source: Source) -> str:
    what = [CACHE_FORMAT, decoder_digest(), source.kind, source.place, source.fingerprint()]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()


def _open(path: Path, source: Source, fingerprint: str) -> ImageData | None:
    """The cached data set, or None if it is not there, damaged, or not of these files and code."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})[METADATA_KEY])
            # Mapped, not read: the processes of a machine share one copy in memory.
            tensors = {name: file.get_tensor(name) for name in TENSORS}
        # 18 ms, where SHA-256 takes up to 140; a damaged cache would cost a wrong result.
        whole = about["fingerprint"] == fingerprint and about["checksum"] == _crc32(tensors, about)
        whole = whole and _have_expected_form(tensors)
        preparation = Preparation(**about["preparation"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    if not whole:
        return None
    return ImageData(
        name=source.name,
        source=f"{source.kind}:{source.place}",
        digest=about["digest"],
        classes=about["classes"],
        preparation=preparation,
        **tensors,
    )


def _have_expected_form(tensors: dict[str, Tensor]) -> bool:
    """Whether these are images and labels of the shapes and dtypes that this code computes with."""
    splits = [(tensors[f"{split}_images"], tensors[f"{split}_labels"]) for split in SPLITS]
    return all(
        (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        and (images.shape[1:], labels.shape) == (IMAGE_SHAPE, images.shape[:1])
        for images, labels in splits
    )


def _build(path: Path, source: Source, fingerprint: str) -> None:
    """Decodes into a temporary name and renames: a file under its own name is whole."""
    for leftover in path.parent.glob(f"{path.stem}.*.tmp"):
        leftover.unlink()  # of a builder that was killed; nobody else writes under this lock
    decoded = source.read()
    tensors = {
        f"{split}_{kind}": torch.from_numpy(array.copy())
        for kind, arrays in (("images", decoded.images), ("labels", decoded.labels))
        for split, array in arrays.items()
    }
    about: dict[str, Any] = {
        "classes": decoded.classes,
        "preparation": dataclasses.asdict(decoded.preparation()),
        "digest": _sha256(tensors, decoded),
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
    """Of all that the file holds: finds damage, where the digest tells data sets apart."""
    told = [about[key] for key in ("classes", "preparation", "digest", "fingerprint")]
    checksum = zlib.crc32(json.dumps(told, sort_keys=True).encode())
    for name in TENSORS:
        checksum = zlib.crc32(_kind(name, tensors[name]), checksum)
        checksum = zlib.crc32(tensors[name].numpy().data, checksum)
    return checksum


def _sha256(tensors: dict[str, Tensor], decoded: Decoded) -> str:
    """Of pixels, labels, class names and conversions."""
    sha = hashlib.sha256(json.dumps([decoded.classes, decoded.notes]).encode())
    for name in TENSORS:
        sha.update(_kind(name, tensors[name]))
        sha.update(tensors[name].numpy().data)
    return sha.hexdigest()


def _kind(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {list(tensor.shape)}".encode()


@contextlib.contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(
            f"{folder}: the cache cannot be written ({reason}); use --cache-dir or DDP_MNIST_CACHE"
            " to put it elsewhere"
        ) from error
