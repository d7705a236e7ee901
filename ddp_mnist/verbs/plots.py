"""The curves of a run as matplotlib figures: inline SVG for the report, PNG on demand."""

import io
import re
from collections.abc import Sequence
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
    "gradient_norm": "Gradient norm (of the step, before clipping)",
    "images_per_second": "Speed (images/s, all processes)",
    "waiting_for_data": "Waiting for data (share of the time, rank 0)",
    "peak_memory_mb": "Peak memory (MB, rank 0)",
}

STYLE = matplotlib.rc_params_from_file(TEMPLATES / "curves.mplstyle", use_default_template=False)
DOTS = 40  # at most: more would overlap and hide the line
MOST_DOTS = 2000  # of a scatter, each of which takes 175 bytes


def title(key: str) -> str:
    """Return a curve's title, including those of scores that only this run has."""
    split = "Validation" if key.startswith("val_") else "Training"
    return CURVES.get(key) or f"{split} {key.removeprefix('val_')}"


def draw(key: str, lines: Sequence[dict[str, Any]]) -> Figure | None:
    """Return a figure of one curve of lines of metrics.jsonl; None if it has no two points."""
    points = [(line["step"], float(line[key])) for line in lines if line.get(key) is not None]
    if len(points) < 2:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.5), layout="constrained")
        axes = figure.add_subplot(title=title(key), xlabel="optimizer step")
        axes.plot(*np.transpose(points), marker="o" if len(points) <= DOTS else "")
    return figure


def scatter(name: str, predictions: Sequence[float], targets: Sequence[float]) -> str:
    """Return an <svg> of what was predicted over what is right, a dot for each image."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 4.4), layout="constrained")
        axes = figure.add_subplot(title=name, xlabel="is", ylabel="predicted")
        axes.plot(targets[:MOST_DOTS], predictions[:MOST_DOTS], ".", alpha=0.5)
        axes.axline((targets[0], targets[0]), slope=1, linewidth=0.8)
    return as_svg(figure, f"scatter {name}")


def as_svg(figure: Figure, key: str) -> str:
    """Return an <svg> element for a page; its text has no colour, so the page's CSS sets it."""
    written = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": key}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    # An id must be unique in a page, and matplotlib numbers its groups alike in each figure.
    unused = r' id="[a-z0-9.]+_\d+"|<metadata>.*?</metadata>'
    return re.sub(unused, "", svg[svg.index("<svg") :], flags=re.DOTALL)
