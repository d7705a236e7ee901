"""The figures of a benchmark as a picture: one bar each, with its spread."""

from __future__ import annotations

from pathlib import Path

from ddp_mnist.bench.benches import Row
from ddp_mnist.bench.figures import Absent, Ratio
from ddp_mnist.errors import StorageError


def draw(bench: str, rows: list[Row], path: Path) -> None:
    """Speeds or seconds at the left, ratios at the right, because they share no scale.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if not isinstance(row.figure, Absent)]
    groups = [
        [row for row in measured if isinstance(row.figure, Ratio) is ratios]
        for ratios in (False, True)
    ]
    figure = Figure(figsize=(12, 1 + 0.45 * max(map(len, groups))), layout="constrained")
    axes = figure.subplots(1, 2)
    figure.suptitle(f"ddp-mnist bench {bench}")
    for axis, group, title in zip(
        axes, groups, ("median, lowest, highest", "ratios and shares, 90 % interval"), strict=True
    ):
        for place, row in enumerate(group):
            spread = row.figure
            assert not isinstance(spread, Absent)
            low, high = (
                (spread.low, spread.high)
                if isinstance(spread, Ratio)
                else (spread.lowest, spread.highest)
            )
            axis.barh(place, spread.median, color="#4c78a8" if row.met else "#e45756")
            axis.plot([low, high], [place, place], color="black", marker="|")
        axis.set_yticks(range(len(group)), [row.what for row in group])
        axis.invert_yaxis()
        axis.set_title(title)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise StorageError(f"--plot {path}: cannot be written ({error})") from error
