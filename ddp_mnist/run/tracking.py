"""The trackers that --trackers names: Accelerate logs to them, besides metrics.jsonl.

Only the process that has the run folder has them. A tracker that raises an error, e.g. because its
server is gone, is dropped, and the training continues; a slow one holds up the steps.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers

from ddp_mnist.cluster.world import World
from ddp_mnist.config.run import ResolvedConfig
from ddp_mnist.errors import UsageError, did_you_mean, reason
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import RunFolder

PROJECT, FOLDER = "ddp_mnist", "tracking"


def known_trackers(trackers: str | None) -> list[str]:
    """Return the comma-separated names; to be called on rank 0, where the trackers run.

    Raise UsageError if Accelerate does not know a tracker, or its package is not installed.
    """
    names = [name.strip() for name in (trackers or "").split(",") if name.strip()]
    installed = [str(name) for name in get_available_trackers()] if names else []
    for name in names:
        fix = f"its package is not installed; pip install {name.replace('_', '-')}, or leave it out"
        if name not in LOGGER_TYPE_TO_CLASS:
            legal = sorted(LOGGER_TYPE_TO_CLASS)
            fix = f"choose from {', '.join(legal)}{did_you_mean(name, legal)}"
        if name not in installed:
            raise UsageError(f"--trackers {name}: {fix}")
    return names


@contextlib.contextmanager
def tracked(
    config: ResolvedConfig, folder: RunFolder, world: World, console: Console
) -> Iterator[None]:
    """Log the block's metrics to the trackers too. Raise UsageError if one cannot be started."""
    names = known_trackers(config.run.trackers) if folder.path else []
    if folder.path is None or not names:
        yield
        return
    accelerator = world.accelerator
    place, run_name = str(folder.path / FOLDER), folder.path.name
    accelerator.project_configuration.set_directories(place)
    accelerator.log_with = filter_trackers(names, place)
    options = {
        "tensorboard": {"purge_step": folder.step + 1},  # from steps that are repeated
        "wandb": {"name": run_name, "dir": place},
        "mlflow": {"run_name": run_name},
        "trackio": {"name": run_name},
    }
    settings = dataclasses.asdict(config.recipe) | {
        "metrics": ",".join(config.recipe.metrics),  # TensorBoard takes no tuple
        "seed": config.run.seed,
        "dataset": config.run.dataset,
        "world_size": accelerator.num_processes,
        "precision": world.precision,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    try:
        accelerator.init_trackers(PROJECT, config=settings, init_kwargs=options)
    except Exception as error:  # whatever a service raises
        raise UsageError(
            f"--trackers {config.run.trackers}: cannot be started ({reason(error)}); fix that,"
            " or leave it out"
        ) from error
    trackers = folder.trackers = Trackers(accelerator.trackers, console)
    try:
        yield
    finally:
        trackers.call_each(lambda tracker: tracker.finish())
        accelerator.trackers = []


class Trackers:
    """Accelerate's trackers, each of which is dropped after its first error."""

    def __init__(self, trackers: list[Any], console: Console) -> None:
        self.working, self.console = list(trackers), console

    def log(self, metrics: dict[str, Any], step: int) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        self.call_each(lambda tracker: tracker.log(known, step=step))

    def call_each(self, action: Callable[[Any], object]) -> None:
        for tracker in list(self.working):
            try:
                action(tracker)
            except Exception as error:  # whatever a service raises
                self.working.remove(tracker)
                self.console.print(
                    f"--trackers {tracker.name}: failed ({reason(error)}); left out from here on,"
                    " metrics.jsonl has everything"
                )
