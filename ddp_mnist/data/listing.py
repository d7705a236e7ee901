"""What a source lists: the images of each split and their labels, before anything is decoded."""

import contextlib
import itertools
import os
import re
import reprlib
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EISDIR, ENOENT, ENOTDIR
from typing import Any, TypeVar

import numpy as np
import PIL.Image

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import open_image
from ddp_mnist.errors import DataError, blamed
from ddp_mnist.system.text import count, first_of, joined, reason, shown_name

STORED_SPLITS = ("train", "test", "validation")  # by their numbers in the cache
# The words that mean a split, in names of folders and files and in a column `split`, as `datasets`
# defines them.
SPLIT_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
SPLIT_OF = {word: split for split, words in SPLIT_WORDS.items() for word in words}
LABELS = ("label", "labels")  # names of the column
MAX_CLASSES = 1000
LARGEST = 3.4e38  # number in float32
LEAST_DISTINCT = 0.9  # of a column's numbers: by chance a few of many are equal in float32

Cell = str | bytes | np.ndarray | None  # an image file's path or content, or its pixels
# Of a column's cells: which are right, what the rows of others have, and what to do
Check = tuple[Callable[[Any], bool], str, str]
Split = TypeVar("Split", bound=Collection[Any])


@dataclass
class Listing:
    """A data set that is not decoded yet; its images are numbered from 0, train's first."""

    typed: str  # as errors begin, e.g. --dataset photos
    images: Mapping[str, Iterable[Cell]]  # by split; read twice: headers first, then pixels
    # Of each split: labels, int64 [N], 0 <= label < len(classes), or numbers, float32 [N, columns]
    targets: Mapping[str, np.ndarray]
    classes: list[str]  # [] if targets are numbers
    notes: list[str]  # for the user, one sentence each
    column: str = ""  # the table's column of files or paths
    folder: str = ""  # in which the files lie, unless they are named otherwise
    careful: list[str] = field(default_factory=list)  # what may spoil a result, one sentence each
    # Names by number, of a column; "" where its cell is empty. Without one, these or []
    groups: list[str] = field(default_factory=list)
    files: dict[int, str] = field(default_factory=dict)  # path by number, of those in a file
    tables: list[str] = field(default_factory=list)  # paths of tables, which may lie elsewhere
    broken: dict[int, str] = field(default_factory=dict)  # name and reason, by number

    def __len__(self) -> int:
        return sum(map(len, self.targets.values()))

    def check_classes(self) -> None:
        """Raise DataError if there are too many classes, or one, or if train lacks one of another
        split.

        Images that are known to be broken do not count.
        """
        if not 2 <= len(self.classes) <= MAX_CLASSES:
            names = joined(map(shown_name, self.classes), 80)
            fault = f"{self.typed}: has {count(len(self.classes), 'class')} ({names})"
            raise DataError("; ".join([fault, *self.notes, f"give from 2 to {MAX_CLASSES:,}"]))
        labels = np.concatenate([*self.targets.values()])
        every = {*labels.tolist()}
        labels[[*self.broken]] = -1
        ends = np.cumsum([len(each) for each in self.targets.values()])
        read = dict(zip(self.targets, np.split(labels, ends[:-1]), strict=True))
        for split, found in read.items():
            unseen = np.flatnonzero((found >= 0) & ~np.isin(found, read.get("train", found)))
            if unseen.size:
                row, label = unseen[0], shown_name(self.classes[found[unseen[0]]])
                fault = f"class {label} has images in {split} (row {row}) and none in train"
                fix = "add some to train, or correct the labels"
                raise DataError("; ".join([f"{self.typed}: {fault}", *self.notes, fix]))
        if lost := every - {*labels.tolist()}:
            fault = f"no image of class {shown_name(self.classes[min(lost)])} can be read"
            fix = "replace them, or take the class out"
            raise DataError("; ".join([f"{self.typed}: {fault}", *self.notes, fix]))

    def each(
        self, function: Callable[[PIL.Image.Image], Any], threads: int = 1
    ) -> Iterator[tuple[int, Any]]:
        """Yield the number of each image, in order, and the function's result for the opened file.

        An image for which the function raises an error counts as broken, and is left out from then
        on.
        """

        def open_one(number: int, split: str, row: int, cell: Cell) -> Any:
            name = f"split {split}, column {self.column}: row {row}"
            if isinstance(cell, str):
                self.files[number] = cell
                name = shown_file(cell, self.folder)
            try:
                if cell is None:
                    raise ValueError("its cell is empty")
                with open_image(cell) as image:
                    return number, function(image)
            except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
                may_pass = getattr(error, "errno", None) not in (None, ENOENT, EISDIR, ENOTDIR)
                if may_pass or isinstance(error, MemoryError):
                    raise blamed(f"{self.typed}: {name}", DataError, error, "") from error
                self.broken[number] = f"{name} ({reason(error)})"

        every = ((split, *each) for split in self.images for each in enumerate(self.images[split]))
        rest = ((n, *each) for n, each in enumerate(every) if n not in self.broken)
        from joblib import Parallel, delayed  # takes a moment, and a cached run needs none of it

        # Pillow and NumPy release Python's lock as they compute. Few images are taken in advance.
        pool = Parallel(threads, "threading", return_as="generator", pre_dispatch="4 * n_jobs")
        with warnings.catch_warnings(action="ignore"):
            yield from filter(None, pool(delayed(open_one)(*each) for each in rest))


def shown_file(file: str, folder: str) -> str:
    """Return the name of a file for people: relative to the folder, and without the home folder."""
    home = os.path.expanduser("~")  # noqa: PTH111 # raises nothing
    inside = file.removeprefix(f"{folder}/")
    return shown_name(f"~{inside[len(home) :]}" if inside.startswith(f"{home}/") else inside)


