"""The one decoder: what it makes of an image file is what a net sees, in training and after it.

What was decided when a data set was read lies with the weights, so that `predict` does the same.
"""

import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from ddp_mnist.errors import DataError, reason

IMAGE_SHAPE = (28, 28)
DIGITS = [str(digit) for digit in range(10)]
SPLITS = ("train", "test")
MAX_CLASSES = 1000
DARK = 32  # of 255: less is black to the eye, and what JPEG makes of black


@dataclass(frozen=True)
class Preparation:
    """The way in which a data set's images became what the net was trained on."""

    notes: list[str]  # what was converted, one sentence each
    bright_on_black: bool  # all are bright strokes within a black border
    # They are digits as MNIST stores them: `predict` makes of a photo what MNIST makes of a scan.
    digit_photos: bool


@dataclass
class Decoded:
    """A data set in memory."""

    images: dict[str, np.ndarray]  # uint8 [N, *IMAGE_SHAPE] per split (train, test)
    labels: dict[str, np.ndarray]  # int64 [N] per split, 0 <= label < len(classes)
    classes: list[str]
    notes: list[str] = field(default_factory=list)  # what was converted, one sentence each
    as_stored: bool = True  # no file had to be converted

    def preparation(self) -> Preparation:
        """Return how these images were made, by facts of the data and not by a name."""
        bright = all(bright_on_black(images) for images in self.images.values())
        digits = bright and self.as_stored and self.classes == DIGITS
        return Preparation(self.notes, bright_on_black=bright, digit_photos=digits)


