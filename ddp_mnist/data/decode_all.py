"""Decode all images of a data set: their common shape, their pixels, and a drawn test split."""

import dataclasses
import statistics
from collections import Counter

import numpy as np
import PIL.Image

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import (
    SIXTEEN_BITS,
    decode_image,
    facts_of,
    has_transparent_pixels,
    stored_pixels,
)
from ddp_mnist.data.held_out import draw_by_share, key_of, share_of
from ddp_mnist.data.image_files import ImageFiles, threads_for
from ddp_mnist.data.image_format import Decoded, Reserve, Shape
from ddp_mnist.errors import DataError, UsageError, first_of, joined

MAX_CLASSES = 1000
# The largest shorter side, in pixels, that images get unless a size was asked for: that of
# torchvision's weights, or less for a small data set, which then trains faster and just as well.
LARGEST, LARGEST_OF_FEW, FEW = 224, 96, 5000


def decode_all(files: ImageFiles, image_options: ImageOptions, reserve: Reserve) -> Decoded:
    """Decode the images into the room that `reserve` makes for them.

    Raise DataError, which names all images that cannot be read, or UsageError if no test split can
    be drawn.
    """
    where, classes, labels = files.where, files.classes, files.labels
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{where}: {len(classes)} classes; give at most {MAX_CLASSES}")
    if not image_options.for_evaluation and "test" in labels:
        _check_classes(files)
    shape, converted, largest = _find_shape(files, image_options)
    labels = {"train": np.zeros(0, np.int64)} | labels  # an evaluation can do without it
    images = reserve(shape, {split: len(each) for split, each in labels.items()})
    keys = {split: np.empty(len(each), np.uint64) for split, each in labels.items()}

    def decode(image: PIL.Image.Image, split: str, row: int) -> bool:
        images[split][row] = decode_image(image, shape)
        keys[split][row] = key_of(stored_pixels(image))
        return has_transparent_pixels(image)

    if clear := sum(files.each(decode, threads_for(largest))):
        total = sum(map(len, labels.values()))
        converted.append(f"{clear:,} of {total:,} images had transparent parts, which became white")
    files.refuse_broken()  # in one line, whether the header or decoding showed them
    sixteen_bits = any(SIXTEEN_BITS in note for note in converted)
    if sixteen_bits and max(np.max(each, initial=0) for each in images.values()) < 16:
        converted.append("all pixels are below 4096 of 65535, as of 12 bits: scale them to 16 bits")
    notes, as_stored = files.notes + converted, not converted
    decoded = Decoded(images, labels, classes, notes, as_stored, keys, files.paths)
    return decoded if "test" in labels else _hold_out_test(decoded, image_options, reserve)


def _check_classes(files: ImageFiles) -> None:
    """Raise DataError if the test split has a class that train lacks."""
    test = files.labels["test"]
    if (unseen := np.flatnonzero(~np.isin(test, files.labels["train"]))).size:
        row, label = unseen[0], files.classes[test[unseen[0]]]
        fault = f"{files.where}: class {label} has images in test (row {row}) and none in train"
        fix = "add some to train, or correct the labels"
        raise DataError("; ".join([fault, *files.notes, fix]))


def _find_shape(files: ImageFiles, image_options: ImageOptions) -> tuple[Shape, list[str], int]:
    """Return the shape that all images get, notes on conversions, and the largest image's pixels.

    All are in colour if any is.
    """
    sizes: Counter[tuple[int, int]] = Counter()
    odd: Counter[str] = Counter()
    colourful = 0
    for size, grey, what in files.each(lambda image, *_: facts_of(image)):
        sizes[size] += 1
        odd.update(what)
        colourful += not grey
    if not sizes:
        files.refuse_broken()
    size, total = image_options.size or usual_size(sizes), sizes.total()
    colour = (colourful or image_options.for_evaluation) and not image_options.grey
    notes = [f"{count:,} of {total:,} images had {what}" for what, count in odd.items()]
    if set(sizes) != {size}:
        shown = [f"{height}x{width}" for (height, width), _ in sizes.most_common()]
        notes.append(f"images of {', '.join(first_of(shown, 3))} became {size[0]}x{size[1]}")
    if colourful and image_options.grey:
        notes.append(f"{colourful:,} of {total:,} images had colour and became grey")
    elif colour and colourful < total:
        notes.append(f"{total - colourful:,} of {total:,} images had no colour and became RGB")
    return (3 if colour else 1, *size), notes, max(height * width for height, width in sizes)


def usual_size(sizes: Counter[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width to give to images of these sizes.

    If all are equal, that is their size, or, above LARGEST, a smaller one of the same ratio.
    Otherwise it is a square whose side is the median of the shorter sides, at most LARGEST or
    LARGEST_OF_FEW.
    """
    most = LARGEST if sizes.total() >= FEW else LARGEST_OF_FEW
    if len(sizes) > 1:
        side = statistics.median_low(min(size) for size in sizes.elements())
        return (min(side, most),) * 2
    [(height, width)] = sizes
    side = min(height, width)
    if side <= LARGEST:
        return height, width
    return round(height * most / side), round(width * most / side)


def _hold_out_test(decoded: Decoded, image_options: ImageOptions, reserve: Reserve) -> Decoded:
    """Return the data set with about `test_size` of its train images moved to a test split.

    Raise UsageError if each class has only one image.
    """
    images, keys = decoded.images["train"], decoded.keys["train"]
    test_size = image_options.test_size
    assert test_size is not None, "there is no test split"
    share = share_of(test_size, image_options.test_of or len(keys))
    held = draw_by_share(keys, decoded.labels["train"], share)
    if not held.size:
        problem = "each class has only one image (copies count as one); add more to train"
        raise UsageError(f"--test-size {test_size}: {problem}")
    rows = {"train": np.delete(np.arange(len(keys)), held), "test": held}
    parts = reserve(images.shape[1:], {split: len(those) for split, those in rows.items()})
    for split, those in rows.items():  # "clip", as otherwise NumPy buffers them all in memory
        np.take(images, those, axis=0, out=parts[split], mode="clip")
    labels = {split: decoded.labels["train"][those] for split, those in rows.items()}
    paths = {("test", at): decoded.paths.get(("train", row), "") for at, row in enumerate(held)}
    without = sorted(set(labels["train"]) - set(labels["test"]))
    shown = joined((f'"{decoded.classes[label]}"' for label in without), 80)
    fix = "add images, or give a larger --test-size"
    note = (
        f"{len(held):,} of {len(keys):,} images were held out for testing, chosen by a hash of"
        " their pixels, so each stays there as the folder grows"
    )
    return dataclasses.replace(
        decoded,
        images=parts,
        labels=labels,
        keys={split: keys[those] for split, those in rows.items()},
        paths=decoded.paths | paths,
        test_drawn=True,
        notes=[note, *decoded.notes],
        careful=[f"the test has no image of {shown}: {fix}"] if without else [],
    )
