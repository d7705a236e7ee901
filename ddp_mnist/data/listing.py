"""What a source lists: the images of each split and their labels, before anything is decoded."""

import contextlib
import math
import unicodedata
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from errno import EISDIR, ENOENT, ENOTDIR
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import open_image, why_unread
from ddp_mnist.errors import DataError
from ddp_mnist.system.text import joined, reason, shown_name

STORED_SPLITS = ("train", "test")
LABELS = ("label", "labels")  # names of the column
MAX_CLASSES = 1000
LARGEST = 3.4e38  # number in float32

Cell = str | bytes | np.ndarray | None  # an image file's path or content, or its pixels
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
    files: dict[int, str] = field(default_factory=dict)  # path by number, of those in a file
    broken: dict[int, str] = field(default_factory=dict)  # name and reason, by number

    def __len__(self) -> int:
        return sum(map(len, self.targets.values()))

    def check_classes(self) -> None:
        """Raise DataError if there are too many classes, or one, or if test has one of its own."""
        if not 2 <= len(self.classes) <= MAX_CLASSES:
            names = joined(map(shown_name, self.classes), 80)
            fault = f"{self.typed}: has {len(self.classes):,} classes ({names})"
            raise DataError("; ".join([fault, *self.notes, f"give from 2 to {MAX_CLASSES:,}"]))
        if not self.targets.keys() >= {*STORED_SPLITS}:
            return
        test = self.targets["test"]
        if (unseen := np.flatnonzero(~np.isin(test, self.targets["train"]))).size:
            row, label = unseen[0], shown_name(self.classes[test[unseen[0]]])
            fault = f"{self.typed}: class {label} has images in test (row {row}) and none in train"
            fix = "add some to train, or correct the labels"
            raise DataError("; ".join([fault, *self.notes, fix]))

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
                name = cell.removeprefix(f"{Path.cwd()}/")
            try:
                if cell is None:
                    raise ValueError("its cell is empty")
                with open_image(cell) as image:
                    return number, function(image)
            except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
                may_pass = getattr(error, "errno", None) not in (None, ENOENT, EISDIR, ENOTDIR)
                if may_pass or isinstance(error, MemoryError):
                    raise DataError(f"{self.typed}: {name}: {reason(error)}") from error
                self.broken[number] = f"{name} ({why_unread(name, error)})"

        every = ((split, *each) for split in self.images for each in enumerate(self.images[split]))
        rest = ((n, *each) for n, each in enumerate(every) if n not in self.broken)
        from joblib import Parallel, delayed  # takes a moment, and a cached run needs none of it

        # Pillow and NumPy release Python's lock as they compute. Few images are taken in advance.
        pool = Parallel(threads, "threading", return_as="generator", pre_dispatch="4 * n_jobs")
        with warnings.catch_warnings(action="ignore"):
            yield from filter(None, pool(delayed(open_one)(*each) for each in rest))


def choose_splits(
    found: Mapping[str, Split], typed: str, options: ImageOptions
) -> tuple[dict[str, Split], list[str]]:
    """Return train and, if there is one, test; and notes on what the other splits are.

    Without a test split, one named validation is the test. Raise DataError without a train split,
    unless test alone is to be evaluated.
    """
    splits, notes = {split: found[split] for split in STORED_SPLITS if split in found}, list[str]()
    others = [split for split in found if split not in STORED_SPLITS]
    if "test" not in splits and "validation" in others:
        splits["test"] = found["validation"]
        others.remove("validation")
        notes.append("split validation is the test, as there is no split of that name")
    if others:
        unused = f"split {', '.join(others)} is not used"
        notes.append(f"{unused}: validation images are cut out of train (--val-size)")
    if "train" not in splits and not (options.for_evaluation and splits):
        fix = "name a split, a folder or the files so"
        raise DataError(f"{typed}: needs the split train, found: {', '.join(found)}; {fix}")
    return splits, notes


def number_in(value: Any, at: str) -> float:
    """Return a cell of a column of numbers. Raise DataError, which begins with `at`."""
    found = math.nan
    with contextlib.suppress(TypeError, ValueError):
        found = float(value)
    if not abs(found) < LARGEST:  # nor if it is NaN
        raise DataError(f"{at} is {value!r}; give a number below {LARGEST:.1g}")
    return found


def number_labels(
    labels: Mapping[str, Sequence[Any]], typed: str, column: str, names: Sequence[str] = ()
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Return labels as int64 indices of their classes, and the names of the classes.

    Labels are words, whole numbers or truth values; the classes are those that occur, sorted. If
    `names` declares the classes, labels are indices of these. Raise DataError for any other label.
    """
    last = len(names) - 1
    legal = f"a whole number from 0 to {last}" if names else "a word, or a whole number from 0"
    for split, values in labels.items():
        for row, value in enumerate(values):
            is_one = isinstance(value, int) and 0 <= value <= (last if names else value)
            if not is_one and (names or not value or not isinstance(value, str)):
                at = f"{typed}: split {split}, column {column}: row {row}"
                raise DataError(f"{at} has label {value!r}; give {legal}")
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
