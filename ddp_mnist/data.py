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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_mnist.decode import IMAGE_SHAPE, Preparation, decoder_digest
from ddp_mnist.errors import DataError, StorageError
from ddp_mnist.seeding import generator
from ddp_mnist.sources import Decoded, Source, find_source

CACHE_FORMAT = 3
METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order
SPLITS = ("train", "test")
TENSORS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class ImageData:
    """A decoded data set.

    Attributes:
        name: for people, e.g. mnist.
        source: kind and place, e.g. hub:ylecun/mnist.
        digest: SHA-256 of pixels, labels, class names and conversions.
        classes: class names; a label is an index into it.
        preparation: how the images were made.
        train_images, test_images: uint8 [N, 28, 28], read-only by convention.
        train_labels, test_labels: int64 [N].
        warnings: what happened while it was opened.
    """

    name: str
    source: str
    digest: str
    classes: list[str]
    preparation: Preparation
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    warnings: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What was converted, one sentence each."""
        return self.preparation.notes

    def to(self, device: torch.device) -> ImageData:
        """The same in a device's memory, where a whole MNIST takes 55 MB; on a CPU no copy."""
        if device.type == "cpu":
            return self  # Accelerate numbers each process's CPU: .to() would unmap the file
        moved = {name: getattr(self, name).to(device) for name in TENSORS}
        return dataclasses.replace(self, **moved)

    def describe(self) -> dict[str, Any]:
        """What a summary says of it."""
        return {
            "name": self.name,
            "source": self.source,
            "digest": self.digest,
            "train_rows": len(self.train_labels),
            "test_rows": len(self.test_labels),
        }


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


# --- Rows and their order


def split_rows(rows: int, val_size: int) -> tuple[Tensor, Tensor]:
    """Row numbers for training and for validation, int64; the same for every seed and run."""
    order = torch.randperm(rows, generator=generator("validation"))
    return order[val_size:], order[:val_size]


class Rows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Some rows of a split, fetched a whole batch at a time.

    A batch is (images uint8 [B, 28, 28], labels int64 [B], numbers int64 [B]); a number is the
    position among these rows, which augmentation is looked up by.
    """

    def __init__(self, images: Tensor, labels: Tensor, rows: Tensor | None = None) -> None:
        self.images, self.labels = images, labels
        rows = torch.arange(len(labels)) if rows is None else rows
        self.rows = rows.to(images.device)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        images, labels, numbers = self.__getitems__([number])
        return images[0], labels[0], numbers[0]

    def __getitems__(self, numbers: list[int] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        numbers = torch.as_tensor(numbers, device=self.rows.device)
        rows = self.rows[numbers]
        # images[rows] would copy pixel by pixel: four times as long
        return self.images.index_select(0, rows), self.labels[rows], numbers


class GlobalBatches(Sampler[Any]):
    """A batch sampler of GLOBAL batches: the same on every rank, a function of (seed, epoch).

    Accelerate deals each one out to the ranks (`split_batches=True`). The rows after an epoch's
    last full batch are left out, others in each epoch.

    Args:
        rows: how many there are.
        batch_size: of one optimizer step, over all ranks.
        seed: of the order.
        parts: micro-batches that a step is split into, each of them dealt out to all ranks.
        device: where the rows lie; an epoch's order is sent there once, not batch by batch.
    """

    drop_last = True

    def __init__(
        self,
        rows: int,
        batch_size: int,
        seed: int,
        parts: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self.rows, self.seed, self.parts, self.device = rows, seed, parts, device
        self.batch_size = batch_size // parts  # the name that Accelerate reads
        self.steps_per_epoch = rows // batch_size
        self.epoch = self.first_step = 0

    def begin(self, epoch: int, first_step: int = 0) -> None:
        """The next iteration is that of `epoch`, from its optimizer step `first_step` on."""
        self.epoch, self.first_step = epoch, first_step

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.first_step) * self.parts

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(self.rows, generator=generator("order", self.seed, self.epoch))
        order = order.to(self.device)
        for batch in range(self.first_step * self.parts, self.steps_per_epoch * self.parts):
            yield order[batch * self.batch_size : (batch + 1) * self.batch_size]


def as_fetched(batch: Any) -> Any:
    """For DataLoader's collate_fn: Rows already returns whole batches."""
    return batch


def train_loader(rows: Rows, batches: GlobalBatches) -> DataLoader[Any]:
    # A generator of its own: iterating would otherwise draw a seed from the global one.
    return DataLoader(
        rows, batch_sampler=batches, collate_fn=as_fetched, generator=torch.Generator()
    )


def eval_loader(rows: Rows, batch_size: int) -> DataLoader[Any]:
    """In order, all rows; the last batch may be short."""
    return DataLoader(
        rows, batch_size=batch_size, collate_fn=as_fetched, generator=torch.Generator()
    )
