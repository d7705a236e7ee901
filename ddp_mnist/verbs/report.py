"""The verb `report`: one HTML file about one or more runs, which needs nothing else.

    ddp-mnist report runs/latest
    ddp-mnist report runs/mnist-001 runs/mnist-002

The page is templates/report.html, its figures are drawn by plots.py.

No network and no script; light or dark as the reader's system; the figures are summary.json's. The
images that the model got wrong are found by running it once more: seconds.
"""

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import PIL.Image
import torch

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.batches import ImageData, eval_batch_size
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import CheckpointError, DataError, DdpMnistError, printable, reason
from ddp_mnist.run import folder, weights
from ddp_mnist.run.console import Console, warn
from ddp_mnist.run.evaluation import CROSS_ENTROPY, MANY_CLASSES, most_confused, unpacked
from ddp_mnist.run.hints import overfits, overfitting
from ddp_mnist.run.summary import changed_since
from ddp_mnist.verbs import plots
from ddp_mnist.verbs.flags import Report
from ddp_mnist.verbs.render import render

MOST_WRONG = 24
TOP, TOP_FROM = 5, 20  # the top-5 accuracy is shown from so many classes on
LEARNED = 0.9  # of the training images
NOT_IN_A_ROW = (
    "ranks",
    "confusion",
    "classes",
    "class_accuracy",
    "images_per_class",
    "notes",
)  # of the settings


@dataclass
class ReportedRun:
    """A run folder's content."""

    name: str  # of the folder
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    summary: dict[str, Any]  # perhaps of the part before a resume; {} if it has never finished
    status: dict[str, Any]  # its state may be "killed" too
    mistakes: Sequence[dict[str, Any]] = ()  # the most certain ones first
    no_mistakes: str = "The run has not finished."  # why none are shown
    top_accuracy: float | None = None  # share of test images whose class is among the TOP


def run(flags: Report) -> None:
    """Write the page, and with --png each curve beside it; say where.

    Raise DataError at the end if mistakes are missing there because images have changed.
    """
    folder.check_place(flags.out, "--out")
    console = Console(True)
    console.print("reading    the runs and their predictions")
    paths = list(dict.fromkeys(Path(run).resolve() for run in flags.runs))
    runs = [read_run(path) for path in paths]
    alike = len({run.name for run in runs}) < len(runs)
    changed = []
    for path, run in zip(paths, runs, strict=True):
        run.name = printable(str(path)) if alike else run.name
        if run.status["state"] == "finished" and (change := find_mistakes(run, path, flags)):
            changed.append(change)
    metrics = {run.name: run.metrics for run in runs}
    scores = [f"val_{name}" for run in runs for name in run.config["recipe"]["metrics"]]
    keys = dict.fromkeys([*plots.CURVES, *scores])
    names = dict.fromkeys(run.config["recipe"].get("loss") or CROSS_ENTROPY for run in runs)
    losses = "" if [*names] == [CROSS_ENTROPY] else ", ".join(names)
    figures = {key: drawn for key in keys if (drawn := plots.draw(key, metrics, losses))}
    first = Path(flags.runs[0])
    page = Path(flags.out or (first if len(runs) == 1 else first.parent) / "report.html")
    titles = {key: plots.title(key, losses) for key in figures}
    curves = {titles[key]: plots.as_svg(figure, key) for key, figure in figures.items()}
    with folder.storage_errors(page, "--out"):
        folder.write_atomically(page, render_page(runs, curves).encode())
        console.print(f"written to {page}")
        for key, figure in figures.items() if flags.png else ():
            picture = page.with_name(f"{page.stem}-{key}.png")
            figure.savefig(picture, dpi=200)
            console.print(f"written to {picture}")
    if changed:
        more = f" (and so for {len(changed) - 1} more)" * (len(changed) > 1)
        fix = "put them back, or name a copy of them with --dataset"
        raise DataError(f"{changed[0]}{more}, so the page shows no mistakes of it; {fix}")


