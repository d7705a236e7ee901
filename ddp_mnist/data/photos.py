"""Tell photos from other images before they are decoded, by what is cached or by a few of them."""

import contextlib
import itertools
import statistics
from dataclasses import replace
from typing import Any

import numpy as np

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.decode import as_seen, open_image, pixels_of
from ddp_mnist.data.image_format import borders_of
from ddp_mnist.data.sources import find_source

SEEN = 8  # images
SMALLEST = 64  # pixels of a photo's shorter side: weights of larger ones see little in less


def are_photos(
    dataset: str, cache_dir: str | None, options: ImageOptions, side: int | None = None
) -> bool:
    """Return whether the images are pictures that are large enough for weights made on photos.

    They are looked up in the cache, as squares of `side` too, or else a few are opened: the answer
    may then be wrong for strokes on black. Raise as `cache.load` does for what cannot be read.
    """
    sizes = dict.fromkeys((options.size, options.size or (side, side) if side else None))
    for size in sizes:
        if known := cache.cached(dataset, cache_dir, replace(options, size=size)):
            made = known.image_format
            return made.kind == "pictures" and min(made.shape[1:]) >= SMALLEST
    listing = find_source(dataset).listing(options)
    if {*map(len, listing.classes)} == {1}:  # characters
        return False
    cells = next(iter(listing.images.values()))
    if isinstance(cells, list | np.ndarray):
        cells = cells[:: -(-len(cells) // SEEN)]
    looks = [look for cell in itertools.islice(cells, SEEN) if (look := look_at(cell))]
    is_large = statistics.median(side for side, _ in looks or [(0, False)]) >= SMALLEST
    return is_large and any(is_bright for _, is_bright in looks)


def look_at(cell: Any) -> tuple[int, bool] | None:
    """Return an image's shorter side, and whether it has colour or a bright border; None if it
    cannot be read.
    """
    with contextlib.suppress(Exception), open_image(cell) as image:  # told when it is decoded
        pixels = pixels_of(as_seen(image))
        is_bright = pixels.ndim == 3 or borders_of(pixels[None, None])[1].item()
        return min(pixels.shape[:2]), is_bright
    return None
