"""One rank's part in a run: what `fit` gets, and the bookkeeping while it trains."""

import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import World, broadcast_bytes
from ddp_mnist.config.run import ResolvedConfig
from ddp_mnist.data.batches import ImageData
from ddp_mnist.errors import DivergedError
from ddp_mnist.nets.ours import Normalised, with_test_time_augmentation
from ddp_mnist.run import checkpoint, hints, summary, weights
from ddp_mnist.run.console import Console, draws, tell
from ddp_mnist.run.evaluation import Metrics, evaluate_split, import_evaluate_meanwhile
from ddp_mnist.run.folder import MODEL, SUMMARY, RunFolder
from ddp_mnist.run.identity import Identity
from ddp_mnist.run.profiling import StepProfiler
from ddp_mnist.run.state import Progress, State
from ddp_mnist.system.neighbours import Neighbours

JUDGED_S = 30.0  # of training, after which its length is judged
EPOCH_LINES = 50  # on the console at most, of a run of more epochs; metrics.jsonl has all


@dataclass
class TrainingRun:
    """A run, as `fit` gets it; by default it writes nowhere and prints nothing."""

    config: ResolvedConfig  # has the values that the data and the number of processes decide
    world: World  # all processes
    images: ImageData
    stop: StopSignals
    folder: RunFolder = field(default_factory=RunFolder)  # has no place where it is not written
    console: Console = field(default_factory=lambda: Console(False))  # silent on all but one
    identity: Identity | None = None  # of a run that is written: it is in each checkpoint
    checkpoint: bytes | None = None  # to go on from: whole on rank 0, empty on the other ranks
    where: str = ""  # the folder's path on rank 0's machine
    profiler: StepProfiler = field(init=False)
    state: State = field(init=False)  # set by `begin`
    neighbours: Neighbours | None = None  # other programs on these cores, until reported
    overfits: bool = False  # whether the hint has been printed
    judges_length: bool = False  # if the recipe has chosen it; a person waits for a CPU
    line: dict[str, Any] = field(default_factory=dict)  # of the last sync point, as it is logged
    began: tuple[float, int] | None = None  # when and at which step the first sync point was

    def __post_init__(self) -> None:
        steps, is_cpu = self.config.run.profile, self.world.accelerator.device.type == "cpu"
        self.profiler = StepProfiler(steps, self.world, self.folder, self.console)
        hosts = self.world.store.hosts
        if self.console.verbose and is_cpu:
            ranks_here = hosts.count(hosts[self.world.store.rank])
            self.neighbours = Neighbours(self.world.threads, ranks_here)
            self.judges_length = not self.config.resumes and "epochs" not in self.config.explicit
        self.stop.answer, self.stop.at_once = self.answer, self.give_up

    # --- Before the first step

    def begin(self, state: State) -> Progress:
        """Bring every rank to where rank 0's checkpoint left the run. Return how far it has come.

        From here on a stop signal saves the state before it ends the run. Raise CheckpointError if
        the checkpoint's tensors are not those of this net and optimizer.
        """
        recipe, self.state = self.config.recipe, state
        if self.checkpoint is not None:
            raw = broadcast_bytes(self.world.accelerator, self.checkpoint)
            self.checkpoint = None  # it may be large
            content = checkpoint.from_bytes(raw, f"the checkpoint of {self.where}")
            state.restore(content["state"], recipe)
        self.profiler.plan(state.progress.step, recipe.steps_per_epoch, recipe.total_steps)
        self.stop.save = self.save_to_go_on
        import_evaluate_meanwhile(self.world.accelerator)
        return state.progress

    def save_to_go_on(self) -> str:
        """Save, and return how the run ended and how it goes on."""
        self.save(self.state)
        return (
            f"stopped after step {self.state.progress.step} and saved; to go on, add"
            f" --resume {self.where} to the command"
        )

    # --- While it trains

    def report_step(
        self, progress: Progress, lr: float, newly_slow: dict[int, float], log: bool
    ) -> None:
        """Show the means since the last log line, at each sync point; with `log`, write them too.

        Name each slow rank.
        """
        means = progress.end_log_line() if log else progress.since_log.means()
        self.line = {"epoch": progress.epoch, "lr": lr, **means}
        self.folder.step = progress.step
        self.began = self.began or (time.monotonic(), progress.step)
        if log:
            self.folder.append_metrics(progress.step, self.line)
            self.console.progress(*self.shown())
        else:
            self.console.draw(*self.shown())
        if newly_slow and self.world.store.rank == 0:  # which knows the machines
            for rank, times in newly_slow.items():
                host = self.world.store.host(rank)
                slow = {"slow_rank": rank, "host": host, "times_median": round(times, 1)}
                self.folder.append_metrics(progress.step, {"epoch": progress.epoch, **slow})
                self.console.note(hints.slow_line(rank, host, times))
        if self.neighbours and (fit := self.neighbours.judge()):
            threads, has_launcher = self.neighbours.threads, self.stop.has_launcher
            self.console.print(hints.neighbours_line(fit, threads, has_launcher))
            self.neighbours = None
        if self.judges_length and time.monotonic() - self.began[0] >= JUDGED_S:
            self.judges_length = False
            if line := hints.long_line(self.left_s() or 0.0, self.config.recipe.epochs):
                self.console.print(line)

    def evaluate(self, phase: str, net: nn.Module, loader: DataLoader[Any]) -> Metrics:
        """Return the metrics of a split that `make_eval_loader` made, as `evaluate_split` does."""
        self.phase(phase)
        recipe, accelerator = self.config.recipe, self.world.accelerator
        eval_net, classes = with_test_time_augmentation(net, recipe.model), len(self.images.classes)
        return evaluate_split(
            accelerator, eval_net, loader, classes, self.stop, recipe.metrics, recipe.loss
        )

    def log_epoch(
        self, means: dict[str, Any], progress: Progress, validation: Metrics | None
    ) -> None:
        """Write what the validation found, and show the epoch that has ended."""
        epoch = progress.epoch - 1
        if validation:
            self.folder.append_metrics(progress.step, {"epoch": epoch, **validation.named("val")})
        recipe = self.config.recipe
        every = -(-recipe.epochs // EPOCH_LINES)
        if progress.epoch % every == 0 or progress.epoch == recipe.epochs or progress.stopped_by:
            self.console.print(summary.epoch_line(epoch, recipe.epochs, means, validation))
        hint = hints.overfit_line(means["accuracy"], validation, recipe)
        if hint and not self.overfits:
            self.overfits = True
            self.console.print(hint)
        if progress.stopped_by:
            self.console.print(f"stopped by {progress.stopped_by} after epoch {progress.epoch}")

    def phase(self, name: str) -> None:
        """Say in status.json and on the bar, beside the step, what comes now."""
        self.folder.status(phase=name)
        self.console.draw(*self.shown(name))

    def shown(self, phase: str = "") -> tuple[float, str]:
        """Return the share that is done and the line of the last sync point."""
        total, step = self.config.recipe.total_steps, self.folder.step
        return step / total, summary.step_line(self.line, step, total, self.left_s(), phase)

    def left_s(self) -> float | None:
        """Return the seconds that the run will take yet; None before its first step."""
        step, steps_left = self.folder.step, self.config.recipe.total_steps - self.folder.step
        if self.began and step > self.began[1]:
            return (time.monotonic() - self.began[0]) / (step - self.began[1]) * steps_left
        if speed := self.line.get("images_per_second"):  # of the first step alone
            return self.config.recipe.batch_size / speed * steps_left
        return None

    def save(self, state: State) -> None:
        """Write a checkpoint; all ranks come here at the same step.

        Raise DivergedError if the weights are not finite numbers, although each loss was.
        """
        clock, step = time.monotonic(), state.progress.step
        finite = [torch.isfinite(parameter).all() for parameter in state.net.parameters()]
        if not torch.stack(finite).all():
            raise DivergedError(
                f"--lr {self.config.recipe.lr:g}: by step {step} the weights are not finite numbers"
                " any more; use a lower learning rate, or --max-grad-norm 1"
            )
        self.folder.step = step
        if self.folder.path and self.identity:
            about = {**asdict(self.identity), "metrics_lines": self.folder.metrics_lines}
            content = {**about, "state": state.content()}
            checkpoint.save(self.folder.path, step, content, self.config.run.keep)
        state.progress.save_seconds += time.monotonic() - clock

    def answer(self) -> None:
        """Say what a first Ctrl-C does: once on each machine where it is pressed.

        Of a second one a launcher makes a SIGTERM to its processes, which save then as well.
        """
        again = "; press Ctrl-C again to stop without saving" * (not self.stop.has_launcher)
        if self.where and self.world.local_rank == 0 and not self.config.run.quiet:
            self.console.tell(f"ddp-mnist: stopping after this step{again}")

    def give_up(self) -> None:
        """Say what is saved already, after a second Ctrl-C, which saves nothing any more."""
        if self.folder.path is None:
            return
        self.folder.record_outcome("failed", 130, "interrupted twice")
        rest = "nothing is saved"
        if saved := checkpoint.newest_first(self.folder.path):
            rest = (
                f"nothing after step {checkpoint.step_of(saved[0])} is saved; to go on from there,"
                f" add --resume {self.where} to the command"
            )
        below_the_bar = "\n" if draws(sys.stderr) else ""
        tell(f"{below_the_bar}ddp-mnist: interrupted twice: stopped at once, {rest} (code 130)")

    # --- After the last step

    def finish(self, net: Normalised, test: Metrics, forward_ms: float) -> dict[str, Any]:
        """Write the test's metrics, the weights and the summary, and show the result."""
        state, progress, accelerator = self.state, self.state.progress, self.world.accelerator
        line = {"epoch": progress.epoch - 1, **test.named("test")}
        self.folder.append_metrics(progress.step, line)
        model, images = self.config.recipe.model, self.images
        content = weights.to_bytes(net.net.state_dict(), model, images.classes, images.image_format)
        self.folder.write_bytes(MODEL, content)
        mine = [progress.train_seconds - state.seconds_before, forward_ms]
        times = accelerator.gather(torch.tensor([mine], device=accelerator.device)).tolist()
        outcome = summary.summarise(self.config, self.world, images, state, test, times)
        self.folder.write_json(SUMMARY, outcome)
        self.console.print(summary.last_lines(outcome, self.folder, self.overfits))
        return outcome
