"""What a run tells people while it runs."""

from __future__ import annotations

import contextlib
import os
import sys
import time

SECONDS_BETWEEN = 1.0


class Screen:
    """One rank's voice; the others, and --quiet, are silent.

    Args:
        speaks: whether lines go to the screen.
    """

    def __init__(self, speaks: bool) -> None:
        self.speaks = speaks
        self._last = time.monotonic()

    def now_and_then(self, line: str) -> None:
        """`say`, but not more often than a person reads."""
        if time.monotonic() - self._last >= SECONDS_BETWEEN:
            self.say(line)

    def say(self, line: str) -> None:
        """One line on stdout. A reader that went away (`| head -1`) does not end the training."""
        if not self.speaks:
            return
        self._last = time.monotonic()
        try:
            print(line, flush=True)
        except OSError:
            self.speaks = False
            # What is left in the buffer must not raise again when Python closes stdout.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
