"""The verb `predict`: classify image files, including your own photos.

    ddp-mnist predict runs/latest seven.png photos/        # on a terminal, a table
    ddp-mnist predict runs/latest photos/ > answers.jsonl  # elsewhere, or with --json, JSON lines
    ddp-mnist predict runs/latest photos/ --csv > answers.csv  # for a spreadsheet
    cat seven.png | ddp-mnist predict runs/latest -

An image is prepared as training prepared its own. If the run was trained on MNIST or the like, a
file that is not 28x28 is taken for a photo of a digit, see digit_photos.py.
"""

import dataclasses
import io
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.utils import disp_len  # a Chinese letter takes two columns

from ddp_mnist.config.flag_fields import typed_flag
from ddp_mnist.core.task import Classification, Task
from ddp_mnist.data import folders
from ddp_mnist.data.decode import decode_image, open_image
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import DataError, UsageError, blame
from ddp_mnist.system.console import Console, warn
from ddp_mnist.system.files import check_place, storage_errors, write_atomically
from ddp_mnist.system.text import as_json, escaped, printable, reason, shown_name
from ddp_mnist.training import model_file
from ddp_mnist.training.model_file import TrainedModel
from ddp_mnist.training.scores import number_texts
from ddp_mnist.verbs import spreadsheet
from ddp_mnist.verbs.answers import written
from ddp_mnist.verbs.digit_photos import as_mnist
from ddp_mnist.verbs.flags import Predict

Answer = dict[str, Any]  # the line of JSON about an image
LISTED, IN_A_TABLE = 10, 3  # the most probable classes
NOT_SURE = "not sure"  # the label below --sure
MOST_SHOWN, PER_ROW, INCHES, DPI = 64, 8, 1.3, 100  # in the picture that --show writes
LETTERS = 18  # above an image of INCHES, each 0.6 of 8 points wide


def run(flags: Predict) -> None:
    """Print a line for each image: of CSV if asked, of a table on a terminal, else of JSON."""
    console, as_table = Console(True), sys.stdout.isatty() and not (flags.json or flags.csv)
    trained = load(flags)
    lines: Iterable[Any]
    if flags.csv:
        flags = dataclasses.replace(flags, top=len(trained.task.names))
        lines = csv_rows(answer(flags, trained), trained.task)
    elif as_table:
        files = tuple(str(file) for image in flags.images for file in find_images(image))
        flags = dataclasses.replace(flags, images=files, top=flags.top or IN_A_TABLE)
        lines = table(answer(flags, trained), files, trained.task)
    else:
        lines = map(as_json, answer(flags, trained))
    for number, line in enumerate(lines):
        if flags.csv:
            spreadsheet.print_row(console, line, is_first=number == 0)
        else:
            console.print(line)
        if not (console.verbose or flags.show):
            return  # the reader has closed the pipe
    if as_table and flags.show:
        console.print(f"written to {escaped(flags.show)}")


def table(answers: Iterable[Answer], files: Sequence[str], task: Task) -> Iterator[str]:
    """Yield a heading, then a line for each answer: file, label, probability, and next classes.

    In a task of numbers, these follow the file.
    """

    def padded(text: str, columns: int) -> str:
        return text + " " * (columns - disp_len(text))

    first = max(map(disp_len, ["file", *map(printable, files)]))
    names = [*map(shown_name, task.names)]
    second = max(map(disp_len, ["label", NOT_SURE, *names]))
    heading = f"{padded('label', second)}   probability   next"
    if not isinstance(task, Classification):
        heading = "   ".join(f"{name:>10}" for name in names)
    yield f"{padded('file', first)}   {heading}"
    for each in answers:
        file = padded(printable(each["file"]), first)
        if "error" in each:
            yield f"{file}   {each['error']}"
        elif "prediction" in each:
            numbers = number_texts(task, [*each["prediction"].values()])
            yield f"{file}   " + "   ".join(f"{x:>10}" for x in numbers)
        else:
            label = padded(shown_name(each["label"]), second)
            others = [pair for pair in each["probabilities"].items() if pair[0] != each["label"]]
            rest = "   ".join(f"{shown_name(name)} {number:.2f}" for name, number in others)
            yield f"{file}   {label}   {each['probability']:<11.2f}   {rest}".rstrip()


def csv_rows(answers: Iterable[Answer], task: Task) -> Iterator[list[Any]]:
    """Yield a heading, then a row for each answer, with every class in the order of the task."""
    of_classes = ["answer", "probability"] if isinstance(task, Classification) else []
    yield ["file", *of_classes, *task.names, "error"]
    for each in answers:
        shares = each.get("probabilities") or each.get("prediction") or {}
        found = [each.get("label"), each.get("probability")] if of_classes else []
        yield [each["file"], *found, *map(shares.get, task.names), each.get("error")]


def load(flags: Predict) -> TrainedModel:
    """Return the run's model. Raise UsageError if it does not fit the flags, or CheckpointError."""
    for name in ("json", "top") if flags.csv else ():
        if value := getattr(flags, name):
            raise UsageError(
                f"{typed_flag(name, value)}: has no part in --csv; leave one of them out"
            )
    check_place(flags.show, "--show", ".png")
    trained = model_file.from_bytes(model_file.read_bytes(flags.run), flags.run)
    if flags.digit_photos and not trained.image_format.bright_on_black:
        other = f"{flags.run} was trained on other images than bright strokes on black"
        raise UsageError(f"--digit-photos: {other}; leave it out")
    if flags.sure and not isinstance(trained.task, Classification):
        why = f"{flags.run} predicts numbers, which have no probability"
        raise UsageError(f"--sure {flags.sure:g}: {why}; leave it out")
    return trained


