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

    A few are opened: it may be wrong for strokes on black. Grey images whose classes have a single
    character as their names are taken for writing.
    """
    may_be_writing = {*map(len, listing.classes)} == {1}
    cells = next(iter(listing.images.values()))
    if isinstance(cells, list | np.ndarray):
        cells = cells[:: -(-len(cells) // SEEN)]
    looks = [look for cell in itertools.islice(cells, SEEN) if (look := look_at(cell))]
    is_large = statistics.median([side for side, *_ in looks] or [0]) >= SMALLEST
    return is_large and any(
        has_colour or (is_bright and not may_be_writing) for _, has_colour, is_bright in looks
    )


def look_at(cell: Any) -> tuple[int, bool, bool] | None:
    """Return an image's shorter side, and whether it has colour, or else a border that is not dark;
    None if it cannot be read.
    """
    with contextlib.suppress(Exception), open_image(cell) as image:  # told when it is decoded
        pixels = pixels_of(as_seen(image))
        has_colour = pixels.ndim == 3
        is_bright = not has_colour and not borders_of(pixels[None, None])[0].item()
        return min(pixels.shape[:2]), has_colour, is_bright
    return None
