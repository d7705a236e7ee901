"""The verb `report`: write one HTML file about a run, which needs nothing else.

    ddp-mnist report runs/latest

The page is verbs/templates/report.html; plots.py draws its curves. It needs no network and no
script, is light or dark as the reader's system, and its figures are those of summary.json. What the
model answers for each image is found by running it once more, which takes seconds. Beside the page
are the same facts for spreadsheets: classes.csv and predictions.csv.
"""

import base64
import io
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import numpy as np
import PIL.Image
import torch
from matplotlib.figure import Figure
from tqdm.utils import disp_len  # a Chinese letter takes two columns

from ddp_mnist.config.flag_fields import flag_name
from ddp_mnist.config.recipe import PRETRAINED
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import check_still_there, find_source
from ddp_mnist.errors import CheckpointError, DataError, DdpMnistError, blame
from ddp_mnist.nets.published import NAME
from ddp_mnist.system import files
from ddp_mnist.system.console import Console, warn
from ddp_mnist.system.locks import is_held
from ddp_mnist.system.text import escaped, finite, printable
from ddp_mnist.task import Task, options_of
from ddp_mnist.training import folder, model_file
from ddp_mnist.training.saved_config import why_others
from ddp_mnist.training.scores import MANY_CLASSES, most_confused, share_text, unpacked
from ddp_mnist.verbs import answers, plots, spreadsheet
from ddp_mnist.verbs.answers import Answers, Counts
from ddp_mnist.verbs.flags import Report
from ddp_mnist.verbs.render import render

MOST_WRONG = 24
TABLES = {"classes.csv": answers.COUNTED, "predictions.csv": answers.IMAGE}  # and how they begin
LEARNED = 0.9  # of the training images
# Of a confusion matrix, in em: its width at which it begins to shrink, a letter's, what is around
# the text of a cell, and the bounds of the text of a row's head and of a column; all by eye
WIDEST, WIDE, BORDER = 72, 0.62, 1
LEAST_HEAD, MOST_HEAD, LEAST_COLUMN, MOST_COLUMN = 3, 14, 2, 8
TOO_FAR = 0.1  # the other images' accuracy below that of the training images
# Entries of summary.json that are not among the settings
LISTS = ("hosts", "confusion", "classes", "class_accuracy", "images_per_class", "notes")


@dataclass(frozen=True)
class Answered:
    """What the model of a finished run answers."""

    task: Task
    splits: Sequence[Answers]  # of the test, and of the validation if there is one
    mistakes: Sequence[dict[str, Any]]  # the most certain ones, or the worst, first
    scatter: dict[str, Figure]  # by the column of numbers


@dataclass(frozen=True)
class ReportedRun:
    """The content of a run folder, and what its model answers."""

    path: Path
    name: str  # of the folder
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    summary: dict[str, Any]  # perhaps from before a resume; {} if it has never finished
    status: dict[str, Any]  # its state may be "killed" too
    answered: Answered | None = None
    why_not: str = "The run has not finished."

    @property
    def matrix(self) -> np.ndarray | None:
        """Return the confusion matrix; None without a result or without classes."""
        if self.status["state"] != "finished" or not self.summary["classes"]:
            return None
        return unpacked(self.summary["confusion"], len(self.summary["classes"]))

    @property
    def counts(self) -> list[Counts]:
        """Return the counts of each class, or else of each label that is known."""
        found = self.answered
        if self.matrix is not None:
            tested = found.splits[0] if found else None
            return answers.class_counts(self.summary["classes"], self.matrix, tested)
        return answers.label_counts(found.task, found.splits[0]) if found else []


def run(flags: Report) -> None:
    """Write the page, the tables next to it, and with --png pictures; print where.

    Raise DataError at the end if the page lacks mistakes because images have changed.
    """
    files.check_place(flags.out, "--out", ".html")
    console = Console(True)
    console.print("reading    the run and its predictions")
    run, changed = read_run(Path(flags.run)), None
    if run.status["state"] == "finished":
        run, changed = with_answers(run, flags)
    logged = (key for line in run.metrics for key in line if key not in ("epoch", "step"))
    keys = dict.fromkeys([*plots.CURVES, *logged])
    page = Path(flags.out or run.path / "report.html")
    prefix = f"{page.stem}-" if flags.out else ""  # of several pages in one folder
    with catch_warnings(action="ignore"):  # matplotlib's, of each letter that no font has
        with blame(f"{run.path}/{folder.METRICS}", CheckpointError):
            figures = {key: figure for key in keys if (figure := plots.draw(key, run.metrics))}
            curves = {plots.title(key): plots.as_svg(each, key) for key, each in figures.items()}
        contents = {page.name: render_page(run, curves).encode()}
        contents |= {prefix + name: content for name, content in tables(run).items()}
        for key, figure in (figures | pictures(run)).items() if flags.png else ():
            for form in ("png", "svg"):
                contents[f"{page.stem}-{key}.{form}"] = plots.as_file(figure, form)
    with files.storage_errors(page, "--out"):
        for name, heading in TABLES.items():  # an earlier page's may be of other weights
            begins = f"{spreadsheet.MARK}{','.join(heading)}".encode()
            table = page.with_name(prefix + name)
            if table.is_file() and table.read_bytes().startswith(begins):
                table.unlink()
                if table.name not in contents:
                    warn(
                        f"{run.name}: removed {escaped(table)}, as this page has no answers for it"
                    )
        for name, content in contents.items():
            files.write_atomically(page.with_name(name), content)
            console.print(f"written to {escaped(page.with_name(name))}")
    if changed:
        why, fix = changed
        raise DataError(f"{run.name}: {why}, so the page shows no mistakes of it; {fix}")


