"""`predict RUN IMAGE...`: the class of image files, for a person's own pictures too.

    ddp-mnist predict runs/latest seven.png photos/
    cat seven.png | ddp-mnist predict runs/latest -

An image is prepared as training prepared it. For MNIST and data sets made like it, a file of
another form than theirs is a photo of a digit, and gets what MNIST's authors did to a scan.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.ExifTags
import PIL.Image
import torch
from PIL.Image import Transpose

from ddp_mnist.data.decode import IMAGE_SHAPE, as_grey, decode_image, is_as_seen
from ddp_mnist.errors import DataError, UsageError
from ddp_mnist.run import weights
from ddp_mnist.run.folder import storage_errors

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")

BATCH = 256

STDIN = Path("-")

COLUMNS, INCHES = 8, 1.3  # of what --show draws

MOST_SHOWN = 64

LONGEST_SIDE = 1000  # of a photo, in pixels; the digit in it will be 20 high

UPRIGHT: dict[Any, Transpose] = {  # by the EXIF tag that tells how the camera was held
    2: Transpose.FLIP_LEFT_RIGHT,
    3: Transpose.ROTATE_180,
    4: Transpose.FLIP_TOP_BOTTOM,
    5: Transpose.TRANSPOSE,
    6: Transpose.ROTATE_270,
    7: Transpose.TRANSVERSE,
    8: Transpose.ROTATE_90,
}

LEAST_CONTRAST = 8  # of 255, between ground and strokes

FAINT = 0.25  # of the strongest stroke: less is paper, its shadows and its grain


def predict(
    run: str, images: Iterable[str], digit_photos: bool | None = None
) -> Iterator[dict[str, Any]]:
    """One {file, label, probability, probabilities} per image; see `predict_and_see`."""
    for line, _ in predict_and_see(run, images, digit_photos):
        yield line


def predict_and_see(
    run: str, images: Iterable[str], digit_photos: bool | None = None
) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
    """Like `predict`, with what the model saw: uint8 [28, 28]. In the order given.

    A file that cannot be read has a line {file, error}, and None for the image.

    Args:
        run: run folder.
        images: files, or folders whose images are taken in the order of their names; - is one
            image on stdin.
        digit_photos: whether files of another form than MNIST's are photos of digits; None: if
            the run was trained on MNIST or what is made like it.

    Raises:
        CheckpointError: no finished run.
        UsageError: photos of digits are nothing for this run.
        DataError: a folder holds no images; or, after all others were labelled, some file could
            not be read.
    """
    trained = weights.from_bytes(weights.read_bytes(run), run)
    prepare = as_mnist if takes_photos(run, trained, digit_photos) else as_trained
    files = [file for image in images for file in find_images(image)]
    errors: list[DataError] = []
    for start in range(0, len(files), BATCH):
        lines: list[dict[str, Any]] = []
        pixels: list[np.ndarray | None] = []
        for file in files[start : start + BATCH]:
            lines.append({"file": str(file)})
            try:
                pixels.append(prepare(file))
            except DataError as error:
                errors.append(error)
                lines[-1]["error"] = str(error).removeprefix(f"{file}: ")
                pixels.append(None)
        readable = [image for image in pixels if image is not None]
        rows = iter(probabilities(trained.model, readable) if readable else [])
        for line, seen in zip(lines, pixels, strict=True):
            if seen is not None:
                row = next(rows)
                best = max(range(len(row)), key=row.__getitem__)
                line["label"] = trained.classes[best]
                line["probability"] = round(row[best], 6)
                line["probabilities"] = {
                    name: round(p, 6) for name, p in zip(trained.classes, row, strict=True)
                }
            yield line, seen
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise DataError(f"{errors[0]} ({len(errors)} of {len(files):,} files have no answer)")


@torch.inference_mode()
def probabilities(model: torch.nn.Module, images: Sequence[np.ndarray]) -> list[list[float]]:
    """Of each class, for each uint8 [28, 28]."""
    return model(torch.from_numpy(np.stack(images))).softmax(1).tolist()


def find_images(path: str) -> list[Path]:
    """The file itself, or the images directly in a folder, hidden ones not."""
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


def takes_photos(run: str, trained: weights.Trained, asked: bool | None) -> bool:
    """Whether files of other sizes are photos of digits, or what was `asked` for.

    Raises:
        UsageError: photos of digits would not look like the images of this run.
    """
    preparation = trained.preparation
    if asked and not preparation.bright_on_black:
        raise UsageError(
            f"--digit-photos: {run} was trained on images that are not bright strokes on black, as"
            " it would make them; leave it out"
        )
    return preparation.digit_photos if asked is None else asked


@contextlib.contextmanager
def opened(file: Path) -> Iterator[PIL.Image.Image]:
    """An image file, or stdin. Raises DataError for all that Pillow raises on a damaged one."""
    try:
        content = io.BytesIO(sys.stdin.buffer.read()) if file == STDIN else file
        with warnings.catch_warnings(action="ignore"), PIL.Image.open(content) as image:
            yield image  # Pillow warns of what it can do without, as a part of the EXIF
    except DataError:
        raise
    except Exception as error:  # OSError, SyntaxError, ValueError, struct.error and more
        reason = (getattr(error, "strerror", None) or "").lower() or "no image that Pillow reads"
        raise DataError(f"{file}: {reason}; give a PNG or JPEG file") from error


def as_trained(file: Path) -> np.ndarray:
    """uint8 [28, 28], as training would have made it of the same file. Raises DataError."""
    with opened(file) as image:
        return decode_image(image)


def as_mnist(file: Path) -> np.ndarray:
    """An image file as MNIST draws digits: uint8 [28, 28], bright strokes on black.

    28x28 images are taken as they are, but for dark strokes on a bright ground, which are
    inverted. Of others the ground may have any brightness; they are cropped to their strokes,
    scaled to fit 20x20 and placed with their centre of mass in the middle: how MNIST itself was
    made (LeCun et al., 1998, section III.A).

    Raises:
        DataError: it cannot be read, or shows nothing.
    """
    with opened(file) as image:
        grey = decode_image(image) if is_as_seen(image) else as_viewed(image)
    nothing = DataError(f"{file}: shows nothing but its ground; give an image of a digit")
    if grey.min() == grey.max():
        raise nothing
    if grey.shape == IMAGE_SHAPE:
        border = np.concatenate([grey[0], grey[-1], grey[:, 0], grey[:, -1]])
        return 255 - grey if np.median(border) > 127 else grey
    brighter = grey - ground_of(grey)
    if np.abs(brighter).max() < LEAST_CONTRAST:
        raise nothing
    return centred(strokes_of(brighter))


def as_viewed(image: PIL.Image.Image) -> np.ndarray:
    """uint8 [H, W], upright as viewers show it, and no side longer than LONGEST_SIDE.

    It is made small at once, as what follows takes 66 bytes a pixel.
    """
    image.draft("L", (LONGEST_SIDE, LONGEST_SIDE))  # a JPEG is not even decoded in full
    grey = as_grey(image)
    low, high = grey.getextrema()
    if low == high and image.has_transparency_data:
        grey = as_grey(image, paper="black")  # white strokes
    grey.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    turn = None
    with contextlib.suppress(Exception):  # EXIF may be damaged where the image is not
        turn = UPRIGHT.get(image.getexif().get(PIL.ExifTags.Base.Orientation))
    return np.asarray(grey if turn is None else grey.transpose(turn))


def ground_of(grey: np.ndarray) -> np.ndarray:
    """float64 [H, W]: the paper's brightness under uneven light, a plane through the border's.

    Fitted twice, the second time to the half that is nearest, as a stroke may touch the border.
    """
    height, width = grey.shape
    y, x = np.mgrid[:height, :width]
    at_border = (y % (height - 1 or 1) == 0) | (x % (width - 1 or 1) == 0)
    places = np.stack([np.ones_like(x), x / width, y / height], axis=-1)
    points, values = places[at_border].astype(np.float64), grey[at_border].astype(np.float64)
    residuals = np.abs(values - np.median(values))
    for _ in range(2):
        near = residuals <= max(np.median(residuals), 2.0)
        plane = np.linalg.lstsq(points[near], values[near], rcond=None)[0]
        residuals = np.abs(points @ plane - values)
    return places @ plane


def strokes_of(brighter: np.ndarray) -> np.ndarray:
    """uint8 [H, W], strokes that reach 255 on black, of float64 [H, W], the contrast to the ground.

    They are on the side of the ground that has the greater contrast.
    """
    strokes = brighter if brighter.max() >= -brighter.min() else -brighter
    strokes = strokes.clip(0) / strokes.max()
    return np.where(strokes > FAINT, strokes * 255, 0).round().astype(np.uint8)


def centred(grey: np.ndarray) -> np.ndarray:
    """uint8 [H, W], bright strokes on black, to uint8 [28, 28] as MNIST places a digit."""
    strokes = grey > 0
    rows, columns = np.flatnonzero(strokes.any(1)), np.flatnonzero(strokes.any(0))
    crop = grey[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    scale = 20 / max(crop.shape)
    height, width = (max(1, round(side * scale)) for side in crop.shape)
    small = PIL.Image.fromarray(crop).resize(
        (width, height), PIL.Image.Resampling.BOX if scale < 1 else PIL.Image.Resampling.BILINEAR
    )
    pixels = np.asarray(small, dtype=np.float64)
    mass = max(pixels.sum(), 1.0)
    centre_y = (pixels.sum(1) * np.arange(height)).sum() / mass
    centre_x = (pixels.sum(0) * np.arange(width)).sum() / mass
    top = int(np.clip(round(13.5 - centre_y), 0, 28 - height))
    left = int(np.clip(round(13.5 - centre_x), 0, 28 - width))
    frame = np.zeros((28, 28), dtype=np.uint8)
    frame[top : top + height, left : left + width] = np.asarray(small)
    return frame


def draw(answers: Sequence[tuple[dict[str, Any], np.ndarray]], path: Path) -> None:
    """A picture of the first MOST_SHOWN that `predict_and_see` gave. Raises StorageError."""
    from matplotlib.figure import Figure

    shown = answers[:MOST_SHOWN]
    rows = -(-len(shown) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * INCHES, rows * INCHES * 1.35 + 0.3), layout="constrained")
    figure.suptitle(f"{len(shown)} of {len(answers):,} images", fontsize=9)
    places = figure.subplots(rows, COLUMNS).flat
    for axis, (line, seen) in zip(places, shown, strict=False):
        axis.imshow(seen, cmap="gray", vmin=0, vmax=255)
        name = Path(line["file"]).name
        answer = f"{name[-18:]}\n{line['label']} ({line['probability']:.2f})"
        axis.set_title(answer, fontsize=8, parse_math=False)
    for axis in figure.axes:
        axis.axis("off")
    with storage_errors(path, "--show"):
        figure.savefig(path, dpi=100)
