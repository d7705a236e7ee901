"""Every image file of a data set is opened here, on all cores that this process may use."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import PIL.Image

from ddp_mnist.data.decode import open_in_thread
from ddp_mnist.data.threads import in_order
from ddp_mnist.errors import DataError, reason
from ddp_mnist.system.limits import cores, free_memory

SHOWN = 10  # broken files in an error
SMALL = 128**2  # pixels; below this, threads mostly wait for each other to run Python
BYTES_A_PIXEL = 20  # at most, while an image is decoded

Cell = str | bytes | None  # a path, or what is in the file


@dataclass
class ImageFiles:
    """The image files of each split, and those of them that are broken."""

    splits: Mapping[str, Callable[[], Iterable[Cell]]]
    where: str  # as errors begin
    column: str  # of the table that holds them or their paths, or ""
    # By its place among all files: its name, and why it cannot be read.
    broken: dict[int, tuple[str, str]] = field(default_factory=dict)

    def each(
        self, function: Callable[[PIL.Image.Image, str, int], Any], threads: int = 1
    ) -> Iterator[Any]:
        """Yield the function's result for each opened image, its split and its row, in order.

        An image for which it raises an error is broken, and left out from then on.
        """

        def open_one(
            place: int, split: str, row: int, cell: Cell
        ) -> tuple[int, Any, tuple[str, str] | None]:
            try:
                if not cell:
                    raise ValueError("its cell is empty")
                with open_in_thread(cell) as image:
                    return place, function(image, split, row), None
            except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
                unknown = isinstance(error, PIL.UnidentifiedImageError)
                why = "of no format that Pillow knows" if unknown else reason(error)
                return place, None, (self._name(split, row, cell), why)

        every = (
            (split, *each) for split, cells in self.splits.items() for each in enumerate(cells())
        )
        rest = ((place, *each) for place, each in enumerate(every) if place not in self.broken)
        with warnings.catch_warnings(action="ignore"):
            for place, found, fault in in_order(open_one, rest, threads):
                if fault:
                    self.broken[place] = fault
                else:
                    yield found

    def _name(self, split: str, row: int, cell: Cell) -> str:
        if cell and isinstance(cell, str):
            return cell.removeprefix(f"{Path.cwd()}/")
        return f"split {split}, column {self.column}: row {row}"

    def refuse_broken(self, total: int) -> None:
        """Raise DataError that names the broken files of `total`, if there are any."""
        if not self.broken:
            return
        broken = [each for _, each in sorted(self.broken.items())]
        name, why = broken[0]
        fault, them, rows = f"{name} is no readable image ({why})", "it", "its row"
        if len(broken) > 1:
            names = ", ".join(f"{name} ({why})" for name, why in broken[:SHOWN])
            more = f" and {len(broken) - SHOWN:,} more" * (len(broken) > SHOWN)
            fault = f"{len(broken):,} of {total:,} images cannot be read: {names}{more}"
            them, rows = "them", "their rows"
        leave_out = f"leave {rows} out" if self.column else f"move {them} out of the folder"
        raise DataError(f"{self.where}: {fault}; replace {them} or {leave_out}")


def threads_for(largest: int) -> int:
    """Return how many threads are to decode images, the largest of `largest` pixels.

    That is one more than there are cores, as one often waits for Python's lock, or as many as have
    room for their images in half of the free memory.
    """
    if largest < SMALL or (own := cores()) == 1:
        return 1
    return max(1, min(own + 1, int(free_memory() / 2 / (BYTES_A_PIXEL * largest))))
