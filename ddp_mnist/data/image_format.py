"""A decoded data set, and its image format: shape, statistics, and the kind of images.

The format is saved with the weights, so that `predict` prepares an image as training did.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Shape = tuple[int, int, int]  # channels, height and width of an image
DIGITS = [str(digit) for digit in range(10)]
DARK = 32  # of 255: anything darker looks black; JPEG turns pure black into such values
BLOCK = 2**22  # pixels at a time, for statistics


@dataclass(frozen=True)
class ImageFormat:
    """How a data set's images were prepared for the net."""

    shape: Shape
    mean: tuple[float, ...]  # of the train images' pixels, per channel, as shares of 255
    std: tuple[float, ...]
    notes: list[str]  # what was converted, one sentence each
    bright_on_black: bool  # all are bright strokes within a black border
    # The images are digits in MNIST's format: `predict` prepares a photo as MNIST did a scan.
    digit_photos: bool
    # The classes are single characters: mirrored, some would be another one or meaningless.
    characters: bool = False

    @property
    def pictures(self) -> bool:
        """Whether the images are not bright strokes on black: pictures are augmented by default."""
        return not self.bright_on_black

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "ImageFormat":
        """Rebuild from an `asdict` that went through JSON.

        Raise KeyError or TypeError if it is not one.
        """
        return cls(**plain | {name: tuple(plain[name]) for name in ("shape", "mean", "std")})


TENSORS = ("train_images", "train_labels", "test_images", "test_labels")
KEYS = ("train_keys", "test_keys")

# Allocates uint8 images, given their shape and the number of rows per split, in memory or in files.
Reserve = Callable[[Shape, dict[str, int]], dict[str, np.ndarray]]


@dataclass
class Decoded:
    """A data set, decoded."""

    images: dict[str, np.ndarray]  # uint8 [N, C, H, W] per split (train, test)
    labels: dict[str, np.ndarray]  # int64 [N] per split, 0 <= label < len(classes)
    classes: list[str]
    notes: list[str] = field(default_factory=list)  # what was converted, one sentence each
    as_stored: bool = True  # whether no image had to be converted
    keys: dict[str, np.ndarray] = field(default_factory=dict)  # uint64 [N] per split: held_out.py
    paths: dict[tuple[str, int], str] = field(default_factory=dict)  # of files, by split and row
    test_drawn: bool = False  # drawn from train, for want of a test split
    careful: list[str] = field(default_factory=list)  # what may spoil a result, one sentence each

    def image_format(self) -> ImageFormat:
        """Return the format of these images, which follows from the data, not from its name."""
        mean, std = statistics_of(self.images["train"])
        shape = tuple(self.images["train"].shape[1:])
        bright = shape[0] == 1 and bright_on_black(self.images)
        digits = bright and self.as_stored and self.classes == DIGITS and shape == (1, 28, 28)
        characters = all(len(name) == 1 for name in self.classes)
        return ImageFormat(shape, mean, std, self.notes, bright, digits, characters)


def statistics_of(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of uint8 [N, C, H, W] per channel, as shares of 255.

    They are sums of whole numbers, rounded to four decimals: the same on every machine, and for
    MNIST the 0.1307 and 0.3081 that everybody uses.
    """
    total, squares = np.zeros(images.shape[1]), np.zeros(images.shape[1])
    for block in blocks_of(images):
        block = block.astype(np.uint16)  # holds 255 squared; 64 bits take 3 times as long
        total += block.sum((0, 2, 3), dtype=np.uint64)
        squares += (block**2).sum((0, 2, 3), dtype=np.uint64)
    pixels = max(1, images[:, 0].size)  # 0 if the test split is read alone
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 1))  # 0 if all pixels were equal
    return tuple((mean / 255).round(4).tolist()), tuple((std / 255).round(4).tolist())


def blocks_of(images: np.ndarray) -> Iterator[np.ndarray]:
    """Yield some of the images at a time: a copy of all of them may not fit into memory."""
    rows = max(1, BLOCK // math.prod(images.shape[1:]))
    for start in range(0, len(images), rows):
        yield images[start : start + rows]


def is_bright_paper(border: np.ndarray) -> np.ndarray:
    """Return whether most of an image's border, uint8 [..., pixels], is bright: bool [...]."""
    return np.median(border, axis=-1) >= 128


def bright_on_black(images: dict[str, np.ndarray]) -> bool:
    """Return whether uint8 [N, 1, H, W] are bright strokes within a black border, as MNIST's are.

    That is so if no image is blank or has a bright border, and fewer than 10 % have strokes in
    their outermost pixels. 1.3 % of MNIST's train images have; so have most pictures, as they fill
    their frame.
    """
    for split in images.values():
        dark = 0
        for block in blocks_of(split[:, 0]):
            top, bottom, left, right = block[:, 0], block[:, -1], block[:, :, 0], block[:, :, -1]
            border = np.concatenate([top, bottom, left, right], axis=1)
            blank = (np.ptp(block, axis=(1, 2)) == 0).any()
            if blank or is_bright_paper(border).any():
                return False
            dark += int((border.max(axis=1) < DARK).sum())
        if dark <= 0.9 * len(split):
            return False
    return True
