"""Makes of an image file what a net sees: the one decoder of training and of all that comes after.

What was decided when a data set was read lies with the weights, so that `predict` does the same.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddp_mnist.errors import DataError

if TYPE_CHECKING:
    import PIL.Image

IMAGE_SHAPE = (28, 28)

DIGITS = [str(number) for number in range(10)]

STRIP = 2**20  # pixels that are converted at a time

DARK = 32  # of 255: less is black to the eye, and what JPEG makes of black


@dataclass(frozen=True)
class Preparation:
    """How the images of a data set became what the net was trained on.

    Attributes:
        notes: what was converted, one sentence each.
        bright_on_black: whether all are bright strokes within a black border.
        digit_photos: whether they are digits as MNIST stores them, so that `predict` makes of a
            photo what MNIST's authors made of a scan.
    """

    notes: list[str]
    bright_on_black: bool
    digit_photos: bool


def decode_image(image: PIL.Image.Image) -> np.ndarray:
    """An opened image file as uint8 IMAGE_SHAPE: greyscale, and stretched if of another size.

    Takes at most 6 bytes a pixel on top of a file in memory, 4 of them Pillow's own.
    """
    import PIL.Image

    if is_as_seen(image):
        return np.asarray(image)
    return np.asarray(as_grey(image).resize(IMAGE_SHAPE[::-1], PIL.Image.Resampling.BILINEAR))


def is_as_seen(image: PIL.Image.Image) -> bool:
    """Whether there is nothing to convert."""
    return image.mode == "L" and image.size == IMAGE_SHAPE[::-1]


def as_grey(image: PIL.Image.Image, paper: str = "white") -> PIL.Image.Image:
    """Mode L. `paper` shows through what is transparent; 16-bit greys keep their upper 8 bits.

    Strip by strip, as the steps between take up to 16 bytes a pixel. Raises ValueError for mode F.
    """
    import PIL.Image

    grey = PIL.Image.new("L", image.size)
    rows = max(1, STRIP // image.width)
    for top in range(0, image.height, rows):
        box = (0, top, image.width, min(top + rows, image.height))
        grey.paste(_strip_as_grey(image.crop(box), paper), box)
    return grey


def _strip_as_grey(image: PIL.Image.Image, paper: str) -> PIL.Image.Image:
    import PIL.Image

    if image.mode.startswith("I"):  # convert("L") would make all above 255 white
        return PIL.Image.fromarray((np.asarray(image) // 256).clip(0, 255).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("mode F has no fixed range: save 8-bit images")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", layer.size, paper), layer)
    return image.convert("L")


def decoder_digest() -> str:
    """16 hex digits of this file: an edited decoder has others, without a version to be raised."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def bright_on_black(images: np.ndarray) -> bool:
    """Whether uint8 [N, H, W] are bright strokes within a black border, as MNIST's are.

    None is blank, none has a bright border, and hardly any has something in its outermost pixels:
    of MNIST's train images 1.3 %, of pictures that fill their frame most.
    """
    top, bottom, left, right = images[:, 0], images[:, -1], images[:, :, 0], images[:, :, -1]
    border = np.concatenate([top, bottom, left, right], axis=1)
    none_blank = bool((np.ptp(images.reshape(len(images), -1), axis=1) > 0).all())
    none_bright = bool((np.median(border, axis=1) < 128).all())
    return none_blank and none_bright and float((border.max(axis=1) < DARK).mean()) > 0.9


@dataclass
class Decoded:
    """A data set in memory.

    Attributes:
        images: uint8 [N, 28, 28] per split (train, test).
        labels: int64 [N] per split, 0 <= label < len(classes).
        classes: their names.
        notes: what was converted, one sentence each.
        as_stored: whether no file had to be converted.
    """

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    classes: list[str]
    notes: list[str] = field(default_factory=list)
    as_stored: bool = True

    def preparation(self) -> Preparation:
        """How these images were made, by facts of the data and not by a name."""
        bright = all(bright_on_black(images) for images in self.images.values())
        return Preparation(
            notes=self.notes,
            bright_on_black=bright,
            digit_photos=bright and self.as_stored and self.classes == DIGITS,
        )


def refuse_unseen(labels: dict[str, np.ndarray], classes: list[str], where: str) -> None:
    """A class without a train row cannot be learnt: a test row of it is a slip in the labels."""
    unseen = np.flatnonzero(~np.isin(labels["test"], labels["train"]))
    if unseen.size:
        row = unseen[0]
        raise DataError(
            f"{where}: row {row} has label {classes[labels['test'][row]]}, which no train row has;"
            " correct the labels, or add such rows to train"
        )
