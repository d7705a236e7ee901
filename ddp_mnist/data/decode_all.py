"""Decode all images of a listing into one array, and note what is unusual about them."""

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
from psutil import virtual_memory

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import (
    SIXTEEN_BITS,
    TRANSPARENT,
    as_seen,
    facts_of,
    in_shape,
    pixels_of,
    without_equal_channels,
)
from ddp_mnist.data.groups import NONE, keys_of
from ddp_mnist.data.held_out import alike, key_of, strata
from ddp_mnist.data.image_format import DIGITS, Shape, borders_of
from ddp_mnist.data.listing import STORED_SPLITS, Listing, read_alike, shown_file
from ddp_mnist.errors import DataError
from ddp_mnist.system.affinity import cores
from ddp_mnist.system.files import write_atomically
from ddp_mnist.system.text import first_of, printable

Array = np.ndarray
RowsBySplit = dict[str, Array]  # by split

# The largest shorter side, in pixels, that images get unless a size was asked for: that of
# torchvision's weights, or less for a small data set, which then trains faster and just as well.
LARGEST, LARGEST_OF_FEW, FEW = 224, 96, 5000
SHOWN = 10  # broken files to name in an error
MOST_BROKEN = 0.01  # of all, which are left out
SEEN_CUT = 0.02  # of a side; rounding takes less
SMALL = 128**2  # pixels; below this, threads mostly wait for each other to run Python
BLOCK = 2**22  # pixels at a time, for statistics
BYTES_A_PIXEL = 20  # at most, while an image is decoded


def decode_all(
    listing: Listing, options: ImageOptions, folder: Path, tell: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, Array]]:
    """Decode the images into images.npy in `folder`, and return facts for JSON and other arrays.

    These are targets, as in `Listing`, keys and decoded_keys (see held_out.py) and groups (see
    groups.py), uint64 [N], the part, int8 [N] (place in STORED_SPLITS, -1 if it cannot be read),
    and sums of each image's values and of their squares, uint64 [N, C, 2]. `tell` is called with a
    line as decoding begins. If many images cannot be read, they are listed in a file beside the
    folder. Raise DataError, which names all images that cannot be read, if more than a few cannot,
    and OSError if the disk has no room.
    """
    if listing.classes and not options.for_evaluation:
        listing.check_classes()
    shape, converted, largest = find_shape(listing, options)
    images = allocate(folder / "images.npy", len(listing), shape, tell)
    keys, decoded_keys = np.zeros((2, len(listing)), np.uint64)

    def decode(image: PIL.Image.Image) -> tuple[Array, int, int]:
        whole = as_seen(image)
        pixels, seen = in_shape(whole, shape, options.fit), pixels_of(whole)
        decoded, key = without_equal_channels(pixels.transpose(1, 2, 0)), key_of(seen)
        decoded_key = key if decoded.shape == seen.shape else key_of(decoded)
        return pixels, key, decoded_key

    for number, found in listing.each(decode, threads_for(largest)):
        images[number], keys[number], decoded_keys[number] = found
    listing.notes += broken_files(listing, folder.with_suffix(".broken.txt"))
    if listing.classes and not options.for_evaluation:
        listing.check_classes()  # again: a class may have lost its last image

    targets = np.concatenate([*listing.targets.values()])
    parts = [np.full(len(of), STORED_SPLITS.index(split)) for split, of in listing.targets.items()]
    part = np.concatenate(parts).astype(np.int8)
    part[[*listing.broken]] = -1
    groups = keys_of(listing.groups or [""] * len(listing))
    groups[[*listing.broken]] = NONE
    rows = rows_of(part)
    if unread := listing.targets.keys() - rows.keys():
        fault = f"{listing.typed}: no image of split {unread.pop()} can be read"
        raise DataError(f"{fault}; replace them")
    sums, is_plain, is_bright_on_black = facts_of_pixels(images, rows)
    if any(SIXTEEN_BITS in note for note in converted) and images.max() < 16:
        converted.append("all pixels are below 4096 of 65535, as of 12 bits: scale them to 16 bits")
    changed = [note for note in converted if TRANSPARENT not in note]  # which may be opaque
    is_digits = listing.classes == DIGITS and shape == (1, 28, 28) and not changed
    same = alike(keys, decoded_keys)
    names = [*listing.classes, *options.numbers]
    careful = warnings_about(listing, rows, same, strata(targets), is_plain)
    about = {
        "classes": listing.classes,
        "image_format": {
            "shape": shape,
            "bright_on_black": is_bright_on_black,
            "digit_photos": is_bright_on_black and is_digits,
            "characters": {*map(len, listing.classes)} == {1},
            "fit": options.fit,
        },
        "digest": data_digest(images, targets, keys, groups, rows, names),
        "group_names": sorted({*listing.groups} - {""}),
        "notes": [*listing.notes, *converted],
        "careful": careful,
    }
    arrays = {"targets": targets, "keys": keys, "decoded_keys": decoded_keys, "groups": groups}
    return about, {**arrays, "part": part, "sums": sums}


