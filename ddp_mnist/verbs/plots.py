"""The curves of runs as matplotlib figures: inline SVG for the report, PNG on demand."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ddp_mnist.verbs.render import TEMPLATES

CURVES = {  # titles of the values in metrics.jsonl
    "loss": "Training loss",
    "accuracy": "Training accuracy (share correct)",
    "val_accuracy": "Validation accuracy (share correct)",
    "val_loss": "Validation loss",
    "lr": "Learning rate (of the step)",
    "images_per_second": "Speed (images/s, all processes)",
}

STYLE = matplotlib.rc_params_from_file(TEMPLATES / "curves.mplstyle", use_default_template=False)
LEGEND_COLUMNS = 3
DOTS = 40  # per line, at most: more would overlap and hide it


def title(key: str) -> str:
    """Return a curve's title, including those of the scores that --metrics names."""
    return CURVES.get(key) or f"Validation {key.removeprefix('val_')}"


def draw(key: str, runs: Mapping[str, Sequence[dict[str, Any]]]) -> Figure | None:
    """Return a figure of one curve, with a line per run; None if no run has two points.

    `runs` are the lines of metrics.jsonl by the run's name.
    """
    points = {
        name: [(line["step"], line[key]) for line in lines if line.get(key) is not None]
        for name, lines in runs.items()
    }
    if max(map(len, points.values()), default=0) < 2:
        return None
    legend_rows = -(-len(runs) // LEGEND_COLUMNS) if len(runs) > 1 else 0
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.5 + 0.16 * legend_rows), layout="constrained")
        axes = figure.add_subplot(title=title(key), xlabel="optimizer step")
        for name, line in points.items():  # even if empty: a run has the same colour in all curves
            # matplotlib leaves out names that begin with _, but not behind a space of no width
            marker = "o" if len(line) <= DOTS else ""
            axes.plot(*np.reshape(line, (-1, 2)).T, marker=marker, label=f"\u200b{name}")
        if legend_rows:
            figure.legend(loc="outside lower left", ncols=LEGEND_COLUMNS)
    return figure


def as_svg(figure: Figure, key: str) -> str:
    """Return an <svg> element for a page; its text has no colour, so the page's CSS sets it."""
    written = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": key}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    # An id must be unique in a page, and matplotlib numbers its groups alike in each figure.
    unused = r' id="[a-z0-9.]+_\d+"|<metadata>.*?</metadata>'
    return re.sub(unused, "", svg[svg.index("<svg") :], flags=re.DOTALL)
