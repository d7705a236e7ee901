"""What a run tells people while it runs."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

from ddp_mnist.errors import StorageError
from ddp_mnist.streams import warn, written_out

SECONDS_BETWEEN = 1.0
COLUMNS, INDENT = 80, " " * 11
BAR = "{bar:8} {desc}"


class Screen:
    """One rank's voice; the others, and --quiet, are silent. Ends as a context manager.

    On a terminal progress is a bar below the lines, elsewhere a line now and then: what goes to a
    file or a pipe has no control characters.

    Args:
        speaks: whether lines go to the screen; no longer, once their reader went away.
        trains: whether the lines tell of a training, which goes on where they cannot be written.
    """

    def __init__(self, speaks: bool, *, trains: bool = False) -> None:
        self.speaks, self.trains = speaks, trains
        self._last = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_error: object) -> None:
        """Takes the bar away, so that what others print begins a line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def progress(self, done: float, line: str) -> None:
        """How far it is.

        Args:
            done: share of all there is to do, 0 to 1.
            line: for people, in 70 columns.
        """
        if not self.speaks:
            return
        if not sys.stdout.isatty():
            if time.monotonic() - self._last >= SECONDS_BETWEEN:
                self.say(line)
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=1, bar_format=BAR, file=sys.stdout, leave=False, dynamic_ncols=True
            )
        with self._heard():
            self._bar.n = done
            self._bar.set_description_str(line)

    def say(self, line: str) -> None:
        """One line on stdout. Raises StorageError, e.g. on a full disk, unless a training says it.

        A reader that went away (`| head -1`) is no error: the screen is silent from then on.
        """
        if not self.speaks:
            return
        self._last = time.monotonic()
        with self._heard():
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line)

    @contextlib.contextmanager
    def _heard(self) -> Iterator[None]:
        try:
            with written_out():
                yield
        except BrokenPipeError:
            self.speaks = False
        except StorageError as error:
            self.speaks = False
            if not self.trains:
                raise
            warn(f"{error}; the run goes on without output; see its folder")


def panel(lines: dict[str, str]) -> str:
    """Name and text of each, in 80 columns; only a word that is longer, as a path, stands out."""
    wrapped = [
        textwrap.wrap(
            text,
            COLUMNS,
            initial_indent=f"{name:<10} ",
            subsequent_indent=INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, text in lines.items()
    ]
    return "\n".join(line for each in wrapped for line in each)
