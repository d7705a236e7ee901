"""The verb `report`: one HTML file that tells of one or more runs, and needs nothing else.

    ddp-mnist report runs/latest
    ddp-mnist report runs/mnist-001 runs/mnist-002

No network and no script; light or dark as the reader's system; the figures are summary.json's. The
images that were taken for something else are found by running the model once more: seconds.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import PIL.Image
import torch

from ddp_mnist import data, plots, run_folder, templates, weights
from ddp_mnist.errors import CheckpointError, DdpMnistError

MOST_WRONG = 24
OTHERS = 2  # classes that a wrong answer is shown with
BATCH = 500


@dataclass
class Mistake:
    """A test image that was taken for something else.

    Attributes:
        number: its place in the test split.
        label: what it is.
        guesses: the most likely classes with their probabilities, the highest first.
        label_probability: what the label was given.
        png: the image, as a data URI.
    """

    number: int
    label: str
    guesses: list[tuple[str, float]]
    label_probability: float
    png: str


@dataclass
class Told:
    """What a run's folder tells.

    Attributes:
        name: of the folder.
        config: config.json.
        metrics: the lines of metrics.jsonl.
        summary: summary.json; {} while it has not ended.
        status: status.json.
        mistakes: the most certain ones first.
        no_mistakes: why there are none to be seen.
    """

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    status: dict[str, Any]
    mistakes: list[Mistake] = field(default_factory=list)
    no_mistakes: str = ""

    @property
    def wrong(self) -> int:
        return sum(map(sum, self.summary["confusion"])) - self.right

    @property
    def right(self) -> int:
        return sum(row[label] for label, row in enumerate(self.summary["confusion"]))

    @property
    def most_confused(self) -> int:
        """The largest number off the diagonal, at least 1."""
        rows = enumerate(self.summary["confusion"])
        return max([1, *(n for label, row in rows for c, n in enumerate(row) if c != label)])

    @property
    def per_class(self) -> list[dict[str, Any]]:
        """Of each class: its rows, how many were right, and what it was most often taken for."""
        classes, confusion = self.summary["classes"], self.summary["confusion"]
        lines = []
        for label, row in enumerate(confusion):
            others = [0 if other == label else n for other, n in enumerate(row)]
            taken = others.index(max(others))
            called = sum(each[label] for each in confusion)
            lines.append(
                {
                    "name": classes[label],
                    "rows": sum(row),
                    "right": row[label],
                    "recall": row[label] / sum(row) if sum(row) else None,
                    "precision": row[label] / called if called else None,
                    "taken_for": f"{classes[taken]} ({others[taken]})" if others[taken] else "",
                }
            )
        return lines


def report(runs: Sequence[str], out: str | None = None, *, png: bool = False) -> list[Path]:
    """Writes the page, and with `png` each curve beside it. Returns the files written.

    Args:
        runs: run folders.
        out: the page's file; else report.html in the first run's folder.

    Raises:
        CheckpointError: one is no run.
        StorageError: a file cannot be written.
    """
    told = [read_run(Path(run)) for run in runs]
    if len({each.name for each in told}) < len(told):
        for run, each in zip(runs, told, strict=True):
            each.name = run
    for run, each in zip(runs, told, strict=True):
        find_mistakes(each, run)
    metrics = {each.name: each.metrics for each in told}
    figures = {c.key: drawn for c in plots.CURVES if (drawn := plots.draw(c, metrics))}
    page = Path(out) if out else Path(runs[0]) / "report.html"
    with run_folder.storage_errors(page):
        run_folder.write_atomically(page, page_of(told, figures).encode())
    written = [page]
    if png:
        for key, figure in figures.items():
            written.append(page.with_name(f"{page.stem}-{key}.png"))
            plots.as_png(figure, written[-1])
    return written


def read_run(run: Path) -> Told:
    """Raises CheckpointError if it is no run."""
    try:
        name = run.resolve().name  # of what runs/latest leads to
        lines = (run / run_folder.METRICS).read_text(encoding="utf-8").splitlines()
        ended = (run / run_folder.SUMMARY).exists()
        return Told(
            name=name,
            config=run_folder.read_json(run / run_folder.CONFIG),
            metrics=[json.loads(line) for line in lines],
            summary=run_folder.read_json(run / run_folder.SUMMARY) if ended else {},
            status=run_folder.read_json(run / run_folder.STATUS),
        )
    except (OSError, ValueError) as error:
        file = Path(getattr(error, "filename", None) or run_folder.METRICS).name
        reason = getattr(error, "strerror", None) or "damaged"
        raise CheckpointError(
            f"{run}: is no run that can be told of ({file}: {reason}); name one, e.g. runs/latest"
        ) from error


# --- The images that were taken for something else


def find_mistakes(told: Told, run: str) -> None:
    """Asks the run's model once more, if its test images are at hand."""
    if not told.summary:
        told.no_mistakes = "The run has not ended."
        return
    try:
        trained = weights.from_bytes(weights.read_bytes(run), run)
        flags = told.config["run"]
        images = data.cached(flags["dataset"], flags["cache_dir"])
    except DdpMnistError as error:
        told.no_mistakes = str(error)
        return
    if images is None or images.digest != told.summary["dataset"]["digest"]:
        found = "not" if images is None else "other ones"
        told.no_mistakes = f"The test images are {found} in the cache of this machine."
        return
    probabilities = all_probabilities(trained.model, images.test_images)
    predictions = probabilities.argmax(1)
    wrong = (predictions != images.test_labels).nonzero().flatten()
    certain_first = probabilities[wrong].max(1).values.argsort(descending=True, stable=True)
    for number in wrong[certain_first][:MOST_WRONG].tolist():
        row, label = probabilities[number], int(images.test_labels[number])
        best = row.argsort(descending=True, stable=True)[:OTHERS].tolist()
        told.mistakes.append(
            Mistake(
                number,
                trained.classes[label],
                [(trained.classes[guess], float(row[guess])) for guess in best],
                float(row[label]),
                as_data_uri(images.test_images[number]),
            )
        )
    if not told.mistakes:
        told.no_mistakes = "There are none."