def read_run(path: Path) -> ReportedRun:
    """Return the folder's content. Raise CheckpointError unless it is a run of this version."""
    try:
        status = folder.read_json(path / folder.STATUS)
        if status["state"] == "running" and not folder.in_use(path):
            status["state"] = "killed"
        metrics, summary = path / folder.METRICS, path / folder.SUMMARY
        lines = metrics.read_text(encoding="utf-8").split("\n") if metrics.exists() else []
        run = ReportedRun(
            printable(path.name),
            folder.read_json(path / folder.CONFIG),
            [json.loads(line) for line in lines[:-1]],  # the last may be torn
            folder.read_json(summary) if summary.exists() else {},
            status,
        )
        render_page([run], {})  # which shows whether all is there
        return run
    except OSError as error:
        why = f"holds no run to report on ({Path(error.filename or path).name}: {reason(error)})"
        raise CheckpointError(f"{path}: {why}; {folder.name_a_run()}") from error
    except (LookupError, ValueError, TypeError, jinja2.UndefinedError) as error:
        why = f"is damaged, or of another version of ddp_mnist ({error})"
        raise CheckpointError(f"{path}: {why}; use that one's report") from error


@torch.inference_mode()
def find_mistakes(run: ReportedRun, path: Path, places: Report) -> str:
    """Fill in `run.mistakes` of a finished run, or `run.no_mistakes` if none can be shown.

    Return how the images have changed since, in words; "" if they have not.
    """
    try:
        trained = weights.from_bytes(weights.read_bytes(str(path)), str(path))
        flags = run.config["run"]
        image_options = ImageOptions.of(flags)
        dataset, cache_dir = places.dataset or flags["dataset"], places.cache_dir
        # What lies on this machine is read again if it has to be; from the Hub nothing is fetched.
        read = cache.cached if find_source(dataset).kind == "hub" else cache.load
        images = read(dataset, cache_dir or flags["cache_dir"], image_options)
        if images is None:
            raise DataError(
                "the test images are not in the cache of this machine; name their place: --dataset"
            )
    except DdpMnistError as error:
        run.no_mistakes = f"They cannot be shown: {error}."
        warn(f"{run.name}: its mistakes are not in the page: {error}")
        return ""
    if images.digest != run.summary["dataset"]["digest"]:
        change = changed_since(run.name, dataset, run.summary, images)
        run.no_mistakes = f"They cannot be shown: {change}."
        return change
    batches = images.test_images.split(eval_batch_size(images.test_images))
    probabilities = torch.cat([trained.model(batch).softmax(1) for batch in batches])
    certainty, guesses = probabilities.max(1)
    wrong = (guesses != images.test_labels).nonzero().flatten()
    certain_first = wrong[certainty[wrong].argsort(descending=True, stable=True)]
    if len(trained.classes) >= TOP_FROM:
        among = probabilities.topk(TOP).indices == images.test_labels[:, None]
        run.top_accuracy = among.any(1).double().mean().item()
    run.no_mistakes = "There are none."
    shown = certain_first[:MOST_WRONG].tolist()
    named = places_of(shown, images, dataset)
    run.mistakes = [
        {
            "index": index,  # in the test split
            "place": named[index],
            "label": trained.classes[label := int(images.test_labels[index])],
            "label_probability": float(probabilities[index, label]),
            "guess": trained.classes[guesses[index]],
            "guess_probability": float(certainty[index]),
            "png": as_data_uri(images.test_images[index]),
        }
        for index in shown
    ]
    return ""


def places_of(rows: Sequence[int], images: ImageData, dataset: str) -> dict[int, str]:
    """Return for each row of the test split its file in the folder, or where else it is."""
    files = images.files_of_test(rows)
    has_rows = find_source(dataset).kind in ("folder", "hub") and not images.test_drawn
    other = "row {} of split test" if has_rows else "test image {}"
    return {row: printable(files.get(row) or other.format(row)) for row in rows}


