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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import PIL.Image
import torch

from ddp_mnist.data import cache
from ddp_mnist.errors import CheckpointError, DdpMnistError
from ddp_mnist.run import weights
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import (
    CONFIG,
    METRICS,
    STATUS,
    SUMMARY,
    in_use,
    read_json,
    storage_errors,
    write_atomically,
)
from ddp_mnist.run.outputs import check_place
from ddp_mnist.verbs import plots, templates
from ddp_mnist.verbs.flags import Report

MOST_WRONG = 24

BATCH = 500


@dataclass
class Mistake:
    """A test image that was taken for something else.

    Attributes:
        number: its place in the test split.
        label, label_probability: what it is, and what that was given.
        guess, guess_probability: what it was taken for.
        png: the image, as a data URI.
    """

    number: int
    label: str
    label_probability: float
    guess: str
    guess_probability: float
    png: str


@dataclass
class ReportedRun:
    """What a run's folder holds.

    Attributes:
        name: of the folder.
        config: config.json.
        metrics: the lines of metrics.jsonl.
        summary: summary.json; {} if the run has not finished, or not again.
        earlier: summary.json of a part that had finished, if the run was taken up again since.
        status: status.json; its state may be "killed" too.
        mistakes: the most certain ones first.
        no_mistakes: why there are none to be seen.
    """

    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    status: dict[str, Any]
    earlier: dict[str, Any] = field(default_factory=dict)
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


def run(flags: Report) -> None:
    """Write the page, and say where."""
    out = check_place(flags.out, "--out")
    console = Console(True)
    console.print("reading    the runs, and asking each model for its mistakes")
    for path in report(
        flags.runs,
        str(out) if out else None,
        png=flags.png,
        dataset=flags.dataset,
        cache_dir=flags.cache_dir,
    ):
        console.print(f"written to {path}")


def report(
    folders: Sequence[str],
    out: str | None = None,
    *,
    png: bool = False,
    dataset: str | None = None,
    cache_dir: str | None = None,
) -> list[Path]:
    """Writes the page, and with `png` each curve beside it. Returns the files written.

    Args:
        folders: of runs.
        out: the page's file; else report.html in the run's folder, or beside those of several.
        png: whether to write the curves.
        dataset, cache_dir: where the test images are now, if not where the runs had them.

    Raises:
        CheckpointError: one is no run, or of another version.
        StorageError: a file cannot be written.
    """
    once: dict[Path, str] = {}  # runs/latest is one of the others
    for folder in folders:
        once.setdefault(Path(folder).resolve(), folder)
    folders = list(once.values())
    runs = [read_run(Path(folder)) for folder in folders]
    if len({run.name for run in runs}) < len(runs):
        for folder, run in zip(folders, runs, strict=True):
            run.name = folder
    for folder, run in zip(folders, runs, strict=True):
        find_mistakes(run, folder, dataset, cache_dir)
    metrics = {run.name: run.metrics for run in runs}
    figures = {c.key: drawn for c in plots.CURVES if (drawn := plots.draw(c, metrics))}
    first = Path(folders[0])
    page = Path(out) if out else (first if len(runs) == 1 else first.parent) / "report.html"
    content = page_of(runs, figures).encode()
    with storage_errors(page, "--out"):
        write_atomically(page, content)
    written = [page]
    if png:
        for key, figure in figures.items():
            written.append(page.with_name(f"{page.stem}-{key}.png"))
            plots.as_png(figure, written[-1])
    return written


