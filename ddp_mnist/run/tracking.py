"""The trackers that --trackers names: what Accelerate logs to, beside metrics.jsonl.

Only the process that has the run folder has them. One that raises an error, as when its server is
gone, is left out from there on, and the training goes on; one that is slow holds up the steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, filter_trackers, get_available_trackers

from ddp_mnist.cluster.world import World
from ddp_mnist.config import ResolvedConfig
from ddp_mnist.errors import UsageError, did_you_mean, reason
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import RunFolder

PROJECT, FOLDER = "ddp_mnist", "tracking"


def named(trackers: str | None) -> list[str]:
    """Return the names, which commas separate; to be called where the trackers run: on rank 0.

    Raises:
        UsageError: Accelerate knows no such tracker, or its package is not installed.
    """
    names = [name.strip() for name in (trackers or "").split(",") if name.strip()]
    if not names:
        return []  # without looking for all the packages
    legal = sorted(LOGGER_TYPE_TO_CLASS)
    installed = [str(name) for name in get_available_trackers()]
    for name in names:
        if name not in legal:
            hint = did_you_mean(name, legal)
            raise UsageError(f"--trackers {name}: choose from {', '.join(legal)}{hint}")
        if name not in installed:
            raise UsageError(
                f"--trackers {name}: its package is not installed; pip install"
                f" {name.replace('_', '-')}, or leave it out"
            )
    return names


@contextlib.contextmanager
def tracked(
    config: ResolvedConfig, folder: RunFolder, world: World, console: Console
) -> Iterator[None]:
    """Log to the trackers too what the block logs. Raises UsageError if one cannot be started."""
    names = named(config.run.trackers) if folder.path else []
    if folder.path is None or not names:
        yield
        return
    accelerator, place, run_name = world.accelerator, str(folder.path / FOLDER), folder.path.name
    accelerator.project_configuration.set_directories(place)
    accelerator.log_with = filter_trackers(names, place)
    options = {
        "tensorboard": {"purge_step": folder.step + 1},  # steps that are done again
        "wandb": {"name": run_name, "dir": place},
        "mlflow": {"run_name": run_name},
        "trackio": {"name": run_name},
    }
    settings = dataclasses.asdict(config.recipe) | {
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
    folder.trackers = [Guarded(tracker, console) for tracker in accelerator.trackers]
    try:
        yield
    finally:
        for tracker in folder.trackers:
            tracker.finish()
        accelerator.trackers = []


class Guarded:
    """A tracker of Accelerate's that is left out after its first error."""

    def __init__(self, tracker: Any, console: Console) -> None:
        self.tracker, self.console = tracker, console
        self.works = True

    def log(self, metrics: dict[str, Any], step: int) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        self._call(lambda: self.tracker.log(known, step=step))

    def finish(self) -> None:
        self._call(self.tracker.finish)

    def _call(self, action: Callable[[], None]) -> None:
        if not self.works:
            return
        try:
            action()
        except Exception as error:  # whatever a service raises
            self.works = False
            self.console.print(
                f"--trackers {self.tracker.name}: failed ({reason(error)}); left out from here on,"
                " metrics.jsonl has everything"
            )
