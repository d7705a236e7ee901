"""The cache: each data set is decoded once, into files that all of a machine's processes map."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data.image_format import KEYS, TENSORS, Decoded, ImageFormat, Shape
from ddp_mnist.data.sources import Source, find_source
from ddp_mnist.errors import DataError, StorageError, blame, reason
from ddp_mnist.system.locks import take

if TYPE_CHECKING:
    from ddp_mnist.data.batches import ImageData

ABOUT = "about.json"  # everything but the arrays
ARRAYS = (*TENSORS, *KEYS)
DECODER = sorted(Path(__file__).parent.glob("*.py"))  # all of data/, so that nothing is forgotten
HASH = 8  # hex digits, of the source and of the decoder in a folder's name
MOVE = "use --cache-dir or DDP_MNIST_CACHE to put it elsewhere"
Log = Callable[[str], None] | None


def cache_folder(cache_dir: str | None) -> Path:
    """Return --cache-dir, else DDP_MNIST_CACHE, else ~/.cache/ddp_mnist."""
    chosen = cache_dir or os.environ.get("DDP_MNIST_CACHE") or "~/.cache/ddp_mnist"
    with blame(chosen, StorageError, MOVE):  # without a home folder, as in some containers
        return Path(chosen).expanduser()


def choose(
    dataset: str, cache_dir: str | None, image_options: ImageOptions = AS_THEY_ARE, log: Log = None
) -> tuple[str, list[str]]:
    """Return the data set to load, and warnings about the choice but for those of `load`.

    `auto` is mnist if it is available, else digits. Any other name is used as given.
    """
    if dataset != "auto":
        return dataset, []
    try:
        warnings = prepare("mnist", cache_dir, image_options, log=log)["warnings"]
    except DataError as error:
        return "digits", [
            f"MNIST is not available: {str(error).partition(';')[0]}",
            "INSTEAD OF MNIST, this is a run on the 1,797 digits built into scikit-learn",
        ]
    said_by_load = find_source("mnist", image_options).warnings
    return "mnist", [each for each in warnings if each not in said_by_load]


def load(
    dataset: str,
    cache_dir: str | None = None,
    image_options: ImageOptions = AS_THEY_ARE,
    log: Log = None,
) -> "ImageData":
    """Return the data set from the cache, mapped; read and decode it first if it is not cached.

    Raises as `prepare` does.
    """
    return _as_images(prepare(dataset, cache_dir, image_options, log=log))


def prepare(
    dataset: str,
    cache_dir: str | None = None,
    image_options: ImageOptions = AS_THEY_ARE,
    *,
    refresh: bool = False,
    log: Log = None,
) -> dict[str, Any]:
    """Return the fields of ImageData, with arrays for tensors: importing torch takes a second.

    One process per machine decodes, under a file lock; the others wait for it and map its files.
    `refresh` decodes again even if cached, and deletes what other decoders wrote. `log` is called
    with a line when decoding begins, as it can take a minute.

    Raise UsageError or DataError if the data set does not exist or cannot be read, StorageError if
    the cache folder cannot be written.
    """
    source = find_source(dataset, image_options)
    stem, path = _stem_and_path(source, cache_dir)
    if not refresh and (data := _open(path, source)):
        return data
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with take(folder / f"{stem}.lock", wait=True):
            # Another process may have built it while this one waited for the lock.
            if not refresh and (data := _open(path, source)):
                return data
            replaced = path.exists() and not refresh
            for leftover in folder.glob(f"{stem}-*.tmp"):
                shutil.rmtree(leftover)  # of a killed process; no other writes now
            _build(path, source, log)
            for other in folder.glob(f"{stem}-{'?' * HASH}") if refresh else ():
                if other != path:
                    shutil.rmtree(other)
            if not (data := _open(path, source)):
                raise OSError(f"{path.name} cannot be read back")
    except OSError as error:
        why = f"the cache cannot be written ({reason(error)})"
        raise StorageError(f"{folder}: {why}; {MOVE}") from error
    if replaced:
        data["warnings"].append(f"{path} was incomplete or out of date and was built again")
    return data


def cached(
    dataset: str, cache_dir: str | None = None, image_options: ImageOptions = AS_THEY_ARE
) -> "ImageData | None":
    """Return the data set if it is in the cache. Raises as `find_source` does."""
    source = find_source(dataset, image_options)
    fields = _open(_stem_and_path(source, cache_dir)[1], source)
    return _as_images(fields) if fields else None


def _as_images(fields: dict[str, Any]) -> "ImageData":
    import torch

    from ddp_mnist.data.batches import ImageData

    tensors = {name: torch.from_numpy(fields[name]) for name in TENSORS}
    return ImageData(**fields | tensors)


def _stem_and_path(source: Source, cache_dir: str | None) -> tuple[str, Path]:
    """Return the prefix of the source's folder names, and the folder for this decoder.

    A clone with an edited decoder shares the cache but not the folder.
    """
    readable = re.sub(r"[^A-Za-z0-9._-]+", "_", source.name)[:60]
    options = json.dumps(dataclasses.asdict(source.image_options))
    place = hashlib.sha256(os.fsencode(source.place) + options.encode()).hexdigest()[:HASH]
    stem = f"{source.kind}-{readable}-{place}"
    code = b"".join(path.read_bytes() for path in DECODER)
    decoder = hashlib.sha256(code).hexdigest()[:HASH]
    return stem, cache_folder(cache_dir) / f"{stem}-{decoder}"


def _open(path: Path, source: Source) -> dict[str, Any] | None:
    """Return the fields of ImageData; None if they are missing, cut short, or of other files."""
    try:
        about = dict(json.loads((path / ABOUT).read_text("utf-8")))
        outside = about.pop("outside")
        same = outside == source.facts_outside(name for name, *_ in outside)
        if not same or about.pop("fingerprint") != source.fingerprint:
            return None
        # Mapped, not read: the processes of a machine share one copy in memory. "c" looks writable
        # to torch, which warns of anything else; a write would stay in this process.
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="c") for name in ARRAYS}
        about["image_format"] = ImageFormat.from_dict(about["image_format"])
        of_source = {"name": source.name, "source": f"{source.kind}:{source.place}"}
        return about | arrays | of_source | {"warnings": [*source.warnings]}
    except (OSError, EOFError, KeyError, TypeError, ValueError):
        return None


def _build(path: Path, source: Source, log: Log) -> None:
    """Decode into a temporary folder, then rename it: a folder with its final name is complete."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")

    def reserve(shape: Shape, rows: dict[str, int]) -> dict[str, np.ndarray]:
        """Allocate and map the images' files, so that images are decoded straight into them.

        A second call is for the same images, some of which were drawn for testing.
        """
        channels, height, width = shape
        count, kind = sum(rows.values()), "in colour" if channels == 3 else "grey"
        mb = count * math.prod(shape) / 1e6
        what = f"{count:,} images of {height}x{width} {kind} take {mb:,.0f} MB"
        if log and not any(temporary.iterdir()):
            log(f"reading    {source.name}, decoded once into {path.parent}: {what}")
        try:
            if count * math.prod(shape) > shutil.disk_usage(temporary).free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return {
                split: _allocate(temporary / f"{split}_images.npy", (count, *shape))
                for split, count in rows.items()
            }
        except OSError as error:
            raise StorageError(
                f"{path.parent}: {what}, and the cache cannot be written ({reason(error)});"
                f" {MOVE}, or give a smaller --image-size"
            ) from error

    temporary.mkdir()
    try:
        fingerprint, decoded = source.fingerprint, source.read(reserve)
        for kind, parts in (("labels", decoded.labels), ("keys", decoded.keys)):
            for split, values in parts.items():
                np.save(temporary / f"{split}_{kind}.npy", values)
        about: dict[str, Any] = {
            "classes": decoded.classes,
            "image_format": dataclasses.asdict(decoded.image_format()),
            "digest": _digest(decoded),
            "fingerprint": fingerprint,
            "outside": source.facts_outside(decoded.paths.values()),
            "test_files": _test_files(decoded, source),
            "test_drawn": decoded.test_drawn,
            "careful": decoded.careful,
        }
        (temporary / ABOUT).write_text(json.dumps(about, sort_keys=True), encoding="utf-8")
        for file in temporary.iterdir():  # a power cut must leave no zeros under the final name
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if path.exists():
            shutil.rmtree(path)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _test_files(decoded: Decoded, source: Source) -> list[str]:
    """Return each test image's path in its folder, or "" if it is not a separate file."""
    paths = [decoded.paths.get(("test", row), "") for row in range(len(decoded.labels["test"]))]
    return [path.removeprefix(f"{source.place}/") for path in paths if source.kind == "folder"]


def _allocate(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return a new file of uint8, mapped. Raise OSError if the disk has no room for it.

    If blocks were missing, a write to the mapped file would end the process by SIGBUS, without a
    message: a quota may be full although the disk is not, and others may fill it meanwhile.
    """
    path.unlink(missing_ok=True)  # processes that have mapped it keep it
    images = np.lib.format.open_memmap(path, "w+", np.uint8, shape)
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return images


def _digest(decoded: Decoded) -> str:
    """Return the SHA-256 of pixels, labels and class names, by which runs recognise a data set."""
    digest = hashlib.sha256(json.dumps(decoded.classes).encode())
    for name in TENSORS:
        split, _, kind = name.partition("_")
        array = getattr(decoded, kind)[split]
        digest.update(f"{name} {array.dtype} {list(array.shape)}".encode())
        digest.update(array.data)
    return digest.hexdigest()
