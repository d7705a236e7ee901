"""The one decoder: what it makes of an image file is what a net sees, in training and after it.

What was decided when a data set was read lies with the weights, so that `predict` does the same.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from PIL.ExifTags import Base

Shape = tuple[int, int, int]  # channels, height and width of an image
DIGITS = [str(digit) for digit in range(10)]
GREY_MODES = ("1", "L", "LA", "La")
DARK = 32  # of 255: less is black to the eye, and what JPEG makes of black
TURN = PIL.Image.Transpose
# What makes an image upright, by its orientation in EXIF (2 to 8).
TURNS = dict(
    enumerate(
        (
            *(TURN.FLIP_LEFT_RIGHT, TURN.ROTATE_180, TURN.FLIP_TOP_BOTTOM, TURN.TRANSPOSE),
            *(TURN.ROTATE_270, TURN.TRANSVERSE, TURN.ROTATE_90),
        ),
        start=2,
    )
)
BLOCK = 2**22  # pixels of which statistics are taken at a time, in 8 bytes each


@dataclass(frozen=True)
class Preparation:
    """The way in which a data set's images became what the net was trained on."""

    shape: Shape
    mean: tuple[float, ...]  # of the train images' pixels, per channel, as shares of 255
    std: tuple[float, ...]
    notes: list[str]  # what was converted, one sentence each
    bright_on_black: bool  # all are bright strokes within a black border
    # They are digits as MNIST stores them: `predict` makes of a photo what MNIST makes of a scan.
    digit_photos: bool

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Preparation":
        """Undo asdict and JSON. Raise KeyError or TypeError for the dict of something else."""
        return cls(**plain | {name: tuple(plain[name]) for name in ("shape", "mean", "std")})


# Makes room for uint8 images of a shape and a number of rows per split, in memory or in files.
Reserve = Callable[[Shape, dict[str, int]], dict[str, np.ndarray]]


def in_memory(shape: Shape, rows: dict[str, int]) -> dict[str, np.ndarray]:
    return {split: np.empty((count, *shape), dtype=np.uint8) for split, count in rows.items()}


@dataclass
class Decoded:
    """A data set, decoded."""

    images: dict[str, np.ndarray]  # uint8 [N, C, H, W] per split (train, test)
    labels: dict[str, np.ndarray]  # int64 [N] per split, 0 <= label < len(classes)
    classes: list[str]
    notes: list[str] = field(default_factory=list)  # what was converted, one sentence each
    as_stored: bool = True  # no file had to be converted

    def preparation(self) -> Preparation:
        """Return how these images were made, by facts of the data and not by a name."""
        mean, std = statistics_of(self.images["train"])
        shape = tuple(self.images["train"].shape[1:])
        bright = shape[0] == 1 and bright_on_black(self.images)
        digits = bright and self.as_stored and self.classes == DIGITS and shape == (1, 28, 28)
        return Preparation(shape, mean, std, self.notes, bright, digits)


def statistics_of(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of uint8 [N, C, H, W] per channel, as shares of 255.

    They are sums of whole numbers, rounded to four decimals: the same on every machine, and for
    MNIST the 0.1307 and 0.3081 that everybody uses.
    """
    total, squares = np.zeros(images.shape[1]), np.zeros(images.shape[1])
    for block in blocks_of(images):
        block = block.astype(np.uint64)
        total += block.sum((0, 2, 3))
        squares += (block**2).sum((0, 2, 3))
    pixels = images[:, 0].size
    mean = total / pixels
    std = np.sqrt(np.maximum(squares / pixels - mean**2, 1))  # of one grey alone it would be 0
    return tuple((mean / 255).round(4).tolist()), tuple((std / 255).round(4).tolist())


def blocks_of(images: np.ndarray) -> Iterator[np.ndarray]:
    """Yield some of the images at a time: a copy of all of them may not fit into the memory."""
    rows = max(1, BLOCK // math.prod(images.shape[1:]))
    for start in range(0, len(images), rows):
        yield images[start : start + rows]


def bright_on_black(images: dict[str, np.ndarray]) -> bool:
    """Return whether uint8 [N, 1, H, W] are bright strokes within a black border, as MNIST's are.

    None is blank, none has a bright border, and hardly any has something in its outermost pixels:
    of MNIST's train images 1.3 %, of pictures that fill their frame most.
    """
    for split in images.values():
        dark = 0
        for block in blocks_of(split[:, 0]):
            top, bottom, left, right = block[:, 0], block[:, -1], block[:, :, 0], block[:, :, -1]
            border = np.concatenate([top, bottom, left, right], axis=1)
            blank = np.ptp(block.reshape(len(block), -1), axis=1) == 0
            if blank.any() or (np.median(border, axis=1) >= 128).any():
                return False
            dark += int((border.max(axis=1) < DARK).sum())
        if dark <= 0.9 * len(split):
            return False
    return True


# --- An image


def decode_image(image: PIL.Image.Image, shape: Shape) -> np.ndarray:
    """Return an opened image file, upright, as uint8 [C, H, W].

    The middle of an image of another size is kept, as much as has the wanted sides' ratio.
    """
    channels, height, width = shape
    image.load()  # damage is an error here: getexif of a PNG would load it, and be forgiven
    image = in_mode(upright(image), "L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = PIL.ImageOps.fit(image, (width, height), PIL.Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def upright(image: PIL.Image.Image, orientation: int | None = None) -> PIL.Image.Image:
    """Return it turned as its EXIF says, or by the `orientation` of the file that it was."""
    turn = TURNS.get(orientation or orientation_of(image))
    return image if turn is None else image.transpose(turn)


def orientation_of(image: PIL.Image.Image) -> int:
    """Return EXIF's 1 (upright) to 8; EXIF may be damaged where the image is not."""
    with contextlib.suppress(Exception):
        orientation = image.getexif().get(Base.Orientation)
        return orientation if orientation in TURNS else 1
    return 1


def in_mode(image: PIL.Image.Image, mode: str, paper: str = "white") -> PIL.Image.Image:
    """Return it in mode L or RGB, 16-bit greys by their upper 8 bits; `paper` shows where clear.

    Raises ValueError for mode F.
    """
    if image.mode.startswith("I"):  # convert("L") would make all above 255 white
        upper = (np.asarray(image) // 256).clip(0, 255).astype(np.uint8)
        image = PIL.Image.fromarray(upper)
    if image.mode == "F":
        raise ValueError("mode F has no fixed range: save 8-bit images")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", layer.size, paper), layer)
    return image if image.mode == mode else image.convert(mode)


def facts_of(image: PIL.Image.Image) -> tuple[tuple[int, int], bool, list[str]]:
    """Return an opened file's height and width, upright, whether it is grey, and what is odd.

    Only its header is read.
    """
    turned, odd = orientation_of(image), []
    size = (image.width, image.height) if turned >= 5 else (image.height, image.width)
    sixteen = image.mode.startswith("I")
    for wrong, what in (
        (turned != 1, "turned as their EXIF says"),
        (getattr(image, "is_animated", False), "animated, of which the first frame counts"),
        (sixteen, "of 16 bits, of which the upper 8 count"),
        (image.has_transparency_data, "transparent, on white"),
        (image.mode == "CMYK", "in CMYK, which became RGB"),
    ):
        if wrong:
            odd.append(what)
    return size, sixteen or image.mode in GREY_MODES, odd
