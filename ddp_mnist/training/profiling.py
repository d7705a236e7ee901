"""`--profile N`: trace where the time of N steps goes, on every rank, by Accelerate's profiler.

Each rank writes RUN/profile/rank-<rank>.json on its own machine; chrome://tracing and
ui.perfetto.dev open it.
"""

import contextlib
from pathlib import Path
from typing import Any

from accelerate.utils import ProfileKwargs

from ddp_mnist.system.files import storage_errors
from ddp_mnist.training.training_run import TrainingRun

STEPS_BEFORE = 11  # the first steps are the slowest; in the last of these the profiler warms up


def profiled(run: TrainingRun, folder: str) -> contextlib.AbstractContextManager[Any]:
    """Trace --profile optimizer steps of the block, after STEPS_BEFORE others, if it has so many.

    The traces go to the run's `folder`. It yields torch's profiler, whose `step` has to be called
    after each step, or None without the flag.
    """
    world, steps = run.world, run.config.run.profile
    if not steps:
        return contextlib.nullcontext()
    file = Path(folder, "profile", f"rank-{world.store.rank}.json").absolute()

    # Accelerate's own output_trace_dir fails in a run that ends before these steps.
    def write(trace: Any) -> None:
        with storage_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)  # it would be written through a link
            trace.export_chrome_trace(str(file))
            file.stat()  # if it could not be written, the profiler is silent

    skipped = STEPS_BEFORE - 1
    schedule = {"skip_first": skipped, "wait": 0, "warmup": 1, "active": steps, "repeat": 1}
    return world.accelerator.profile(ProfileKwargs(schedule_option=schedule, on_trace_ready=write))
