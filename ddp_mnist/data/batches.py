"""."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_mnist.data.decode import Preparation
from ddp_mnist.seeding import generator

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
