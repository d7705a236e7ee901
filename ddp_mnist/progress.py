"""How far a run has come: all that changes in it, besides the weights and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddp_mnist.config import Recipe


@dataclass
class Progress:
    """Counts and times of a run, over all its parts; equal on all ranks but for the last digits.

    Attributes:
        epoch: epochs completed.
        step: optimizer steps taken.
        skipped_steps: of these, the ones that fp16's loss scaler left out.
        train_seconds: wall-clock time in training steps, without validation.
        save_seconds: of these, the time in saving checkpoints.
        total_seconds: wall-clock time since the processes began to look for each other.
        val_accuracy: of the weights as they are; None before the first validation.
        best_accuracy, best_epoch: the highest so far, and after how many epochs.
        stopped_by: the flag that ended the run early.
        resumed_from: the steps at which the run was taken up again.
        bad_in_a_row: batches whose loss was not finite, since the last look at which none was.
        loss_sum, seen, seconds: of the steps since the last log line.
    """

    epoch: int = 0
    step: int = 0
    skipped_steps: int = 0
    train_seconds: float = 0.0
    save_seconds: float = 0.0
    total_seconds: float = 0.0
    val_accuracy: float | None = None
    best_accuracy: float = -1.0
    best_epoch: int = 0
    stopped_by: str | None = None
    resumed_from: list[int] = field(default_factory=list)
    bad_in_a_row: float = 0.0
    loss_sum: float = 0.0
    seen: float = 0.0
    seconds: float = 0.0

    def add(self, loss_sum: float, seen: float, bad: float, seconds: float) -> None:
        """Takes in what all ranks saw since they last added it up."""
        self.loss_sum += loss_sum
        self.seen += seen
        self.seconds += seconds
        self.train_seconds += seconds
        self.bad_in_a_row = self.bad_in_a_row + bad if bad else 0.0

    def log_line(self) -> dict[str, float | None]:
        """Mean loss (None if none was finite) and speed since the last log line; begins anew."""
        line = {
            "loss": self.loss_sum / self.seen if self.seen else None,
            "images_per_second": self.seen / max(self.seconds, 1e-9),
        }
        self.loss_sum = self.seen = self.seconds = 0.0
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


class Lookout:
    """When the ranks next look up from their work: at one step, about once a second.

    Args:
        step: the step that is taken already; they look up after the next one.
    """

    def __init__(self, step: int) -> None:
        self.last = step
        self.next = step + 1

    def looked(self, step: int, seconds: float) -> None:
        """Plans the next look. `seconds` since the last one have to be equal on all ranks."""
        self.next = step + max(1, int((step - self.last) / max(seconds, 1e-3)))
        self.last = step
