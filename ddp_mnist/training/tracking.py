"""The trackers that --trackers names: Accelerate logs to them, besides metrics.jsonl.

Only the process that has the run folder has them. A slow one holds up the steps.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from accelerate.tracking import filter_trackers

from ddp_mnist.errors import StorageError, UsageError, blame
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.training.training_run import TrainingRun

PROJECT, FOLDER = "ddp_mnist", "tracking"


@contextlib.contextmanager
def tracked(run: TrainingRun, folder: RunFolder) -> Iterator[None]:
    """Log the block's metrics to the run's trackers too.

    Raise UsageError if one cannot be started, StorageError if one fails.
    """
    config, world = run.config, run.world
    if folder.path is None or not run.found.trackers:
        yield
        return
    accelerator, prefix = world.accelerator, f"--trackers {config.run.trackers}"
    place, run_name = str(folder.path / FOLDER), folder.path.name
    options = {
        "tensorboard": {"purge_step": folder.step},  # what is repeated: validation at that step
        "wandb": {"name": run_name, "dir": place},
        "mlflow": {"run_name": run_name},
        "trackio": {"name": run_name},
    }
    settings = dataclasses.asdict(config.recipe) | {
        "metrics": ",".join(config.recipe.metrics),  # TensorBoard takes no tuple
        "seed": config.run.seed,
        "dataset": config.run.dataset,
        "world_size": world.store.world_size,
        "precision": world.precision,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    with blame(prefix, UsageError):
        accelerator.project_configuration.set_directories(place)
        accelerator.log_with = filter_trackers(run.found.trackers, place)
        accelerator.init_trackers(PROJECT, config=settings, init_kwargs=options)

    def log(metrics: dict[str, Any], step: int) -> None:
        with blame(prefix, StorageError):
            known = {name: value for name, value in metrics.items() if value is not None}
            accelerator.log(known, step)

    for line in folder.lines_at(folder.step):  # which are purged too, but not repeated
        log(line, line.pop("step"))

    def finish() -> None:  # Accelerate's end_training would end the process group too
        for tracker in accelerator.trackers:
            tracker.finish()

    folder.log_to_trackers = log
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):  # the first error counts
            finish()
        raise
    with blame(prefix, StorageError):
        finish()
