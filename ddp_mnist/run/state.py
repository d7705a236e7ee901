"""."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ddp_mnist.cluster.world import World
from ddp_mnist.config import Recipe
from ddp_mnist.errors import CheckpointError, DivergedError

BAD_STEPS_ALLOWED = 3  # of fp16, in a row: losses that are not finite

# A scaler begins at 2**16 and halves its scale with each step that it leaves out: at 2**-8 it is
# the gradients themselves that are not finite.
SKIPPED_STEPS_ALLOWED = 24


@dataclass
class Sums:
    """Over steps, of all ranks: losses of images, images that were right, images seen; seconds."""

    loss: float = 0.0
    right: float = 0.0
    seen: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, right: float, seen: float, seconds: float) -> None:
        self.loss += loss
        self.right += right
        self.seen += seen
        self.seconds += seconds

    def means(self) -> dict[str, float | None]:
        """Loss and accuracy per image, None if no loss was finite, and images per second."""
        return {
            "loss": self.loss / self.seen if self.seen else None,
            "accuracy": self.right / self.seen if self.seen else None,
            "images_per_second": self.seen / max(self.seconds, 1e-9),
        }


@dataclass
class Progress:
    """Counts and times of a run, over all parts that led to where it is.

    Equal on all ranks, but for the seconds, which each measures itself.

    Attributes:
        epoch: epochs completed.
        step: optimizer steps taken.
        skipped_steps: of these, the ones that fp16's loss scaler left out.
        skipped_in_a_row: of these, since the last that it did not.
        train_seconds: wall-clock time in training steps, without validation and saving.
        save_seconds: wall-clock time in saving checkpoints.
        total_seconds: wall-clock time since the processes began to look for each other.
        val_accuracy: of the weights as they are; None before the first validation.
        best_accuracy, best_epoch: the highest so far, and after how many epochs.
        stopped_by: the flag that ended the run early.
        resumed_from: the steps at which the run was taken up again.
        bad_in_a_row: batches whose loss was not finite, since the last look at which none was.
        since_log, in_epoch: of the steps since the last log line, and of this epoch's.
    """

    epoch: int = 0
    step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    train_seconds: float = 0.0
    save_seconds: float = 0.0
    total_seconds: float = 0.0
    val_accuracy: float | None = None
    best_accuracy: float = -1.0
    best_epoch: int = 0
    stopped_by: str | None = None
    resumed_from: list[int] = field(default_factory=list)
    bad_in_a_row: float = 0.0
    since_log: Sums = field(default_factory=Sums)
    in_epoch: Sums = field(default_factory=Sums)

    @classmethod
    def of(cls, plain: dict[str, Any]) -> Progress:
        """From what asdict made of one. Raises KeyError or TypeError if it is something else."""
        sums = {name: Sums(**plain[name]) for name in ("since_log", "in_epoch")}
        return cls(**{**plain, **sums})

    def stepped(self, skipped: bool) -> None:
        """One more step, which the scaler may have left out: on all ranks alike, as it sees the
        gradients after the all-reduce."""
        self.step += 1
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def add(self, loss: float, right: float, seen: float, bad: float, seconds: float) -> None:
        """Takes in what all ranks saw since they last added it up."""
        self.since_log.add(loss, right, seen, seconds)
        self.in_epoch.add(loss, right, seen, seconds)
        self.train_seconds += seconds
        self.bad_in_a_row = self.bad_in_a_row + bad if bad else 0.0

    def refuse_divergence(self, recipe: Recipe, world: World) -> None:
        """Raises DivergedError, on all ranks alike, once the weights are beyond repair.

        Without a loss scaler one loss that is not finite has spoilt them already; with fp16's,
        which leaves such a step out, it takes several looks in a row.
        """
        scaler, batches = world.accelerator.scaler, world.accelerator.num_processes
        allowed = BAD_STEPS_ALLOWED * batches * recipe.grad_accum if scaler else 0
        if self.bad_in_a_row > allowed or self.skipped_in_a_row > SKIPPED_STEPS_ALLOWED:
            what = "loss" if self.bad_in_a_row > allowed else "gradient"
            raise DivergedError(
                f"--lr {recipe.lr:g}: by step {self.step} the {what} is not a finite number any"
                " more; use a lower rate, or --max-grad-norm 1"
            )

    def log_line(self) -> dict[str, float | None]:
        """Means since the last log line, which begin anew."""
        line, self.since_log = self.since_log.means(), Sums()
        return line

    def end_epoch(self) -> dict[str, float | None]:
        """Means of the epoch that ends here."""
        line, self.in_epoch = self.in_epoch.means(), Sums()
        self.epoch += 1
        return line

    def validated(self, accuracy: float, recipe: Recipe) -> bool:
        """Notes an accuracy that all ranks share. True if it is the best so far."""
        self.val_accuracy = accuracy
        improved = accuracy > self.best_accuracy
        if improved:
            self.best_accuracy, self.best_epoch = accuracy, self.epoch
        self.decide(recipe)
        return improved

    def decide(self, recipe: Recipe) -> None:
        """Sets stopped_by, after a validation."""
        accuracy, target, patience = self.val_accuracy, recipe.target_accuracy, recipe.patience
        self.stopped_by = None
        if target is not None and accuracy is not None and accuracy >= target:
            self.stopped_by = "--target-accuracy"
        elif patience is not None and self.epoch - self.best_epoch >= patience:
            self.stopped_by = "--patience"


@dataclasses.dataclass
class State:
    """All that changes in a run.

    Attributes:
        net: the bare model, without DDP around it.
        optimizer: its moments and step counts.
        scaler: fp16's loss scaler, or None.
        started: time.monotonic() at which the run would have begun without a break.
        progress: counts and times.
        best_weights: of the best validation, where --patience asks for them.
        seconds_before: in training steps, when this part of the run began.
    """

    net: nn.Module
    optimizer: Any
    scaler: Any
    started: float
    progress: Progress = dataclasses.field(default_factory=Progress)
    best_weights: dict[str, Tensor] | None = None
    seconds_before: float = 0.0

    def content(self) -> dict[str, Any]:
        self.progress.total_seconds = time.monotonic() - self.started
        return {
            "model": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "progress": dataclasses.asdict(self.progress),
            "best_weights": self.best_weights,
        }

    def restore(self, content: dict[str, Any], recipe: Recipe, steps_per_epoch: int) -> None:
        """Takes over what `content` returned, under a recipe that may have changed since.

        Raises:
            CheckpointError: the tensors are not those of this net and optimizer.
        """
        groups = self.optimizer.param_groups
        try:
            for group, saved in zip(groups, content["optimizer"]["param_groups"], strict=True):
                saved["fused"] = group["fused"]  # as this device needs it
            self.net.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
            if self.scaler and content["scaler"]:
                self.scaler.load_state_dict(content["scaler"])
            if content["best_weights"] is not None:
                device = next(self.net.parameters()).device
                self.best_weights = {n: w.to(device) for n, w in content["best_weights"].items()}
            self.progress = Progress.of(content["progress"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit the model or the optimizer ({error}); remove it to"
                " use the one before"
            ) from error
        if recipe.patience and self.best_weights is None:  # none were kept: the search begins here
            self.progress.best_accuracy, self.progress.best_epoch = -1.0, self.progress.epoch
        self.started -= self.progress.total_seconds
        self.progress.resumed_from.append(self.progress.step)
        self.seconds_before = self.progress.train_seconds
        if self.progress.step == self.progress.epoch * steps_per_epoch:  # it was just validated
            self.progress.decide(recipe)
