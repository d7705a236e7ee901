"""How far a run has come: all that changes in it, besides the weights and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_mnist.config import Recipe


@dataclass
class Progress:
    """Counts and times of a run.

    Attributes:
        epoch: epochs completed.
        step: optimizer steps taken.
        skipped_steps: of these, the ones that fp16's loss scaler left out.
        train_seconds: wall-clock time in training steps, without validation.
        val_accuracy: of the weights as they are; None before the first validation.
        best_accuracy, best_epoch: the highest so far, and after how many epochs.
        stopped_by: the flag that ended the run early.
    """

    epoch: int = 0
    step: int = 0
    skipped_steps: int = 0
    train_seconds: float = 0.0
    val_accuracy: float | None = None
    best_accuracy: float = -1.0
    best_epoch: int = 0
    stopped_by: str | None = None

    def validated(self, accuracy: float, recipe: Recipe) -> bool:
        """Notes an accuracy that all ranks share. True if it is the best so far."""
        self.val_accuracy = accuracy
        improved = accuracy > self.best_accuracy
        if improved:
            self.best_accuracy, self.best_epoch = accuracy, self.epoch
        if recipe.target_accuracy is not None and accuracy >= recipe.target_accuracy:
            self.stopped_by = "--target-accuracy"
        elif recipe.patience is not None and self.epoch - self.best_epoch >= recipe.patience:
            self.stopped_by = "--patience"
        return improved