@torch.inference_mode()
def all_probabilities(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """[N, classes] of uint8 [N, 28, 28]."""
    return torch.cat([model(batch).softmax(1) for batch in images.split(BATCH)])


def as_data_uri(image: torch.Tensor) -> str:
    """uint8 [28, 28] as a PNG within the page."""
    written = io.BytesIO()
    PIL.Image.fromarray(image.numpy()).save(written, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


# --- The page


def page_of(told: Sequence[Told], figures: dict[str, Any]) -> str:
    """The HTML."""
    svgs = [plots.as_svg(figure, key.replace("_", "-")) for key, figure in figures.items()]
    return templates.render("report.html", runs=told, curves=svgs, rows=side_by_side(told))


def side_by_side(told: Sequence[Told]) -> list[tuple[str, list[str], bool]]:
    """Name, value of each run, and whether they differ: the result, then every setting."""
    columns = []
    for each in told:
        s, config = each.summary, each.config
        column = {"state": each.status["state"]}
        if s:
            column |= {
                "test accuracy": f"{s['test_accuracy']:.4f}",
                "wrong": f"{each.wrong:,} of {s['test_count']:,}",
                "test loss": f"{s['test_loss']:.4f}",
                "validation accuracy": shown(s["val_accuracy"]),
                "training": f"{s['train_seconds']:.1f} s",
                "in all": f"{s['total_seconds']:.1f} s",
                "speed": f"{s['images_per_second']:,.0f} images/s",
                "epochs, steps": f"{s['epochs']}, {s['steps']:,}",
                "resumed after step": ", ".join(map(str, s["resumed_from"])) or "never",
                "processes": f"{s['world_size']} on {s['num_machines']} machines",
                "device": s["device"],
                "backend": s["backend"],
                "precision": s["precision"],
                "data": f"{s['dataset']['name']} ({s['dataset']['source']})",
                "digest": s["dataset"]["digest"][:16],
                "commit": s["git"] or "unknown",
            }
            column |= s["versions"]
        for group in ("run", "recipe", "distribution"):
            for name, value in config[group].items():
                column[f"--{name.replace('_', '-')}"] = shown(value)
        columns.append(column)
    names = list(dict.fromkeys(name for column in columns for name in column))
    rows = [(name, [column.get(name, "") for column in columns]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def shown(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)
