"""What a run tells people while it runs."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from typing import Any

SECONDS_BETWEEN = 1.0
COLUMNS, INDENT = 80, " " * 11
BAR = "{bar:8} {desc}"


class Screen:
    """One rank's voice; the others, and --quiet, are silent. Ends as a context manager.

    On a terminal progress is a bar below the lines, elsewhere a line now and then: what goes to a
    file or a pipe has no control characters.

    Args:
        speaks: whether lines go to the screen.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
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
        self._bar.n = done
        self._bar.set_description_str(line)

    def say(self, line: str) -> None:
        """One line on stdout. A reader that went away (`| head -1`) does not end the training."""
        if not self.speaks:
            return
        self._last = time.monotonic()
        try:
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line, flush=True)
        except OSError:
            self.speaks = False
            # What is left in the buffer must not raise again when Python closes stdout.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
