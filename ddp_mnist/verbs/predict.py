"""The verb `predict`: the class of image files, for a person's own pictures too.

    ddp-mnist predict runs/latest seven.png photos/
    cat seven.png | ddp-mnist predict runs/latest -

An image is prepared as training prepared it. If the run was trained on MNIST or the like, a file
that is not 28x28 and grey is a photo of a digit, and is prepared as MNIST's authors prepared scans.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import torch
from PIL.ExifTags import Base

from ddp_mnist.data.decode import IMAGE_SHAPE, as_grey, decode_image, is_as_seen
from ddp_mnist.errors import DataError, UsageError, reason
from ddp_mnist.run import weights
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import check_place, storage_errors
from ddp_mnist.verbs.flags import Predict

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
STDIN = Path("-")
BATCH = 256
LONGEST_SIDE = 1000  # of a photo, in pixels; the digit in it becomes 20 high
LEAST_CONTRAST = 8  # of 255, between paper and strokes
FAINT = 0.25  # of the strongest stroke: less is paper, its shadows and its grain
MOST_SHOWN, COLUMNS, INCHES = 64, 8, 1.3  # in the picture that --show writes


def run(flags: Predict) -> None:
    """Print a line for each image, and draw those that could be read if --show asks for it."""
    picture = check_place(flags.show, "--show", ".png")
    console, answers, unread = Console(True), [], None
    try:
        for line, seen in predict(flags):
            console.print(json.dumps(line))
            if not (console.verbose or picture):
                return  # nobody reads the rest
            answers += [(line, seen)] if picture and seen is not None else []
    except DataError as error:
        unread = error
    if picture and answers:
        draw(answers, picture)
    if unread:
        raise unread


def predict(flags: Predict) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
    """Yield {file, label, probability, probabilities} and the net's input, uint8 [28, 28].

    For a file that cannot be read they are {file, error} and None.

    Raises:
        CheckpointError: it is no finished run.
        UsageError: photos of digits do not look like the images of this run.
        DataError: a folder holds no images; or, after all others were labelled, some file could
            not be read.
    """
    trained = weights.from_bytes(weights.read_bytes(flags.run), flags.run)
    prepare = as_mnist if takes_photos(flags, trained) else as_trained
    files = [file for image in flags.images for file in find_images(image)]
    errors: list[DataError] = []
    for start in range(0, len(files), BATCH):
        batch = files[start : start + BATCH]
        inputs: list[np.ndarray | DataError] = []
        for file in batch:
            try:
                inputs.append(prepare(file))
            except DataError as error:
                inputs.append(error)
        readable = [image for image in inputs if isinstance(image, np.ndarray)]
        rows = iter(probabilities(trained.model, readable) if readable else [])
        for file, image in zip(batch, inputs, strict=True):
            if isinstance(image, DataError):
                errors.append(image)
                yield {"file": str(file), "error": str(image).removeprefix(f"{file}: ")}, None
            else:
                yield {"file": str(file), **answer(next(rows), trained.classes)}, image
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise DataError(f"{errors[0]} ({len(errors)} of {len(files):,} files have no answer)")


@torch.inference_mode()
def probabilities(model: torch.nn.Module, images: Sequence[np.ndarray]) -> list[list[float]]:
    """Return the probability of each class for each uint8 [28, 28]."""
    return model(torch.from_numpy(np.stack(images))).softmax(1).tolist()


def answer(row: list[float], classes: list[str]) -> dict[str, Any]:
    """Return the likeliest class, its probability, and that of every class."""
    best = row.index(max(row))
    rounded = [round(probability, 6) for probability in row]
    return {
        "label": classes[best],
        "probability": rounded[best],
        "probabilities": dict(zip(classes, rounded, strict=True)),
    }


def find_images(path: str) -> list[Path]:
    """Return the file itself, or the images directly in a folder, without hidden ones."""
    place = Path(path)
    if place == STDIN or not place.is_dir():
        return [place]
    files = sorted(
        p
        for p in place.iterdir()
        if p.suffix.lower() in SUFFIXES and p.is_file() and not p.name.startswith(".")
    )
    if not files:
        raise DataError(f"{path}: holds no images; give files or a folder of them")
    return files


# --- An image file as the net sees it


def takes_photos(flags: Predict, trained: weights.Trained) -> bool:
    """Return whether files of other sizes are photos of digits. Raises UsageError."""
    if flags.digit_photos and not trained.preparation.bright_on_black:
        raise UsageError(
            f"--digit-photos: {flags.run} was trained on images that are not bright strokes on"
            " black, as it would make them; leave it out"
        )
    wanted = flags.digit_photos
    return trained.preparation.digit_photos if wanted is None else wanted


@contextlib.contextmanager
def open_image(file: Path) -> Iterator[PIL.Image.Image]:
    """Open an image file, or stdin. Raises DataError for whatever Pillow raises."""
    try:
        content = io.BytesIO(sys.stdin.buffer.read()) if file == STDIN else file
        with warnings.catch_warnings(action="ignore"), PIL.Image.open(content) as image:
            yield image  # Pillow warns of what it can do without, as a part of the EXIF
    except DataError:
        raise
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error and more
        system = isinstance(error, OSError) and error.errno  # else Pillow's, of several lines
        why = reason(error).lower() if system else "no image that Pillow reads"
        raise DataError(f"{file}: {why}; give a PNG or JPEG file") from error


def as_trained(file: Path) -> np.ndarray:
    """Return uint8 [28, 28], as training would have made it of the same file. Raises DataError."""
    with open_image(file) as image:
        return decode_image(image)


def as_mnist(file: Path) -> np.ndarray:
    """Return an image file as MNIST draws digits: uint8 [28, 28], bright strokes on black.

    28x28 images are taken as they are, but for dark strokes on a bright ground, which are
    inverted. In others the paper may have any brightness; they are cropped to their strokes,
    scaled to fit 20x20 and placed with their centre of mass in the middle: how MNIST itself was
    made (LeCun et al., 1998, section III.A).

    Raises:
        DataError: it cannot be read, or shows nothing.
    """
    with open_image(file) as image:
        grey = decode_image(image) if is_as_seen(image) else as_viewed(image)
    nothing = DataError(f"{file}: shows nothing but its ground; give an image of a digit")
    if grey.min() == grey.max():
        raise nothing
    if grey.shape == IMAGE_SHAPE:
        return 255 - grey if np.median(grey[border_of(grey)]) > 127 else grey
    contrast = grey - paper_of(grey)
    if np.abs(contrast).max() < LEAST_CONTRAST:
        raise nothing
    return centred(strokes_of(contrast))


def as_viewed(image: PIL.Image.Image) -> np.ndarray:
    """Return uint8 [H, W], upright, and small at once, as what follows takes 66 bytes a pixel."""
    image.draft("L", (LONGEST_SIDE, LONGEST_SIDE))  # a JPEG is not even decoded in full
    grey = as_grey(image)
    low, high = grey.getextrema()
    if low == high and image.has_transparency_data:
        grey = as_grey(image, paper="black")  # white strokes
    grey.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    with contextlib.suppress(Exception):  # EXIF may be damaged where the image is not
        grey.getexif()[Base.Orientation] = image.getexif()[Base.Orientation]
    return np.asarray(PIL.ImageOps.exif_transpose(grey))


def border_of(grey: np.ndarray) -> np.ndarray:
    """Return bool [H, W], True for the outermost pixels."""
    border = np.ones(grey.shape, dtype=bool)
    border[1:-1, 1:-1] = False
    return border


def paper_of(grey: np.ndarray) -> np.ndarray:
    """Return the paper's brightness as float64 [H, W]: a plane, as light falls from one side.

    It is fitted to the border, then to the nearer half of it, as a stroke may touch the border. By
    the border's median instead, 28 to 42 % of MNIST's digits were read correctly where one side had
    half the light of the other; by the plane 98 %.
    """
    height, width = grey.shape
    places = np.stack([np.ones(grey.shape), *np.mgrid[:height, :width]], axis=-1)
    near = border = border_of(grey)
    for _ in range(2):
        plane = np.linalg.lstsq(places[near], grey[near].astype(np.float64), rcond=None)[0]
        apart = np.abs(grey - places @ plane)
        near = border & (apart <= max(np.median(apart[border]), 2))
    return places @ plane


def strokes_of(contrast: np.ndarray) -> np.ndarray:
    """Return uint8 [H, W]: what differs most from the paper, up to 255 on black."""
    strokes = contrast if contrast.max() >= -contrast.min() else -contrast
    strokes = strokes.clip(0) / strokes.max()
    return np.where(strokes > FAINT, strokes * 255, 0).round().astype(np.uint8)


def centred(grey: np.ndarray) -> np.ndarray:
    """Return uint8 [28, 28] with a digit as MNIST places it, of uint8 [H, W] on black."""
    strokes = grey > 0
    rows, columns = np.flatnonzero(strokes.any(1)), np.flatnonzero(strokes.any(0))
    crop = grey[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = 20 / max(crop.shape)
    height, width = (max(1, round(side * scale)) for side in crop.shape)
    how = PIL.Image.Resampling.BOX if scale < 1 else PIL.Image.Resampling.BILINEAR
    small = np.asarray(PIL.Image.fromarray(crop).resize((width, height), how))
    mass = max(small.sum(dtype=np.float64), 1.0)
    centre_y = (small.sum(1) * np.arange(height)).sum() / mass
    centre_x = (small.sum(0) * np.arange(width)).sum() / mass
    top = int(np.clip(round(13.5 - centre_y), 0, 28 - height))
    left = int(np.clip(round(13.5 - centre_x), 0, 28 - width))
    frame = np.zeros(IMAGE_SHAPE, dtype=np.uint8)
    frame[top : top + height, left : left + width] = small
    return frame


def draw(answers: Sequence[tuple[dict[str, Any], np.ndarray]], path: Path) -> None:
    """Write a picture of the first MOST_SHOWN of what `predict` yielded. Raises StorageError."""
    from matplotlib.figure import Figure

    shown = answers[:MOST_SHOWN]
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * INCHES, rows * INCHES * 1.35 + 0.3), layout="constrained")
    figure.suptitle(f"{len(shown)} of {len(answers):,} images", fontsize=9)
    places = figure.subplots(rows, COLUMNS).flat
    for axis, (line, image) in zip(places, shown, strict=False):
        axis.imshow(image, cmap="gray", vmin=0, vmax=255)
        name = Path(line["file"]).name
        title = f"{name[-18:]}\n{line['label']} ({line['probability']:.2f})"
        axis.set_title(title, fontsize=8, parse_math=False)
    for axis in figure.axes:
        axis.axis("off")
    with storage_errors(path, "--show"):
        figure.savefig(path, dpi=100)
