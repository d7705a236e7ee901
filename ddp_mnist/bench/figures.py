"""Repeated measurements and their summary: median, spread, and ratios within a round."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_mnist.run.console import tell
from ddp_mnist.verify.results import FAIL, PASS, CheckResult

CONFIDENCE = 0.90
FIX = "goals are for MNIST and two free CPU cores: close other programs and repeat"


@dataclass(frozen=True)
class Figure:
    """The median of `n` measurements, and how far they spread.

    Attributes:
        low, high: the lowest and the highest; of a ratio, the 90 % interval of its median, if
            there are five or more.
        is_ratio: whether it is a ratio of what ran in one round.
    """

    median: float
    low: float
    high: float
    n: int
    is_ratio: bool = False

    def __str__(self) -> str:
        digits = ".3f" if self.is_ratio else ".4g"
        median, low, high = (format(x, digits) for x in (self.median, self.low, self.high))
        sure = "90 %: " if self.is_ratio and self.n >= 5 else ""
        return f"{median}  ({sure}{low} to {high}, n = {self.n})"


def spread(values: Sequence[float]) -> Figure:
    return Figure(statistics.median(values), min(values), max(values), len(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Figure:
    """Return the ratios over[i] / under[i]."""
    return ratio_of_difference(over, [0.0] * len(over), under)


def ratio_of_difference(a: Sequence[float], b: Sequence[float], base: Sequence[float]) -> Figure:
    """Return the ratios (a[i] - b[i]) / base[i]."""
    shares = [(x - y) / z for x, y, z in zip(a, b, base, strict=True)]
    return Figure(statistics.median(shares), *interval(shares), len(shares), is_ratio=True)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 90 % interval of the median, by the sign test (Conover, 1999).

    It assumes no distribution. Each value lies below the true median with probability 1/2, so the
    k-th lowest lies above it with that of fewer than k heads in n throws; k is the largest for
    which this is at most 5 %.
    """
    ordered, n = sorted(values), len(values)
    allowed = (1 - CONFIDENCE) / 2 * 2**n
    tails = itertools.accumulate(math.comb(n, heads) for heads in range(n))
    k = max(1, sum(tail <= allowed for tail in tails))
    return ordered[k - 1], ordered[-k]


def to_result(name: str, figure: Figure, goal: str = "", met: bool = True) -> CheckResult:
    """Return the figure with its goal beside it; FAIL if that is missed."""
    beside = f"  goal {'met' if met else 'missed'}: {goal}" if goal else ""
    status, fix = (PASS, "") if met else (FAIL, FIX)
    numbers = {key: getattr(figure, key) for key in ("median", "low", "high", "n")}
    return CheckResult(status, name, f"{figure}{beside}", fix, numbers)


def alternate(
    kinds: Sequence[str],
    repeats: int,
    measure: Callable[[str], float],
    *,
    verbose: bool = True,
) -> dict[str, list[float]]:
    """Return measure(kind) of each kind in `repeats` rounds, every other one in reverse order.

    A first round is discarded. `verbose` reports each on stderr, for the person who waits.
    """
    measured: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-1, repeats):
        figures = {kind: measure(kind) for kind in (kinds if number % 2 == 0 else reversed(kinds))}
        for kind in kinds if number >= 0 else ():
            measured[kind].append(figures[kind])
        if verbose:
            name = f"round {number + 1} of {repeats}" if number >= 0 else "warm-up"
            shown = ", ".join(f"{kind} {figures[kind]:.4g}" for kind in kinds)
            tell(f"{name}: {shown}")
    return measured