def read_run(path: Path) -> ReportedRun:
    """Return a run folder's content. Raise CheckpointError, which names a file that is damaged."""
    config = folder.read_config(path)
    metrics, summary_file = path / folder.METRICS, path / folder.SUMMARY
    with blame(f"{path}/{folder.STATUS}", CheckpointError):
        status = files.read_json(path / folder.STATUS)
        is_finished = status["state"] == "finished"
    with blame(str(summary_file), CheckpointError):
        has_summary = is_finished or summary_file.exists()
        summary = files.read_json(summary_file) if has_summary else {}
    with blame(str(metrics), CheckpointError):
        raw = files.regular(metrics).read_bytes() if metrics.exists() else b""
        is_as_written = summary.get("metrics_sha256") in (None, sha256(raw).hexdigest())
        if is_finished and not is_as_written:
            raise CheckpointError(f"{metrics}: {files.CHANGED}; put it back")
        # the last line of a run that was killed may be incomplete
        lines = [{**finite(json.loads(line))} for line in raw.decode().split("\n")[:-1]]
    with blame(str(path), CheckpointError):
        if status["state"] == "running" and not is_held(path / folder.LOCK):
            status["state"] = "killed"
        run = ReportedRun(path, printable(path.resolve().name), config, lines, summary, status)
        render_page(run, {})  # fails if a field is missing
        return run


@torch.inference_mode()
def with_answers(run: ReportedRun, flags: Report) -> tuple[ReportedRun, tuple[str, str] | None]:
    """Return a finished run with what its model answers, or with why that cannot be known.

    Return too why the images are not those of the run, and what to do; None if they are.
    """
    saved = run.config["run"]
    dataset = flags.dataset or saved["dataset"]
    try:
        drawn = {"test_size": run.config.get("test_share")}  # perhaps not what was asked for
        options = options_of({"task": None} | run.config["recipe"] | saved | drawn)
        trained = model_file.from_bytes(model_file.read_bytes(str(run.path)), str(run.path))
        if not flags.dataset:
            check_still_there(dataset, run.name)
        cache_dir = flags.cache_dir or cache.dir_of_run(dataset, saved["cache_dir"], options)
        source = find_source(dataset)
        # Images on this machine are decoded again if necessary; nothing is fetched from the Hub.
        if source.kind == "hub" and not cache.cached(dataset, cache_dir, options):
            fix = "name their place: --dataset"
            raise DataError(f"the test images are not in the cache of this machine; {fix}")
        images = cache.load(dataset, cache_dir, options)
    except DdpMnistError as error:
        warn(f"{run.name}: its mistakes are not in the page: {error}")
        return replace(run, why_not=f"They cannot be shown: {error}."), None
    put_back = "put them back, or name a copy of them with --dataset"
    if others := why_others(images, run.config, dataset, put_back):
        return replace(run, why_not=f"They cannot be shown: {others[0]}."), others
    images = images.hold_out(run.config["recipe"]["val_size"])
    images = images.without(run.config.get("left_out", []), "trained on by --weights")
    return replace(run, answered=answer(trained, images)), None


def answer(trained: model_file.TrainedModel, images: ImageData) -> Answered:
    """Return the answers, the mistakes, and a scatter of each column of numbers."""
    names = [split for split in ("test", "validation") if len(images.rows[split])]
    splits = [answers.answers_of(trained, images, split) for split in names]
    test, task, scatter = splits[0], trained.task, dict[str, Figure]()
    if images.classes:
        wrong = answers.most_certain_mistakes(test, task.names, MOST_WRONG)
    else:
        wrong = answers.worst_numbers(test, task, MOST_WRONG)
        columns = zip(task.names, task.are_labels, test.predictions.T, test.targets.T, strict=True)
        scatter = {n: plots.scatter(n, *both) for n, is_label, *both in columns if not is_label}
    pixels = (torch.from_numpy(images.images[images.rows["test"][row]]) for row in wrong)
    mistakes = [
        {"place": printable(test.files[row]), "png": as_data_uri(image), **facts}
        for (row, facts), image in zip(wrong.items(), pixels, strict=True)
    ]
    return Answered(task, splits, mistakes, scatter)


