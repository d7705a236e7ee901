"""Images that belong together, as of an animal, a patient or a burst: no draw parts a group.

A group has a name, in a column `group` or in the path of each image (--group). Its key, a hash of
the name, decides for all its images, so a group stays on its side as the data set grows.
"""

import hashlib
import itertools
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ddp_mnist.system.text import shown_name

COLUMN = "group"
NONE = 2**64 - 1  # in place of a key: the image is a group by itself
MOST = 0.1  # of all images


def name_in(cell: Any) -> str:
    """Return the name of a group in a cell; "" if that is empty, or not a number.

    It is 1 for 1.0 and 1,0, as whole numbers are written if a cell of their column is empty.
    """
    name = "" if cell is None or cell != cell else composed(str(cell).strip())
    return re.sub(r"^(-?[0-9]+)[.,]0$", r"\1", name)


def composed(text: str) -> str:
    """Return text with accents as they are typed: macOS composes those of files in another way."""
    return unicodedata.normalize("NFC", text)


def keys_of(names: Sequence[str]) -> np.ndarray:
    """Return the key of each image's group, uint64 [N], by its name; NONE if that is ""."""
    as_bytes = {name: name.encode(errors="surrogatepass") for name in {*names}}
    hashes = {name: hashlib.blake2b(x, digest_size=8).digest() for name, x in as_bytes.items()}
    keys = {name: int.from_bytes(each, "big") for name, each in hashes.items()} | {"": NONE}
    return np.array([keys[name] for name in names], np.uint64)


def named_by(pattern: str, paths: Sequence[str]) -> list[str]:
    """Return the group's name in each path: its first parenthesis, or else the match; or ""."""
    matches = (re.search(composed(pattern), composed(path)) for path in paths)
    return [(m[min(1, m.re.groups)] or "") if m else "" for m in matches]


def together(keys: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
    """Return the keys to draw by, uint64 [N]: one for all images of a group, the group's.

    `keys` are those of the images, `groups` as `keys_of`. Groups that share an image, by its key,
    have one, the lowest of theirs.
    """
    if groups is None:
        return keys
    from scipy.sparse import coo_array  # takes a moment
    from scipy.sparse.csgraph import connected_components

    own = np.where(groups == NONE, keys, groups)
    image, name = (np.unique(each, return_inverse=True)[1] for each in (keys, own))
    count = len(keys)  # of nodes of both kinds, at most
    links = coo_array((np.ones(count), (image, count + name)), shape=(2 * count, 2 * count))
    part = connected_components(links, directed=False)[1][image]
    lowest = np.full(2 * count, NONE, np.uint64)
    np.minimum.at(lowest, part, groups)
    return np.where(lowest[part] == NONE, keys, lowest[part])


def on_two_sides(
    groups: np.ndarray, rows: Mapping[str, np.ndarray], files: Sequence[str]
) -> Iterator[str]:
    """Yield a sentence on the groups that two splits share, with the file of such an image."""
    for one, other in itertools.combinations(rows, 2):
        there = rows[other][groups[rows[other]] != NONE]
        if (shared := there[np.isin(groups[there], groups[rows[one]])]).size:
            few, of_all = (len(np.unique(groups[each])) for each in (shared, there))
            those = f"{few:,} of {of_all:,} groups in {other} are in {one} too"
            yield f"{those}{as_file(files[shared[0]])}: put each wholly into one"


def joined_by_copies(
    groups: np.ndarray, keys: np.ndarray, drawn_by: np.ndarray, files: Sequence[str]
) -> Iterator[str]:
    """Yield a sentence on the groups that count as fewer, see `together`, with the file of the
    image that most of them share.
    """
    named = np.flatnonzero(groups != NONE)
    names, first = np.unique(groups[named], return_index=True)
    parts, sizes = np.unique(drawn_by[named][first], return_counts=True)
    if len(parts) < len(names):
        pairs = np.unique(np.stack([keys[named], groups[named]]), axis=1)
        shared, owners = np.unique(pairs[0], return_counts=True)
        row = named[keys[named] == shared[owners.argmax()]][0]
        those = (
            f"{sizes[sizes > 1].sum():,} of {len(names):,} groups count as {(sizes > 1).sum():,}"
        )
        has = f"{owners.max():,} have the same image{as_file(files[row])}"
        yield f"{those}, as they share images: {has}; take it out if it shows nothing"


def too_large(groups: np.ndarray, names: Sequence[str], files: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on the largest group, if that may be a camera's name, not an animal's."""
    keys, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    largest = np.where(keys == NONE, 0, sizes).argmax()
    if sizes[largest] > MOST * len(groups):
        name = dict(zip(keys_of(names).tolist(), names, strict=True))[keys[largest].item()]
        has = f"group {shown_name(name)} has {sizes[largest]:,} of {len(groups):,} images"
        yield f"{has}{as_file(files[first[largest]])}: see that it names what belongs together"


def as_file(file: str) -> str:
    """Return an image's file as part of a sentence; "" if it has none."""
    return f", as {shown_name(file)}" if file else ""
