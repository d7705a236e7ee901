"""Choose the images to hold out, each by its key, a hash of its pixels.

Names and order do not matter. The pixels are those that a viewer shows, at full size: an image has
the same key in every lossless format, turned by EXIF or in the file, and whatever size or colour is
asked for. So a copy lands in the same split as the original: nothing leaks into the test.
"""

import hashlib

import numpy as np

from ddp_mnist.errors import DataError, UsageError

FIFTH = 0.2


def key_of(pixels: np.ndarray) -> int:
    """Return a 64-bit hash of an image's pixels, uint8 [H, W], or [H, W, 3] if any has colour.

    37 ms for 12 megapixels, a quarter of what their JPEG takes to decode.
    """
    found = hashlib.blake2b(f"{pixels.dtype.str} {pixels.shape}".encode(), digest_size=8)
    found.update(np.ascontiguousarray(pixels).data)
    return int.from_bytes(found.digest(), "big")


def alike(keys: np.ndarray, decoded_keys: np.ndarray) -> np.ndarray:
    """Return the keys to draw by, uint64 [N]: those that decode to the same pixels have one."""
    _, group = np.unique(decoded_keys, return_inverse=True)
    lowest = np.full(len(keys), 2**64 - 1, np.uint64)
    np.minimum.at(lowest, group, keys)
    return lowest[group]


def draw_test(
    keys: np.ndarray, labels: np.ndarray, asked: float | None, typed: str
) -> tuple[np.ndarray, float]:
    """Return the images, in order, that are the test, and their share.

    `asked` is a share, a number or None: a fifth. Raise UsageError if there are not so many images,
    DataError if none can be held out.
    """
    share = FIFTH if asked is None else asked
    if share >= 1:
        if share >= len(keys):
            fix = f"give fewer, or a share such as {FIFTH}"
            raise UsageError(f"--test-size {asked:g}: {typed} has {len(keys):,} images; {fix}")
        share /= len(keys)
    held = draw_by_share(keys, labels, share)
    if not held.size:
        fault = "no image can be held out for the test, as each class has only one"
        raise DataError(
            f"{typed}: {fault} (copies, and the images of a group, count as one); add more"
        )
    return held, share


def draw_fold(
    keys: np.ndarray, labels: np.ndarray, number: int, folds: int, typed: str
) -> np.ndarray:
    """Return the images, in order, of fold `number`, from 1.

    The keys are dealt out in turn, class by class, so each is in one fold, and all folds have as
    many of them, and of each class, but for one. Raise UsageError if there are fewer than folds.
    """
    order = np.lexsort((keys, labels))
    _, first = np.unique(keys[order], return_index=True)  # of a key in two classes, the first
    dealt = keys[order][np.sort(first)]
    if folds > len(dealt):
        fix = f"give at most {len(dealt)} folds"
        those = f"{typed} has {len(dealt):,} images (copies, and those of a group, count as one)"
        raise UsageError(f"--fold {number}/{folds}: {those}; {fix}")
    return np.flatnonzero(np.isin(keys, dealt[number - 1 :: folds]))


def validation_rows(
    keys: np.ndarray, labels: np.ndarray, val_size: int, by_share: bool
) -> np.ndarray:
    """Return the train images, in order, that are held out for validation.

    There are `val_size`, or a few fewer, see `draw_exactly`; or, `by_share`, about as many, drawn
    as the test split was.
    """
    if not val_size:
        return np.arange(0)
    if not by_share:
        return draw_exactly(keys, labels, val_size)
    share = FIFTH if val_size == len(keys) // 5 else val_size / len(keys)
    # With the halves of a key swapped, bits decide that had no part in the draw of the test.
    return draw_by_share((keys << np.uint64(32)) | (keys >> np.uint64(32)), labels, share)


def strata(targets: np.ndarray) -> np.ndarray:
    """Return the labels, int64 [N], by which images are drawn; all 0 if targets are numbers."""
    return targets if targets.ndim == 1 else np.zeros(len(targets), np.int64)


def draw_by_share(hashes: np.ndarray, labels: np.ndarray, share: float) -> np.ndarray:
    """Return the rows to hold out: those whose hash is below `share` of the range of uint64.

    So each row is decided by itself, with two exceptions: the largest hash of each class is never
    held out, and if no hash is below, the lowest one is held out.
    """
    largest = np.zeros(labels.max() + 1, np.uint64)
    np.maximum.at(largest, labels, hashes)
    free = np.flatnonzero(~np.isin(hashes, largest))  # nor its copies in another class
    lowest = hashes[free].min(initial=2**64 - 1)
    return free[(hashes[free] < share * 2.0**64) | (hashes[free] == lowest)]


def draw_exactly(keys: np.ndarray, labels: np.ndarray, count: int) -> np.ndarray:
    """Return `count` rows to hold out: the lowest keys of each class, in proportion to its size.

    Shares are rounded as seats are by Webster and Sainte-Lague: the image of rank r (from 0) among
    the n of its class has the place (r + 1/2) / n in the queue of all. The largest key of a class
    is last. An image whose copy stays in train stays too, so there may be fewer than `count`.
    """
    order = np.lexsort((keys, labels))
    keys, labels, row = keys[order], labels[order], np.arange(len(keys))
    new = np.diff(keys, prepend=keys[:1] + np.uint64(1)) != 0  # a copy has the rank of the first
    new |= np.diff(labels, prepend=-1) != 0
    sizes = np.bincount(labels)
    ends = np.cumsum(sizes)
    rank = np.maximum.accumulate(np.where(new, row, 0)) - (ends - sizes)[labels]
    queue = np.lexsort((keys, (rank + 0.5) / sizes[labels], keys == keys[ends - 1][labels]))
    held, rest = queue[:count], queue[count:]
    return np.sort(order[held[~np.isin(keys[held], keys[rest])]])