def read_run(path: Path) -> ReportedRun:
    """Raises CheckpointError if it is no run."""
    try:
        status = read_json(path / STATUS)
        if status["state"] == "running" and not in_use(path):
            status["state"] = "killed"
        finished = status["state"] == "finished"
        has_summary = finished or (path / SUMMARY).exists()
        summary = read_json(path / SUMMARY) if has_summary else {}
        run = ReportedRun(
            name=path.resolve().name,  # of what runs/latest leads to
            config=read_json(path / CONFIG),
            metrics=list(read_metrics(path / METRICS)),
            summary=summary if finished else {},
            status=status,
            earlier={} if finished else summary,
        )
        page_of([run], {})  # has all that a page shows
        return run
    except (KeyError, jinja2.UndefinedError) as error:
        raise CheckpointError(
            f"{path}: is of another version of ddp_mnist ({error}); use that one's report"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        file = Path(getattr(error, "filename", None) or path).name
        reason = getattr(error, "strerror", None) or "damaged, or of another program"
        raise CheckpointError(
            f"{path}: holds no run to report on ({file}: {reason}); name one, e.g. runs/latest"
        ) from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Its lines, if there are any; the last one may be torn, when the machine went down."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    for line in lines[:-1]:
        yield json.loads(line)


# --- The images that were taken for something else


def find_mistakes(
    run: ReportedRun, folder: str, dataset: str | None = None, cache_dir: str | None = None
) -> None:
    """Asks the run's model once more, if its test images are at hand."""
    if not run.summary:
        run.no_mistakes = "The run has not finished."
        return
    try:
        trained = weights.from_bytes(weights.read_bytes(folder), folder)
        flags = run.config["run"]
        images = cache.cached(dataset or flags["dataset"], cache_dir or flags["cache_dir"])
    except DdpMnistError as error:
        run.no_mistakes = str(error)
        return
    if images is None:
        run.no_mistakes = "The test images are not in the cache of this machine."
        return
    if images.digest != run.summary["dataset"]["digest"]:
        run.no_mistakes = "The cache of this machine holds other images than the run had."
        return
    probabilities = all_probabilities(trained.model, images.test_images)
    predictions = probabilities.argmax(1)
    wrong = (predictions != images.test_labels).nonzero().flatten()
    certain_first = probabilities[wrong].max(1).values.argsort(descending=True, stable=True)
    for number in wrong[certain_first][:MOST_WRONG].tolist():
        row, label = probabilities[number], int(images.test_labels[number])
        guess = int(predictions[number])
        run.mistakes.append(
            Mistake(
                number,
                trained.classes[label],
                float(row[label]),
                trained.classes[guess],
                float(row[guess]),
                as_data_uri(images.test_images[number]),
            )
        )
    if not run.mistakes:
        run.no_mistakes = "There are none."


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


def page_of(runs: Sequence[ReportedRun], figures: dict[str, Any]) -> str:
    """The HTML."""
    svgs = [plots.as_svg(figure, key.replace("_", "-")) for key, figure in figures.items()]
    return templates.render("report.html", runs=runs, curves=svgs, rows=side_by_side(runs))


def side_by_side(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str], bool]]:
    """Name, value of each run, and whether they differ: the result, then every setting."""
    columns = []
    for run in runs:
        s, config = run.summary, run.config
        column = {"state": run.status["state"]}
        if s:
            column |= {
                "test accuracy": f"{s['test_accuracy']:.4f}",
                "wrong": f"{run.wrong:,} of {s['test_count']:,}",
                "test loss": f"{s['test_loss']:.4f}",
                "validation accuracy": shown(s["val_accuracy"]),
                "training": f"{s['train_seconds']:.1f} s",
                "in all": f"{s['total_seconds']:.1f} s",
                "speed": f"{s['images_per_second']:,.0f} images/s",
                "epochs, steps": f"{s['epochs']}, {s['steps']:,}",
                "resumed after step": ", ".join(map(str, s["resumed_from"])) or "never",
                "processes": str(s["world_size"]),
                "machines": str(s["num_machines"]),
                "device": s["device"],
                "backend": s["backend"],
                "precision": s["precision"],
                "data": f"{s['dataset']['name']} ({s['dataset']['source']})",
                "digest": s["dataset"]["digest"][:16],
                "commit": s["git"] or "unknown",
            }
            column |= {name: str(value) for name, value in s["machine"].items()} | s["versions"]
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