@torch.inference_mode()
def answer(flags: Predict, trained: TrainedModel) -> Iterator[Answer]:
    """Yield {file, label, probability, probabilities} for each image; with --show, draw them.

    Below --sure the label is NOT_SURE, and `guess` is what it would have been. With numbers instead
    of classes it is {file, prediction}. For a file that cannot be read yield {file, error}; once
    all others are labelled, a DataError names it.
    """
    made = trained.image_format
    digit_photos = made.digit_photos if flags.digit_photos is None else flags.digit_photos
    titled_images, errors = list[tuple[str, np.ndarray]](), list[str]()
    files = [file for image in flags.images for file in find_images(image)]
    for file in files:
        try:
            image = read_image(file, made, digit_photos)
            outputs = trained.model(torch.tensor(image[None]))
            if not outputs.isfinite().all():
                raise DataError("the model's outputs for it are not finite numbers; train it again")
        except DataError as error:
            errors.append(f"{file}: {error}")
            yield {"file": str(file), "error": str(error)}
            continue
        found = prediction_of(trained.task, outputs, flags.top or LISTED)
        if found.get("probability", 1) < (flags.sure or 0):
            found = found | {"label": NOT_SURE, "guess": found["label"]}
        if flags.show:
            titled_images.append((titled(file.name, in_short(found, trained.task)), image))
        yield {"file": str(file), **found}
    if flags.show and titled_images:
        draw(titled_images, Path(flags.show))
    if errors:
        several = f" ({len(errors)} of {len(files):,} files have no answer)"
        raise DataError(errors[0] + (several if len(errors) > 1 else ""))


def prediction_of(task: Task, outputs: Tensor, top: int) -> Answer:
    """Return, for JSON, the answer in outputs [1, outputs] for an image, with the `top` classes."""
    if not isinstance(task, Classification):
        numbers = map(written, task.predict(outputs)[0].tolist())
        return {"prediction": dict(zip(task.names, numbers, strict=True))}
    shares = zip(task.classes, outputs.softmax(1)[0].tolist(), strict=True)
    likely = sorted(shares, key=lambda pair: -pair[1])[:top]
    probabilities = {name: round(share, 6) for name, share in likely}
    label, share = next(iter(probabilities.items()))
    return {"label": label, "probability": share, "probabilities": probabilities}


def in_short(found: Answer, task: Task) -> str:
    """Return an answer in a few words."""
    if "label" in found:
        return f"{shown_name(found['label'])} ({found['probability']:.2f})"
    numbers = zip(task.names, number_texts(task, [*found["prediction"].values()]), strict=True)
    return ", ".join(f"{shown_name(name)} {text}" for name, text in numbers)


def find_images(path: str) -> list[Path]:
    """Return the file itself, or the images in a folder and its subfolders, but no hidden ones."""
    with blame(path, DataError):
        if not (place := Path(path)).is_dir():
            return [place]
    images, notes = folders.find_images(path, path, folders.paths_in(place))
    for note in notes:
        warn(f"{path}: {note}")
    if not images:
        raise DataError(f"{path}: holds no images; give files or a folder of them")
    return [place / image for image in images]


# --- An image file as the net sees it


def read_image(file: Path, image_format: ImageFormat, digit_photos: bool) -> np.ndarray:
    """Return an image file, or stdin, as uint8 [C, H, W], prepared like MNIST or as in training.

    If it cannot be read, the DataError's message has to follow the file's name.
    """
    content = sys.stdin.buffer.read() if file == Path("-") else file
    try:
        if file.exists() and not file.is_file():  # reading a pipe may never end
            raise DataError("not a regular file; give one, or - and the image on stdin")
        # Pillow warns even of faults that it can ignore, such as in the EXIF.
        with warnings.catch_warnings(action="ignore"), open_image(content) as opened:
            image = as_mnist(opened) if digit_photos else opened
            return decode_image(image, image_format.shape, image_format.fit)
    except DataError:
        raise
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error and more
        raise DataError(reason(error)) from error


# --- The picture that --show writes


def titled(name: str, answer: str) -> str:
    """Return the end of a file's name, and below it the answer, as lines above an image.

    A line may end after an underscore, rather than within a word.
    """
    texts = printable(name[-LETTERS:]), answer
    wide = max(map(disp_len, texts)) > max(map(len, texts))
    width, lines = LETTERS // (1 + wide), list[str]()
    for text in texts:
        fits = len(text) <= width
        lines += textwrap.wrap(text if fits else text.replace("_", "_ "), width)
    return "\n".join(lines).replace("_ ", "_")


def draw(titled_images: Sequence[tuple[str, np.ndarray]], path: Path) -> None:
    """Write a picture of the first MOST_SHOWN images, with their titles. Raise StorageError."""
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    from ddp_mnist.verbs.plots import families

    font = FontProperties(family=families("DejaVu Sans Mono"), size=8)
    shown = titled_images[:MOST_SHOWN]
    rows, lines = -(-len(shown) // PER_ROW), max(title.count("\n") for title, _ in shown)
    size = PER_ROW * INCHES, rows * INCHES * (1.23 + 0.12 * lines) + 0.3
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{len(shown)} of {len(titled_images):,} images", fontsize=9)
    for place, (title, image) in enumerate(shown, start=1):
        axis = figure.add_subplot(rows, PER_ROW, place)
        axis.imshow(image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
        axis.set_title(title, parse_math=False, fontproperties=font)
        axis.axis("off")
    # matplotlib warns of each letter that no font has
    with storage_errors(path, "--show"), warnings.catch_warnings(action="ignore"):
        figure.savefig(written := io.BytesIO(), dpi=DPI)
        write_atomically(path, written.getvalue())
