"""The program's lines on stdout and stderr: they arrive, or the exit code says that they do not."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any, TextIO

from ddp_mnist.errors import StorageError, printable, reason

SECONDS_BETWEEN = 1.0  # two lines of progress, where there is no terminal
BAR = "{bar:8} {desc}"


class Console:
    """Prints lines and progress on stdout, if `verbose`: on one rank, and not with --quiet.

    On a terminal progress is a bar below the lines, elsewhere a line now and then: what goes to a
    file or a pipe has no control characters. As a context manager it removes the bar at the end.
    A line that cannot be written is an error if it `must_arrive`; a training goes on, silent.
    """

    def __init__(self, verbose: bool, *, must_arrive: bool = True) -> None:
        self.verbose, self.must_arrive = verbose, must_arrive
        self._last = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove the bar, so that what others print begins a line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def print(self, line: str) -> None:
        """Print a line. Raises StorageError, but not if the reader went away (`| head -1`)."""
        if not self.verbose:
            return
        self._last = time.monotonic()
        with self._going_on():
            if self._bar is not None:
                self._bar.write(line, file=sys.stdout)
            else:
                print(line)

    def progress(self, done: float, line: str) -> None:
        """Show the share that is done, 0 to 1, with a line of 70 columns."""
        if not self.verbose:
            return
        if not sys.stdout.isatty():
            if time.monotonic() - self._last >= SECONDS_BETWEEN:
                self.print(line)
            return
        with self._going_on():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(
                    total=1, bar_format=BAR, file=sys.stdout, leave=False, dynamic_ncols=True
                )
            self._bar.n = done
            self._bar.set_description_str(line)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Print no more once stdout could not be written; raise only where lines must arrive."""
        try:
            with stdout_errors():
                yield
        except BrokenPipeError:
            self.verbose = False
        except StorageError as error:
            self.verbose = False
            if self.must_arrive:
                raise
            warn(f"{error}; the run goes on without output; see its folder")


def panel(lines: dict[str, str]) -> str:
    """Return a line for each name and its text, wrapped at 80 columns; paths stay whole."""
    wrapper = textwrap.TextWrapper(80, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * 11
    wrapped = []
    for name, text in lines.items():
        wrapper.initial_indent = f"{name:<10} "
        wrapped += wrapper.wrap(text)
    return "\n".join(wrapped)


def tell(line: str) -> None:
    """Print a line on stderr; where that cannot be written either, the exit code has to do."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _discard_buffer(sys.stderr)


def warn(message: str) -> None:
    """Print on stderr that a result may not be the one that was meant."""
    tell(f"ddp-mnist: warning: {printable(message)}")


def open_what_is_closed() -> None:
    """Give a standard stream that was closed before the start (`>&-`, as daemons do) its number.

    Else the next file to be opened, a checkpoint say, would get that number, and with it what any
    library prints. /dev/null takes the place, for stdin write-only and for stdout read-only: to
    read or to print is an error then, as on a closed stream, and neither an empty input nor a
    result that is lost without a word. What is printed on a closed stderr may be lost.
    """
    for number, name, flags in (
        (0, "stdin", os.O_WRONLY),
        (1, "stdout", os.O_RDONLY),
        (2, "stderr", os.O_WRONLY),
    ):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, flags), True)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def flush_stdout() -> None:
    """Write what waits in stdout's buffer. Raises StorageError, but not if the reader went away."""
    with contextlib.suppress(BrokenPipeError), stdout_errors():
        pass


@contextlib.contextmanager
def stdout_errors() -> Iterator[None]:
    """Flush stdout after the block, which writes to nothing else.

    Raises:
        BrokenPipeError: the reader went away (`| head -1`).
        StorageError: it cannot be written, e.g. to a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _discard_buffer(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise StorageError(
            f"stdout: cannot be written ({reason(error)}); free space, or redirect it elsewhere"
        ) from error


def _discard_buffer(stream: TextIO) -> None:
    """Send what could not be written to /dev/null, so that it fails no more when Python ends."""
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
