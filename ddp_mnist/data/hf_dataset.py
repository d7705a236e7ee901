"""Decode the splits, labels and images of a table of the library `datasets`, or of files."""

import dataclasses
import os
import statistics
import textwrap
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

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
from ddp_mnist.data.image_files import Cell, ImageFiles, threads_for
from ddp_mnist.data.image_format import Decoded, Reserve, Shape
from ddp_mnist.data.threads import in_order
from ddp_mnist.errors import DataError, UsageError
from ddp_mnist.system.limits import cores

SPLITS = ("train", "test")
NAMES = {
    "image": ("image", "images", "img", "pixels", "pixel_values"),
    "label": ("label", "labels"),
}
MAX_CLASSES = 1000
COPIED = 64  # images at a time, by a thread
# The largest shorter side, in pixels, that images get unless a size was asked for: that of
# torchvision's weights, or less for a small data set, which trains as well and faster with it.
LARGEST, LARGEST_OF_FEW, FEW = 224, 96, 5000


def decode_dataset(
    dataset: Any, where: str, image_options: ImageOptions, reserve: Reserve
) -> Decoded:
    """Decode a table. Raise DataError, which names the file, or column and row."""
    splits, not_used = _splits(dataset, where, image_options)
    each = list(splits.values())
    first, last = each[0], each[-1]
    image_column, label_column, unused = _find_columns(first, where)
    for column in (image_column, label_column):
        # Splits that were saved one by one may differ: label 3 may be another class in test.
        if (kind := first.features[column]) != (other := last.features.get(column, "missing")):
            raise DataError(
                f"{where}: column {column} is {kind} in train and {other} in test; give both the"
                " same type and the same names"
            )
    labels, classes = dict[str, np.ndarray](), list[str]()
    for split, rows in splits.items():
        if len(rows) == 0:
            if split == "train" and image_options.for_evaluation:
                continue
            raise DataError(f"{where}: split {split} has no rows; check its files")
        at = f"{where}: split {split}"
        labels[split], classes = _decode_labels(rows, label_column, classes, at)
    cells = {split: partial(_cells, rows, image_column) for split, rows in splits.items()}
    files = ImageFiles(cells, where, image_column)
    decoded = decode_images(files, labels, classes, not_used + unused, image_options, reserve)
    decoded.files = [file for rows in splits.values() for file in _files_named(rows, image_column)]
    return decoded


def decode_files(
    folder: str,
    found: dict[str, list[Path]],
    where: str,
    image_options: ImageOptions,
    reserve: Reserve,
) -> Decoded:
    """Decode the image files of each split; the class of each is its folder."""
    splits, not_used = _splits(found, where, image_options)
    classes = sorted({file.parent.name for files in found.values() for file in files})
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{where}: {len(classes)} classes; give at most {MAX_CLASSES}")
    label_of = {name: label for label, name in enumerate(classes)}
    labels = {
        split: np.array([label_of[file.parent.name] for file in files], np.int64)
        for split, files in splits.items()
    }
    paths = {
        split: partial(map, partial(os.path.join, folder), those) for split, those in splits.items()
    }
    files = ImageFiles(paths, where, column="")
    return decode_images(files, labels, classes, not_used, image_options, reserve)


def decode_images(
    files: ImageFiles,
    labels: dict[str, np.ndarray],
    classes: list[str],
    notes: list[str],
    image_options: ImageOptions,
    reserve: Reserve,
) -> Decoded:
    """Decode the images. Raise DataError, which names all those that cannot be read."""
    shape, converted, largest = _find_shape(files, image_options)
    threads, total = threads_for(largest), sum(map(len, labels.values()))
    if "train" not in labels:  # an evaluation does not need it
        labels = {"train": np.zeros(0, np.int64), **labels}
    images = reserve(shape, {split: len(each) for split, each in labels.items()})
    keys = {split: np.empty(len(each), np.uint64) for split, each in labels.items()}

    def decode(image: PIL.Image.Image, split: str, row: int) -> bool:
        images[split][row] = decode_image(image, shape)
        keys[split][row] = key_of(stored_pixels(image))
        return has_transparent_pixels(image)

    if clear := sum(files.each(decode, threads)):
        converted.append(f"{clear:,} of {total:,} images had transparent parts, which became white")
    files.refuse_broken(total)  # all in one line, whether found by header or by decoding
    sixteen_bits = any(SIXTEEN_BITS in note for note in converted)
    if sixteen_bits and max(np.max(each, initial=0) for each in images.values()) < 16:
        converted.append("all pixels are below 4096 of 65535, as of 12 bits: scale them to 16 bits")
    decoded = Decoded(images, labels, classes, notes + converted, not converted, keys)
    return decoded if "test" in labels else _hold_out_test(decoded, image_options, reserve)


