"""The image files of a data set, before they are decoded; every one of them is opened here."""

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL.Image
from psutil import virtual_memory

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode import open_in_thread
from ddp_mnist.errors import DataError, UsageError, first_of, reason
from ddp_mnist.system.limits import cores

SPLITS = ("train", "test")
SHOWN = 10  # broken files to name in an error
SMALL = 128**2  # pixels; below this, threads mostly wait for each other to run Python
BYTES_A_PIXEL = 20  # at most, while an image is decoded
AHEAD = 4  # queued calls per thread, so that all have work while one takes long

Cell = str | bytes | np.ndarray | None  # an image file's path or content, or its pixels
Split = TypeVar("Split", bound=Collection[Any])


@dataclass
class ImageFiles:
    """A data set that is not decoded yet."""

    where: str  # as errors begin
    splits: Mapping[str, Iterable[Cell]]  # read twice: headers first, then pixels
    labels: dict[str, np.ndarray]  # int64 [N] of each split, 0 <= label < len(classes)
    classes: list[str]
    notes: list[str]  # notes for the user, one sentence each
    column: str = ""  # the table's column of files or paths
    paths: dict[tuple[str, int], str] = field(default_factory=dict)  # by split and row, if read
    broken: dict[int, str] = field(default_factory=dict)  # name and reason, by place among all

    def each(
        self, function: Callable[[PIL.Image.Image, str, int], Any], threads: int = 1
    ) -> Iterator[Any]:
        """Yield the function's result, which is not None, for each opened image, split and row.

        The order is that of the files. An image for which the function raises an error counts as
        broken, and is left out from then on.
        """

        def open_one(place: int, split: str, row: int, cell: Cell) -> Any:
            name = f"split {split}, column {self.column}: row {row}"
            if isinstance(cell, str):
                self.paths[split, row] = cell
                name = cell.removeprefix(f"{Path.cwd()}/")
            try:
                if cell is None:
                    raise ValueError("its cell is empty")
                with open_in_thread(cell) as image:
                    return function(image, split, row)
            except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
                unknown = isinstance(error, PIL.UnidentifiedImageError)
                why = "of no format that Pillow knows" if unknown else reason(error)
                self.broken[place] = f"{name} ({why})"

        every = ((split, *each) for split in self.splits for each in enumerate(self.splits[split]))
        rest = ((place, *each) for place, each in enumerate(every) if place not in self.broken)
        with warnings.catch_warnings(action="ignore"):
            results = in_order(open_one, rest, threads)
            yield from (result for result in results if result is not None)

    def refuse_broken(self) -> None:
        """Raise a DataError that names the broken files, if any."""
        if not self.broken:
            return
        named = [name for _, name in sorted(self.broken.items())]
        total = sum(map(len, self.labels.values()))
        shown = ", ".join(first_of(named, SHOWN))
        leave_out = "leave their rows out" if self.column else "move them out of the folder"
        fault = f"{self.where}: {len(named):,} of {total:,} images cannot be read: {shown}"
        raise DataError(f"{fault}; replace them or {leave_out}")


def choose_splits(
    found: Mapping[str, Split], where: str, image_options: ImageOptions
) -> tuple[dict[str, Split], list[str]]:
    """Return train and test, or train alone if the test will be drawn from it, and a note.

    The note, if any, names splits that are not used. Raise DataError if one is missing, UsageError
    if --test-size does not fit.
    """
    splits = {split: found[split] for split in SPLITS if split in found}
    for_evaluation, test_size = image_options.for_evaluation, image_options.test_size
    count = len(next(iter(found.values())))
    fifth = max(1, count // 5)
    if test_size is not None and [*splits] == ["train"]:
        if test_size > (image_options.test_of or count - 1):
            fix = f"give at most {count - 1}, e.g. {fifth}"
            raise UsageError(f"--test-size {test_size}: {where} has {count:,} images; {fix}")
    elif "test" not in splits or (len(splits) == 1 and not for_evaluation):
        needed = "split test" if for_evaluation else "splits train and test"
        draw = f", or hold images out in training, e.g. train --test-size {fifth}"
        fix = f"name the files or folders so, e.g. test/cat/2.png{'' if for_evaluation else draw}"
        raise DataError(f"{where}: needs the {needed}, found: {', '.join(found)}; {fix}")
    elif test_size is not None and not for_evaluation:
        problem = f"{where} already has a test split; remove --test-size"
        raise UsageError(f"--test-size {test_size}: {problem}")
    unused = ", ".join(split for split in found if split not in SPLITS)
    note = f"split {unused} is not used: validation images are cut out of train (--val-size)"
    return splits, [note] if unused else []


def in_order(
    function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], threads: int
) -> Iterator[Any]:
    """Yield the function's result for each tuple of arguments, in their order.

    Arguments are taken only as needed, at most AHEAD for each thread in advance.
    """
    if threads == 1:
        yield from itertools.starmap(function, arguments)
        return
    rest = iter(arguments)
    with ThreadPoolExecutor(threads) as pool:  # Pillow and NumPy release the lock as they compute
        under_way = deque(
            pool.submit(function, *each) for each in itertools.islice(rest, AHEAD * threads)
        )
        while under_way:
            yield under_way.popleft().result()
            under_way.extend(pool.submit(function, *each) for each in itertools.islice(rest, 1))


def threads_for(largest: int) -> int:
    """Return how many threads should decode images, the largest of which has `largest` pixels.

    That is one more than there are cores, as one often waits for Python's lock, or fewer if their
    images would not fit into half of the free memory.
    """
    if largest < SMALL or (own := cores()) == 1:
        return 1
    return max(1, min(own + 1, int(virtual_memory().available / 2 / (BYTES_A_PIXEL * largest))))
