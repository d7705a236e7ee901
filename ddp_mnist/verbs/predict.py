"""The verb `predict`: the class of image files, for a person's own pictures too.

    ddp-mnist predict runs/latest seven.png photos/        # on a terminal, a table
    ddp-mnist predict runs/latest photos/ > answers.jsonl  # elsewhere, or with --json, JSON lines
    cat seven.png | ddp-mnist predict runs/latest -

An image is prepared as training prepared it. If the run was trained on MNIST or the like, a file
that is not 28x28 is a photo of a digit, see digit_photos.py.
"""

import dataclasses
import sys
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_mnist.data import folders
from ddp_mnist.data.decode import decode_image, open_image, reads_heif
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import DataError, UsageError, printable, reason
from ddp_mnist.run import weights
from ddp_mnist.run.console import Console, as_json, warn, width_of, wrapped
from ddp_mnist.run.folder import check_place, storage_errors
from ddp_mnist.verbs.digit_photos import as_mnist
from ddp_mnist.verbs.flags import Predict

STDIN = Path("-")
MOST_SHOWN, COLUMNS, INCHES, DPI = 64, 8, 1.3, 100  # in the picture that --show writes
LISTED, IN_A_TABLE = 10, 3  # the most probable classes
# Columns of a table at least: a longer class makes its own wider, and that of the files narrower.
LABEL, FILE = 12, 12


def run(flags: Predict) -> None:
    """Print a line for each image: of a table on a terminal, else of JSON."""
    console = Console(True)
    if as_table := sys.stdout.isatty() and not flags.json:
        files = tuple(str(file) for image in flags.images for file in find_images(image))
        flags = dataclasses.replace(flags, images=files, top=flags.top or IN_A_TABLE)
    answers = answer(flags)
    for line in table(answers, flags.images) if as_table else map(as_json, answers):
        console.print(line)
        if not (console.verbose or flags.show):
            return  # nobody reads the rest
    if as_table and flags.show:
        console.print(f"written to {flags.show}")


def table(answers: Iterable[dict[str, Any]], files: Sequence[str]) -> Iterator[str]:
    """Yield a head and a line for each answer: its file, label, probability, and the next classes.

    To fit into the terminal's width, the beginning of a long file name is left out, and then all of
    the next classes but the first.
    """
    from tqdm.utils import disp_len  # a Chinese letter takes two columns

    first, second, third = max(map(disp_len, ["file", *files])), LABEL, LABEL + len(" 0.25")
    width = width_of(sys.stdout)

    def row(file: str, label: str, share: str, others: Sequence[str]) -> str:
        nonlocal first, second, third
        second = max(second, disp_len(label))
        third = max([third, *map(disp_len, others[:1])])
        rest = f"   {cell(label, second)}   {share:<11}"
        first = min(first, max(FILE, width - disp_len(rest) - 3 - third))
        line = cell(file, first) + rest
        for other in others:
            if disp_len(line) + 3 + disp_len(other) > width:
                break
            line += f"   {other}"
        return line.rstrip()

    def cell(text: str, columns: int) -> str:
        while disp_len(text) > columns:
            text = f"...{text[4:]}"
        return text + " " * (columns - disp_len(text))

    yield row("file", "label", "probability", ["next"])
    for each in answers:
        file = printable(each["file"])
        if "error" in each:
            head = f"{cell(file, first)}   "
            yield "\n".join(wrapped(each["error"], head, " " * disp_len(head), width))
            continue
        names = [f"{printable(name)} {share:.2f}" for name, share in each["probabilities"].items()]
        yield row(file, printable(each["label"]), f"{each['probability']:.2f}", names[1:])


def answer(flags: Predict) -> Iterator[dict[str, Any]]:
    """Yield what `predict` does for each image, and at the end draw them if --show asks for it."""
    picture, answers = check_place(flags.show, "--show", ".png"), []
    try:
        for line, seen in predict(flags):
            if picture and seen is not None:
                answers.append((line, seen))
            yield line
    finally:  # after an unreadable file too, whose error goes on from here
        if picture and answers:
            draw(answers, picture)


