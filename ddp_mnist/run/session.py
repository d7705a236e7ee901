"""One rank's part in a run: what all ranks agree on first, and the bookkeeping while it trains."""

import contextlib
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.rendezvous import check_same
from ddp_mnist.cluster.signals import StopSignals, listen
from ddp_mnist.cluster.world import World, broadcast_bytes
from ddp_mnist.config import ResolvedConfig, TrainConfig, resolve_recipe
from ddp_mnist.data import cache
from ddp_mnist.data.batches import ImageData
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.errors import DivergedError, UsageError
from ddp_mnist.flags import flag_values
from ddp_mnist.models import Normalised
from ddp_mnist.nets import build_net, has_batch_norm
from ddp_mnist.run import checkpoint, resume, summary, tracking, weights
from ddp_mnist.run.console import Console, tell
from ddp_mnist.run.evaluation import Metrics, check_scores
from ddp_mnist.run.folder import CONFIG, MODEL, SUMMARY, RunFolder
from ddp_mnist.run.profiling import StepProfiler
from ddp_mnist.run.state import Progress, State


@dataclass
class Session:
    """A run, as `fit` gets it; by default it writes nowhere and prints nothing."""

    config: ResolvedConfig  # has the values that the data and the number of processes decide
    world: World  # all processes
    images: ImageData
    stop: StopSignals
    folder: RunFolder = field(default_factory=RunFolder)  # has no place where it is not written
    console: Console = field(default_factory=lambda: Console(False))  # silent on all but one
    identity: dict[str, Any] = field(default_factory=dict)  # in each checkpoint, see resume.py
    checkpoint: bytes | None = None  # to go on from: whole on rank 0, empty on the other ranks
    where: str = ""  # the folder's path on rank 0's machine
    profiler: StepProfiler = field(init=False)

    def __post_init__(self) -> None:
        steps, accelerator = self.config.run.profile, self.world.accelerator
        self.profiler = StepProfiler(steps, accelerator, self.folder, self.console)

    # --- Before the first step

    def restore(self, state: State) -> Progress:
        """Bring every rank to where rank 0's checkpoint left the run. Return how far it has come.

        Raise CheckpointError if its tensors are not those of this net and optimizer.
        """
        recipe = self.config.recipe
        if self.checkpoint is not None:
            raw = broadcast_bytes(self.world.accelerator, self.checkpoint)
            self.checkpoint = None  # it may be large
            content = checkpoint.from_bytes(raw, f"the checkpoint of {self.where}")
            state.restore(content["state"], recipe)
        self.profiler.plan(state.progress.step, recipe.steps_per_epoch, recipe.total_steps)
        return state.progress

    def save_when_stopped(self, state: State) -> None:
        """From here on a stop signal saves the state before it ends the run."""

        def save() -> str:
            self.save(state)
            return (
                f"stopped after step {state.progress.step} and saved; to go on, add"
                f" --resume {self.where} to the command"
            )

        self.stop.save, self.stop.at_once = save, self.give_up

    # --- While it trains

    def log_step(self, progress: Progress, lr: float) -> None:
        """Write the means since the last log line, and show them."""
        line = {"epoch": progress.epoch, "lr": lr, **progress.end_log_line()}
        self.folder.append_metrics(progress.step, line)
        recipe = self.config.recipe
        shown = summary.step_line(line, progress.step, recipe.total_steps, recipe.batch_size)
        self.console.progress(progress.step / recipe.total_steps, shown)

    def log_epoch(
        self, means: dict[str, Any], progress: Progress, validation: Metrics | None
    ) -> None:
        """Write what the validation found, and show the epoch that has ended."""
        epoch = progress.epoch - 1
        if validation:
            decided = {"val_accuracy": validation.accuracy, "val_loss": validation.loss}
            decided |= {f"val_{name}": value for name, value in validation.scores.items()}
            self.folder.append_metrics(progress.step, {"epoch": epoch, **decided})
        self.console.print(summary.epoch_line(epoch, self.config.recipe.epochs, means, validation))
        if progress.stopped_by:
            self.console.print(f"stopped by {progress.stopped_by} after epoch {progress.epoch}")

    def phase(self, name: str, progress: Progress) -> None:
        """Say in status.json and on the console what comes now."""
        self.folder.status(phase=name)
        self.console.progress(progress.step / self.config.recipe.total_steps, name)

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
        if self.folder.path:
            about = {**self.identity, "metrics_lines": self.folder.metrics_lines}
            content = {**about, "state": state.content()}
            checkpoint.save(self.folder.path, step, content, self.config.run.keep)
        state.progress.save_seconds += time.monotonic() - clock

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
        below_the_bar = "\n" if sys.stderr.isatty() else ""
        tell(f"{below_the_bar}ddp-mnist: interrupted twice: stopped at once, {rest} (code 130)")

    # --- After the last step

    def finish(self, state: State, net: Normalised, test: Metrics) -> dict[str, Any]:
        """Write the test's metrics, the weights and the summary, and show the result."""
        progress, accelerator = state.progress, self.world.accelerator
        tested = {"test_accuracy": test.accuracy, "test_loss": test.loss}
        tested |= {f"test_{name}": value for name, value in test.scores.items()}
        self.folder.append_metrics(progress.step, {"epoch": progress.epoch - 1, **tested})
        model, images = self.config.recipe.model, self.images
        content = weights.to_bytes(net.net.state_dict(), model, images.classes, images.preparation)
        self.folder.write_bytes(MODEL, content)
        own_seconds = [progress.train_seconds - state.seconds_before]
        seconds = accelerator.gather(torch.tensor(own_seconds, device=accelerator.device)).tolist()
        outcome = summary.summarise(self.config, self.world, images, state, test, seconds)
        self.folder.write_json(SUMMARY, outcome)
        self.console.print(summary.last_lines(outcome, self.folder))
        return outcome


