"""Turn a photo of a digit into an image like MNIST's, for nets trained on MNIST."""

import numpy as np
import PIL.Image

from ddp_mnist.data.decode import in_mode, opaque, orientation_of, upright
from ddp_mnist.data.image_format import is_bright_paper
from ddp_mnist.errors import DataError

SHAPE = (28, 28)
LONGEST_SIDE = 1000  # of a photo, in pixels; the digit in it becomes 20 high
LEAST_CONTRAST = 8  # of 255, between paper and strokes
FAINT = 0.25  # of the strongest stroke: less is paper, its shadows and its grain


def as_mnist(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an opened image as MNIST draws digits: 28x28 grey, bright strokes on black.

    28x28 images are used as they are, except that dark strokes on a bright ground are inverted. In
    others the paper may have any brightness; they are cropped to their strokes, scaled to fit 20x20
    and placed with their centre of mass in the middle, as MNIST itself was made (LeCun et al.,
    1998, section III.A). Raise DataError if there are no strokes.
    """
    grey = as_viewed(image)
    borders, (height, width) = (*grey[[0, -1]], *grey.T[[0, -1]]), grey.shape
    if grey.shape == SHAPE and np.ptp(grey):
        return PIL.Image.fromarray(255 - grey if is_bright_paper(np.concatenate(borders)) else grey)
    # Light may fall from one side: the paper is a plane through the medians of the borders.
    top, bottom, left, right = map(np.median, borders)
    paper = (top + bottom + left + right) / 4
    down, across = np.linspace(-0.5, 0.5, height), np.linspace(-0.5, 0.5, width)
    strokes = grey - (paper + (bottom - top) * down[:, None] + (right - left) * across)
    strokes *= 1 if strokes.max() >= -strokes.min() else -1
    if (strongest := strokes.max()) < LEAST_CONTRAST:
        raise DataError("shows nothing but background; give an image of a digit")
    strokes = np.where(strokes > FAINT * strongest, strokes / strongest * 255, 0)
    return centred(strokes.round().astype(np.uint8))


def as_viewed(image: PIL.Image.Image) -> np.ndarray:
    """Return uint8 [H, W], upright, and shrunk first: later steps take 40 bytes per pixel."""
    image.draft("L", (LONGEST_SIDE, LONGEST_SIDE))  # so that a JPEG is not decoded in full
    grey = in_mode(opaque(image), "L")
    grey.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    return np.asarray(upright(grey, orientation_of(image)))


def centred(strokes: np.ndarray) -> PIL.Image.Image:
    """Return a 28x28 image with the strokes, uint8 [H, W] on black, where MNIST places them."""
    drawn = PIL.Image.fromarray(strokes)
    crop = drawn.crop(drawn.getbbox())
    size = [max(1, round(20 * side / max(crop.size))) for side in crop.size]
    small = np.asarray(crop.resize(size, PIL.Image.Resampling.BILINEAR))
    frame = np.zeros(SHAPE, dtype=np.uint8)
    place = []
    for axis, side in enumerate(small.shape):
        mass = small.sum(1 - axis) + 1e-9  # thin strokes on a large page may have vanished
        start = round(13.5 - np.average(np.arange(side), weights=mass))
        start = min(max(start, 0), 28 - side)
        place.append(slice(start, start + side))
    frame[tuple(place)] = small
    return PIL.Image.fromarray(frame)
