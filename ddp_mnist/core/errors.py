"""How a run ends early: all ranks raise the same, after the same step.

What one rank alone raises, such as a full disk, ends the others only as its launcher ends them.
"""

from collections.abc import Sequence


class StopRequested(Exception):
    """A rank was asked to stop, and the state of this step is saved."""

    def __init__(self, step: int, requests: Sequence[float]) -> None:
        super().__init__(f"stopped after step {step}, and saved")
        self.step = step
        self.requests = requests  # the sums over all ranks of their `Run.stop_requests`


class Diverged(ArithmeticError):
    """The loss, the gradient or a weight is no longer a finite number."""

    def __init__(self, lr: float, step: int, what: str) -> None:
        super().__init__(f"lr {lr:g}: by step {step} {what} is no longer a finite number")
        self.lr, self.step, self.what = lr, step, what
