"""The mistakes people make with DDP, on purpose: `train --inject`, to see what each one costs.

Nothing of this is in the training: a fault is another argument of `train.fit`. config.FAULTS lists
all, with the check of verify that finds each; BatchNorm is a fault by the recipe alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_mnist.cluster.store import Store
from ddp_mnist.config import EXIT_STEP
from ddp_mnist.data.batches import GlobalBatches, Rows
from ddp_mnist.optim import learning_rate
from ddp_mnist.run.evaluation import prepare_split
from ddp_mnist.run.session import Session

Build = Callable[..., nn.Module]


def injected(run: Session, build: Build) -> dict[str, Any]:
    """Return the arguments of `fit`: `build`, or with --inject what its fault makes of them."""
    make = MADE_BY.get(run.config.recipe.inject)
    return {"build": build} | (make(run.world.store, build) if make else {})


def own_seeds(store: Store, _: Build) -> dict[str, Any]:
    def make_batches(rows: Rows, size: int, seed: int, *rest: int) -> GlobalBatches:
        return GlobalBatches(rows, size, seed + store.rank, *rest)

    return {"make_batches": make_batches}


def summed_gradients(store: Store, build: Build) -> dict[str, Any]:
    """The mean of N times each rank's gradients is their sum; it is so before they are clipped."""

    def build_it(*given: Any) -> nn.Module:
        net = build(*given)
        for parameter in (p for p in net.parameters() if p.requires_grad):
            parameter.register_hook(lambda gradient: gradient * store.world_size)
        return net

    return {"build": build_it}


def left_out_parameter(_: Store, build: Build) -> dict[str, Any]:
    return {"build": lambda *given: leave_out_last_parameter(build(*given))}


def leave_out_last_parameter(net: nn.Module) -> nn.Module:
    """Mark it as one that DistributedDataParallel is not to synchronise."""
    last = [name for name, parameter in net.named_parameters() if parameter.requires_grad][-1]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [last])
    return net


class SameOrder(GlobalBatches):
    """An order that nobody told the epoch: it is the first one's, each time."""

    def begin(self, _epoch: int, first_step: int = 0) -> None:
        super().begin(0, first_step)


def prepare_padded(accelerator: Accelerator, rows: Rows, *per_process: int) -> Any:
    """Return a loader that repeats rows until all ranks' batches are full, and counts each."""
    size = prepare_split(accelerator, rows, *per_process).total_batch_size
    filled_up = torch.arange(-(-len(rows) // size) * size, device=rows.rows.device) % len(rows)
    padded = Rows(rows.images, rows.labels, rows.rows[filled_up])
    return prepare_split(accelerator, padded, *per_process)


def early_exit(store: Store, _: Build) -> dict[str, Any]:
    """The last rank waits for a word that nobody says.

    Its process lives, so no connection breaks: the others wait for it until --dist-timeout.
    """

    def rate(step: int, *rest: Any) -> float:
        if step + 1 >= EXIT_STEP and store.rank == store.world_size - 1:
            store.broadcast_from_rank0("a word that is never said", bool)
        return learning_rate(step, *rest)

    return {"learning_rate": rate}


def schedule_stepped_by_each(store: Store, _: Build) -> dict[str, Any]:
    """A scheduler that steps once per process is at its end, at 0, N times too early."""

    def rate(step: int, total_steps: int, *rest: float) -> float:
        counted = step * store.world_size
        return learning_rate(counted, total_steps, *rest) if counted < total_steps else 0

    return {"learning_rate": rate}


MADE_BY: dict[str | None, Callable[[Store, Build], dict[str, Any]]] = {
    "sampler": own_seeds,
    "gradients": summed_gradients,
    "parameter": left_out_parameter,
    "epoch": lambda *_: {"make_batches": SameOrder},
    "padding": lambda *_: {"prepare_split": prepare_padded},
    "exit": early_exit,
    "schedule": schedule_stepped_by_each,
}