def _splits(
    dataset: Any, where: str, image_options: ImageOptions
) -> tuple[dict[str, Any], list[str]]:
    """Return the rows of train and test, or of train alone for --test-size, and notes on others."""
    named = dict(dataset) if isinstance(dataset, dict) else {"train": dataset}
    splits = {split: named[split] for split in SPLITS if split in named}
    found, unused = ", ".join(named), ", ".join(split for split in named if split not in SPLITS)
    note = f"split {unused} is not used: validation images are cut out of train (--val-size)"
    notes, test_size = [note] if unused else [], image_options.test_size
    if image_options.for_evaluation and "test" in splits:  # all that it needs
        return splits, notes
    if [*splits] == ["train"] and test_size is not None:
        most = len(splits["train"]) - 1
        if test_size > (image_options.test_of or most):
            raise UsageError(
                f"--test-size {test_size}: {where} has {most + 1:,} images; give at most {most},"
                f" e.g. {max(1, most // 5)}"
            )
        return splits, notes
    if image_options.for_evaluation:
        raise DataError(
            f"{where}: needs the split test, found: {found}; name the files or folders so, e.g."
            " test/cat/2.png"
        )
    if len(splits) < len(SPLITS):
        some = max(1, len(next(iter(named.values()))) // 5)
        raise DataError(
            f"{where}: needs the splits train and test, found: {found}; name the files or folders"
            " so, e.g. train/cat/1.png and test/cat/2.png, or hold images out in training,"
            f" e.g. train --test-size {some}"
        )
    image_options.refuse_test_size(where)
    return splits, notes


def _find_shape(files: ImageFiles, image_options: ImageOptions) -> tuple[Shape, list[str], int]:
    """Return the shape of all images, notes on conversions, and the pixels of the largest image.

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
        files.refuse_broken(len(files.broken))
    size = image_options.size or usual_size(sizes)
    total, colour = sizes.total(), bool(colourful) or image_options.for_evaluation
    channels = 3 if colour and not image_options.grey else 1
    notes = [f"{count:,} of {total:,} images had {what}" for what, count in odd.items()]
    if set(sizes) != {size}:
        shown = [f"{height}x{width}" for (height, width), _ in sizes.most_common(3)]
        more = f" and {len(sizes) - 3:,} more size{'s' * (len(sizes) > 4)}" * (len(sizes) > 3)
        notes.append(f"images of {', '.join(shown)}{more} became {size[0]}x{size[1]}")
    if colourful and image_options.grey:
        notes.append(f"{colourful:,} of {total:,} images had colour and became grey")
    elif channels == 3 and colourful < total:
        notes.append(f"{total - colourful:,} of {total:,} images had no colour and became RGB")
    return (channels, *size), notes, max(height * width for height, width in sizes)


def usual_size(sizes: Counter[tuple[int, int]]) -> tuple[int, int]:
    """Return the height and width to give to images of these sizes.

    If all are equal, it is their size, or, above LARGEST, a smaller one of the same ratio. Else it
    is a square whose side is the median of the shorter sides, LARGEST or LARGEST_OF_FEW at most.
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


def _find_columns(rows: Any, where: str) -> tuple[str, str, list[str]]:
    """Return the names of the image column and of the label column, and notes on unused ones.

    Of several candidates, the first in the order of NAMES is taken, else the first in the table.
    """
    from datasets import ClassLabel, Image

    features = rows.features.items()
    found = {
        # Plain parquet without Hugging Face's metadata stores an image as {bytes, path}.
        "image": [
            name
            for name, kind in features
            if isinstance(kind, Image) or (isinstance(kind, dict) and "bytes" in kind)
        ],
        "label": [
            name
            for name, kind in features
            if isinstance(kind, ClassLabel) or name in NAMES["label"]
        ],
    }
    notes = []
    for what, names in NAMES.items():
        if not (columns := found[what]):
            among = ", ".join(rows.column_names)
            raise DataError(f"{where}: no {what} column among {among}; add one, named {what}")
        columns.sort(key=lambda name: [*names, name].index(name))
        if others := ", ".join(columns[1:]):
            notes.append(f"{what}s are those of column {columns[0]}; not used: {others}")
    return found["image"][0], found["label"][0], notes


def _decode_labels(
    rows: Any, column: str, classes: list[str], where: str
) -> tuple[np.ndarray, list[str]]:
    """Return int64 labels and the names of the classes; `classes` are train's, once decoded.

    Unless declared, the names are the words, sorted, or the numbers from 0 to the highest.
    """
    values = rows.with_format("arrow")[:].column(column).to_pylist()
    given = [value for value in values if value is not None]
    declared = getattr(rows.features[column], "names", None)  # of a ClassLabel
    words, fault = all(isinstance(value, str) for value in given), ""
    if not words and not isinstance(given[0], int):
        fault = f"labels are {type(given[0]).__name__}; give whole numbers or words"
    elif words:
        classes = classes or declared or sorted(set(given))
    else:
        highest = min(max(0, max(given)), MAX_CLASSES - 1)
        classes = classes or declared or [str(label) for label in range(highest + 1)]
    if len(classes) > MAX_CLASSES:
        fault = f"{len(classes)} classes; give at most {MAX_CLASSES}"
    index_of = {name if words else index: index for index, name in enumerate(classes)}
    for row, value in enumerate(() if fault else values):
        if value not in index_of:
            what = "no label" if value is None else f"label {value}"
            last = len(classes) - 1
            legal = "a word that train has" if words else f"a whole number from 0 to {last}"
            fault = f"row {row} has {what}; give {legal}"
            break
    if fault:
        raise DataError(f"{where}, column {column}: {fault}")
    return np.asarray([index_of[value] for value in values], dtype=np.int64), list(classes)


def _files_named(rows: Any, column: str) -> Iterator[str]:
    """Yield the paths of images that the table names instead of holding their bytes."""
    import pyarrow.compute as pc

    for cells in rows.select_columns([column]).with_format("arrow")[:].column(column).chunks:
        if {"bytes", "path"} <= {field.name for field in cells.type}:
            empty = pc.and_(cells.field("bytes").is_null(), cells.field("path").is_valid())
            yield from cells.field("path").filter(empty).to_pylist()


def _cells(rows: Any, column: str) -> Iterator[Cell]:
    """Yield the bytes of each row's image file, or else its path."""
    from datasets import Image

    if isinstance(rows.features[column], Image):
        rows = rows.cast_column(column, Image(decode=False))
    # more photos of several megabytes each would fill the memory
    for batch in rows.select_columns([column]).with_format(None).iter(batch_size=100):
        for cell in batch[column]:
            yield cell and (cell["bytes"] or cell.get("path"))


def _hold_out_test(decoded: Decoded, image_options: ImageOptions, reserve: Reserve) -> Decoded:
    """Return the data set with about `test_size` of its train images moved to a test split.

    Raise UsageError if each class has only one image.
    """
    images, labels, keys = (
        part["train"] for part in (decoded.images, decoded.labels, decoded.keys)
    )
    test_size = image_options.test_size
    assert test_size is not None, "there is no test split"
    held = draw_by_share(keys, labels, share_of(test_size, image_options.test_of or len(keys)))
    if not held.size:
        problem = "each class has only one image; add more to train"
        raise UsageError(f"--test-size {test_size}: {problem}")
    rows = {"train": np.delete(np.arange(len(keys)), held), "test": held}
    parts = reserve(images.shape[1:], {split: len(those) for split, those in rows.items()})

    def copy(split: str, start: int) -> None:
        for to, row in enumerate(rows[split][start : start + COPIED], start):
            parts[split][to] = images[row]  # one by one: they may not all fit into memory

    starts = ((split, at) for split, those in rows.items() for at in range(0, len(those), COPIED))
    for _ in in_order(copy, starts, cores()):
        pass
    return dataclasses.replace(
        decoded,
        images=parts,
        labels={split: labels[those] for split, those in rows.items()},
        keys={split: keys[those] for split, those in rows.items()},
        test_drawn=True,
        notes=[
            f"{len(held):,} of {len(keys):,} images were held out for testing, chosen by a hash of"
            " their pixels, so each stays there as the folder grows",
            *decoded.notes,
        ],
        careful=_untested(decoded.classes, labels, keys, held),
    )


def _untested(
    classes: list[str], labels: np.ndarray, keys: np.ndarray, held: np.ndarray
) -> list[str]:
    """Return notes that name the classes without a test image, if any."""
    without = set(range(len(classes))).difference(labels[held].tolist())
    alone = {label for label in without if len(np.unique(keys[labels == label])) < 2}
    notes = []
    for those, fix in (
        (without - alone, "give a larger --test-size"),
        (alone, "add images, as the only one of a class stays in train"),
    ):
        shown = ", ".join(f'"{classes[label]}"' for label in sorted(those))
        shown = textwrap.shorten(shown, 80, placeholder=" ...")
        notes += [f"the test has no image of {shown}: {fix}"] if those else []
    return notes
