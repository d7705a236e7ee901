"""What is said of repeated measurements: n, median, spread, and ratios of what ran side by side."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ddp_mnist.run.console import tell

CONFIDENCE = 0.90


@dataclass(frozen=True)
class Spread:
    """Median, lowest, highest and number of measurements."""

    median: float
    lowest: float
    highest: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.4g}  ({self.lowest:.4g} to {self.highest:.4g}, n = {self.n})"


@dataclass(frozen=True)
class Ratio:
    """Of pairs, each from one round.

    Attributes:
        median: of the pairs' ratios.
        low, high: 90 % interval of that median; of fewer than five pairs, the lowest and highest.
        n: pairs.
    """

    median: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        sure = "90 %: " if self.n >= 5 else ""
        return f"{self.median:.3f}  ({sure}{self.low:.3f} to {self.high:.3f}, n = {self.n})"


@dataclass(frozen=True)
class Absent:
    """What cannot be measured here, and why."""

    why_not: str

    def __str__(self) -> str:
        return self.why_not


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values), len(values))


def ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """over[i] / under[i]."""
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    return Ratio(statistics.median(pairs), *interval(pairs), len(pairs))


def ratio_of_difference(a: Sequence[float], b: Sequence[float], base: Sequence[float]) -> Ratio:
    """(a[i] - b[i]) / base[i]: the share that the difference has."""
    shares = [(x - y) / z for x, y, z in zip(a, b, base, strict=True)]
    return Ratio(statistics.median(shares), *interval(shares), len(shares))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the median, by the sign test (Conover, 1999); assumes no distribution.

    Each value lies below the true median with probability 1/2, so the k-th lowest lies above it
    with that of fewer than k heads in n throws; k is the largest for which this is at most 5 %.
    """
    ordered, n = sorted(values), len(values)
    allowed = (1 - CONFIDENCE) / 2 * 2**n
    tails = itertools.accumulate(math.comb(n, heads) for heads in range(n))
    k = max(1, sum(tail <= allowed for tail in tails))
    return ordered[k - 1], ordered[-k]


def alternate(
    kinds: Sequence[str],
    repeats: int,
    measure: Callable[[str], float],
    *,
    warm_up: bool = True,
    verbose: bool = True,
) -> dict[str, list[float]]:
    """`repeats` rounds of measure(kind) for each kind, every other round in reverse order.

    Args:
        warm_up: measure a first round, and throw it away.
        verbose: tell each round on stderr, for who waits.
    """
    measured: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-int(warm_up), repeats):
        figures = {kind: measure(kind) for kind in (kinds if number % 2 == 0 else reversed(kinds))}
        if number >= 0:
            for kind in kinds:
                measured[kind].append(figures[kind])
        if verbose:
            name = f"round {number + 1} of {repeats}" if number >= 0 else "warm-up"
            shown = ", ".join(f"{kind} {figures[kind]:.4g}" for kind in kinds)
            tell(f"{name}: {shown}")
    return measured
