"""The mistakes that `train --inject` can make on purpose; verbs/verify/mistakes.py makes them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ddp_mnist.errors import UsageError

EXIT_STEP = 20  # with --inject exit, the last rank takes no part from this step on


class Mistake(NamedTuple):
    """A mistake of distributed training."""

    what: str
    caught_by: str  # the check of `verify`
    recipe: Mapping[str, Any] = {}  # fields of the recipe that it sets, unless they are typed
    processes: int = 2  # at least; with fewer, the mistake changes nothing
    epochs: int = 1
    steps: int = 1


MISTAKES = {
    "sampler": Mistake("each rank shuffles with its own seed", "samples"),
    "gradients": Mistake("gradients are summed over the ranks, not averaged", "gradients"),
    "parameter": Mistake("DDP does not synchronise one parameter", "replicas"),
    "epoch": Mistake(
        "each epoch has the same order, as without set_epoch", "samples", processes=1, epochs=2
    ),
    "padding": Mistake("rows that fill up the last batches are counted in the metrics", "metrics"),
    "exit": Mistake(
        f"the last rank leaves in step {EXIT_STEP}, and the others wait", "runs", steps=EXIT_STEP
    ),
    "batchnorm": Mistake(
        "BatchNorm (--model cnn_bn) over each process's own share of the batch",
        "weights",
        {"model": "cnn_bn"},
    ),
    "schedule": Mistake(
        "the scheduler is stepped by each process, N times a step", "learning rates"
    ),
}


def wrong_on_purpose(mistake: str | None) -> list[str]:
    """Return the warning line printed first and last with --inject, as a list; [] without it."""
    return [f"WRONG ON PURPOSE, --inject {mistake}: {MISTAKES[mistake].what}"] if mistake else []


def check_mistake(name: str, processes: int, epochs: int, steps: int) -> None:
    """Raise UsageError if the mistake could not happen in a run of this size."""
    mistake = MISTAKES[name]
    if processes < mistake.processes or epochs < mistake.epochs or steps < mistake.steps:
        least = f"processes {mistake.processes}, epochs {mistake.epochs}, steps {mistake.steps}"
        raise UsageError(f"--inject {name}: in so small a run it changes nothing; least: {least}")
