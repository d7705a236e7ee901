"""stdin, stdout and stderr: what a program prints arrives, or its exit code says so."""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ddp_mnist.errors import DdpMnistError, StorageError, one_line, printable


def run_program(run: Callable[[list[str]], int], argv: Sequence[str] | None) -> NoReturn:
    """Exits with what `run` returns for the command line; an expected failure is its one line."""
    open_what_is_closed()
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
    except DdpMnistError as error:
        tell(one_line(error))
        code = error.code
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def open_what_is_closed() -> None:
    """Gives a standard stream that was closed before the start (`>&-`, as daemons do) its number.

    Else the next file to be opened, a checkpoint say, would get it, and with it what any library
    prints. stdin and stdout get /dev/null the wrong way round: to use them fails as if they were
    closed. What is meant for a closed stderr is for nobody.
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


@contextlib.contextmanager
def written_out() -> Iterator[None]:
    """What the block prints, and what is left in the buffer, is written when it ends.

    Raises:
        BrokenPipeError: the reader went away (`| head -1`).
        StorageError: it cannot be written, e.g. to a full disk.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _drop_what_is_left(1)
        if isinstance(error, BrokenPipeError):
            raise
        raise StorageError(
            f"stdout: cannot be written ({error.strerror}); free space, or redirect it elsewhere"
        ) from error


def flush_stdout() -> None:
    """Raises StorageError. A reader that went away has read what it wanted."""
    with contextlib.suppress(BrokenPipeError), written_out():
        pass


def tell(line: str) -> None:
    """One line on stderr; where that cannot be written either, the exit code has to do."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        _drop_what_is_left(2)


def warn(message: str) -> None:
    """One line on stderr about a result that may not be the one that was meant."""
    tell(f"ddp-mnist: warning: {printable(message)}")


def _drop_what_is_left(number: int) -> None:
    """A buffer that could not be written must not fail once more when Python ends."""
    stream = sys.stdout if number == 1 else sys.stderr
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


SECONDS_BETWEEN = 1.0

COLUMNS, INDENT = 80, " " * 11

BAR = "{bar:8} {desc}"


class Console:
    """One rank's voice; the others, and --quiet, are silent. Ends as a context manager.

    On a terminal progress is a bar below the lines, elsewhere a line now and then: what goes to a
    file or a pipe has no control characters.

    Args:
        verbose: whether lines go to the console; no longer, once their reader went away.
        trains: whether the lines tell of a training, which goes on where they cannot be written.
    """

    def __init__(self, verbose: bool, *, trains: bool = False) -> None:
        self.verbose, self.trains = verbose, trains
        self._last = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Console:
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
        if not self.verbose:
            return
        if not sys.stdout.isatty():
            if time.monotonic() - self._last >= SECONDS_BETWEEN:
                self.print(line)
            return
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=1, bar_format=BAR, file=sys.stdout, leave=False, dynamic_ncols=True
            )
        with self._heard():
            self._bar.n = done
            self._bar.set_description_str(line)

    def print(self, line: str) -> None:
        """One line on stdout. Raises StorageError, e.g. on a full disk, unless a training says it.

        A reader that went away (`| head -1`) is no error: the console is silent from then on.
        """
        if not self.verbose:
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
            self.verbose = False
        except StorageError as error:
            self.verbose = False
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
