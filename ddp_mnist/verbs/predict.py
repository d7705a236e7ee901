"""The verb `predict`: the class of image files, for a person's own pictures too.

    ddp-mnist predict runs/latest seven.png photos/
    cat seven.png | ddp-mnist predict runs/latest -

An image is prepared as training prepared it. If the run was trained on MNIST or the like, a file
that is not 28x28 and grey is a photo of a digit, and is prepared as MNIST's authors prepared scans.
"""

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
LONGEST_SIDE = 1000  # of a photo, in pixels; the digit in it becomes 20 high
LEAST_CONTRAST = 8  # of 255, between paper and strokes
FAINT = 0.25  # of the strongest stroke: less is paper, its shadows and its grain
MOST_SHOWN, COLUMNS, INCHES = 64, 8, 1.3  # in the picture that --show writes


def run(flags: Predict) -> None:
    """Print a line for each image, and draw those that could be read if --show asks for it."""
    picture = check_place(flags.show, "--show", ".png")
    console, answers = Console(True), []
    try:
        for line, seen in predict(flags):
            console.print(json.dumps(line))
            if picture and seen is not None:
                answers.append((line, seen))
            elif not console.verbose:
                return  # nobody reads the rest
    finally:  # after an unreadable file too, whose error goes on from here
        if picture and answers:
            draw(answers, picture)


@torch.inference_mode()
def predict(flags: Predict) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
    """Yield {file, label, probability, probabilities} and the net's input, uint8 [28, 28].

    For a file that cannot be read they are {file, error} and None, and once all others are
    labelled, a DataError names it.
    """
    trained = weights.from_bytes(weights.read_bytes(flags.run), flags.run)
    if flags.digit_photos and not trained.preparation.bright_on_black:
        raise UsageError(
            f"--digit-photos: {flags.run} was trained on images that are not bright strokes on"
            " black, as it would make them; leave it out"
        )
    photos = flags.digit_photos
    photos = trained.preparation.digit_photos if photos is None else photos
    files = [file for image in flags.images for file in find_images(image)]
    errors = []
    for file in files:
        try:
            image = read_image(file, photos)
        except DataError as error:
            errors.append(f"{file}: {error}")
            yield {"file": str(file), "error": str(error)}, None
            continue
        row = trained.model(torch.tensor(image[None])).softmax(1)[0].tolist()
        probabilities = {c: round(p, 6) for c, p in zip(trained.classes, row, strict=True)}
        best = max(probabilities, key=lambda c: probabilities[c])
        answer = {"label": best, "probability": probabilities[best], "probabilities": probabilities}
        yield {"file": str(file), **answer}, image
    if errors:
        others = f" ({len(errors)} of {len(files):,} files have no answer)"
        raise DataError(errors[0] + (others if len(errors) > 1 else ""))


def find_images(path: str) -> list[Path]:
    """Return the file itself, or the images directly in a folder, without hidden ones."""
    if not (place := Path(path)).is_dir():
        return [place]
    images = [p for p in place.glob("[!.]*") if p.suffix.lower() in SUFFIXES and p.is_file()]
    if not images:
        raise DataError(f"{path}: holds no images; give files or a folder of them")
    return sorted(images)


# --- An image file as the net sees it


def read_image(file: Path, digit_photos: bool) -> np.ndarray:
    """Return uint8 [28, 28] of an image file or stdin: as MNIST, or as training, would make it.

    Where it cannot, the DataError's message has to follow the file's name.
    """
    try:
        content = io.BytesIO(sys.stdin.buffer.read()) if file == STDIN else file
        # Pillow warns of what it can do without, as a part of the EXIF.
        with warnings.catch_warnings(action="ignore"), PIL.Image.open(content) as image:
            return as_mnist(image) if digit_photos else decode_image(image)
    except DataError:
        raise
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error and more
        system = isinstance(error, OSError) and error.errno  # else Pillow's, of several lines
        why = reason(error).lower() if system else "no image that Pillow reads"
        raise DataError(f"{why}; give a PNG or JPEG file") from error


