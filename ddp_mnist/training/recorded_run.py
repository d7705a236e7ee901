"""What `fit` tells of a run: to its folder, the console, the trackers and the other ranks."""

import contextlib
import hashlib
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.config.flag_fields import flag_name
from ddp_mnist.core.accelerator import broadcast_bytes
from ddp_mnist.core.errors import Diverged, StopRequested
from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.run import Run
from ddp_mnist.core.state import State
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.errors import CheckpointError, DivergedError, blame
from ddp_mnist.system.console import Console
from ddp_mnist.system.quick_import import import_metrics_meanwhile
from ddp_mnist.system.text import quoted
from ddp_mnist.training import checkpoint, model_file, result, scores
from ddp_mnist.training.folder import MODEL, SUMMARY, RunFolder
from ddp_mnist.training.training_run import TrainingRun

MISFIT = "undo what has changed in the code of the net or the optimizer, or begin a new run"
EPOCH_LINES = 50  # on the console at most, of a run of more epochs; metrics.jsonl has all


class OpenedFolder(NamedTuple):
    """What every rank knows of the run folder, and of the checkpoint in it."""

    run_id: str = ""  # each checkpoint holds it
    where: str = ""  # the folder's path on rank 0's machine
    checkpoint: bytes | None = None  # to resume from: complete on rank 0, empty on other ranks


class RecordedRun(Run):
    """The run that `fit` is given. By default it writes and prints nothing."""

    def __init__(
        self,
        run: TrainingRun,
        stop: StopSignals,
        folder: RunFolder | None = None,  # has no path on ranks that do not write
        console: Console | None = None,  # silent on all but one
        opened: OpenedFolder | None = None,
        profile: Any = None,  # torch's, with --profile
    ) -> None:
        self.run, self.stop, self.profile = run, stop, profile
        self.run_id, self.where, self.checkpoint = opened or OpenedFolder()
        self.folder, self.console = folder or RunFolder(), console or Console(False)
        flags = run.config.run
        self.log_every, self.checkpoint_every = flags.log_every, flags.checkpoint_every
        self.stop_requests, self.is_rank0 = stop.requests, run.world.store.rank == 0
        self.line: dict[str, Any] = {}  # of the last sync point, as it is logged
        self.began: tuple[float, int] | None = None  # time and step of the first sync point

    @contextlib.contextmanager
    def as_errors(self) -> Iterator[None]:
        """Raise what ends `fit` as the errors that the ranks agree on and the folder records."""
        try:
            yield
        except StopRequested as error:
            done = f"stopped after step {error.step}"
            if self.where:
                done += f" and saved; to go on, add --resume {quoted(self.where)} to the command"
            raise self.stop.ending(error.requests, done, self.is_rank0) from None
        except Diverged as error:
            raise DivergedError(
                f"--{error}; use a lower learning rate, or --max-grad-norm 1, and look at your own"
                " net or loss, if any"
            ) from error

    # --- Before the first step

    def begin(self, state: State) -> None:
        """Bring every rank to where rank 0's checkpoint left the run.

        From here on a stop signal saves the state before it ends the run. Raise CheckpointError if
        the checkpoint's tensors are not those of this net and optimizer.
        """
        state.start_time = self.run.world.start_time
        if self.checkpoint is not None:
            raw = broadcast_bytes(self.run.world.accelerator, self.checkpoint)
            self.checkpoint = None  # it may be large
            content = checkpoint.from_bytes(raw, f"the checkpoint of {self.where}")
            with blame("the checkpoint", CheckpointError, MISFIT):
                state.restore(content["state"], self.run.recipe)
        self.stop.saves_on_stop = True
        if self.run.world.accelerator.is_main_process:
            import_metrics_meanwhile()

    # --- While it trains

    def phase(self, name: str) -> None:
        """Announce the next phase in status.json and on the bar."""
        self.folder.status(phase=name)
        self.console.draw(*self.progress_line(name))

    def step(self) -> None:
        self.run.world.store.steps += 1
        if self.profile:
            self.profile.step()

    def log(self, step: int, line: dict[str, Any], write: bool) -> None:
        """Show the line of a sync point; with `write`, add it to metrics.jsonl and the trackers."""
        self.line, self.folder.step = line, step
        self.began = self.began or (time.monotonic(), step)
        if write:
            self.folder.log(step, line)
        show = self.console.progress if write else self.console.draw
        show(*self.progress_line())

    def log_epoch(self, state: State, means: dict[str, Any], validation: EvalResult | None) -> None:
        """Write the validation's results, and show the epoch that has ended."""
        progress, epochs, task = state.progress, self.run.recipe.epochs, self.run.task
        if validation:
            metrics = {"epoch": progress.epoch - 1, **validation.as_log_line("val")}
            self.folder.log(progress.step, metrics)
            if self.is_rank0:
                scores.warn_unless_finite(validation)
        every = -(-epochs // EPOCH_LINES)
        if progress.epoch % every == 0 or progress.epoch == epochs or progress.stopped_by:
            line = scores.epoch_line(progress.epoch - 1, epochs, means, validation, task.name)
            self.console.print(line)
        if progress.stopped_by:
            flag = flag_name(progress.stopped_by)
            self.console.print(f"stopped by {flag} after epoch {progress.epoch}")

    def progress_line(self, phase: str = "") -> tuple[float, str]:
        """Return the share that is done and the line of the last sync point."""
        total, step = self.run.recipe.total_steps, self.folder.step
        return step / total, scores.step_line(self.line, step, total, self.left_s(), phase)

    def left_s(self) -> float | None:
        """Return the seconds that the run will still take; None before its second sync point."""
        step, steps_left = self.folder.step, self.run.recipe.total_steps - self.folder.step
        if self.began and step > self.began[1]:
            return (time.monotonic() - self.began[0]) / (step - self.began[1]) * steps_left
        return None

    def save(self, state: State) -> None:
        """Write a checkpoint."""
        clock, progress = time.monotonic(), state.progress
        content = state.content(self.run.recipe)  # on all ranks, as for a net in shards
        self.folder.step = progress.step
        if self.folder.path:
            self.folder.check_ours()
            written = {
                "run_id": self.run_id,
                "metrics_lines": self.folder.metrics_lines,
                "metrics_sha256": self.folder.metrics_sha256.hexdigest(),
            }
            keep = self.run.config.run.keep
            checkpoint.save(self.folder.path, progress.step, {**written, "state": content}, keep)
        progress.save_seconds += time.monotonic() - clock

    # --- After the last step

    def finish(self, state: State, net: Normalised, test: EvalResult) -> dict[str, Any]:
        """Write the test's metrics, the weights and the summary, and show the result."""
        run, progress = self.run, state.progress
        self.folder.log(progress.step, {"epoch": progress.epoch - 1, **test.as_log_line("test")})
        if self.is_rank0:
            scores.warn_unless_finite(test)
        state_dict, image_format = net.net.state_dict(), run.images.image_format
        content = model_file.to_bytes(state_dict, run.model, run.task, image_format)
        self.folder.write_bytes(MODEL, content)
        outcome = result.summarise(run, state, test)
        outcome |= {
            "run_id": self.run_id,
            "config": self.folder.config_sha256,
            "model_sha256": hashlib.sha256(content).hexdigest(),
            "metrics_sha256": self.folder.metrics_sha256.hexdigest(),
        }
        self.folder.write_json(SUMMARY, outcome)
        self.console.print(result.last_lines(outcome, self.folder))
        return outcome