def choose_splits(
    found: Mapping[str, Split], typed: str, options: ImageOptions
) -> tuple[dict[str, Split], list[str]]:
    """Return train, test and validation, if they are there, and notes on what the others are.

    Without a test split, one named validation is the test. Raise DataError without a train split,
    unless test alone is to be evaluated.
    """
    splits, notes = {split: found[split] for split in STORED_SPLITS if split in found}, list[str]()
    others = [split for split in found if split not in STORED_SPLITS]
    if "test" not in splits and "validation" in splits:
        splits["test"] = splits.pop("validation")
        notes.append("split validation is the test, as there is no split of that name")
    if others:
        notes.append(f"split {', '.join(others)} is not used")
    if "train" not in splits and not (options.for_evaluation and splits):
        fix = "name a split, a folder or the files so"
        raise DataError(f"{typed}: needs the split train, found: {', '.join(found)}; {fix}")
    return splits, notes


def check_cells(at: str, cells: Sequence[Any], check: Check, places: Sequence[str] = ()) -> None:
    """Raise DataError, which begins with `at`, unless all cells are right.

    It counts those that are not, and names the first three by their places, or else by their rows.
    """
    is_right, what, fix = check
    if bad := [number for number, cell in enumerate(cells) if not is_right(cell)]:
        first = ((places[n] if places else f"row {n}", cells[n]) for n in bad[:4])
        told = [f"{n} has none" if x is None else f"{n} is {reprlib.repr(x)}" for n, x in first]
        rows = f"{len(bad):,} of {len(cells):,} rows {'has' if len(bad) == 1 else 'have'}"
        raise DataError(f"{at}: {rows} {what}: {', '.join(first_of(told, 3))}; {fix}")


def is_label(cell: Any) -> bool:
    """Return whether a cell is a word or a whole number from 0."""
    if isinstance(cell, str):
        return bool(cell) and "\n" not in cell  # as after a quote that was not closed
    return isinstance(cell, int) and cell >= 0


def is_number(cell: Any) -> bool:
    """Return whether float32 can hold a cell as a number."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return abs(float(cell)) < LARGEST and "_" not in str(cell)  # nor if it is NaN
    return False


def number_check(column: str) -> Check:
    fix = f"give numbers below {LARGEST:.1g}, or delete these rows"
    return is_number, f"no number in column {column}", fix


def label_check(column: str, names: Sequence[str] = ()) -> Check:
    """Return the check of a label: a word or a whole number, or an index of `names`."""
    if names:
        fix = f"give whole numbers from 0 to {len(names) - 1}"
        return range(len(names)).__contains__, f"no index of a class in column {column}", fix
    fix = "give words or whole numbers from 0, or delete these rows"
    return is_label, f"no label in column {column}", fix


def number_columns(
    found: Mapping[str, Sequence[Sequence[Any]]], typed: str, names: Sequence[str]
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return each split's columns of numbers as float32 [N, columns], and sentences on what is lost
    thereby. Raise DataError for other cells.
    """
    for split, columns in found.items():
        for name, cells in zip(names, columns, strict=True):
            check_cells(f"{typed}: split {split}", cells, number_check(name))
    numbers, lost = {split: np.array(each, float) for split, each in found.items()}, list[str]()
    for name, every in zip(names, np.concatenate([*numbers.values()], axis=1), strict=True):
        before, after = (len(np.unique(every.astype(kind))) for kind in (float, np.float32))
        if after < LEAST_DISTINCT * before:
            those = f"column {name} has {before:,} different numbers, and {after:,} in float32"
            lost.append(f"{those}: subtract their mean")
    return {split: each.T.astype(np.float32) for split, each in numbers.items()}, lost


def number_labels(
    labels: Mapping[str, Sequence[Any]], typed: str, column: str, names: Sequence[str] = ()
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return labels as int64 indices of their classes, and the names of the classes.

    Labels are words, whole numbers or truth values; the classes are those that occur, sorted. If
    `names` declares the classes, labels are indices of these. Raise DataError for any other label.
    """
    for split, values in labels.items():
        check_cells(f"{typed}: split {split}", values, label_check(column, names))
    if names:
        return {split: np.asarray(values, np.int64) for split, values in labels.items()}, [*names]
    # NFC: macOS composes accents in another way, and both look alike.
    words = {s: [unicodedata.normalize("NFC", str(v)) for v in each] for s, each in labels.items()}
    numbers = all(type(value) is int for values in labels.values() for value in values)
    every = {word for each in words.values() for word in each}
    classes = sorted(every, key=int if numbers else None)
    index_of = {name: index for index, name in enumerate(classes)}
    indices = {s: np.array([index_of[w] for w in each], np.int64) for s, each in words.items()}
    return indices, classes


def read_alike(kind: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a sentence on names of classes or groups that people read as one, if there are any."""
    by_look = itertools.groupby(sorted(names, key=as_read), key=as_read)
    if several := [each for _, alike in by_look if len(each := [*alike]) > 1]:
        shown = ", ".join(first_of([" and ".join(map(repr, each)) for each in several], 3))
        few = f" ({len(several):,} such names)" * (len(several) > 1)
        yield f"{kind} {shown} look alike and are kept apart{few}: write each in one way"


def as_read(name: str) -> str:
    """Return a name without what people overlook: case, blanks at its ends, signs without
    width, and the point that spreadsheets give whole numbers, as 1.0.
    """
    seen = "".join(sign for sign in name if unicodedata.category(sign) != "Cf")
    return re.sub(r"^(\d+)\.0$", r"\1", " ".join(seen.split()).casefold())
