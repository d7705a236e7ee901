"""The data set as training reads it: rows of images, and their order.

N processes train as one only if together they read the same batches. So the sampler yields GLOBAL
batches, the same on every rank, and Accelerate gives each rank its part of each batch
(`DataLoaderConfiguration(split_batches=True)`). Nothing here knows its rank.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from .recipe import Recipe
from .seeding import generator

# --- Rows


class Rows(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """A subset of the images, read a batch at a time; `rows`=None takes all.

    A batch is (images uint8 [B, C, H, W], their targets, indices int64 [B]). An index is the
    position among these rows; augmentation looks up its random numbers by it. Targets are classes,
    int64 [N], or numbers, float [N, columns]: [N] minus outputs [N, 1] would be [N, N] in silence.
    """

    def __init__(self, images: Tensor, targets: Tensor, rows: Tensor | None = None) -> None:
        if targets.is_floating_point() and targets.ndim != 2:
            raise ValueError(f"targets that are numbers need [N, columns], not {[*targets.shape]}")
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


# --- Their order


class GlobalBatchSampler(Sampler[Any]):
    """A batch sampler of GLOBAL batches: the same on every rank, a function of (seed, epoch).

    A step takes the recipe's `batch_size` images over all ranks, in its `grad_accum` micro-batches.
    Rows that do not fill a last step are left out; the shuffle leaves out others in each epoch. An
    epoch's order is sent to the device of the rows once, not batch by batch.
    """

    drop_last = True  # Accelerate reads this name and `batch_size`

    def __init__(self, rows: Rows, recipe: Recipe, seed: int) -> None:
        """Raise ValueError if the recipe does not match the rows, or its batch has no equal parts.

        Accelerate checks that a micro-batch divides among the ranks.
        """
        self.rows, self.seed, self.grad_accum = rows, seed, recipe.grad_accum
        self.steps_per_epoch = recipe.steps_per_epoch
        self.micro_batch_size, rest = divmod(recipe.batch_size, recipe.grad_accum)
        steps = len(rows) // recipe.batch_size
        if not steps or steps != recipe.steps_per_epoch:
            raise ValueError(
                f"{len(rows):,} rows make {steps:,} steps an epoch, not as in {recipe}"
            )
        if rest:
            raise ValueError(f"a batch cannot be split into equal micro-batches: {recipe}")
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


def make_loader(rows: Rows, **options: Any) -> DataLoader[Any]:
    """Return a loader with a `batch_sampler`, or of all rows in order, `batch_size` at a time."""
    # Rows returns whole batches, so there is nothing to collate. Without its own generator the
    # loader would draw a seed from the global one.
    return DataLoader(rows, collate_fn=lambda batch: batch, generator=torch.Generator(), **options)
