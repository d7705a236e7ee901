"""The mistakes people make with DDP, on purpose: `train --inject`, to see what each one costs.

Nothing of this is in the training. A fault enters `train.fit` as one of its arguments, or comes
through torch's hook before an optimizer step, and `verify --inject` shows which check finds it.
What is a fault only by the recipe, as BatchNorm, stands in config.py with the list of all.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ddp_mnist.data.batches import GlobalBatches, Rows
from ddp_mnist.optim import learning_rate
from ddp_mnist.run.evaluation import prepare_split
from ddp_mnist.run.session import Session

LEAVES_AT = 20  # the optimizer step in which the last rank takes part no more


@contextlib.contextmanager
def injected(run: Session | None, build: Callable[..., nn.Module]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `fit`, `build` among them, with the fault of --inject, if any."""
    fault = run and run.config.recipe.inject
    arguments: dict[str, Any] = {"build": build}
    with contextlib.ExitStack() as hooks:
        if run and fault in IN_STEPS:
            hooks.enter_context(before_each_step(IN_STEPS[fault](run)))
        elif run and fault == "sampler":
            own_seed = run.config.run.seed + run.world.store.rank
            run.config = replace(run.config, run=replace(run.config.run, seed=own_seed))
        elif run and fault == "parameter":
            arguments["build"] = lambda *given: leave_out_last_parameter(build(*given))
        elif run and fault == "schedule":
            arguments["learning_rate"] = stepped_by_each_of(run.world.store.world_size)
        yield arguments | REPLACED.get(fault or "", {})


# --- Faults in the arguments of fit


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


def stepped_by_each_of(world_size: int) -> Callable[..., float]:
    """Return the learning rate by a scheduler that steps once per process, and ends at 0."""

    def rate(step: int, total_steps: int, *peak_and_warmup: float) -> float:
        counted = step * world_size
        return learning_rate(counted, total_steps, *peak_and_warmup) if counted < total_steps else 0

    return rate


def leave_out_last_parameter(net: nn.Module) -> nn.Module:
    """Mark it as one that DistributedDataParallel is not to synchronise."""
    last = [name for name, _ in net.named_parameters()][-1]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [last])
    return net


REPLACED: dict[str, dict[str, Any]] = {
    "epoch": {"make_batches": SameOrder},
    "padding": {"prepare_split": prepare_padded},
}


# --- Faults in a step


def sum_gradients(run: Session) -> "BeforeStep":
    """Return what makes of the mean of all ranks' gradients their sum."""

    def times_n(_: Optimizer, gradients: list[Tensor]) -> None:
        torch._foreach_mul_(gradients, run.world.store.world_size)

    return times_n


def leave(run: Session) -> "BeforeStep":
    """Return what lets the last rank wait, in step LEAVES_AT, for a word that nobody says.

    Its process lives, so no connection breaks: the others wait for it until --dist-timeout.
    """
    store, steps = run.world.store, itertools.count(1)

    def wait(*_: Any) -> None:
        if next(steps) == LEAVES_AT and store.rank == store.world_size - 1:
            store.get("never said")

    return wait


BeforeStep = Callable[[Optimizer, list[Tensor]], None]
IN_STEPS: dict[str | None, Callable[[Session], BeforeStep]] = {
    "gradients": sum_gradients,
    "exit": leave,
}


@contextlib.contextmanager
def before_each_step(function: BeforeStep) -> Iterator[None]:
    """Call `function` before each optimizer step in the block, with the averaged gradients too."""

    def hook(optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        # Muon's step ends with AdamW's, where the hook may run again, without kernels' gradients.
        if len(gradients) == len(parameters):
            function(optimizer, gradients)

    handle = register_optimizer_step_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