def rows_of(part: Array) -> RowsBySplit:
    """Return the rows of each split that has any, for the part of each image, see `decode_all`."""
    rows = {split: np.flatnonzero(part == number) for number, split in enumerate(STORED_SPLITS)}
    return {split: found for split, found in rows.items() if found.size}


def find_shape(listing: Listing, options: ImageOptions) -> tuple[Shape, list[str], int]:
    """Return the shape that all images get, notes on conversions, and the largest image's pixels.

    All are in colour if any is.
    """
    sizes, odd, colourful = Counter[tuple[int, int]](), Counter[str](), 0
    for _, (size, grey, what) in listing.each(facts_of):
        sizes[size] += 1
        odd.update(what)
        colourful += not grey
    sizes = sizes or Counter([(1, 1)])  # none can be read
    size = options.size or usual_size(sizes)
    total = sizes.total()
    colour = (colourful or options.for_evaluation) and not options.grey
    notes = [f"{count:,} of {total:,} images had {what}" for what, count in odd.items()]
    if set(sizes) != {size}:
        shown = [f"{height}x{width}" for (height, width), _ in sizes.most_common()]
        how, ratio = "", size[0] / size[1]
        if options.fit == "pad":
            how = ", kept whole on grey"
        elif any(abs(math.log(height / width / ratio)) > SEEN_CUT for height, width in sizes):
            how = ", cut to their middle (train --fit pad keeps them whole)"
        became = f"became {size[0]}x{size[1]}{how}"
        notes.append(f"images of {', '.join(first_of(shown, 3))} {became}")
    if colourful and options.grey:
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


def allocate(file: Path, count: int, shape: Shape, tell: Callable[[str], None]) -> Array:
    """Return a new file of uint8 [count, *shape], mapped. Raise OSError without room for it.

    If blocks were missing, a write to the mapped file would end the process by SIGBUS, without a
    message: a quota may be full although the disk is not, and others may fill it meanwhile.
    """
    channels, height, width = shape
    size, kind = count * math.prod(shape), "in colour" if channels == 3 else "grey"
    what = f"{count:,} images of {height}x{width} {kind} take {size / 1e6:,.0f} MB"
    tell(what)
    if size > shutil.disk_usage(file.parent).free:
        raise OSError(errno.ENOSPC, f"{what}, and there is no space left; resize by --image-size")
    images = np.lib.format.open_memmap(file, "w+", np.uint8, (count, *shape))
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with file.open("r+b") as written:
            os.posix_fallocate(written.fileno(), 0, file.stat().st_size)
    return images


def threads_for(largest: int) -> int:
    """Return how many threads should decode images, the largest of which has `largest` pixels.

    That is one more than there are cores, as one often waits for Python's lock, or fewer if their
    images would not fit into half of the free memory.
    """
    if largest < SMALL or (own := cores()) == 1:
        return 1
    return max(1, min(own + 1, int(virtual_memory().available / 2 / (BYTES_A_PIXEL * largest))))


def broken_files(listing: Listing, list_of_broken: Path) -> list[str]:
    """Return a note on images that cannot be read; if they are many, raise DataError.

    If not all are named, they are listed in a file.
    """
    if not listing.broken:
        return []
    named = [name for _, name in sorted(listing.broken.items())]
    shown = printable(", ".join(first_of(named, SHOWN)))
    if len(named) > SHOWN:
        lines = "".join(f"{name}\n" for name in named)
        write_atomically(list_of_broken, lines.encode(errors="backslashreplace"))
        shown += f" (all are in {list_of_broken})"
    those = f"{len(named):,} of {len(listing):,} images cannot be read"
    if len(named) <= MOST_BROKEN * len(listing):
        return [f"{those} and were left out: {shown}"]
    fix = "leave their rows out" if listing.column else "move them out of the folder"
    raise DataError(f"{listing.typed}: {those}: {shown}; replace them or {fix}")


