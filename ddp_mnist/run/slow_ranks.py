"""Find the ranks that the others wait for: every step takes as long as the slowest rank."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

SLOW = 1.5  # times the median
# Slow for six windows in a row, a minute. A one-off delay, such as the first steps, a compilation
# or a stopped process, falls into one or two of them, however long it is.
WINDOW_S, WINDOWS = 10.0, 6
GPU_SAMPLE = 8  # on a GPU, whose steps may take only a millisecond, one pass in so many is timed


class ForwardClock:
    """Times this rank's forward passes in training, the part of a step in which no rank waits.

    The net's hooks do it, because DDP sends BatchNorm's buffers to all ranks just before it calls
    the net. Only with --sync-bn do ranks wait for each other inside the net; all then take about
    equally long.
    """

    def __init__(self, net: nn.Module) -> None:
        self.seconds, self.passes = 0.0, 0  # up to the last `read`
        self._gpu = next(net.parameters()).device.type == "cuda"
        self._marks: list[Any] = []  # times, or a GPU's events: start, end, start, ...
        self._calls = 0  # since the last `read`
        mark = torch.compiler.disable(self._mark)  # not part of a compiled net's graph
        net.register_forward_pre_hook(mark)
        net.register_forward_hook(mark)

    @property
    def mean_ms(self) -> float:
        """Return the mean milliseconds of a forward pass."""
        return 1e3 * self.seconds / max(self.passes, 1)

    def _mark(self, net: nn.Module, *_: Any) -> None:
        if not net.training:
            return
        if not self._gpu:
            self._marks.append(time.monotonic())
        elif self._calls // 2 % GPU_SAMPLE == 0:
            self._marks.append(event := torch.cuda.Event(enable_timing=True))
            event.record()
        self._calls += 1

    def read(self) -> None:
        """Add up the times since the last read; at a sync point a GPU's events are complete."""
        for began, ended in zip(self._marks[::2], self._marks[1::2], strict=True):
            self.seconds += began.elapsed_time(ended) / 1e3 if self._gpu else ended - began
        self.passes += len(self._marks) // 2
        self._marks.clear()
        self._calls = 0


class SlowRanks:
    """Compares all ranks' seconds in forward passes; each rank does equally many passes.

    The median of an even number of ranks is the lower of the two in the middle. With two ranks it
    is thus the faster one's: both wait for the slower.
    """

    def __init__(self, ranks: int) -> None:
        self._before = np.zeros(ranks)  # each rank's seconds when this window began
        self._passed_s = 0.0  # of this window
        self._slow_windows = np.zeros(ranks, dtype=int)  # in a row, up to this window

    def judge(self, seconds: Sequence[float], passed_s: float) -> dict[int, float]:
        """Note each rank's seconds in forward passes so far, `passed_s` of training later.

        Return the ranks that have just been slow for a minute, each with its multiple of the
        median; a rank that stays slow is not returned again.
        """
        self._passed_s += passed_s
        if self._passed_s < WINDOW_S:
            return {}
        own = np.subtract(seconds, self._before)
        times = own / max(np.quantile(own, 0.5, method="lower"), 1e-9)
        self._slow_windows = np.where(times >= SLOW, self._slow_windows + 1, 0)
        self._before, self._passed_s = np.array(seconds), 0.0
        return {int(r): float(times[r]) for r in np.flatnonzero(self._slow_windows == WINDOWS)}
