"""Losses, counts and times between two sync points, and when the next sync point is due."""

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from .recipe import Recipe
from .state import Progress
from .task import Task

# Unless a run says how often to save: at least so many steps, and so many seconds of training,
# between two checkpoints.
SAVE_STEPS = 100
SAVE_S = 5.0
MEASURED = ("images_per_second", "waiting_for_data", "peak_memory_mb")  # vary between equal runs


class Meter:
    """A rank's counts since the last sync point; at a sync point all ranks add theirs up.

    Between sync points nothing is read from the device, so the host runs ahead of a GPU. Sync
    points are about a second apart, and at the same step on all ranks: each plans the next one from
    the mean of all ranks' speeds.
    """

    def __init__(
        self, accelerator: Accelerator, progress: Progress, recipe: Recipe, task: Task
    ) -> None:
        self.accelerator, self.progress, self.recipe = accelerator, progress, recipe
        self.task = task
        self.losses: list[Tensor] = []
        self.answers: list[tuple[Tensor, Tensor]] = []  # predictions and targets
        # Before clipping, of the last step that measured it
        self.gradient_norm: Tensor | None = None
        self.waited_s = self.training_s = 0.0  # this rank's, since the last log line
        self.last_sync = self.last_save = progress.step
        self.next_sync_step = progress.step + 1  # the same on all ranks
        self.steps_per_s = 0.0  # this rank's, in the interval before the last sync point
        self.agreed_steps_per_s = 0.0  # the mean of all ranks', one interval earlier
        self.restart_clock()

    def restart_clock(self) -> None:
        """Exclude the time since the last sync point from the training's seconds."""
        self.clock = time.monotonic()

    def is_save_due(self, every: int | None) -> bool:
        """Return whether to save after this step: every `every` steps if given, else by the clock.

        A GPU can take 100 steps in 0.2 s, and a save to a network disk would take nearly as long.
        The ranks agree, as they count the seconds since the last save by the mean of their speeds.
        """
        step = self.progress.step
        if every:
            return step % every == 0
        least = max(SAVE_STEPS, SAVE_S * self.agreed_steps_per_s)
        return step % SAVE_STEPS == 0 and step - self.last_save >= least

    def mark_saved(self) -> None:
        """Note that this step was saved, and exclude that time from the training's seconds."""
        self.last_save = self.progress.step
        self.restart_clock()

    def steps_of(self, loader: Any) -> Iterator[list[Any]]:
        """Yield the micro-batches of each step, and count the seconds of waiting for them.

        A step's micro-batches are in memory together, as uint8.
        """
        batches, clock = iter(loader), time.monotonic()
        while micro_batches := [*islice(batches, self.recipe.grad_accum)]:
            self.waited_s += time.monotonic() - clock
            yield micro_batches
            clock = time.monotonic()

    def update(self, loss: Tensor, outputs: Tensor, targets: Tensor) -> None:
        """Note a batch: its mean loss, a scalar, its outputs [B, outputs] and its targets.

        Nothing here may wait for the device, and what can be done for all batches at once waits for
        the sync point.
        """
        self.losses.append(loss.detach())
        self.answers.append((self.task.predict(outputs.detach()), targets))

    def sync(self, stop_requests: Sequence[float]) -> list[float]:
        """Add all ranks' counts to their progress, and plan the next sync point.

        Return the sums over all ranks of `stop_requests`, which are this rank's. Raise
        Diverged, on all ranks alike.
        """
        scores = self.task.score(*map(torch.cat, zip(*self.answers, strict=True)))
        sums = sum_up(self.losses, scores.view(len(self.losses), -1))
        mine = sums.new_tensor([*stop_requests, self.steps_per_s])
        reduced = self.accelerator.reduce(torch.cat([sums, mine])).tolist()
        loss, score, seen, bad, *requests, steps_per_s = reduced
        self.losses.clear()
        self.answers.clear()
        step, seconds = self.progress.step, time.monotonic() - self.clock
        self.training_s += seconds
        self.restart_clock()
        self.progress.add(loss, score, seen, bad, seconds)
        # About a second from here, by the speeds that the ranks had measured before.
        self.agreed_steps_per_s = steps_per_s / self.accelerator.num_processes
        self.next_sync_step = step + max(1, int(self.agreed_steps_per_s))
        self.steps_per_s = (step - self.last_sync) / max(seconds, 1e-3)
        self.last_sync = step
        self.progress.raise_if_diverged(self.recipe, self.accelerator)
        return requests

    def line(self, end: bool) -> dict[str, Any]:
        """Return the means since the last log line, and what was measured; `end` starts over.

        The score has its own name. Waiting and memory are those of this rank.
        """
        progress = self.progress
        means = progress.end_log_line() if end else progress.since_log.means()
        means[self.task.name] = means.pop("score")
        if not end:
            return means
        norm = None if self.gradient_norm is None else self.gradient_norm.item()
        waiting = self.waited_s / max(self.training_s, 1e-9)
        self.waited_s = self.training_s = 0.0
        memory = peak_memory_mb(self.accelerator.device)
        measured = {"waiting_for_data": round(waiting, 4), "peak_memory_mb": memory}
        return {**means, "gradient_norm": norm, **measured}


def peak_memory_mb(device: torch.device) -> int:
    """Return the most that this process has held at once, in 10^6 bytes: of the GPU, or else of
    the machine.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) // 10**6
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) differs
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit // 10**6


def sum_up(losses: list[Tensor], scores: Tensor) -> Tensor:
    """Return float64 [loss, score, seen, bad] over batches, without a sync of the device.

    A batch has its mean loss, a scalar, and its images' scores, a row of [batches, images]. One
    whose loss is not finite counts as bad and is left out of the other sums. Rounded to 2**-30,
    sums are exact, and therefore equal however a run was divided.
    """
    loss, images_per_batch = torch.stack(losses).double(), float(scores.shape[1])
    finite = torch.isfinite(loss)
    both = torch.stack([loss * images_per_batch, scores.double().sum(1)])
    loss_sum, score_sum = ((torch.where(finite, both, 0.0) * 2**30).round() / 2**30).sum(1)
    seen = finite.sum() * images_per_batch
    return torch.stack([loss_sum, score_sum, seen, (~finite).sum().double()])
