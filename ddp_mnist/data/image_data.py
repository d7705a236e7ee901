"""The data set in numbers: all images, their targets, and the rows of each split.

It takes no torch, so that preparing a data set needs none.
"""

import dataclasses
import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddp_mnist.data import held_out
from ddp_mnist.data.groups import NONE, keys_of, together
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.data.listing import STORED_SPLITS
from ddp_mnist.errors import DataError, blame

# Of groups, of which only the names are known: those of other data may be named so by chance
NAMED_ALIKE = " named as those trained on: if they are the same, it has seen them"


def files_in(path: Path) -> list[str]:
    """Return the files of a data set's images from the list at this path."""
    with blame(str(path), DataError, "decode again: prepare --refresh"):
        found: list[str] = json.loads(path.read_text())
        return found


@dataclass(frozen=True)
class ImageData:
    """A decoded data set, read-only by convention: processes share its memory."""

    name: str  # for people, e.g. mnist
    source: str  # kind and place, e.g. hub:ylecun/mnist
    digest: str  # SHA-256 of what is trained on, held out and counted, see data_digest
    classes: list[str]  # their names; a label is an index into these. [] if targets are numbers
    image_format: ImageFormat  # how the images were prepared
    images: np.ndarray  # uint8 [N, C, H, W], of all splits
    targets: np.ndarray  # int64 [N], labels; or float32 [N, columns], of a task without classes
    keys: np.ndarray  # uint64 [N], a hash of each image's pixels, see held_out.py
    decoded_keys: np.ndarray  # uint64 [N], the same of the pixels as in `images`
    rows: dict[str, np.ndarray]  # int64, of train, test and validation, given or once held out
    files: Path | None = None  # a JSON list of the images' paths in their folder, "" if unknown
    groups: np.ndarray | None = None  # uint64 [N], see groups.py
    group_names: Sequence[str] = ()  # of all groups, in no order
    test_share: float | None = None  # of all, drawn for want of a test split; 0: all are the test
    has_validation: bool = False  # the data set has such a split; else it is held out of train
    caveats: list[str] = field(default_factory=list)  # what may spoil a result, one sentence each
    warnings: list[str] = field(default_factory=list)  # messages from opening it
    left_out: Sequence[int] = ()  # keys of images and groups that had been seen, see `without`

    @property
    def notes(self) -> list[str]:
        """All that is to be said of the images, one sentence each, what matters most first."""
        return [*self.warnings, *self.caveats, *self.image_format.notes]

    def hold_out(self, val_size: int) -> "ImageData":
        """Return the data set with `val_size` train images held out, the same for every seed.

        If the test split was drawn from train too, or if there are groups, their number is
        approximate. If the data set has a validation split, it is that.
        """
        if self.has_validation:
            return self
        train, made = self.rows["train"], self.image_format
        keys = together(held_out.alike(self.keys, self.decoded_keys), self.groups)[train]
        strata = held_out.strata(self.targets[train])
        by_share = bool(self.test_share) or self.groups is not None
        held = held_out.validation_rows(keys, strata, val_size, by_share)
        if self.groups is not None:
            few, every = (len(np.unique(each)) for each in (keys[held], keys))
            note = f"{few:,} of {every:,} groups of train are held out for validation"
            made = dataclasses.replace(made, notes=[*made.notes, note])
        rows = {"train": np.delete(train, held), "validation": train[held]}
        return dataclasses.replace(self, rows=self.rows | rows, image_format=made)

    def without(self, keys: Collection[int], why: str) -> "ImageData":
        """Return the data set without the validation and test images with one of the `keys`.

        Raise DataError, which begins with `why`, if nothing is left of a split.
        """
        rows, caveats, left_out = dict(self.rows), [*self.caveats], list[int]()
        for split in ("validation", "test"):
            there = rows.get(split, np.arange(0))
            is_seen = self.are_among(keys, there)
            if is_seen.any():
                those = f"{why}: {is_seen.sum():,} of {len(there):,} {split} images"
                if is_seen.all():
                    raise DataError(f"{those}; give images that it has not seen, for {split}")
                caveats.append(f"{those}, which are left out")
                left_out += self.keys[there[is_seen]].tolist()
                rows[split] = there[~is_seen]
            if (seen := self.of_groups(keys, rows.get(split, there))).size:
                caveats.append(f"{why}: {len(seen):,} {split} images are of groups{NAMED_ALIKE}")
                left_out += np.unique(self.groups_at(seen)).tolist()
        return dataclasses.replace(self, rows=rows, caveats=caveats, left_out=left_out)

    def are_among(self, keys: Collection[int], rows: np.ndarray) -> np.ndarray:
        """Return whether each of these rows' images has one of the `keys`, bool [rows].

        It is the same image if it looks the same at full size, or as it was decoded.
        """
        known = np.asarray(keys, np.uint64)
        return np.isin(self.keys[rows], known) | np.isin(self.decoded_keys[rows], known)

    def train_keys(self) -> np.ndarray:
        """Return all keys of the train images and of their groups, uint64, sorted."""
        train = self.rows["train"]
        every = [self.keys[train], self.decoded_keys[train], self.groups_at(train)]
        return np.setdiff1d(np.concatenate(every), [np.uint64(NONE)])

    def groups_at(self, rows: np.ndarray) -> np.ndarray:
        """Return the key of each row's group; NONE if there are no groups."""
        return np.full(len(rows), NONE, np.uint64) if self.groups is None else self.groups[rows]

    def of_groups(self, keys: Collection[int], rows: np.ndarray) -> np.ndarray:
        """Return those of the rows whose groups have one of the `keys`."""
        return rows[np.isin(self.groups_at(rows), np.asarray(keys, np.uint64))]

    def with_caveat(self, sentence: str) -> "ImageData":
        """Return the data set with one more sentence on what may spoil a result."""
        return dataclasses.replace(self, caveats=[*self.caveats, sentence])

    def files_of(self, rows: Iterable[int]) -> dict[int, str]:
        """Return the files, relative to their folder, of those of the rows that have one."""
        files = files_in(self.files) if self.files else []
        return {row: files[row] for row in rows if files and files[row]}

    def groups_of(self, rows: np.ndarray) -> list[str] | None:
        """Return the names of the rows' groups, "" of an image without; None if there are none."""
        if self.groups is None:
            return None
        named = dict(zip(keys_of(self.group_names).tolist(), self.group_names, strict=True))
        return [named.get(key, "") for key in self.groups[rows].tolist()]

    def per_class(self) -> dict[str, list[int]]:
        """Return the number of images of each class, by split; what was held out is in train."""
        rows = {split: [*self.rows[split]] for split in STORED_SPLITS if split in self.rows}
        if not self.has_validation:
            rows["train"] += rows.pop("validation", [])
        least = len(self.classes)
        counts = {split: np.bincount(self.targets[x], minlength=least) for split, x in rows.items()}
        return {split: each.tolist() for split, each in counts.items()}

    def describe(self) -> dict[str, Any]:
        """Return the data set's entry in summary.json."""
        validation = len(self.rows.get("validation", ()))
        of_train = 0 if self.has_validation else validation
        return {
            "name": self.name,
            "source": self.source,
            "digest": self.digest,
            "train_rows": len(self.rows["train"]) + of_train,
            "test_rows": len(self.rows["test"]),
            "val_rows": validation,
        }
