"""A data set that came whole, as arrays in memory: its images in the size and colours asked for."""

import dataclasses

import numpy as np

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.held_out import as_in_files, keys_of
from ddp_mnist.data.image_format import Decoded, Reserve, Shape


def as_asked(decoded: Decoded, name: str, image_options: ImageOptions, reserve: Reserve) -> Decoded:
    """Return a data set that was read into memory, its images in the size and colours asked for."""
    image_options.refuse_test_size(name)
    channels, height, width = decoded.images["train"].shape[1:]
    wanted = 1 if image_options.grey else 3 if image_options.for_evaluation else channels
    shape = (wanted, *(image_options.size or (height, width)))
    images = reserve(shape, {split: len(labels) for split, labels in decoded.labels.items()})
    unchanged = shape == (channels, height, width)
    for split, given in decoded.images.items():
        images[split][:] = given if unchanged else resized(given, shape)
    notes = decoded.notes
    if not unchanged:
        kind = "in colour" if shape[0] == 3 else "grey"
        notes = [*notes, f"images of {height}x{width} became {shape[1]}x{shape[2]} {kind}"]
    keys = {split: keys_of(given) for split, given in decoded.images.items()}
    as_stored = decoded.as_stored and unchanged
    return dataclasses.replace(decoded, images=images, notes=notes, as_stored=as_stored, keys=keys)


def resized(images: np.ndarray, shape: Shape) -> np.ndarray:
    """Return uint8 [N, C, H, W] in another size, or grey."""
    import PIL.Image

    from ddp_mnist.data.decode import decode_image

    files = map(PIL.Image.fromarray, as_in_files(images))
    return np.stack([decode_image(file, shape) for file in files])