def said_together(run: ReportedRun) -> str:
    """Return what the accuracies of training and validation say together, and what to try next.

    Without a validation the test takes its place; "" where no step was logged.
    """
    lines = [line for line in run.metrics if line.get("accuracy") is not None]
    last = [line["accuracy"] for line in lines if line["epoch"] == lines[-1]["epoch"]]
    if not last:
        return ""
    recipe, trained = run.config["recipe"], sum(last) / len(last)
    split, other = "validation", run.summary["val_accuracy"]
    images = run.summary["dataset"]["val_rows"]
    if other is None:
        split, other, images = "test", run.summary["test_accuracy"], run.summary["test_count"]
    if overfits(trained, other, images):
        what, tries = overfitting(recipe["model"], recipe["weights"], recipe["augment"])
    elif max(trained, other) < LEARNED:
        what = "the net has not learned its images yet (underfitting)"
        tries = ["more --epochs", "a larger --image-size", "another --model"]
    else:
        what = "neither over- nor underfitting"
        tries = ["more images", "more --epochs", "--preset accurate"]
    return (
        f"In the last epoch, {trained:.4f} of the training images were right, and {other:.4f} of"
        f" the {split} images: {what}. To try next: {', or '.join(tries)}."
    )


def as_data_uri(image: torch.Tensor) -> str:
    """Return uint8 [C, H, W] as a PNG within the page."""
    pixels = image.permute(1, 2, 0).squeeze(2).numpy()  # PIL has no channel for grey
    PIL.Image.fromarray(pixels).save(written := io.BytesIO(), format="PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


def render_page(runs: Sequence[ReportedRun], curves: dict[str, str]) -> str:
    """Return the page's HTML, with `curves`: an <svg> by its title."""
    rows, many = side_by_side(runs), MANY_CLASSES
    parts = {"by_class": by_class, "confusions": confusions, "said_together": said_together}
    return render("report.html", runs=runs, curves=curves, rows=rows, many=many, **parts)


def by_class(summary: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield for each class how its test images, and those taken for it, are counted."""
    matrix = unpacked(summary["confusion"], len(summary["classes"]))
    wrong = matrix - np.diag(matrix.diagonal())
    for label, name in enumerate(summary["classes"]):
        taken_for = int(wrong[label].argmax())
        yield {
            "name": name,
            "images": int(matrix[label].sum()),
            "correct": int(matrix[label, label]),
            "guessed": int(matrix[:, label].sum()),
            "most": int(wrong[label, taken_for]),
            "taken_for": summary["classes"][taken_for],
        }


def confusions(summary: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield class, what it was taken for, and how often: the most frequent of MANY_CLASSES."""
    names = summary["classes"]
    matrix = unpacked(summary["confusion"], len(names))
    for label, guess, rows in most_confused(matrix, MOST_WRONG):
        yield names[label], names[guess], rows


def side_by_side(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str], bool]]:
    """Return name, value of each run, and whether they differ: the result, then every setting."""
    columns = []
    for run in runs:
        column = {"state": run.status["state"]}
        for name, value in run.summary.items() if column["state"] == "finished" else ():
            inner = value if isinstance(value, dict) else {"": value}
            if name not in NOT_IN_A_ROW:
                column |= {f"{name} {key}".strip(): each for key, each in inner.items()}
        for group in ("run", "recipe", "distribution"):
            flags = run.config[group].items()
            column |= {f"--{name.replace('_', '-')}": value for name, value in flags}
        columns.append({name: shown(value) for name, value in column.items()})
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, [column.get(name, "") for column in columns]) for name in names]
    return [(name, values, len(set(values)) > 1) for name, values in rows]


def shown(value: Any) -> str:
    """Return a value of the settings as the page shows it."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "not given"
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
