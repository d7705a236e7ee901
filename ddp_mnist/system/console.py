"""Output on stdout and stderr. If a line cannot be written, the exit code says so."""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from ddp_mnist.errors import StorageError
from ddp_mnist.system.text import escaped, printable, reason

BAR = "{bar:8} {desc}"
SECONDS_BETWEEN = 1.0  # between two lines of progress, without a terminal
COLOURS = {"PASS": "32", "WARN": "33", "FAIL": "31"}  # green, yellow and red, as ECMA-48 has them


class Console(contextlib.AbstractContextManager["Console"]):
    """Prints lines and progress on stdout, if `verbose`: on one rank, and not with --quiet.

    On a terminal, progress is a bar below the lines, elsewhere a line now and then: output to a
    file, a pipe or a dumb terminal has no control characters. As a context manager it removes the
    bar at the end. A line that cannot be written is an error if it `must_arrive`; if not, the
    console falls silent.
    """

    def __init__(self, verbose: bool, *, must_arrive: bool = True) -> None:
        self.verbose, self.must_arrive = verbose, must_arrive
        self._last = time.monotonic()
        self._bar: Any = None

    def __exit__(self, *_error: object) -> None:
        """Remove the bar, so that the next output of others begins a line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def print(self, line: str, coloured: bool = False) -> None:
        """Print a line, or several. What would control a terminal is escaped, unless `coloured`.

        Raise StorageError, but not if the reader has closed the pipe (`| head -1`).
        """
        if self.verbose:
            self._last = time.monotonic()
            write = print if self._bar is None else self._bar.write
            shown = line if line.isprintable() or coloured else escaped(line, "\n")
            self.verbose = write_stdout(lambda: write(shown), self.must_arrive)

    def progress(self, done: float, line: str) -> None:
        """Show the share that is done, 0 to 1, with a line: as a bar on a terminal.

        Elsewhere the line is printed, if the last one is SECONDS_BETWEEN old.
        """
        self.draw(done, line)
        if not draws(sys.stdout) and time.monotonic() - self._last >= SECONDS_BETWEEN:
            self.print(line)

    def draw(self, done: float, line: str) -> None:
        """Show progress as a bar on a terminal, and nowhere else."""
        if self.verbose and draws(sys.stdout):
            self.verbose = write_stdout(lambda: self._draw(done, line), self.must_arrive)

    def _draw(self, done: float, line: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=1, bar_format=BAR, file=sys.stdout, leave=False, dynamic_ncols=True
            )
        self._bar.n = done
        self._bar.set_description_str(line)


def draws(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which a bar can be drawn over and over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def coloured(status: str, text: str = "") -> str:
    """Return the text, or PASS, WARN or FAIL itself, in that one's colour if stdout shows colours.

    NO_COLOR (no-color.org) is respected.
    """
    if os.environ.get("NO_COLOR") or not draws(sys.stdout):
        return text or status
    return f"\x1b[1;{COLOURS[status]}m{text or status}\x1b[0m"


def tell(line: str) -> None:
    """Print a line on stderr. If that fails too, only the exit code is left."""
    try:
        print(escaped(line, "\n"), file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        _discard_buffer(sys.stderr)


def tell_at_once(line: str) -> None:
    """Print a line on stderr from a signal's handler, which may interrupt another print."""
    below_the_bar = "\n" if draws(sys.stderr) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{below_the_bar}{line}\n".encode())


def warn(message: str) -> None:
    """Warn on stderr that the result may not be what the user expects."""
    tell(f"ddp-mnist: warning: {printable(message)}")


warn_once = functools.cache(warn)  # each message


def write_stdout(write: Callable[[], object] | None = None, must_arrive: bool = True) -> bool:
    """Call `write`, flush stdout, and return whether all arrived: False if the reader went away.

    Raise StorageError if stdout cannot be written, e.g. to a full disk; if it need not arrive,
    print a warning and return False.
    """
    try:
        if write:
            write()
        sys.stdout.flush()
        return True
    except OSError as error:
        _discard_buffer(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            line = f"stdout: cannot be written ({reason(error)}); "
            if must_arrive:
                raise StorageError(f"{line}free space, or redirect it elsewhere") from error
            warn(f"{line}the run continues without output; see its folder")
        return False


def _discard_buffer(stream: TextIO) -> None:
    """Send what could not be written to /dev/null, so that it fails no more when Python ends."""
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
