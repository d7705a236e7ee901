"""A run as matplotlib figures: inline SVG for the report, and files of PNG and SVG."""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from ddp_mnist.system.text import shown_name
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
LETTERS = 24  # of a class's name in a confusion matrix


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


def scatter(name: str, predictions: Sequence[float], targets: Sequence[float]) -> Figure:
    """Return a figure of what was predicted over what is true, a dot for each image."""
    with matplotlib.rc_context(STYLE | {"font.family": families()}):
        figure = Figure(figsize=(4.4, 4.4), layout="constrained")
        axes = figure.add_subplot(title=shown_name(name), xlabel="true", ylabel="predicted")
        axes.plot(targets[:MOST_DOTS], predictions[:MOST_DOTS], ".", alpha=0.5)
        axes.axline((targets[0], targets[0]), slope=1, linewidth=0.8)
    return figure


def confusion(names: Sequence[str], matrix: np.ndarray) -> Figure:
    """Return a figure of matrix[label, prediction] in images, coloured by their share of a row."""
    shares = matrix / matrix.sum(1, keepdims=True).clip(1)
    texts, places = [shown_name(name) for name in names], range(len(names))
    texts = [text if len(text) <= LETTERS else f"{text[: LETTERS - 1]}…" for text in texts]
    side = 2.2 + 0.3 * max(6, len(names))  # inches
    with matplotlib.rc_context(STYLE | {"font.family": families(), "axes.grid": False}):
        figure = Figure(figsize=(side, side), layout="constrained")
        axes = figure.add_subplot(xlabel="taken for", ylabel="test images of")
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.set_xticks(places, texts, rotation=90 if max(map(len, texts)) > 3 else 0)
        axes.set_yticks(places, texts)
        for (label, guess), images in np.ndenumerate(matrix):
            ink = "white" if shares[label, guess] > 0.5 else "black"
            if images:
                axes.text(guess, label, f"{images}", color=ink, size=7, ha="center", va="center")
    return figure


def families(first: str = "DejaVu Sans") -> list[str]:
    """Return the fonts of names: one of matplotlib's own, and one for Chinese if there is one."""
    chinese = [font.name for font in fontManager.ttflist if " CJK " in font.name]
    return [first, *chinese[:1]]


def as_file(figure: Figure, form: str) -> bytes:
    """Return a figure as a file, on white: "png", or "svg" with texts that can be edited."""
    undated = {"Date": None} if form == "svg" else {}
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": ""}):
        figure.savefig(written := io.BytesIO(), format=form, dpi=200, metadata=undated)
    return written.getvalue()


def as_svg(figure: Figure, key: str) -> str:
    """Return an <svg> element for a page; its text has no colour, so the page's CSS sets it."""
    written = io.StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": key}):
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    svg = written.getvalue()
    # An id must be unique in a page, and matplotlib numbers its groups alike in each figure.
    unused = r' id="[a-z0-9.]+_\d+"|<metadata>.*?</metadata>'
    return re.sub(unused, "", svg[svg.index("<svg") :], flags=re.DOTALL)
