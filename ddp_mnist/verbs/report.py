"""The verb `report`: one HTML file about one or more runs, which needs nothing else.

    ddp-mnist report runs/latest
    ddp-mnist report runs/mnist-001 runs/mnist-002

No network and no script; light or dark as the reader's system; the figures are summary.json's. The
images that the model got wrong are found by running it once more: seconds.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import PIL.Image
import torch

from ddp_mnist.data import cache
from ddp_mnist.errors import CheckpointError, DdpMnistError, reason
from ddp_mnist.run import weights
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import (
    CONFIG,
    METRICS,
    STATUS,
    SUMMARY,
    check_place,
    in_use,
    read_json,
    storage_errors,
    write_atomically,
)
from ddp_mnist.verbs import plots
from ddp_mnist.verbs.flags import Report
from ddp_mnist.verbs.render import render

MOST_WRONG = 24
BATCH = 500
NOT_IN_A_ROW = ("ranks", "confusion", "classes", "class_accuracy", "notes")  # of the settings


@dataclass
class Mistake:
    """A test image, by its index in the split, and the class that it was taken for."""

    index: int
    label: str
    label_probability: float
    guess: str
    guess_probability: float
    png: str  # a data URI


@dataclass
class ReportedRun:
    """A run folder's content.

    Attributes:
        name: of the folder.
        config: config.json.
        metrics: the lines of metrics.jsonl.
        summary: summary.json, perhaps of the part before a resume; {} if it has never finished.
        status: status.json; its state may be "killed" too.
        mistakes: the most certain ones first.
        no_mistakes: why there are none to be seen.
    """

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    status: dict[str, Any]
    mistakes: list[Mistake] = field(default_factory=list)
    no_mistakes: str = "There are none."

    @property
    def finished(self) -> bool:
        return self.status["state"] == "finished"


def run(flags: Report) -> None:
    """Write the page, and say where."""
    check_place(flags.out, "--out")
    console = Console(True)
    console.print("reading    the runs, and asking each model for its mistakes")
    for path in report(flags):
        console.print(f"written to {path}")


def report(flags: Report) -> list[Path]:
    """Write the page, and with --png each curve beside it; return the files written.

    Raises:
        CheckpointError: a folder is no run, or of another version.
        StorageError: a file cannot be written.
    """
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in flags.runs))
    runs = [read_run(path) for path in paths]
    if len({run.name for run in runs}) < len(runs):
        for path, run in zip(paths, runs, strict=True):
            run.name = str(path)
    for path, run in zip(paths, runs, strict=True):
        find_mistakes(run, path, flags.dataset, flags.cache_dir)
    metrics = {run.name: run.metrics for run in runs}
    figures = {key: drawn for key in plots.CURVES if (drawn := plots.draw(key, metrics))}
    first = Path(flags.runs[0])
    page = Path(flags.out or (first if len(runs) == 1 else first.parent) / "report.html")
    curves = {plots.CURVES[key]: plots.as_svg(figure, key) for key, figure in figures.items()}
    with storage_errors(page, "--out"):
        write_atomically(page, render_page(runs, curves).encode())
    written = [page]
    for key, figure in figures.items() if flags.png else ():
        written.append(page.with_name(f"{page.stem}-{key}.png"))
        plots.as_png(figure, written[-1])
    return written


def read_run(path: Path) -> ReportedRun:
    """Return the folder's content. Raises CheckpointError if it is no run of this version."""
    try:
        status = read_json(path / STATUS)
        if status["state"] == "running" and not in_use(path):
            status["state"] = "killed"
        run = ReportedRun(
            path.name,
            read_json(path / CONFIG),
            list(read_metrics(path / METRICS)),
            read_json(path / SUMMARY) if (path / SUMMARY).exists() else {},
            status,
        )
        render_page([run], {})  # which shows whether all is there
        return run
    except OSError as error:
        why = f"holds no run to report on ({Path(error.filename or path).name}: {reason(error)})"
        raise CheckpointError(f"{path}: {why}; name one, e.g. runs/latest") from error
    except (LookupError, ValueError, TypeError, jinja2.UndefinedError) as error:
        why = f"is damaged, or of another version of ddp_mnist ({error})"
        raise CheckpointError(f"{path}: {why}; use that one's report") from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines, if there are any; the last may be torn, when the machine went down."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    for line in lines[:-1]:
        yield json.loads(line)


@torch.inference_mode()
def find_mistakes(
    run: ReportedRun, path: Path, dataset: str | None = None, cache_dir: str | None = None
) -> None:
    """Fill in `run.mistakes`, or `run.no_mistakes` where the test images are not at hand."""
    if not run.finished:
        run.no_mistakes = "The run has not finished."
        return
    try:
        trained = weights.from_bytes(weights.read_bytes(str(path)), str(path))
        flags = run.config["run"]
        images = cache.cached(dataset or flags["dataset"], cache_dir or flags["cache_dir"])
    except DdpMnistError as error:
        run.no_mistakes = str(error)
        return
    if images is None or images.digest != run.summary["dataset"]["digest"]:
        run.no_mistakes = "The test images are not in the cache of this machine."
        return
    logits = torch.cat([trained.model(batch) for batch in images.test_images.split(BATCH)])
    probabilities = logits.softmax(1)
    certainty, guesses = probabilities.max(1)
    wrong = (guesses != images.test_labels).nonzero().flatten()
    certain_first = wrong[certainty[wrong].argsort(descending=True, stable=True)]
    for index in certain_first[:MOST_WRONG].tolist():
        label, guess = int(images.test_labels[index]), int(guesses[index])
        run.mistakes.append(
            Mistake(
                index,
                trained.classes[label],
                float(probabilities[index, label]),
                trained.classes[guess],
                float(certainty[index]),
                as_data_uri(images.test_images[index]),
            )
        )


def as_data_uri(image: torch.Tensor) -> str:
    """Return uint8 [28, 28] as a PNG within the page."""
    written = io.BytesIO()
    PIL.Image.fromarray(image.numpy()).save(written, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def render_page(runs: Sequence[ReportedRun], curves: dict[str, str]) -> str:
    return render("report.html", runs=runs, curves=curves, rows=side_by_side(runs))


def side_by_side(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str], bool]]:
    """Return name, value of each run, and whether they differ: the result, then every setting."""
    columns = []
    for run in runs:
        column = {"state": run.status["state"]}
        for name, value in run.summary.items() if run.finished else ():
            inner = value if isinstance(value, dict) else {"": value}
            if name not in NOT_IN_A_ROW:
                column |= {f"{name} {key}".strip(): shown(each) for key, each in inner.items()}
        for flags in (run.config[group] for group in ("run", "recipe", "distribution")):
            column |= {f"--{name.replace('_', '-')}": shown(flags[name]) for name in flags}
        columns.append(column)
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name, "") for column in columns]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "not given"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