@torch.inference_mode()
def predict(flags: Predict) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
    """Yield {file, label, probability, probabilities} and the net's input, uint8 [C, H, W].

    For a file that cannot be read they are {file, error} and None, and once all others are
    labelled, a DataError names it.
    """
    trained = weights.from_bytes(weights.read_bytes(flags.run), flags.run)
    if flags.digit_photos and not trained.image_format.bright_on_black:
        raise UsageError(
            f"--digit-photos: {flags.run} was trained on images that are not bright strokes on"
            " black, as it would make them; leave it out"
        )
    photos = flags.digit_photos
    photos = trained.image_format.digit_photos if photos is None else photos
    files = [file for image in flags.images for file in find_images(image)]
    errors = []
    for file in files:
        try:
            image = read_image(file, trained.image_format, photos)
        except DataError as error:
            errors.append(f"{file}: {error}")
            yield {"file": str(file), "error": str(error)}, None
            continue
        row = trained.model(torch.tensor(image[None])).softmax(1)[0].tolist()
        likely = sorted(zip(trained.classes, row, strict=True), key=lambda pair: -pair[1])
        probabilities = {name: round(share, 6) for name, share in likely[: flags.top or LISTED]}
        best = likely[0][0]
        answer = {"label": best, "probability": probabilities[best], "probabilities": probabilities}
        yield {"file": str(file), **answer}, image
    if errors:
        others = f" ({len(errors)} of {len(files):,} files have no answer)"
        raise DataError(errors[0] + (others if len(errors) > 1 else ""))


def find_images(path: str) -> list[Path]:
    """Return the file itself, or the images in a folder and its subfolders, but no hidden ones."""
    if not (place := Path(path)).is_dir():
        return [place]
    images, notes = folders.find_images(path, path)
    for note in notes:
        warn(f"{path}: {note}")
    if not images:
        raise DataError(f"{path}: holds no images; give files or a folder of them")
    return [place / image for image in images]


# --- An image file as the net sees it


def read_image(file: Path, image_format: ImageFormat, digit_photos: bool) -> np.ndarray:
    """Return uint8 [C, H, W] of an image file or stdin: as MNIST, or as training, would make it.

    Where it cannot, the DataError's message has to follow the file's name.
    """
    try:
        with open_image(sys.stdin.buffer.read() if file == STDIN else file) as opened:
            image = as_mnist(opened) if digit_photos else opened
            return decode_image(image, image_format.shape)
    except DataError:
        raise
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error and more
        system = isinstance(error, OSError) and error.errno  # else Pillow's, of several lines
        if isinstance(error, FileNotFoundError):
            raise DataError("no such file or directory; check the path") from error
        why = reason(error).lower() if system else "not an image that Pillow can read"
        heif = file.suffix.lower() in folders.HEIF and not reads_heif()
        fix = f"{folders.HEIF_FIX}, or give" if heif else "give"
        raise DataError(f"{why}; {fix} a whole PNG or JPEG file") from error


def draw(answers: Sequence[tuple[dict[str, Any], np.ndarray]], path: Path) -> None:
    """Write a picture of the first MOST_SHOWN of what `predict` yielded. Raise StorageError."""
    from matplotlib.backends.backend_agg import RendererAgg
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties, fontManager

    chinese = [font.name for font in fontManager.ttflist if " CJK " in font.name]
    fonts = ["DejaVu Sans", *chinese[:1]]
    font, canvas = FontProperties(family=fonts, size=8), RendererAgg(1, 1, DPI)

    def wrapped(text: str) -> str:
        """Return as long lines as fit above an image: letters differ in their width."""
        for letters in range(20, 0, -1):
            lines = textwrap.wrap(text, letters)
            widths = [canvas.get_text_width_height_descent(line, font, False)[0] for line in lines]
            if max(widths, default=0) < 0.94 * INCHES * DPI:
                break
        return "\n".join(lines)

    shown = answers[:MOST_SHOWN]
    # matplotlib warns of each letter that no font has
    with storage_errors(path, "--show"), warnings.catch_warnings(action="ignore"):
        said = [f"{line['label']} ({line['probability']:.2f})" for line, _ in shown]
        names = [printable(Path(line["file"]).name[-18:]) for line, _ in shown]
        titles = [f"{wrapped(a)}\n{wrapped(b)}" for a, b in zip(names, said, strict=True)]
        rows, lines = -(-len(shown) // COLUMNS), max(title.count("\n") for title in titles)
        height = rows * INCHES * (1.23 + 0.12 * lines) + 0.3
        figure = Figure(figsize=(COLUMNS * INCHES, height), layout="constrained")
        figure.suptitle(f"{len(shown)} of {len(answers):,} images", fontsize=9)
        for place, (title, (_, image)) in enumerate(zip(titles, shown, strict=True), start=1):
            axis = figure.add_subplot(rows, COLUMNS, place)
            axis.imshow(image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
            axis.set_title(title, parse_math=False, fontproperties=font)
            axis.axis("off")
        figure.savefig(path, dpi=DPI)