# --- What the pixels show


def facts_of_pixels(images: Array, rows: RowsBySplit) -> tuple[Array, Array, bool]:
    """Return the sums of `decode_all`, whether each image is of one colour, and whether all are
    bright strokes on black, see `borders_of`.
    """
    sums = np.zeros((len(images), images.shape[1], 2), np.uint64)
    is_plain, dark, bright = np.zeros((3, len(images)), bool)
    rows_at_once = max(1, BLOCK // math.prod(images.shape[1:]))  # copies of all may not fit
    for start in range(0, len(images), rows_at_once):
        block = slice(start, start + rows_at_once)
        pixels = images[block]
        wide = pixels.astype(np.uint16)  # holds 255 squared; 64 bits take 3 times as long
        sums[block, :, 0] = wide.sum((2, 3), dtype=np.uint64)
        sums[block, :, 1] = (wide**2).sum((2, 3), dtype=np.uint64)
        is_plain[block] = (pixels.max((2, 3)) == pixels.min((2, 3))).all(1)
        dark[block], bright[block] = borders_of(pixels)
    every = np.concatenate([*rows.values()])
    is_of_strokes = images.shape[1] == 1 and not (is_plain | bright)[every].any()
    return sums, is_plain, is_of_strokes and all(dark[each].mean() > 0.9 for each in rows.values())


def data_digest(
    images: Array, targets: Array, keys: Array, groups: Array, rows: RowsBySplit, names: list[str]
) -> str:
    """Return the SHA-256 by which runs recognise a data set.

    It is of all that decides what is trained, held out and counted: the splits' pixels, targets,
    keys and groups, if any, and the names.
    """
    arrays = {"images": images, "labels": targets, "keys": keys}
    arrays |= {"groups": groups} if (groups != NONE).any() else {}
    digest = hashlib.sha256(json.dumps(names).encode())
    for split, these in rows.items():
        for kind, array in arrays.items():
            shape = [len(these), *array.shape[1:]]
            digest.update(f"{split}_{kind} {array.dtype} {shape}".encode())
            for start in range(0, len(these), 1000):
                digest.update(array[these[start : start + 1000]].data)
    return digest.hexdigest()


def warnings_about(
    listing: Listing, rows: RowsBySplit, keys: Array, labels: Array, is_plain: Array
) -> list[str]:
    """Return sentences on whatever may spoil a result.

    It is images in two splits or two classes, classes of a single colour, and of one name.
    """
    found, every = [*listing.careful], np.concatenate([*rows.values()])
    found += read_alike("classes", listing.classes)
    for one, other in itertools.combinations(rows, 2):
        there = rows[other]
        if (shared := there[np.isin(keys[there], keys[rows[one]])]).size:
            those = f"{len(shared):,} of {len(there):,} {other} images are in {one} too"
            found.append(f"{those}{first_file(listing, shared)}: take them out of one")
    order = every[np.lexsort((labels[every], keys[every]))]
    same = (np.diff(keys[order]) == 0) & (np.diff(labels[order]) != 0)
    twice = np.sort(order[np.isin(keys[order], keys[order[1:][same]])])
    if twice.size:
        those = f"{len(twice):,} images lie in two classes or more"
        found.append(f"{those}{first_file(listing, twice)}: decide on one")
    plain = every[is_plain[every]]
    of_class = np.bincount(labels[every])
    if (np.bincount(labels[plain], minlength=len(of_class)) > of_class / 2).any():
        those = f"{len(plain):,} of {len(every):,} images show a single colour"
        found.append(f"{those}{first_file(listing, plain)}: look at them")
    return found


def first_file(listing: Listing, numbers: Array) -> str:
    """Return the first file of these images, as part of a sentence; "" if they have none."""
    file = listing.files.get(int(numbers[0]), "")
    return f", as {shown_file(file, listing.folder)}" if file else ""
