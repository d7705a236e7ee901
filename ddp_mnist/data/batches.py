"""The data set as training reads it: rows of images, and their order.

N processes train as one only if together they read the same batches. So the sampler yields GLOBAL
batches, the same on every rank, and Accelerate gives each rank its part of each batch
(`DataLoaderConfiguration(split_batches=True)`). Nothing here knows its rank.
"""

import dataclasses
import json
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_mnist.data import held_out
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.data.seeding import generator
from ddp_mnist.errors import DataError


@dataclass(frozen=True)
class ImageData:
    """A decoded data set, read-only by convention: processes share its memory."""

    name: str  # for people, e.g. mnist
    source: str  # kind and place, e.g. hub:ylecun/mnist
    digest: str  # SHA-256 of pixels, labels and class names, and of how a test was drawn
    classes: list[str]  # their names; a label is an index into these. [] if targets are numbers
    image_format: ImageFormat  # how the images were prepared
    images: Tensor  # uint8 [N, C, H, W], of all splits
    targets: Tensor  # int64 [N], labels; or float32 [N, columns], of a task without classes
    keys: np.ndarray  # uint64 [N], a hash of each image's pixels, see held_out.py
    rows: dict[str, np.ndarray]  # int64, of train, test and, once held out of train, validation
    files: Path | None = None  # a JSON list of the images' paths in their folder, "" if unknown
    test_share: float | None = None  # of all, drawn for want of a test split; 0: all are the test
    careful: list[str] = field(default_factory=list)  # what may spoil a result, one sentence each
    warnings: list[str] = field(default_factory=list)  # messages from opening it
    left_out: Sequence[int] = ()  # keys of images that neither validate nor test, see `without`

    def to_if_it_fits(self, device: torch.device) -> "ImageData":
        """Return the data set in the device's memory (55 MB for MNIST) if half of that is enough.

        Otherwise, and on a CPU, it stays mapped from the disk, and batches are sent one by one.
        """
        # Accelerate calls a process's CPU cpu:N; .to() would unmap the file.
        if device.type == "cpu" or self.images.nbytes > torch.cuda.mem_get_info(device)[0] / 2:
            return self
        images, targets = self.images.to(device), self.targets.to(device)
        return dataclasses.replace(self, images=images, targets=targets)

    def hold_out(self, val_size: int) -> "ImageData":
        """Return the data set with `val_size` train images held out, the same for every seed.

        If the test split was drawn from train too, their number is approximate.
        """
        train = self.rows["train"]
        keys, strata = self.keys[train], held_out.strata(self.targets.numpy()[train])
        held = train[held_out.validation_rows(keys, strata, val_size, bool(self.test_share))]
        rows = {"train": np.setdiff1d(train, held), "validation": held}
        return dataclasses.replace(self, rows=self.rows | rows)

    def without(self, seen: Collection[int], why: str) -> "ImageData":
        """Return the data set without the validation and test images whose keys were `seen`.

        Raise DataError, which begins with `why`, if nothing is left of a split.
        """
        rows, careful, left_out = dict(self.rows), [*self.careful], list[int]()
        for split in ("validation", "test"):
            there = rows.get(split, np.arange(0))
            is_seen = np.isin(self.keys[there], np.asarray(seen, np.uint64))
            if is_seen.any():
                those = f"{why}: {is_seen.sum():,} of {len(there):,} {split} images"
                if is_seen.all():
                    raise DataError(f"{those}; give images that it has not seen, for {split}")
                careful.append(f"{those}, which are left out")
                left_out += self.keys[there[is_seen]].tolist()
                rows[split] = there[~is_seen]
        return dataclasses.replace(self, rows=rows, careful=careful, left_out=left_out)

    def split(self, name: str) -> "Rows":
        """Return the rows of train, validation or test; none of a split that there is not."""
        rows = self.rows.get(name, np.arange(0))
        return Rows(self.images, self.targets, torch.from_numpy(rows))

    def splits(self) -> tuple["Rows", "Rows", "Rows"]:
        """Return the rows to train on, to validate on and to test on."""
        return self.split("train"), self.split("validation"), self.split("test")

    def trained_on(self) -> np.ndarray:
        """Return the distinct keys, sorted, of the train images that are not held out."""
        return np.unique(self.keys[self.rows["train"]])

    def files_of(self, rows: Iterable[int]) -> dict[int, str]:
        """Return the files, relative to their folder, of those of the rows that have one."""
        files = json.loads(self.files.read_text()) if self.files else []
        return {row: files[row] for row in rows if files and files[row]}

    def per_class(self) -> dict[str, list[int]]:
        """Return the number of images of each class, by split, validation's in train."""
        rows = {"train": [*self.rows["train"], *self.rows.get("validation", [])]}
        rows["test"] = [*self.rows["test"]]
        labels, count = self.targets.cpu().numpy(), len(self.classes)
        return {s: np.bincount(labels[each], minlength=count).tolist() for s, each in rows.items()}

    def describe(self) -> dict[str, Any]:
        """Return the data set's entry in summary.json."""
        validation = len(self.rows.get("validation", ()))
        return {
            "name": self.name,
            "source": self.source,
            "digest": self.digest,
            "train_rows": len(self.rows["train"]) + validation,
            "test_rows": len(self.rows["test"]),
            "val_rows": validation,
        }


