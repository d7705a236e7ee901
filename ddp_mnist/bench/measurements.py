"""Repeated measurements and their summary: median, spread, and ratios within a round."""

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tqdm import tqdm

from ddp_mnist.run.console import draws
from ddp_mnist.verbs.check_result import CheckResult, check

FIX = "goals are for MNIST and two free CPU cores: close other programs and repeat"


class Figure(NamedTuple):
    """The median of `n` measurements, and their spread."""

    median: float
    low: float  # the lowest; of a ratio, the lower end of the 90 % interval of its median
    high: float  # the same above; a ratio of fewer than five rounds has no interval
    n: int
    is_ratio: bool = False  # of two measurements from the same round

    def __str__(self) -> str:
        digits = ".3f" if self.is_ratio else ".4g"
        sure = "90 %: " if self.is_ratio and self.n >= 5 else ""
        median, low, high = (format(number, digits) for number in self[:3])
        return f"{median}  ({sure}{low} to {high}, n = {self.n})"

    def beside(self, name: str, goal: str = "", met: bool = True) -> CheckResult:
        """Return the check result for this figure and its goal: FAIL if the goal is missed."""
        text = f"{self}  goal {'met' if met else 'missed'}: {goal}" if goal else str(self)
        figures = dict(zip(self._fields, self[:4], strict=False))
        return check(name, not met, text, FIX, figures=figures)


def spread(values: Sequence[float]) -> Figure:
    """Return the median of the values, with the lowest and the highest."""
    return Figure(statistics.median(values), min(values), max(values), len(values))


def ratio(
    over: Sequence[float], under: Sequence[float], less: Sequence[float] | None = None
) -> Figure:
    """Return the ratios over[i] / under[i], or (over[i] - less[i]) / under[i].

    The interval of their median is that of the sign test (Conover, 1999), which assumes no
    distribution. Each value lies below the true median with probability 1/2, so the k-th lowest
    lies above it as often as n throws of a coin give fewer than k heads; k is the largest for which
    this is at most 5 %.
    """
    n = len(over)
    rounds = zip(over, less or [0.0] * n, under, strict=True)
    shares = sorted((x - y) / z for x, y, z in rounds)
    tails = itertools.accumulate(math.comb(n, heads) for heads in range(n))
    k = max(1, sum(tail <= 0.05 * 2**n for tail in tails))
    return Figure(statistics.median(shares), shares[k - 1], shares[-k], n, is_ratio=True)


def alternate(
    kinds: Sequence[str], repeats: int, measure: Callable[[str], float], who: str
) -> dict[str, list[float]]:
    """Return measure(kind) of each kind in `repeats` rounds, every other one in reverse order.

    A first round is discarded. On a terminal, a bar on stderr shows the time left, unless `who`
    measures is "".
    """
    measured: dict[str, list[float]] = {kind: [] for kind in kinds}
    is_shown = bool(who) and draws(sys.stderr)
    for number in tqdm(range(repeats + 1), who, leave=False, disable=not is_shown):
        for kind in kinds if number % 2 else reversed(kinds):
            measured[kind].append(measure(kind))
    return {kind: values[1:] for kind, values in measured.items()}
