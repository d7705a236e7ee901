"""`--profile N`: where the time of N steps goes, on every rank.

They are steps in a row of one epoch, so that no validation is among them, and warm ones if there
are enough.
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
from accelerate.utils import ProfileKwargs
from torch.autograd import DeviceType

from ddp_mnist.cluster.world import gather_bytes
from ddp_mnist.errors import UsageError
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import RunFolder, storage_errors, write_atomically

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
        console: is told where the time went.
    """

    def __init__(
        self, steps: int, accelerator: Accelerator, folder: RunFolder, console: Console
    ) -> None:
        self.steps, self.accelerator, self.folder, self.console = (
            steps,
            accelerator,
            folder,
            console,
        )
        self.begin: int | None = None  # the step after which tracing begins
        self.on_gpu = accelerator.device.type == "cuda"
        self._tracing = ExitStack()
        self._profile: Any = None
        self._started = 0.0

    def plan(self, done: int, per_epoch: int, total: int) -> None:
        """Chooses the steps of a run that has taken `done`; says so if too few are left."""
        if self.steps == 0:
            return
        self.begin = first_traced(self.steps, done, per_epoch, total)
        if self.begin is None:
            self.console.print(
                f"--profile {self.steps}: nothing is traced, no epoch has so many steps left"
            )

    def step(self, done: int) -> None:
        """Called on all ranks after optimizer step `done`. Raises StorageError."""
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
        """Seconds, when all that was asked of the GPU is done."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.monotonic()

    def _write(self, seconds: float) -> None:
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
    """Raises UsageError if no epoch has so many steps and one before them."""
    if steps >= per_epoch > 1:
        raise UsageError(
            f"--profile {steps}: an epoch has {per_epoch} steps; ask for at most {per_epoch - 1}"
        )


def first_traced(steps: int, done: int, per_epoch: int, total: int) -> int | None:
    """After which step to begin, so that `steps` of one epoch follow; None if there is none.

    The first one that is warm, else the last one that there is.

    Args:
        steps: to trace.
        done: steps behind the run; the next one is slow, and not traced.
        per_epoch: steps of an epoch.
        total: steps of the run.
    """
    near = min(total - steps, done + WARM_UP + 2 * per_epoch)
    fits = [
        step for step in range(done + 1, near + 1) if 1 <= step % per_epoch <= per_epoch - steps
    ]
    warm = [step for step in fits if step >= done + WARM_UP]
    return warm[0] if warm else fits[-1] if fits else None


def own_times(entries: Any, on_gpu: bool) -> list[tuple[float, str, int]]:
    """(microseconds, name, calls) of what took time itself, without what it calls; largest first.

    On a GPU these are its kernels alone: what called them is listed beside them with the same time,
    and a range that somebody named with that of all kernels in it. gloo works in threads of its
    own, for which the profiler knows the whole time only.

    Args:
        entries: averages of the profiler, one per name.
        on_gpu: whether to tell the GPU's time instead of the CPU's.
    """
    if on_gpu:
        kernels = [
            entry
            for entry in entries
            if entry.device_type == DeviceType.CUDA and not entry.is_user_annotation
        ]
        times = [(entry.self_device_time_total, entry.key, entry.count) for entry in kernels]
        times += [(e.cpu_time_total, e.key, e.count) for e in entries if e.key.startswith(GLOO)]
    else:
        times = [
            (e.cpu_time_total if e.key.startswith(GLOO) else e.self_cpu_time_total, e.key, e.count)
            for e in entries
        ]
    return sorted(times, reverse=True)


def table(times: list[tuple[float, str, int]], steps: int, seconds: float) -> str:
    """The largest entries by their own time, and the share of communication, in 80 columns.

    Args:
        times: of `own_times`.
        steps: that they are of.
        seconds: that these took by the clock.
    """
    exchange = sum(us for us, name, _ in times if name.startswith((GLOO, NCCL)))
    total = seconds * 1e6
    lines = [f"profile    {steps} steps of rank 0, {total / steps / 1e3:.2f} ms a step"]
    lines += [f"{'entry, by its own time':<44} {'calls':>7} {'ms a step':>11} {'share':>7}"]
    lines += [
        f"{name[:44]:<44} {count:>7,} {us / steps / 1e3:>11.3f} {us / total:>7.1%}"
        for us, name, count in times[:ROWS]
    ]
    lines += [
        f"{'communication, partly at the same time':<52} {exchange / steps / 1e3:>11.3f}"
        f" {exchange / total:>7.1%}"
    ]
    return "\n".join(lines)
