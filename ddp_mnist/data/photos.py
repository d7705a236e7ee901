"""Tell photos from other images before they are decoded, by a few of them."""

import contextlib
import itertools
import statistics
from typing import Any

import numpy as np

from ddp_mnist.data.decode import as_seen, open_image, pixels_of
from ddp_mnist.data.image_format import borders_of
from ddp_mnist.data.listing import Listing

SEEN = 8  # images
SMALLEST = 64  # pixels of a photo's shorter side: weights of larger ones see little in less


def are_photos(listing: Listing) -> bool:
    """Return whether the images are pictures that are large enough for weights made on photos.

    A few are opened: it may be wrong for strokes on black.
    """
    if {*map(len, listing.classes)} == {1}:  # characters
        return False
    cells = next(iter(listing.images.values()))
    if isinstance(cells, list | np.ndarray):
        cells = cells[:: -(-len(cells) // SEEN)]
    looks = [look for cell in itertools.islice(cells, SEEN) if (look := look_at(cell))]
    is_large = statistics.median(side for side, _ in looks or [(0, False)]) >= SMALLEST
    return is_large and any(is_picture for _, is_picture in looks)


def look_at(cell: Any) -> tuple[int, bool] | None:
    """Return an image's shorter side, and whether it has colour or a border that is not dark; None
    if it cannot be read.
    """
    with contextlib.suppress(Exception), open_image(cell) as image:  # told when it is decoded
        pixels = pixels_of(as_seen(image))
        is_picture = pixels.ndim == 3 or not borders_of(pixels[None, None])[0].item()
        return min(pixels.shape[:2]), is_picture
    return None
