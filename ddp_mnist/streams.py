"""stdin, stdout and stderr: what a program prints arrives, or its exit code says so."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

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