def decoder_digest() -> str:
    """Return 8 hex digits of this file: an edited decoder has others, with no version to raise."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]


# --- An image


def decode_image(image: PIL.Image.Image) -> np.ndarray:
    """Return an opened file as uint8 IMAGE_SHAPE: greyscale, stretched if of another size."""
    if is_as_seen(image):
        return np.asarray(image)
    return np.asarray(as_grey(image).resize(IMAGE_SHAPE[::-1], PIL.Image.Resampling.BILINEAR))


def is_as_seen(image: PIL.Image.Image) -> bool:
    """Return whether there is nothing to convert."""
    return image.mode == "L" and image.size == IMAGE_SHAPE[::-1]


def as_grey(image: PIL.Image.Image, paper: str = "white") -> PIL.Image.Image:
    """Return it in mode L, 16-bit greys by their upper 8 bits; `paper` shows where it is clear.

    Raise ValueError for mode F. Takes 13 bytes a pixel on top of a transparent image, 1 of others.
    """
    if image.mode.startswith("I"):  # convert("L") would make all above 255 white
        return PIL.Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("mode F has no fixed range: save 8-bit images")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", layer.size, paper), layer)
    return image.convert("L")


def bright_on_black(images: np.ndarray) -> bool:
    """Return whether uint8 [N, H, W] are bright strokes within a black border, as MNIST's are.

    None is blank, none has a bright border, and hardly any has something in its outermost pixels:
    of MNIST's train images 1.3 %, of pictures that fill their frame most.
    """
    top, bottom, left, right = images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]
    border = np.concatenate([top, bottom, left, right], axis=1)
    none_blank = bool((np.ptp(images.reshape(len(images), -1), axis=1) > 0).all())
    none_bright = bool((np.median(border, axis=1) < 128).all())
    return none_blank and none_bright and float((border.max(axis=1) < DARK).mean()) > 0.9


# --- A data set


def decode_dataset(dataset: Any, place: str) -> Decoded:
    """Return all of a datasets.DatasetDict; a DataError names `place`, split, column and row."""
    where = f"--dataset {place}"
    names = list(dataset) if isinstance(dataset, dict) else ["one without a name"]
    if not set(SPLITS) <= set(names):
        raise DataError(
            f"{where}: needs the splits train and test, found: {', '.join(names)}; name the files"
            " or folders so, e.g. train/cat/1.png and test/cat/2.png"
        )
    train, test = (dataset[split] for split in SPLITS)
    image_column, label_column = _find_columns(train, where)
    for column in (image_column, label_column):
        # Splits that were saved one by one may differ: a 3 of test is then not a 3 of train.
        if (kind := train.features[column]) != (other := test.features.get(column, "missing")):
            raise DataError(
                f"{where}: column {column} is {kind} in train and {other} in test; give both the"
                " same type and the same names"
            )
    images: dict[str, np.ndarray] = {}
    labels: dict[str, np.ndarray] = {}
    classes: list[str] = []
    converted: set[str] = set()
    for split in SPLITS:
        rows, place = dataset[split], f"{where}: split {split}"
        labels[split], classes = _decode_labels(rows, label_column, classes, place)
        images[split] = _decode_images(rows, image_column, converted, place)
    notes = []
    if converted:
        kinds = ", ".join(sorted(converted)[:3])
        more = f" and {len(converted) - 3} more kinds" if len(converted) > 3 else ""
        notes = [f"images of {kinds}{more} became 28x28 grey"]
    return Decoded(images, labels, classes, notes, as_stored=not converted)


def _find_columns(rows: Any, where: str) -> tuple[str, str]:
    """Return the names of the image column and of the label column."""
    from datasets import ClassLabel, Image

    features = rows.features.items()
    images = [name for name, feature in features if isinstance(feature, Image)]
    # Plain parquet without Hugging Face's metadata stores an image as {bytes, path}.
    images += [name for name, kind in features if isinstance(kind, dict) and "bytes" in kind]
    labels = [name for name, feature in features if isinstance(feature, ClassLabel)]
    labels += [name for name in ("label", "labels") if name in rows.features]
    for what, found in (("image", images), ("label", labels)):
        if not found:
            columns = ", ".join(rows.column_names)
            raise DataError(f"{where}: no {what} column among {columns}; add one, named {what}")
    return images[0], labels[0]


def _decode_labels(
    rows: Any, column: str, classes: list[str], where: str
) -> tuple[np.ndarray, list[str]]:
    """Return int64 labels and the class names; `classes` are those of train, or none yet.

    Where none are declared they are the words, sorted, or 0 to the highest number.
    """
    where = f"{where}, column {column}"
    values = rows.with_format("arrow")[:].column(column).to_pylist()
    given = [value for value in values if value is not None]
    words = all(isinstance(value, str) for value in given)
    if not words and not isinstance(given[0], int):
        kind = type(given[0]).__name__
        raise DataError(f"{where}: labels are {kind}; give whole numbers or words")
    classes = classes or getattr(rows.features[column], "names", None) or []  # of a ClassLabel
    if not classes and words:
        classes = sorted(set(given))
    elif not classes:
        highest = min(max(0, *given), MAX_CLASSES - 1)
        classes = [str(label) for label in range(highest + 1)]
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{where}: {len(classes)} classes; give at most {MAX_CLASSES}")
    legal = "a word that train has" if words else f"a whole number from 0 to {len(classes) - 1}"
    index_of = {name if words else index: index for index, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value not in index_of:
            what = "no label" if value is None else f"label {value}"
            raise DataError(f"{where}: row {row} has {what}; give {legal}")
    return np.asarray([index_of[value] for value in values], dtype=np.int64), classes


def _decode_images(rows: Any, column: str, converted: set[str], where: str) -> np.ndarray:
    """Return uint8 [N, *IMAGE_SHAPE]; add the kinds that were converted, e.g. 32x32 RGB."""
    from datasets import Image

    where = f"{where}, column {column}"
    if isinstance(rows.features[column], Image):
        rows = rows.cast_column(column, Image(decode=False))
    batches = rows.select_columns([column]).with_format(None).iter(batch_size=1000)
    images = np.empty((len(rows), *IMAGE_SHAPE), dtype=np.uint8)
    for row, cell in enumerate(cell for batch in batches for cell in batch[column]):
        file = cell and (cell["bytes"] or cell.get("path"))
        if not file:
            raise DataError(f"{where}: row {row} has no image; add it or leave the row out")
        try:
            with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
                images[row] = decode_image(image)
                if not is_as_seen(image):
                    converted.add(f"{image.width}x{image.height} {image.mode}")
        except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
            unknown = isinstance(error, PIL.UnidentifiedImageError)
            why = "of no format that Pillow knows" if unknown else reason(error)
            name = f" {file}" if isinstance(file, str) else ""
            raise DataError(
                f"{where}: row {row}{name} is no readable image ({why}); replace it or leave it out"
            ) from error
    return images
