"""The verb `report`: write one HTML file about a run, which needs nothing else.

    ddp-mnist report runs/latest

The page is verbs/templates/report.html; plots.py draws its curves. It needs no network and no
script, is light or dark as the reader's system, and its figures are those of summary.json. The
images that the model got wrong are found by running it once more, which takes seconds.
"""

import base64
import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import numpy as np
import PIL.Image
import torch

from ddp_mnist.config.flag_fields import flag_name
from ddp_mnist.core.evaluation import eval_batch_size
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import check_still_there, find_source
from ddp_mnist.data.splits import subset
from ddp_mnist.errors import CheckpointError, DataError, DdpMnistError, blame
from ddp_mnist.system import files
from ddp_mnist.system.console import Console, warn
from ddp_mnist.system.locks import is_held
from ddp_mnist.system.text import escaped, finite, printable
from ddp_mnist.task import options_of
from ddp_mnist.training import folder, model_file
from ddp_mnist.training.saved_config import why_others
from ddp_mnist.training.scores import MANY_CLASSES, most_confused, unpacked
from ddp_mnist.verbs import plots
from ddp_mnist.verbs.flags import Report
from ddp_mnist.verbs.render import render

MOST_WRONG = 24
LEARNED = 0.9  # of the training images
TOO_FAR = 0.1  # the other images' accuracy below that of the training images
PRETRAINED = "torchvision:resnet18"
# Entries of summary.json that are not among the settings
LISTS = ("hosts", "confusion", "classes", "class_accuracy", "images_per_class", "notes")


@dataclass
class ReportedRun:
    """The content of a run folder, and its model's mistakes."""

    path: Path
    name: str  # of the folder
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    summary: dict[str, Any]  # perhaps from before a resume; {} if it has never finished
    status: dict[str, Any]  # its state may be "killed" too
    mistakes: Sequence[dict[str, Any]] = ()  # the most certain ones first
    no_mistakes: str = "The run has not finished."  # why none are shown
    scatter: dict[str, str] = field(default_factory=dict)  # without classes: an <svg> by its title


def run(flags: Report) -> None:
    """Write the page, and with --png each curve next to it; print where.

    Raise DataError at the end if the page lacks mistakes because images have changed.
    """
    files.check_place(flags.out, "--out", ".html")
    console = Console(True)
    console.print("reading    the run and its predictions")
    run = read_run(Path(flags.run))
    changed = find_mistakes(run, flags) if run.status["state"] == "finished" else None
    logged = (key for line in run.metrics for key in line if key not in ("epoch", "step"))
    keys = dict.fromkeys([*plots.CURVES, *logged])
    # matplotlib warns of each letter that no font has
    with blame(f"{run.path}/{folder.METRICS}", CheckpointError), catch_warnings(action="ignore"):
        figures = {key: figure for key in keys if (figure := plots.draw(key, run.metrics))}
        curves = {plots.title(key): plots.as_svg(figure, key) for key, figure in figures.items()}
    page = Path(flags.out or run.path / "report.html")
    with files.storage_errors(page, "--out"):
        files.write_atomically(page, render_page(run, curves).encode())
        console.print(f"written to {escaped(page)}")
        for key, figure in figures.items() if flags.png else ():
            picture = page.with_name(f"{page.stem}-{key}.png")
            figure.savefig(written := io.BytesIO(), dpi=200)
            files.write_atomically(picture, written.getvalue())
            console.print(f"written to {escaped(picture)}")
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
def find_mistakes(run: ReportedRun, flags: Report) -> tuple[str, str] | None:
    """Fill in `mistakes` of a finished run, or `no_mistakes` if none can be shown.

    Return why the images are not those of the run, and what to do; None if they are.
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
        run.no_mistakes = f"They cannot be shown: {error}."
        warn(f"{run.name}: its mistakes are not in the page: {error}")
        return None
    put_back = "put them back, or name a copy of them with --dataset"
    if others := why_others(images, run.config, dataset, put_back):
        run.no_mistakes = f"They cannot be shown: {others[0]}."
        return others
    run.no_mistakes = "There are none."
    images = images.without(run.config.get("left_out", []), "trained on by --weights")
    test = subset(images, "test")
    batches = torch.arange(len(test)).split(eval_batch_size(test.images))
    outputs = torch.cat([trained.model(test.take(rows)[0]) for rows in batches])
    targets, names = test.targets[test.rows], trained.task.names
    if not images.classes:
        columns = zip(names, trained.task.predict(outputs).T, targets.T, strict=True)
        run.scatter = {name: plots.scatter(name, *both) for name, *both in columns}
        return None
    probabilities, labels = outputs.softmax(1), targets
    certainty, guesses = probabilities.max(1)
    certain_first = certainty.argsort(descending=True, stable=True)
    shown = certain_first[(guesses != labels)[certain_first]][:MOST_WRONG].tolist()
    named = places_of(shown, images)
    run.mistakes = [
        {
            "place": named[row],
            "label": names[label := int(labels[row])],
            "label_probability": float(probabilities[row, label]),
            "guess": names[guesses[row]],
            "guess_probability": float(certainty[row]),
            "png": as_data_uri(test.images[test.rows[row]]),
        }
        for row in shown
    ]
    return None


def places_of(rows: Sequence[int], images: ImageData) -> dict[int, str]:
    """Return, for each row of the test split, its file in the folder, or its number."""
    numbers = dict(zip(rows, images.rows["test"][[*rows]].tolist(), strict=True))
    paths = images.files_of([*numbers.values()])
    return {row: printable(paths.get(numbers[row], f"test image {row}")) for row in rows}


def as_data_uri(image: torch.Tensor) -> str:
    """Return an image, uint8 [C, H, W], as the URI of a PNG, which the page holds."""
    pixels = image.permute(1, 2, 0).squeeze(2).numpy()  # PIL has no channel for grey
    PIL.Image.fromarray(pixels).save(written := io.BytesIO(), format="PNG")
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"


# --- The page's text


def render_page(run: ReportedRun, curves: dict[str, str]) -> str:
    """Return the page's HTML, with `curves`: an <svg> by its title."""
    facts = {"run": run, "curves": curves, "settings": settings_of(run)}
    sizes = {"many": MANY_CLASSES, "most": MOST_WRONG}
    functions = (advice, class_rows, interval, most_confused, parts_of, unpacked)
    return render("report.html", **facts, **sizes, **{each.__name__: each for each in functions})


