"""`--profile N`: where the time of N steps goes, on every rank.

The traces come together on rank 0, as machines share no disk: RUN/profile/rank-0.json.gz and so on,
which chrome://tracing and ui.perfetto.dev open as they are.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, gather_object

from ddp_mnist.run_folder import RunFolder, storage_errors, write_atomically
from ddp_mnist.screen import Screen

WARM_UP = 10  # steps before; the first ones are slower than all others
ROWS = 10
FOLDER = "profile"
GLOO, NCCL = "gloo:", "nccl"  # how the names of their work begin


class StepProfiler:
    """Traces some steps of a training through Accelerate; does nothing with `steps` 0.

    Args:
        steps: optimizer steps to trace, the same on every rank.
        accelerator: the Accelerator.
        folder: of the run.
        screen: is told where the time went.
    """

    def __init__(
        self, steps: int, accelerator: Accelerator, folder: RunFolder, screen: Screen
    ) -> None:
        self.steps, self.accelerator, self.folder, self.screen = steps, accelerator, folder, screen
        self.taken = 0
        self._tracing = ExitStack()
        self._profile: Any = None
        self._started = 0.0

    def step(self) -> None:
        """Called on all ranks after each optimizer step. Raises StorageError."""
        if self.steps == 0:
            return
        self.taken += 1
        if self.taken == WARM_UP:
            activities = ["cpu"] + (["cuda"] if self.accelerator.device.type == "cuda" else [])
            profile = self.accelerator.profile(ProfileKwargs(activities=activities))
            self._profile = self._tracing.enter_context(profile)
            self._started = time.monotonic()
        if self.taken == WARM_UP + self.steps:
            self._finish()

    def _finish(self) -> None:
        if self.accelerator.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - self._started
        self._tracing.close()
        with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
            trace = Path(scratch) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            traces = gather_object([gzip.compress(trace.read_bytes(), 6)])
        if self.folder.path:
            place = self.folder.path / FOLDER
            with storage_errors(place):
                place.mkdir(exist_ok=True)
                for rank, content in enumerate(traces):
                    write_atomically(place / f"rank-{rank}.json.gz", content)
        shown = table(self._profile.key_averages(), self.steps, seconds)
        self.screen.say(f"{shown}\ntraces     {self.folder.path}/{FOLDER}/rank-0.json.gz ...")


def table(entries: Any, steps: int, seconds: float) -> str:
    """The largest entries by their own time, and the share of communication, in 80 columns.

    Args:
        entries: averages of the profiler, one per name.
        steps: that they are of.
        seconds: that these took by the clock.
    """
    times = sorted(((own_us(e), e.key, e.count) for e in entries), reverse=True)
    talk = sum(us for us, name, _ in times if name.startswith((GLOO, NCCL)))
    total = seconds * 1e6
    lines = [f"profile    {steps} steps of rank 0, {total / steps / 1e3:.2f} ms a step"]
    lines += [f"{'entry, by its own time':<44} {'calls':>7} {'ms a step':>11} {'share':>7}"]
    lines += [
        f"{name[:44]:<44} {count:>7,} {us / steps / 1e3:>11.3f} {us / total:>7.1%}"
        for us, name, count in times[:ROWS]
    ]
    lines += [
        f"{'communication, beside the rest':<52} {talk / steps / 1e3:>11.3f} {talk / total:>7.1%}"
    ]
    return "\n".join(lines)


def own_us(entry: Any) -> float:
    """Microseconds of an entry without what it calls: on the GPU, if it works there.

    gloo works in threads of its own, for which the profiler knows the whole time only.
    """
    if entry.key.startswith(GLOO):
        return float(entry.cpu_time_total)
    return float(getattr(entry, "self_device_time_total", 0) or entry.self_cpu_time_total)