def as_data_uri(image: torch.Tensor) -> str:
    """Return an image, uint8 [C, H, W], as the URI of a PNG, which the page holds."""
    pixels = image.permute(1, 2, 0).squeeze(2).numpy()  # PIL has no channel for grey
    PIL.Image.fromarray(pixels).save(written := io.BytesIO(), format="PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


# --- What is written besides the page


def tables(run: ReportedRun) -> dict[str, bytes]:
    """Return CSV files by name: of the classes or labels, and of each image's answer."""
    of_classes, of_images = TABLES
    found = {of_classes: answers.count_table(run.counts)} if run.counts else {}
    if run.answered:
        found[of_images] = answers.table(run.answered.task, run.answered.splits)
    return {name: spreadsheet.to_bytes(rows) for name, rows in found.items()}


def pictures(run: ReportedRun) -> dict[str, Figure]:
    """Return the figures that the page has besides curves, by the end of their files' names."""
    found = dict[str, Figure]()
    for name, figure in run.answered.scatter.items() if run.answered else ():
        key = "scatter-" + re.sub(r"[^\w.-]+", "_", name)
        while key in found:  # columns `a b` and `a_b`
            key += "_"
        found[key] = figure
    if run.matrix is not None and len(run.matrix) <= MANY_CLASSES:
        found["confusion"] = plots.confusion(run.summary["classes"], run.matrix)
    return found


# --- The page's text


def render_page(run: ReportedRun, curves: dict[str, str]) -> str:
    """Return the page's HTML, with `curves`: an <svg> by its title."""
    facts = {"run": run, "curves": curves, "settings": settings_of(run)}
    scatter = run.answered.scatter if run.answered else {}
    splits = run.answered.splits if run.answered else ()
    facts["scatter"] = {n: plots.as_svg(f, f"scatter {n}") for n, f in scatter.items()}
    if run.matrix is not None and len(run.matrix) <= MANY_CLASSES:
        facts["sizes"] = matrix_sizes(run.summary["classes"], run.matrix)
    held = [each for each in splits if each.split == "validation" and run.matrix is not None]
    facts["limits"] = answers.by_limit(held[0]) if held else []
    facts["validated"] = len(held[0].files) if held else 0
    functions = (advice, main_confusion, answers.mean_recall, most_confused, share_text)
    named = {each.__name__: each for each in functions}
    return render("report.html", many=MANY_CLASSES, most=MOST_WRONG, **facts, **named)


def advice(run: ReportedRun) -> str | None:
    """Compare the accuracies of training and validation, in words, and say what to try next.

    Without a validation the test replaces it; None if no step was logged, or without classes.
    """
    lines = [line for line in run.metrics if line.get("accuracy") is not None]
    if not lines or not run.summary["classes"]:
        return None
    recipe, summary = run.config["recipe"], run.summary
    steps = np.diff([line["step"] for line in lines], prepend=0)  # that each line is the mean of
    is_last = [line["epoch"] == lines[-1]["epoch"] for line in lines]
    trained = float(np.average([line["accuracy"] for line in lines], weights=steps * is_last))
    if summary["val_accuracy"] is None:
        split, other, images = "test", summary["test_accuracy"], summary["test_count"]
    else:
        split, other, images = "validation", summary["val_accuracy"], summary["dataset"]["val_rows"]
    error = math.sqrt(other * (1 - other) / images)  # of a share of so many images
    if trained - other >= max(TOO_FAR, 2 * error):
        what, tries = "the net has learned its images by heart (overfitting)", ["more images"]
        if not recipe["augment"]:
            tries.append("--augment")
        if recipe["weights"] in (None, "none"):
            net = "" if NAME.match(recipe["model"]) else f"--model {PRETRAINED} "
            tries.append(f"{net}--weights DEFAULT")
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


def main_confusion(matrix: np.ndarray, label: int) -> tuple[int, int]:
    """Return the class that most images of another were taken for, and how many."""
    wrong = np.where(np.arange(len(matrix)) == label, 0, matrix[label])
    return int(wrong.argmax()), int(wrong.max())


def matrix_sizes(names: list[str], matrix: np.ndarray) -> dict[str, Any]:
    """Return the widths of a confusion matrix, in em: of a row's head, a column, and all of it.

    Names head the columns if they fit side by side, perhaps in several lines; else they stand
    upright. Names too long for a head or a column are broken.
    """
    longest, digits = (WIDE * max(map(disp_len, each)) for each in (names, map(str, matrix.flat)))
    head = min(max(longest, LEAST_HEAD), MOST_HEAD) + BORDER
    column = max(digits, min(longest, MOST_COLUMN), LEAST_COLUMN) + BORDER
    upright = head + len(names) * column > WIDEST
    # of upright names a line is as wide as a digit, and the digits may be closer
    column = round(max(digits + BORDER / 2, 1.5) if upright else column, 1)
    whole = round(head + len(names) * column, 1)
    return {"head": round(head, 1), "column": column, "whole": whole, "upright": upright}


def settings_of(run: ReportedRun) -> dict[str, Any]:
    """Return by name the results, if the run has finished, and every setting."""
    found = {"state": run.status["state"]}
    for name, value in run.summary.items() if found["state"] == "finished" else ():
        inner = value if isinstance(value, dict) else {"": value}
        if name not in LISTS:
            found |= {f"{name} {key}".strip(): each for key, each in inner.items()}
    for group in ("run", "recipe", "distribution"):
        found |= {flag_name(name): value for name, value in run.config[group].items()}
    return found