@contextlib.contextmanager
def open_run(
    config: TrainConfig, world: World, launch: Launch, folder: RunFolder
) -> Iterator[Session | None]:
    """Agree with all ranks on settings, data and folder. Yield the run; None if there is none.

    There is none after --dry-run, and where the run that --resume names has finished. Raise a
    DdpMnistError on all ranks: for whatever is missing, damaged, contradictory or different.
    """
    verbose = not config.run.quiet
    with (
        Console(verbose and launch.rank == 0, must_arrive=False) as console,
        summary.narrated_elsewhere(world, verbose),
    ):
        found = world.store.broadcast_from_rank0("resume", lambda: resume.find(config))
        if found and found["finished"]:
            console.print(found["finished"])
            yield None
            return
        config, images = resolve_and_load(config, world, console, found)
        with listen(launch.child_of_launcher, world.store) as stop:
            check_same(world.store, summary.facts(config, world, images))
            if config.run.dry_run:
                console.print(summary.plan(config, world, images, None))
                yield None
                return
            run = Session(config, world, images, stop, folder, console)
            notes = open_folder(run, found)
            console.print(summary.plan(config, world, images, folder.path))
            with tracking.tracked(config, folder, world, console):
                compiling = ["compiling  the model, which can take minutes"]
                for note in notes + compiling * config.distribution.compile:
                    console.print(note)
                yield run


def resolve_and_load(
    config: TrainConfig, world: World, console: Console, found: dict[str, Any] | None
) -> tuple[ResolvedConfig, ImageData]:
    """Return the flags, with the recipe resolved for this data and world size, and the data.

    Every machine has the data before the first collective; rank 0 decides what `auto` means.
    A run that goes on keeps the values that it began with, but for the flags that were typed.
    """
    config = resume.inherit(config, found)
    store, cache_dir, reading = world.store, config.run.cache_dir, config.run.reading
    store.broadcast_from_rank0("trackers", lambda: tracking.named(config.run.trackers))
    if config.recipe.metrics:
        store.broadcast_from_rank0("metrics", lambda: check_scores(config.recipe.metrics))
    name, notes = store.broadcast_from_rank0(
        "dataset", lambda: cache.choose(config.run.dataset, cache_dir, reading, console.print)
    )
    images = cache.load(name, cache_dir, reading, log=console.print)
    images = replace(images, warnings=[*notes, *images.warnings])
    store.barrier("data")
    if found:
        resume.check_images(name, images.digest, found)
    recipe = resolve_recipe(config.recipe, len(images.train_labels), store.world_size)
    if config.run.profile >= recipe.steps_per_epoch > 1:
        raise UsageError(
            f"--profile {config.run.profile}: an epoch has {recipe.steps_per_epoch} steps; ask for"
            f" at most {recipe.steps_per_epoch - 1}"
        )
    check_net(config, images)
    place = cache_dir and str(cache.cache_folder(cache_dir).absolute())
    run = replace(config.run, dataset=from_anywhere(name), cache_dir=place)
    return ResolvedConfig(run, config.distribution, config.typed, recipe=recipe), images


def check_net(config: TrainConfig, images: ImageData) -> None:
    """Make the net once and throw it away: what is wrong with it is said before a folder is made.

    Raise as `build_net` does, or UsageError for --sync-bn without BatchNorm.
    """
    net = build_net(
        config.recipe.model, len(images.classes), images.preparation, config.recipe.weights
    )
    if config.distribution.sync_bn and not has_batch_norm(net):
        raise UsageError(
            f"--sync-bn: {config.recipe.model} has no BatchNorm; use --model cnn_bn or leave it out"
        )


def open_folder(run: Session, found: dict[str, Any] | None) -> list[str]:
    """Make the run's folder, or take over that of a run that goes on: on rank 0's machine.

    Return lines for the person, on rank 0. Raises as RunFolder.create and resume.load_latest do.
    """
    config, world, notes = run.config, run.world, list[str]()
    run_id = found["run_id"] if found else uuid.uuid4().hex
    run.identity = resume.identity(config, world, run_id, run.images.digest)
    run.checkpoint = b"" if found else None

    def open_it() -> str:
        if found:
            path = Path(found["path"])
            run.checkpoint, lines = resume.load_latest(run.folder, path, run.identity, config)
            run.folder.begin()
            notes.extend(lines)
        else:
            begin_again = config.run.resume == "auto"
            run.folder.create(config.run.run_dir, run.images.name, begin_again=begin_again)
        return str(run.folder.path)

    run.where = world.store.broadcast_from_rank0(summary.FOLDER_KEY, open_it)
    run.folder.write_json(
        CONFIG,
        {
            "run_id": run_id,
            "format": resume.FORMAT,
            "digest": run.images.digest,
            "run": flag_values(config.run) | {"run_dir": run.where, "resume": None},
            "recipe": flag_values(config.recipe),
            "distribution": flag_values(config.distribution)
            | {"backend": world.backend, "mixed_precision": world.precision},
        },
    )
    return notes
