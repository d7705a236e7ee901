"""How to read images, as flags say it. Imports no library, for --help."""

import re
import unicodedata
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
    columns: tuple[tuple[str, str], ...] = ()  # uses, and what a table calls the column for each
    # To evaluate a finished run: in RGB unless grey, and the train split may be missing.
    for_evaluation: bool = False
    numbers: tuple[str, ...] = ()  # columns of an image's targets; without any it has a label

    @classmethod
    def from_flags(cls, flags: Mapping[str, Any]) -> Self:
        """Return the flags' values. Raise UsageError for a malformed one."""
        names = ("grey", "test_size", "group", "fit", "class_folder")
        as_typed = {name: flags[name] for name in names if name in flags}
        with blame(f"--group {flags.get('group')}", UsageError, "try e.g. 'A[0-9]+'"):
            re.compile(flags.get("group") or "")
        fold, columns = _fold(flags.get("fold")), columns_in(flags.get("columns"))
        return cls(_size(flags["image_size"]), fold=fold, columns=columns, **as_typed)

    def own_columns(
        self, table: str, there: Collection[str], needed: Collection[str], others: Collection[str]
    ) -> dict[str, str]:
        """Return the columns that --columns names, by their uses, as a table spells them.

        Raise UsageError for a use that is neither needed nor among the others, and for a column
        that is not there. To evaluate a run, a table may lack those that are not needed.
        """
        legal, found = [*needed, *others], dict[str, str]()
        for use, name in self.columns:
            if use not in legal:
                fix = f"choose from {', '.join(legal)}{did_you_mean(use, legal)}"
                raise UsageError(f"--columns {use}={name}: no column is for {use}; {fix}")
            alike = [each for each in there if folded(each) == folded(name)]
            own = [name] if name in there else alike
            if len(own) == 1:
                found[use] = own[0]
            elif own or use in needed or self.test_size != 0:
                fault = f"{table} has no such column, only {joined(map(repr, there), 120)}"
                fix = did_you_mean(name, there) or "; correct it"
                raise UsageError(f"--columns {use}={name}: {fault}{fix}")
        return found


def folded(name: str) -> str:
    """Return a column's name without case, and with accents composed: people see one."""
    return unicodedata.normalize("NFC", name).casefold()


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


def columns_in(typed: str | None) -> tuple[tuple[str, str], ...]:
    """Return the uses and columns of --columns, sorted. Raise UsageError if it is malformed."""
    parts = [each.partition("=") for each in typed.split(",")] if typed else []
    pairs = sorted((use.strip(), name.strip()) for use, _, name in parts)
    twice = any(len({*each}) < len(pairs) for each in zip(*pairs, strict=True))
    if twice or not all(map(all, pairs)):
        legal = "must be USE=COLUMN,..., each once, e.g. label=species,group=animal"
        raise UsageError(f"--columns {typed}: {legal}")
    return tuple(pairs)


AS_THEY_ARE = ImageOptions()
