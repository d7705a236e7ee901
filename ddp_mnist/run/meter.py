"""How far a run has come: all that changes in it, besides the weights and the optimizer."""

from __future__ import annotations

import torch


class SyncSchedule:
    """When the ranks next look up from their work: at one step, about once a second.

    Args:
        step: the step that is taken already; they look up after the next one.

    Attributes:
        next: the step after which to look up at the latest; equal on all ranks.
        rate: this rank's steps per second.
    """

    def __init__(self, step: int) -> None:
        self.last = step
        self.next = step + 1
        self.rate = 0.0

    def synced(self, step: int, seconds: float, rate: float) -> None:
        """Plans the next look.

        Args:
            step: where all ranks are.
            seconds: since the last look, on this rank.
            rate: the mean of what the ranks told of their `rate`; the same number on each.
        """
        self.next = step + max(1, int(rate))
        self.rate = (step - self.last) / max(seconds, 1e-3)
        self.last = step


def sum_up(losses: list[torch.Tensor], hits: list[torch.Tensor], images: int) -> torch.Tensor:
    """float64 [loss, right, seen, bad] of batches, without asking the device for a number.

    A batch whose loss is not finite is one bad batch, and neither seen nor summed. Rounded to
    2**-30, sums are exact, and therefore equal however a run was cut into parts.

    Args:
        losses: of each batch the mean over its images, a scalar.
        hits: of each batch how many it got right, a scalar.
        images: in each batch.
    """
    loss = torch.stack(losses).double()
    finite = torch.isfinite(loss)
    loss_sums = (torch.where(finite, loss * images, 0.0) * 2**30).round() / 2**30
    right = torch.where(finite, torch.stack(hits), 0).sum().double()
    seen = finite.sum() * float(images)
    return torch.stack([loss_sums.sum(), right, seen, (~finite).sum().double()])
