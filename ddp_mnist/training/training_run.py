"""One rank's part in a run: what `fit` gets, and the bookkeeping while it trains."""

import hashlib
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import World, broadcast_bytes
from ddp_mnist.config.train_config import ResolvedConfig
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.nets.wrappers import Normalised, with_test_time_augmentation
from ddp_mnist.system.console import Console, tell_at_once
from ddp_mnist.task import Task
from ddp_mnist.training import checkpoint, lines, model_file, result
from ddp_mnist.training.evaluation import EvalResult, evaluate_split, import_evaluate_meanwhile
from ddp_mnist.training.folder import MODEL, SUMMARY, RunFolder
from ddp_mnist.training.profiling import NO_PROFILE
from ddp_mnist.training.state import Progress, State, diverged

EPOCH_LINES = 50  # on the console at most, of a run of more epochs; metrics.jsonl has all


@dataclass
class TrainingRun:
    """What `fit` needs to train one run. By default it writes and prints nothing."""

    # With the values that the data and the number of processes decide; --inject changes some.
    config: ResolvedConfig
    world: World  # all processes
    images: ImageData
    task: Task  # what is learned from them
    stop: StopSignals
    folder: RunFolder = field(default_factory=RunFolder)  # has no path on ranks that do not write
    console: Console = field(default_factory=lambda: Console(False))  # silent on all but one
    run_id: str = ""  # each checkpoint holds it
    checkpoint: bytes | None = None  # to resume from: complete on rank 0, empty on other ranks
    where: str = ""  # the folder's path on rank 0's machine
    profile: Any = field(default_factory=lambda: NO_PROFILE)  # torch's, with --profile
    state: State = field(init=False)  # set by `begin_or_resume`
    line: dict[str, Any] = field(default_factory=dict)  # of the last sync point, as it is logged
    began: tuple[float, int] | None = None  # time and step of the first sync point

    # --- Before the first step

    def begin_or_resume(self, state: State) -> Progress:
        """Bring every rank to where rank 0's checkpoint left the run. Return how far it has come.

        From here on a stop signal saves the state before it ends the run. Raise CheckpointError if
        the checkpoint's tensors are not those of this net and optimizer.
        """
        recipe, world, progress = self.config.recipe, self.world, state.progress
        self.state = state
        if self.checkpoint is not None:
            raw = broadcast_bytes(world.accelerator, self.checkpoint)
            self.checkpoint = None  # it may be large
            content = checkpoint.from_bytes(raw, f"the checkpoint of {self.where}")
            progress = state.restore(content["state"], recipe)
        self.stop.save = self.save_to_go_on
        import_evaluate_meanwhile(world.accelerator)
        return progress

    def save_to_go_on(self) -> str:
        """Save, and return how the run ended and how to resume it."""
        self.save(self.state)
        return (
            f"stopped after step {self.state.progress.step} and saved; to go on, add"
            f" --resume {self.where} to the command"
        )

    # --- While it trains

    def log(self, step: int, line: dict[str, Any], write: bool) -> None:
        """Show the line of a sync point; with `write`, add it to metrics.jsonl and the trackers."""
        self.line, self.folder.step = line, step
        self.began = self.began or (time.monotonic(), step)
        if write:
            self.folder.log(step, line)
        show = self.console.progress if write else self.console.draw
        show(*self.progress_line())

    def evaluate(self, phase: str, net: nn.Module, loader: DataLoader[Any]) -> EvalResult:
        """Return the metrics of a split that `make_eval_loader` made, as `evaluate_split` does."""
        self.phase(phase)
        eval_net = with_test_time_augmentation(net, self.config.recipe.model, self.task)
        return evaluate_split(self.world.accelerator, eval_net, loader, self.task, self.stop)

    def log_epoch(
        self, means: dict[str, Any], progress: Progress, validation: EvalResult | None
    ) -> None:
        """Write the validation's results, and show the epoch that has ended."""
        recipe, epoch = self.config.recipe, progress.epoch - 1
        if validation:
            line = {"epoch": epoch, **validation.as_log_line("val")}
            self.folder.log(progress.step, line)
        every = -(-recipe.epochs // EPOCH_LINES)
        if progress.epoch % every == 0 or progress.epoch == recipe.epochs or progress.stopped_by:
            self.console.print(
                lines.epoch_line(epoch, recipe.epochs, means, validation, self.task.name)
            )
        if progress.stopped_by:
            self.console.print(f"stopped by {progress.stopped_by} after epoch {progress.epoch}")

    def phase(self, name: str) -> None:
        """Announce the next phase in status.json and on the bar."""
        self.folder.status(phase=name)
        self.console.draw(*self.progress_line(name))

    def progress_line(self, phase: str = "") -> tuple[float, str]:
        """Return the share that is done and the line of the last sync point."""
        total, step = self.config.recipe.total_steps, self.folder.step
        return step / total, lines.step_line(self.line, step, total, self.left_s(), phase)

    def left_s(self) -> float | None:
        """Return the seconds that the run will still take; None before its first step."""
        step, steps_left = self.folder.step, self.config.recipe.total_steps - self.folder.step
        if self.began and step > self.began[1]:
            return (time.monotonic() - self.began[0]) / (step - self.began[1]) * steps_left
        if speed := self.line.get("images_per_second"):  # of the first step alone
            return self.config.recipe.batch_size / speed * steps_left
        return None

    def save(self, state: State) -> None:
        """Write a checkpoint; all ranks call this at the same step.

        Raise DivergedError if the weights are not finite numbers, although each loss was.
        """
        clock, step = time.monotonic(), state.progress.step
        buffers = filter(torch.is_floating_point, state.net.buffers())  # as BatchNorm's
        finite = [torch.isfinite(each).all() for each in (*state.net.parameters(), *buffers)]
        if not torch.stack(finite).all():
            raise diverged(self.config.recipe, step, "a weight")
        self.folder.step = step
        if self.folder.path:
            self.folder.check_ours()
            state.progress.total_seconds = time.monotonic() - state.start_time
            content = {
                "run_id": self.run_id,
                "metrics_lines": self.folder.metrics_lines,
                "state": state.content(),
            }
            checkpoint.save(self.folder.path, step, content, self.config.run.keep)
        state.progress.save_seconds += time.monotonic() - clock

    def acknowledge_sigint(self) -> None:
        """Say what a first Ctrl-C does, once on each machine on which it is pressed."""
        if self.where and self.world.local_rank == 0 and not self.config.run.quiet:
            tell_at_once("ddp-mnist: stopping after this step")

    def report_second_sigint(self) -> None:
        """After a second Ctrl-C, report the last checkpoint; nothing more is saved."""
        if self.folder.path is None:
            return
        self.folder.record_outcome("failed", 130, "interrupted twice")
        rest = "nothing is saved"
        if saved := checkpoint.newest_first(self.folder.path):
            step = checkpoint.step_of(saved[0])
            rest = f"nothing after step {step} is saved; to go on, add --resume {self.where}"
        tell_at_once(f"ddp-mnist: interrupted twice: stopped at once, {rest} (code 130)")

    # --- After the last step

    def finish(self, net: Normalised, test: EvalResult) -> dict[str, Any]:
        """Write the test's metrics, the weights and the summary, and show the result."""
        state, progress = self.state, self.state.progress
        line = {"epoch": progress.epoch - 1, **test.as_log_line("test")}
        self.folder.log(progress.step, line)
        model, image_format = self.config.recipe.model, self.images.image_format
        content = model_file.to_bytes(net.net.state_dict(), model, self.task, image_format)
        self.folder.write_bytes(MODEL, content)
        outcome = result.summarise(self.config, self.world, self.images, state, test)
        outcome["model_sha256"] = hashlib.sha256(content).hexdigest()
        self.folder.write_json(SUMMARY, outcome)
        self.console.print(result.last_lines(outcome, self.folder))
        return outcome