# --- Rows


class Rows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """A subset of the images, read a batch at a time; `rows`=None takes all.

    A batch is (images uint8 [B, C, H, W], their targets, indices int64 [B]). An index is the
    position among these rows; augmentation looks up its random numbers by it.
    """

    def __init__(self, images: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        self.images, self.targets = images, targets
        rows = torch.arange(len(targets)) if rows is None else rows
        self.rows = rows.to(images.device)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, indices: list[int] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        indices = torch.as_tensor(indices, device=self.rows.device)
        rows = self.rows[indices]
        # images[rows] would copy pixel by pixel: four times as long
        return self.images.index_select(0, rows), self.targets[rows], indices

    __getitems__ = take  # the name by which DataLoader calls it


def eval_batch_size(images: Tensor, on_gpu: bool = False) -> int:
    """Return how many of these images, [N, C, H, W], to evaluate at once; it changes no result.

    500 small images would not keep a GPU busy; 55 of 224x224 do.
    """
    return max(1, min(4000 if on_gpu else 500, 2**23 // math.prod(images.shape[1:])))


# --- Their order


class GlobalBatchSampler(Sampler[Any]):
    """A batch sampler of GLOBAL batches: the same on every rank, a function of (seed, epoch).

    A step takes `batch_size` images over all ranks, as `grad_accum` micro-batches. Rows that do
    not fill a last step are left out; the shuffle leaves out others in each epoch. An epoch's order
    is sent to the device of the rows once, not batch by batch.
    """

    drop_last = True  # Accelerate reads this name and `batch_size`

    def __init__(self, rows: Rows, batch_size: int, seed: int, grad_accum: int = 1) -> None:
        self.rows, self.seed, self.grad_accum = rows, seed, grad_accum
        self.steps_per_epoch = len(rows) // batch_size
        self.micro_batch_size = batch_size // grad_accum
        self.batch_size = self.micro_batch_size  # what is yielded: Accelerate reads this name
        self.epoch = self.skip_steps = 0

    def start_epoch(self, epoch: int, skip_steps: int = 0) -> None:
        """Make the next iteration that of `epoch`, without its first `skip_steps` optimizer steps.

        A resumed run starts in the middle of an epoch without reading earlier batches.
        """
        self.epoch, self.skip_steps = epoch, skip_steps

    def __len__(self) -> int:
        return (self.steps_per_epoch - self.skip_steps) * self.grad_accum

    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(len(self.rows), generator=generator("order", self.seed, self.epoch))
        micro_batches = order.to(self.rows.images.device).split(self.micro_batch_size)
        first, end = self.skip_steps * self.grad_accum, self.steps_per_epoch * self.grad_accum
        yield from micro_batches[first:end]


def make_loader(rows: Rows, **order: Any) -> DataLoader[Any]:
    """Return a loader with a `batch_sampler`, or of all rows in order, `batch_size` at a time."""
    # Rows returns whole batches, so there is nothing to collate. Without its own generator the
    # loader would draw a seed from the global one.
    return DataLoader(rows, collate_fn=lambda batch: batch, generator=torch.Generator(), **order)
