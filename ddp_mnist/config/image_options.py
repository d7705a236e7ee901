"""How to read images, as flags say it. Imports no library, for --help."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Self

from ddp_mnist.errors import UsageError, blame
from ddp_mnist.system.text import did_you_mean, joined

MOST_FOLDS = 100
FITS = ("crop", "pad")


@dataclass(frozen=True)
class ImageOptions:
    """How to read a data set; by default, its images are not changed."""

    size: tuple[int, int] | None = None  # height and width of all images
    grey: bool = False
    # The share of images, or their number, to hold out if there is no test split; None: a fifth,
    # 0: none, as all are for the test.
    test_size: float | None = None
    fit: str = FITS[0]  # how an image of another ratio gets its size
    fold: tuple[int, int] | None = None  # K and N: without a test split, fold K of N is the test
    group: str | None = None  # a pattern: images in whose path it finds the same are a group
    class_folder: str = "last"  # or first: which of an image's folders is that of its class
    # What a table calls the column for this: (("label", "species"), ...)
    named: tuple[tuple[str, str], ...] = ()
    # To evaluate a finished run: in RGB unless grey, and the train split may be missing.
    for_evaluation: bool = False
    columns: tuple[str, ...] = ()  # of numbers, an image's targets; without any it has a label

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Return the flags' values. Raise UsageError for a malformed one."""
        names = ("grey", "test_size", "group", "fit", "class_folder")
        as_typed = {name: flags[name] for name in names if name in flags}
        with blame(f"--group {flags.get('group')}", UsageError, "try e.g. 'A[0-9]+'"):
            re.compile(flags.get("group") or "")
        fold, named = _fold(flags.get("fold")), _named(flags.get("columns"))
        return cls(_size(flags["image_size"]), fold=fold, named=named, **as_typed)

    @property
    def required(self) -> dict[str, str]:
        """What --columns calls the column for each use. Empty if a run is evaluated on images of
        another table, which may call it otherwise.
        """
        return dict(self.named if self.test_size != 0 else ())

    def names_of(self, use: str, *usual: str) -> tuple[str, ...]:
        """Return the names of a column for a use, to be preferred in this order: the required one
        alone, or else the `usual` ones too, by default `use` itself.
        """
        given = tuple(name for each, name in self.named if each == use)
        return given if use in self.required else given + (usual or (use,))

    def check_required(self, uses: Collection[str], table: str, columns: Collection[str]) -> None:
        """Raise UsageError if a required column has a use that is not among these, or is not among
        the table's.
        """
        for use, name in self.required.items():
            typed = f"--columns {use}={name}"
            if use not in uses:
                fix = f"choose from {', '.join(uses)}{did_you_mean(use, uses)}"
                raise UsageError(f"{typed}: no column is for {use}; {fix}")
            if name not in columns:
                there = joined(map(repr, columns), 120)
                fault = f"{table} has no such column, only {there}{did_you_mean(name, columns)}"
                raise UsageError(f"{typed}: {fault}")


def _size(typed: str | None) -> tuple[int, int] | None:
    if typed is None:
        return None
    sides = re.fullmatch("([0-9]{1,4})(?:x([0-9]{1,4}))?", typed)
    if not sides or 0 in map(int, filter(None, sides.groups())):
        raise UsageError(
            f"--image-size {typed}: must be N or HEIGHTxWIDTH up to 9999, e.g. 64 or 48x64"
        )
    return int(sides[1]), int(sides[2] or sides[1])


def _fold(typed: str | None) -> tuple[int, int] | None:
    if typed is None:
        return None
    parts = re.fullmatch("([0-9]{1,3})/([0-9]{1,3})", typed)
    number, folds = map(int, parts.groups()) if parts else (0, 0)
    if not 1 <= number <= folds or not 2 <= folds <= MOST_FOLDS:
        legal = f"must be K/N, with N from 2 to {MOST_FOLDS} and K from 1 to N, e.g. 1/5"
        raise UsageError(f"--fold {typed}: {legal}")
    return number, folds


def _named(typed: str | None) -> tuple[tuple[str, str], ...]:
    parts = [each.partition("=") for each in typed.split(",")] if typed else []
    pairs = [(use.strip(), name.strip()) for use, _, name in parts]
    if not all(map(all, pairs)) or len(dict(pairs)) < len(pairs):
        legal = "must be USE=COLUMN, each use once, e.g. label=species,group=animal"
        raise UsageError(f"--columns {typed}: {legal}")
    return tuple(pairs)


AS_THEY_ARE = ImageOptions()
