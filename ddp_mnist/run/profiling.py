"""`--profile N`: where the time of N steps goes, on every rank.

They are steps in a row of one epoch, so that no validation is among them, and warm ones if there
are enough. The traces are gathered on rank 0, as machines share no disk: RUN/profile/rank-0.json.gz
and so on, which chrome://tracing and ui.perfetto.dev open as they are.
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
from accelerate.utils import ProfileKwargs
from torch.autograd import DeviceType

from ddp_mnist.cluster.world import gather_bytes
from ddp_mnist.errors import UsageError
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import RunFolder, storage_errors, write_atomically

WARM_UP = 10  # steps before; the first ones are slower than all others
ROWS = 10  # of the table
FOLDER = "profile"
GLOO, NCCL = "gloo:", "nccl"  # how the names of their work begin


class StepProfiler:
    """Traces `steps` optimizer steps through Accelerate, the same on every rank; none with 0."""

    def __init__(
        self, steps: int, accelerator: Accelerator, folder: RunFolder, console: Console
    ) -> None:
        self.steps, self.accelerator = steps, accelerator
        self.folder, self.console = folder, console
        self.begin: int | None = None  # the step after which tracing begins
        self.on_gpu = accelerator.device.type == "cuda"
        self._tracing = ExitStack()
        self._profile: Any = None
        self._started = 0.0

    def plan(self, done: int, per_epoch: int, total: int) -> None:
        """Choose the steps of a run that has taken `done`; say so if too few are left."""
        if self.steps == 0:
            return
        self.begin = first_traced(self.steps, done, per_epoch, total)
        if self.begin is None:
            self.console.print(
                f"--profile {self.steps}: nothing is traced, no epoch has so many steps left"
            )

    def step(self, done: int) -> None:
        """Begin or end the trace, on all ranks after optimizer step `done`. Raises StorageError."""
        if self.begin is None:
            return
        if done == self.begin:
            activities = ["cpu"] + (["cuda"] if self.on_gpu else [])
            profile = self.accelerator.profile(ProfileKwargs(activities=activities))
            self._profile = self._tracing.enter_context(profile)
            self._started = self._clock()
        if done == self.begin + self.steps:
            seconds = self._clock() - self._started
            self._tracing.close()
            self._write(seconds)

    def _clock(self) -> float:
        """Return seconds, once the GPU has done all its work."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.monotonic()

    def _write(self, seconds: float) -> None:
        """Write every rank's trace, and print where this rank's time went."""
        with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
            trace = Path(scratch) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            traces = gather_bytes(self.accelerator, gzip.compress(trace.read_bytes(), 6))
        if self.folder.path:
            place = self.folder.path / FOLDER
            with storage_errors(place):
                place.mkdir(exist_ok=True)
                for rank, content in enumerate(traces):
                    write_atomically(place / f"rank-{rank}.json.gz", content)
        times = own_times(self._profile.key_averages(), self.on_gpu)
        self.console.print(
            f"{table(times, self.steps, seconds)}\n"
            f"traces     {self.folder.path}/{FOLDER}/rank-0.json.gz ..."
        )


def refuse_long_profile(steps: int, per_epoch: int) -> None:
    """Raise UsageError if no epoch has so many steps and one before them."""
    if steps >= per_epoch > 1:
        raise UsageError(
            f"--profile {steps}: an epoch has {per_epoch} steps; ask for at most {per_epoch - 1}"
        )


def first_traced(steps: int, done: int, per_epoch: int, total: int) -> int | None:
    """Return the step after which `steps` of one epoch follow: the first warm one, else the last.

    The run has taken `done` of its `total` steps; the next one is slow, and not traced.
    """
    near = min(total - steps, done + WARM_UP + 2 * per_epoch)
    fits = [
        step for step in range(done + 1, near + 1) if 1 <= step % per_epoch <= per_epoch - steps
    ]
    warm = [step for step in fits if step >= done + WARM_UP]
    return warm[0] if warm else fits[-1] if fits else None


def own_times(entries: Any, on_gpu: bool) -> list[tuple[float, str, int]]:
    """Return (microseconds, name, calls) of each entry without what it calls, largest first.

    On a GPU its kernels alone count: the profiler gives what called them the same time, and a
    range that somebody named that of all kernels in it. gloo works in threads of its own, of which
    the profiler knows the whole time only.
    """
    times = []
    for entry in entries:
        if entry.key.startswith(GLOO):
            time_us = entry.cpu_time_total
        elif not on_gpu:
            time_us = entry.self_cpu_time_total
        elif entry.device_type == DeviceType.CUDA and not entry.is_user_annotation:
            time_us = entry.self_device_time_total
        else:
            continue
        times.append((time_us, entry.key, entry.count))
    return sorted(times, reverse=True)


def table(times: list[tuple[float, str, int]], steps: int, seconds: float) -> str:
    """Return the largest own times of steps that took `seconds`, in 80 columns.

    The last line is the share of communication.
    """

    def row(name: str, calls: str, time_us: float) -> str:
        share = time_us / 1e6 / seconds
        return f"{name[:44]:<44} {calls:>7} {time_us / steps / 1e3:>11.3f} {share:>7.1%}"

    communication = sum(time_us for time_us, name, _ in times if name.startswith((GLOO, NCCL)))
    return "\n".join(
        [
            f"profile    {steps} steps of rank 0, {seconds / steps * 1e3:.2f} ms a step",
            f"{'entry, by its own time':<44} {'calls':>7} {'ms a step':>11} {'share':>7}",
            *(row(name, f"{calls:,}", time_us) for time_us, name, calls in times[:ROWS]),
            row("communication, partly at the same time", "", communication),
        ]
    )
