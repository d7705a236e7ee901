"""The image format of a data set: the shape, the statistics and the kind of its images.

The format is saved with the weights, so that `predict` prepares an image as training did.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Shape = tuple[int, int, int]  # channels, height and width of an image
DIGITS = [str(digit) for digit in range(10)]
DARK = 32  # of 255: anything darker looks black; JPEG turns pure black into such values


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
    fit: str = "crop"  # or pad: how an image of another ratio was made one of `shape`

    @property
    def kind(self) -> str:
        """What augmentation calls these images: strokes, characters or pictures."""
        if self.bright_on_black:
            return "strokes"
        return "characters" if self.characters else "pictures"

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "ImageFormat":
        """Rebuild from an `asdict` that went through JSON.

        Raise KeyError or TypeError if it is not one.
        """
        return cls(**plain | {name: tuple(plain[name]) for name in ("shape", "mean", "std")})


def mean_and_std(
    sums: np.ndarray, shape: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation per channel, as shares of 255, of images [C, H, W] of `shape`.

    `sums` are of each image's values and of their squares, uint64 [N, C, 2]: whole numbers, rounded
    at the end to four decimals, so the same on every machine, and for MNIST the 0.1307 and 0.3081
    that everybody uses.
    """
    total, squares = sums.sum(0).T.astype(float)
    pixels = max(1, len(sums) * math.prod(shape[1:]))  # 0 if the test split is read alone
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 1))  # 0 if all pixels were equal
    return tuple((mean / 255).round(4).tolist()), tuple((std / 255).round(4).tolist())


def is_bright_paper(border: np.ndarray) -> np.ndarray:
    """Return whether most of an image's border, uint8 [..., pixels], is bright: bool [...]."""
    return np.median(border, axis=-1) >= 128


def borders_of(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether the outermost pixels of each image, uint8 [N, C, H, W], are all dark, and
    whether most are bright: bool [N] each.

    Images are bright strokes within a black border, as MNIST's, if none is blank or has a bright
    border, and fewer than 10 % have strokes in their outermost pixels. 1.3 % of MNIST's train
    images have; so have most pictures, as they fill their frame.
    """
    grey = images[:, 0]
    top, bottom, left, right = grey[:, 0], grey[:, -1], grey[:, :, 0], grey[:, :, -1]
    border = np.concatenate([top, bottom, left, right], axis=1)
    return border.max(axis=1) < DARK, is_bright_paper(border)
