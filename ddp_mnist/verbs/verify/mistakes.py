"""Common mistakes with DDP, made on purpose: `train --inject`, to see what each one costs.

Each changes what `fit` is given, its Accelerator or the recipe's learning rate, so `fit` knows
nothing of them. config/mistakes.py lists them all, with the check of verify that finds each.
`batchnorm` only changes the recipe's flags.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from ddp_mnist.cluster.store import Store
from ddp_mnist.config.mistakes import EXIT_STEP
from ddp_mnist.core.batches import GlobalBatchSampler, Rows, make_loader
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.training.training_run import TrainingRun

Change = Callable[[nn.Module, GlobalBatchSampler, Store], None]


def make_mistake(run: TrainingRun) -> TrainingRun:
    """Make the mistake that --inject names. Return the run, perhaps with a changed recipe.

    The mistake ends with the run's world, whose Accelerator it changes.
    """
    fault, accelerator, store = run.config.recipe.inject, run.world.accelerator, run.world.store
    if fault == "schedule":
        return replace(run, recipe=stepped_by_each(run.recipe, store.world_size))
    if fault in BEFORE_PREPARE:
        change_before_prepare(accelerator, store, BEFORE_PREPARE[fault])
    elif fault == "padding":
        count_padding(accelerator)
    elif fault == "exit":
        leave(accelerator, store)
    return run


def stepped_by_each(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe, its scheduler stepped once per process: it reaches 0 N times too early."""

    class SteppedByEach(Recipe):
        def learning_rate(self, step: int) -> float:
            counted = step * processes
            return super().learning_rate(counted) if counted < self.total_steps else 0

    return SteppedByEach(**vars(recipe))


# --- Before `prepare`, in the net or in the sampler


def change_before_prepare(accelerator: Accelerator, store: Store, change: Change) -> None:
    """Let the Accelerator `change` the net or the sampler just before it prepares them."""
    prepare = accelerator.prepare

    def prepare_changed(net: nn.Module, optimizer: Any, loader: Any) -> Any:
        change(net, loader.batch_sampler, store)
        return prepare(net, optimizer, loader)

    accelerator.prepare = prepare_changed


def shuffle_by_rank(_: nn.Module, batches: GlobalBatchSampler, store: Store) -> None:
    """Give each rank its own seed, so that the ranks' orders differ."""
    batches.seed += store.rank


def keep_first_order(_: nn.Module, batches: GlobalBatchSampler, __: Store) -> None:
    """The sampler is never told the epoch, so every epoch repeats the first one's order."""
    start_epoch = batches.start_epoch
    batches.start_epoch = lambda _epoch, skip_steps=0: start_epoch(0, skip_steps)  # type: ignore


def sum_gradients(net: nn.Module, _: object, store: Store) -> None:
    """Scale each rank's gradients by N, so that DDP's mean is their sum, before any clipping."""
    for parameter in (p for p in net.parameters() if p.requires_grad):
        parameter.register_hook(lambda gradient: gradient * store.world_size)


def leave_out_last_parameter(net: nn.Module, *_: object) -> None:
    """Tell DistributedDataParallel to ignore the last parameter."""
    last = [name for name, parameter in net.named_parameters() if parameter.requires_grad][-1]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [last])


BEFORE_PREPARE: dict[str | None, Change] = {
    "sampler": shuffle_by_rank,
    "epoch": keep_first_order,
    "gradients": sum_gradients,
    "parameter": leave_out_last_parameter,
}


# --- Later, in the Accelerator's methods


def count_padding(accelerator: Accelerator) -> None:
    """Repeat rows of an evaluation until all ranks' batches are full, and count them all."""
    prepare = accelerator.prepare_data_loader

    def prepare_padded(loader: DataLoader[Any], **options: Any) -> Any:
        if size := loader.batch_size:  # None in training: the sampler makes the batches
            rows: Any = loader.dataset
            filled_up = torch.arange(-(-len(rows) // size) * size, device=rows.rows.device)
            padded = Rows(rows.images, rows.targets, rows.rows[filled_up % len(rows)])
            loader = make_loader(padded, batch_size=size)
        return prepare(loader, **options)

    accelerator.prepare_data_loader = prepare_padded


def leave(accelerator: Accelerator, store: Store) -> None:
    """The last rank blocks, in step EXIT_STEP of this start, on a key that is never set.

    Its process lives, so no connection breaks: the others wait for it until --dist-timeout.
    """
    backward, parts = accelerator.backward, itertools.count(1)

    def wait_in_step(loss: torch.Tensor) -> None:
        if next(parts) == EXIT_STEP * accelerator.gradient_accumulation_steps:
            store.wait("a key that is never written")
        backward(loss)

    if store.rank == store.world_size - 1:
        accelerator.backward = wait_in_step
