"""The curves of runs as matplotlib figures: inline SVG for the report, PNG on demand."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from ddp_mnist.run.folder import storage_errors

# What a page puts in the place of a colour, so that it can follow a person's light or dark theme
INK, FAINT = "#010101", "#020202"

SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito, 2008

DASHES = ("-", "--", "-.", ":")

IN_A_PAGE = {INK: "var(--ink)", FAINT: "var(--faint)"} | {
    colour: f"var(--series-{number})" for number, colour in enumerate(SERIES)
}

STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), FAINT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "grid.linewidth": 0.4,
    "font.size": 8,
    "axes.titlesize": 9,
    "text.parse_math": False,  # a run's name may hold dollars
}

LEGEND_COLUMNS, LEGEND_INCHES = 3, 0.16

LEGEND: Any = {"frameon": False, "fontsize": 7, "ncols": LEGEND_COLUMNS}

INCHES = (4.4, 2.5)

DPI = 200


@dataclass(frozen=True)
class Curve:
    """One thing that metrics.jsonl tells of a run over its steps."""

    key: str
    title: str
    unit: str
    marker: str = ""


CURVES = (
    Curve("loss", "Training loss", "nats, with label smoothing"),
    Curve("accuracy", "Training accuracy", "share right"),
    Curve("val_accuracy", "Validation accuracy", "share right", marker="o"),
    Curve("val_loss", "Validation loss", "nats", marker="o"),
    Curve("lr", "Learning rate", "of the step"),
    Curve("images_per_second", "Speed", "images/s, all processes"),
)


def points(metrics: Sequence[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that have it."""
    lines = [line for line in metrics if line.get(key) is not None]
    return [line["step"] for line in lines], [line[key] for line in lines]


def draw(curve: Curve, runs: Mapping[str, Sequence[dict[str, Any]]]) -> Figure | None:
    """One figure with a line per run, by name; None if no run tells of two points or more.

    Args:
        runs: lines of metrics.jsonl.
    """
    found = {name: points(lines, curve.key) for name, lines in runs.items()}
    found = {name: (steps, values) for name, (steps, values) in found.items() if steps}
    if max((len(steps) for steps, _ in found.values()), default=0) < 2:
        return None
    with matplotlib.rc_context(STYLE):
        rows = -(-len(found) // LEGEND_COLUMNS) if len(found) > 1 else 0
        width, height = INCHES
        figure = Figure(figsize=(width, height + rows * LEGEND_INCHES), layout="constrained")
        axes = figure.add_subplot()
        for number, name in enumerate(runs):
            if name in found:
                axes.plot(
                    *found[name],
                    color=SERIES[number % len(SERIES)],
                    linestyle=DASHES[number // len(SERIES) % len(DASHES)],
                    # a single value beside lines would not be seen
                    marker=curve.marker or ("o" if len(found[name][0]) == 1 else ""),
                    markersize=3,
                    linewidth=1.4,
                )
        axes.set_title(f"{curve.title} ({curve.unit})", loc="left")
        axes.set_xlabel("optimizer step")
        axes.grid(visible=True)
        if rows:
            # matplotlib leaves out names that begin with _, but not behind a space of no width
            names = [f"\u200b{name}" for name in found]
            figure.legend(axes.get_lines(), names, loc="outside lower left", **LEGEND)
    return figure


def as_svg(figure: Figure, name: str) -> str:
    """An <svg> element to stand in a page; its ids begin with what is unique to `name`."""
    written = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # matplotlib numbers its groups alike in each figure, and an id may stand once in a page
    svg = re.sub(r' id="([a-z][a-z0-9.]*_\d+)"', rf' id="{name}-\1"', svg)
    for colour, variable in IN_A_PAGE.items():
        svg = svg.replace(colour, variable)
    label = figure.axes[0].get_title(loc="left")
    size = r'width="[\d.]+pt" height="[\d.]+pt"'
    svg = re.sub(size, f'role="img" aria-label="{label} over the optimizer steps"', svg, count=1)
    return re.sub(r"\n\s*", "\n", svg)


def as_png(figure: Figure, path: Path) -> None:
    """Black on white. Raises StorageError."""
    with storage_errors(path, "--out"):
        figure.savefig(path, dpi=DPI, facecolor="white")
