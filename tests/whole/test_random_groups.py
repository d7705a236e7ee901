"""Data sets made at random, with groups of 1 to 12 images and copies: no draw parts a group.

Each is a function of its seed. Held in memory, it goes through all that decides which rows train,
validate and test; and it grows twice.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.groups import NONE, keys_of, together
from ddp_mnist.data.held_out import alike, strata
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import Source
from tests.data_sets import GREY

SETS, CLASSES, FOLDS = 150, 3, 4
SOURCE = Source("it", "hub", "a/b", "it")


class Images(NamedTuple):
    """Of each image a hash of its pixels, which its copies have too, its class and its group."""

    keys: np.ndarray
    labels: np.ndarray
    groups: np.ndarray

    def only(self, rows: np.ndarray) -> "Images":
        return Images(*(each[rows] for each in self))


def make(seed: int) -> Images:
    """Return the images of a seed: some groups are of two classes, some images of no group."""
    draw = np.random.default_rng([0x6209, seed])
    sizes = draw.integers(1, 13, draw.integers(40, 80))
    groups = np.repeat(keys_of([f"{seed} group {n}" for n in range(len(sizes))]), sizes)
    groups[np.repeat((sizes == 1) & (draw.random(len(sizes)) < 0.5), sizes)] = NONE
    labels = np.repeat(draw.integers(0, CLASSES, len(sizes)), sizes)
    odd = draw.random(len(labels)) < 0.02
    labels[odd] = draw.integers(0, CLASSES, odd.sum())
    keys = draw.integers(0, 2**64, len(labels), np.uint64)
    copied, place = draw.integers(0, len(labels), (2, draw.integers(0, 9)))
    place = np.where(draw.random(len(place)) < 0.5, copied, place)  # in its own group, or another
    copies = Images(keys[copied], labels[place], groups[place])
    images = Images(*map(np.append, Images(keys, labels, groups), copies))
    return images.only(draw.permutation(len(images.keys)))


def splits_of(images: Images, **options: Any) -> np.ndarray:
    """Return the split of each image, drawn as for a run."""
    count, keys = len(images.keys), images.keys
    rows, found = {"train": np.arange(count)}, {"groups": images.groups, "digest": "", "notes": []}
    drawn_by, how = together(alike(keys, keys), images.groups), ImageOptions(**options)
    share = cache._draw_test(found, rows, drawn_by, strata(images.labels), SOURCE, how)
    data = ImageData("it", "it", "", [*"abc"], GREY, keys, images.labels, keys, keys, rows)
    data = replace(data, groups=images.groups, test_share=share)
    rows = data.hold_out(len(data.rows["train"]) // 5).rows
    splits = np.full(count, "none      ")
    for split, these in rows.items():
        splits[these] = split
    assert sum(map(len, rows.values())) == count and {*splits} == {"train", "validation", "test"}
    return splits


def are_whole(parts: np.ndarray, splits: np.ndarray) -> bool:
    """Return whether the images of each part are in one split."""
    pairs = {*zip(parts.tolist(), splits.tolist(), strict=True)}
    return len(pairs) == len({*parts.tolist()})


def steady(images: Images, splits: np.ndarray) -> np.ndarray:
    """Return which images are to be there from the start, so that all groups stay where they are.

    These are what joins groups; and what is drawn whatever its hash is: that of each class which is
    never held out, and the first one that is; of the test, and of the validation.
    """
    own = np.where(images.groups == NONE, images.keys, images.groups)
    drawn_by = together(images.keys, images.groups)
    several = [key for key in np.unique(drawn_by) if len(np.unique(own[drawn_by == key])) > 1]
    needed = np.isin(drawn_by, several)
    swapped = (drawn_by << np.uint64(32)) | (drawn_by >> np.uint64(32))
    for hashes, there in ((drawn_by, splits != "none"), (swapped, splits != "test")):
        last = [hashes[there & (images.labels == n)].max() for n in range(CLASSES)]
        lowest = hashes[there & ~np.isin(hashes, last)].min()
        needed |= np.isin(hashes, [*last, lowest])
    return needed


@pytest.mark.parametrize("seed", range(SETS))
def test_no_group_is_parted_and_none_changes_sides_as_a_set_grows(seed: int) -> None:
    images = make(seed)
    named = images.groups != NONE
    in_the_end = splits_of(images, test_size=0.3)
    for parts, there in ((images.groups, named), (images.keys, slice(None))):
        assert are_whole(parts[there], in_the_end[there])
    order = np.random.default_rng(seed).random(len(named))
    order[steady(images, in_the_end)] = 0
    for share in (0.3, 0.6):
        earlier = np.flatnonzero(order < share)
        assert (splits_of(images.only(earlier), test_size=0.3) == in_the_end[earlier]).all()
    tests = np.zeros(len(named), int)
    for number in range(1, FOLDS + 1):
        splits = splits_of(images, fold=(number, FOLDS))
        tests += splits == "test"
        for parts, there in ((images.groups, named), (images.keys, slice(None))):
            assert are_whole(parts[there], splits[there])
    assert (tests == 1).all()