def advice(run: ReportedRun) -> str | None:
    """Compare the accuracies of training and validation, in words, and say what to try next.

    Without a validation the test replaces it; None if no step was logged, or without classes.
    """
    lines = [line for line in run.metrics if line.get("accuracy") is not None]
    last = [line["accuracy"] for line in lines if line["epoch"] == lines[-1]["epoch"]]
    if not last or not run.summary["classes"]:
        return None
    recipe, summary = run.config["recipe"], run.summary
    trained = sum(last) / len(last)
    if summary["val_accuracy"] is None:
        split, other, images = "test", summary["test_accuracy"], summary["test_count"]
    else:
        split, other, images = "validation", summary["val_accuracy"], summary["dataset"]["val_rows"]
    error = math.sqrt(other * (1 - other) / images)  # of a share of so many images
    if trained - other >= max(TOO_FAR, 2 * error):
        what, tries = "the net has learned its images by heart (overfitting)", ["more images"]
        if not recipe["augment"]:
            tries.append("--augment")
        if not recipe["weights"]:
            net = "" if recipe["model"].startswith("torchvision:") else f"--model {PRETRAINED} "
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


def interval(accuracy: float, images: int) -> tuple[float, float]:
    """Return the bounds between which an accuracy of so many images lies, at 95 %.

    Wilson's score interval: E. B. Wilson, Probable inference, 1927. Near 1 and for few images it
    holds too, where accuracy +- 2 standard errors does not.
    """
    from scipy.stats import binomtest  # slow

    return tuple(binomtest(round(accuracy * images), images).proportion_ci(method="wilson"))


def parts_of(path: str) -> list[str]:
    """Return a file's path in the parts after which a line may break: never within a suffix."""
    return re.findall(r"[^/_ -]+[/_ -]*|[/_ -]+", path)


def class_rows(names: list[str], matrix: np.ndarray) -> Iterator[tuple[str | int, ...]]:
    """Yield for each class its name, images, correct ones, guesses, and its main confusion.

    The guesses are all images taken for the class. The confusion is how many of its images were
    taken for the same other class, and the name of that.
    """
    correct = matrix.diagonal()
    wrong = matrix - np.diag(correct)
    taken_for = [names[guess] for guess in wrong.argmax(1)]
    counts = (each.tolist() for each in (matrix.sum(1), correct, matrix.sum(0), wrong.max(1)))
    return zip(names, *counts, taken_for, strict=True)


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
