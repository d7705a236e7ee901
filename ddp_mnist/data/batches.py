"""The data set as training reads it: rows of images, and their order.

N processes train as one only if together they read the same batches. So the sampler yields GLOBAL
batches, the same on every rank, and Accelerate gives each rank its part of each batch
(`DataLoaderConfiguration(split_batches=True)`). Nothing here knows its rank.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.seeding import generator

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


SPLITS, CPU = ("train", "validation", "test"), torch.device("cpu")


def rows_of_splits(data: ImageData, device: torch.device = CPU) -> tuple[Rows, Rows, Rows]:
    """Return the rows to train on, to validate on and to test on.

    On a GPU the images (55 MB for MNIST) are copied there if they fit into half of its memory.
    Otherwise they stay mapped from the disk, and batches are sent one by one.
    """
    images, targets = torch.from_numpy(data.images), torch.from_numpy(data.targets)
    # Accelerate calls a process's CPU cpu:N; .to() would unmap the file.
    if device.type == "cuda" and images.nbytes <= torch.cuda.mem_get_info(device)[0] / 2:
        images, targets = images.to(device), targets.to(device)
    numbers = (torch.from_numpy(data.rows.get(name, np.arange(0))) for name in SPLITS)
    train, validation, test = (Rows(images, targets, rows) for rows in numbers)
    return train, validation, test


def subset(data: ImageData, name: str) -> Rows:
    """Return the rows of train, validation or test; none of a split that there is not."""
    return rows_of_splits(data)[SPLITS.index(name)]


def eval_batch_size(images: Tensor, on_gpu: bool = False) -> int:
    """Return how many of these images, [N, C, H, W], to evaluate at once; it changes no result.

    500 small images would not keep a GPU busy; 55 of 224x224 do.
    """
    return max(1, min(4000 if on_gpu else 500, 2**23 // math.prod(images.shape[1:])))


# --- Their order


class GlobalBatchSampler(Sampler[Any]):
    """A batch sampler of GLOBAL batches: the same on every rank, a function of (seed, epoch).

    A step takes `images_per_step` images over all ranks, as `grad_accum` micro-batches. Rows that
    do not fill a last step are left out; the shuffle leaves out others in each epoch. An epoch's
    order is sent to the device of the rows once, not batch by batch.
    """

    drop_last = True  # Accelerate reads this name and `batch_size`

    def __init__(self, rows: Rows, images_per_step: int, seed: int, grad_accum: int = 1) -> None:
        self.rows, self.seed, self.grad_accum = rows, seed, grad_accum
        self.steps_per_epoch = len(rows) // images_per_step
        self.micro_batch_size = images_per_step // grad_accum
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