def as_mnist(image: PIL.Image.Image) -> np.ndarray:
    """Return an opened image as MNIST draws digits: uint8 [28, 28], bright strokes on black.

    28x28 images are taken as they are, but for dark strokes on a bright ground, which are
    inverted. In others the paper may have any brightness; they are cropped to their strokes,
    scaled to fit 20x20 and placed with their centre of mass in the middle: how MNIST itself was
    made (LeCun et al., 1998, section III.A). Raise DataError if there are no strokes.
    """
    grey = as_viewed(image)
    height, width = grey.shape
    top, bottom, left, right = (np.median(line) for line in (*grey[[0, -1]], *grey.T[[0, -1]]))
    paper = (top + bottom + left + right) / 4
    if grey.shape == IMAGE_SHAPE and np.ptp(grey):
        return 255 - grey if paper > 127 else grey
    # As light falls from one side, the paper is a plane through what most of each border has.
    down, across = np.linspace(-0.5, 0.5, height), np.linspace(-0.5, 0.5, width)
    strokes = grey - (paper + (bottom - top) * down[:, None] + (right - left) * across)
    strokes *= 1 if strokes.max() >= -strokes.min() else -1
    if (strongest := strokes.max()) < LEAST_CONTRAST:
        raise DataError("shows nothing but its ground; give an image of a digit")
    strokes = np.where(strokes > FAINT * strongest, strokes / strongest * 255, 0)
    return centred(strokes.round().astype(np.uint8))


def as_viewed(image: PIL.Image.Image) -> np.ndarray:
    """Return uint8 [H, W], upright, and small at once, as what follows takes 40 bytes a pixel."""
    if is_as_seen(image):
        return decode_image(image)
    image.draft("L", (LONGEST_SIDE, LONGEST_SIDE))  # a JPEG is not even decoded in full
    grey = as_grey(image)
    low, high = grey.getextrema()
    if low == high and image.has_transparency_data:
        grey = as_grey(image, paper="black")  # white strokes
    grey.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    grey.info.clear()  # of its EXIF, which Pillow would write again
    with contextlib.suppress(Exception):  # EXIF may be damaged where the image is not
        grey.getexif()[Base.Orientation] = image.getexif()[Base.Orientation]
    return np.asarray(PIL.ImageOps.exif_transpose(grey))


def centred(strokes: np.ndarray) -> np.ndarray:
    """Return uint8 [28, 28] with a digit as MNIST places it, of uint8 [H, W] on black."""
    drawn = PIL.Image.fromarray(strokes)
    crop = drawn.crop(drawn.getbbox())
    size = [max(1, round(20 * side / max(crop.size))) for side in crop.size]
    small = np.asarray(crop.resize(size, PIL.Image.Resampling.BILINEAR))
    frame = np.zeros(IMAGE_SHAPE, dtype=np.uint8)
    place = []
    for axis, side in enumerate(small.shape):
        mass = small.sum(1 - axis) + 1e-9  # thin strokes of a large page may have vanished
        start = round(13.5 - np.average(np.arange(side), weights=mass))
        start = min(max(start, 0), 28 - side)
        place.append(slice(start, start + side))
    frame[tuple(place)] = small
    return frame


def draw(answers: Sequence[tuple[dict[str, Any], np.ndarray]], path: Path) -> None:
    """Write a picture of the first MOST_SHOWN of what `predict` yielded. Raises StorageError."""
    from matplotlib.figure import Figure

    shown = answers[:MOST_SHOWN]
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * INCHES, rows * INCHES * 1.35 + 0.3), layout="constrained")
    figure.suptitle(f"{len(shown)} of {len(answers):,} images", fontsize=9)
    for place, (line, image) in enumerate(shown, start=1):
        axis = figure.add_subplot(rows, COLUMNS, place)
        axis.imshow(image, cmap="gray", vmin=0, vmax=255)
        title = f"{Path(line['file']).name[-18:]}\n{line['label']} ({line['probability']:.2f})"
        axis.set_title(title, fontsize=8, parse_math=False)
        axis.axis("off")
    with storage_errors(path, "--show"):
        figure.savefig(path, dpi=100)
