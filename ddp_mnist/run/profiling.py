"""`--profile N`: trace where the time of N steps goes, on every rank.

They are consecutive steps of one epoch, so that no validation is among them. The traces are
gathered on rank 0, as machines may share no disk: RUN/profile/rank-0.json.gz and so on, which
chrome://tracing and ui.perfetto.dev open directly.
"""

import gzip
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accelerate.utils import ProfileKwargs

from ddp_mnist.cluster.world import World, gather_bytes
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import RunFolder, storage_errors, write_atomically

WARM_UP = 10  # steps before, if an epoch has so many: the first steps are the slowest
ROWS = 10  # of the table
FOLDER = "profile"


class StepProfiler:
    """Traces `steps` optimizer steps through Accelerate, the same steps on every rank; 0: none."""

    def __init__(self, steps: int, world: World, folder: RunFolder, console: Console) -> None:
        self.steps, self.world = steps, world
        self.folder, self.console = folder, console
        self.begin: int | None = None  # the step after which tracing begins
        self._tracing = ExitStack()
        self._profile: Any = None
        self._started = 0.0

    def plan(self, done: int, per_epoch: int, total: int) -> None:
        """Choose the last steps of the first warm epoch of a run that has taken `done`.

        Say so if too few are left.
        """
        warm = done + max(1, min(WARM_UP, per_epoch - self.steps))
        begins = range(per_epoch - self.steps, total - self.steps + 1, per_epoch)
        self.begin = next((begin for begin in begins if begin >= warm), None)
        if self.steps and self.begin is None:
            self.console.print(
                f"--profile {self.steps}: nothing is traced, no epoch has so many warm steps"
            )

    def step(self, done: int) -> None:
        """Begin or end the trace, on all ranks after optimizer step `done`.

        Raise StorageError, and over NCCL as `World.wait_for_gpu` does.
        """
        if not self.steps or self.begin is None:
            return
        if done == self.begin:
            self.world.wait_for_gpu()  # the clock is read once the GPU has done its work
            on_gpu = self.world.accelerator.device.type == "cuda"
            kinds = ProfileKwargs(activities=["cpu", "cuda"] if on_gpu else ["cpu"])
            self._profile = self._tracing.enter_context(self.world.accelerator.profile(kinds))
            self._started = time.monotonic()
        elif done == self.begin + self.steps:
            self.world.wait_for_gpu()
            ms = 1e3 * (time.monotonic() - self._started) / self.steps
            self._tracing.close()
            self._write_traces()
            self._print_table(ms)

    def _print_table(self, ms: float) -> None:
        device = self.world.accelerator.device.type.replace("cuda", "device")
        averages, order = self._profile.key_averages(), f"self_{device}_time_total"
        table = averages.table(sort_by=order, row_limit=ROWS, max_name_column_width=40).strip()
        head = f"profile    {self.steps} steps of rank 0, {ms:.2f} ms a step"
        self.console.print(f"{head}\n{table}")
        self.console.print(f"traces     {self.folder.path}/{FOLDER}/rank-0.json.gz ...")

    def _write_traces(self) -> None:
        """Gather every rank's trace, and write them to the run folder."""
        with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
            trace = Path(scratch) / "trace.json"
            self._profile.export_chrome_trace(str(trace))
            traces = gather_bytes(self.world.accelerator, gzip.compress(trace.read_bytes(), 6))
        if self.folder.path:
            place = self.folder.path / FOLDER
            with storage_errors(place):
                place.mkdir(exist_ok=True)
                for rank, content in enumerate(traces):
                    write_atomically(place / f"rank-{rank}.json.gz", content)
