"""Output on stdout and stderr. If a line cannot be written, the exit code says so."""

import contextlib
import json
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from typing import Any, Self, TextIO

from ddp_mnist.errors import StorageError, printable, reason

BAR = "{bar:8} {desc}"
SECONDS_BETWEEN = 1.0  # between two lines of progress, without a terminal
COLUMNS = 80  # of wrapped lines
INDENT = " " * 11  # of the text next to a name, as in a panel
COLOURS = {"PASS": "32", "WARN": "33", "FAIL": "31"}  # green, yellow and red, as ECMA-48 has them
# Text that users copy: a command with its first words, a flag with its value. It stays on one line.
COPIED = re.compile(
    r"(?<!\S)(?:(?:\S*python3?|ddp-mnist|pip|make|hf|torchrun|accelerate)(?: [^\s,;()]+){1,6}"
    r"|--?[a-z][\w-]* [^\s,;()]+)"
)


class Console:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        """Remove the bar, so that the next output of others begins a line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def print(self, line: str) -> None:
        """Print a line.

        Raise StorageError, but not if the reader has closed the pipe (`| head -1`).
        """
        if self.verbose:
            self._last = time.monotonic()
            text = f"{line}\n"
            if self._bar is not None:  # in one write: tqdm's own removes the bar for a moment
                bar = str(self._bar)
                text = f"\r{' ' * len(bar)}\r{text}\r{bar}"
            self.verbose = write_stdout(lambda: sys.stdout.write(text), self.must_arrive)

    def note(self, line: str) -> None:
        """Print a line that begins with a name; a narrower terminal has the rest below its text."""
        self.print(fitted(line, INDENT))

    def tell(self, line: str) -> None:
        """Print a line on stderr, verbose or not; the bar stays below it."""
        tell(line, print if self._bar is None else self._bar.write)

    def close(self) -> None:
        """Remove the bar, and print nothing from here on."""
        self.__exit__()
        self.verbose = False

    def progress(self, done: float, line: str, every_s: float = SECONDS_BETWEEN) -> None:
        """Show the share that is done, 0 to 1, with a line of 70 columns."""
        if not self.draw(done, line) and time.monotonic() - self._last >= every_s:
            self.print(line)

    def draw(self, done: float, line: str) -> bool:
        """Show progress as a bar on a terminal, and nowhere else. Return whether it is shown."""
        if drawn := self.verbose and draws(sys.stdout):
            self.verbose = write_stdout(lambda: self._draw(done, line), self.must_arrive)
        return drawn

    def _draw(self, done: float, line: str) -> None:
        if self._bar is None:
            from tqdm import tqdm

            sys.stdout.write("\r\x1b[K")  # a bar of the process that started this one
            self._bar = tqdm(
                total=1, bar_format=BAR, file=sys.stdout, leave=False, dynamic_ncols=True
            )
        self._bar.n = done
        self._bar.set_description_str(line)


def draws(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which a bar can be drawn over and over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def passing(line: str) -> Iterator[None]:
    """Show a line on stderr while the block runs, then remove it; only if stderr is a terminal."""
    shown = draws(sys.stderr)
    if shown:
        print(line, end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        if shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def width_of(stream: TextIO, elsewhere: int = COLUMNS) -> int:
    """Return a terminal's columns; `elsewhere` for a file, a pipe, or if they are unknown."""
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no number
        return os.get_terminal_size(stream.fileno()).columns or elsewhere
    return elsewhere


def coloured(status: str, text: str = "") -> str:
    """Return the text, or PASS, WARN or FAIL itself, in that one's colour if stdout shows colours.

    NO_COLOR (no-color.org) is respected.
    """
    if os.environ.get("NO_COLOR") or not draws(sys.stdout):
        return text or status
    return f"\x1b[1;{COLOURS[status]}m{text or status}\x1b[0m"


def wrapped(text: str, first: str = "", rest: str = "", columns: int | None = None) -> list[str]:
    """Return lines that break between words; a path, or what is COPIED, stays whole.

    They begin with `first`, and all but the first with `rest`; they have 80 columns, or as many as
    a narrower terminal on stdout.
    """
    columns = columns or min(COLUMNS, width_of(sys.stdout))
    whole = COPIED.sub(lambda found: found[0].replace(" ", "\xa0"), text)
    wrapper = textwrap.TextWrapper(columns, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = first, rest
    return [line.replace("\xa0", " ") for line in wrapper.wrap(whole)]


def fitted(line: str, rest: str = "", stream: TextIO | None = None) -> str:
    """Return a line, broken between words if a terminal, stdout or `stream`, is narrower.

    The terminal itself would break it in the middle of a word. No-break spaces become spaces.
    """
    columns = width_of(stream or sys.stdout, elsewhere=len(line))
    lines = [line] if len(line) <= columns else wrapped(line, rest=rest, columns=columns)
    return "\n".join(lines).replace("\xa0", " ")


def as_json(content: Any, indent: int | None = None) -> str:
    """Return JSON with readable letters of any script, unless stdout cannot show them all.

    What is not printable is escaped.
    """
    in_ascii = "utf" not in (sys.stdout.encoding or "utf").lower()
    text = json.dumps(content, indent=indent, ensure_ascii=in_ascii)
    return re.sub(
        r"[^\n -~]", lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text
    )


def count(number: int, noun: str) -> str:
    """Return e.g. 1 process, 2 processes."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def panel(lines: dict[str, str]) -> str:
    """Return a line for each name that has a text, wrapped, see `wrapped`."""
    each = (wrapped(text, f"{name:<10} ", INDENT) for name, text in lines.items())
    return "\n".join(line for several in each for line in several)


def tell(line: str, write: Callable[..., None] = print) -> None:
    """Print a line on stderr. If that fails too, only the exit code is left."""
    try:
        write(fitted(line, stream=sys.stderr), file=sys.stderr)
        sys.stderr.flush()
    except OSError:
        _discard_buffer(sys.stderr)


def warn(message: str) -> None:
    """Warn on stderr that the result may not be what the user expects."""
    tell(f"ddp-mnist: warning: {printable(message)}")


def write_stdout(write: Callable[[], object] = bool, must_arrive: bool = True) -> bool:
    """Call `write`, flush stdout, and return whether all arrived: False if the reader went away.

    Raise StorageError if stdout cannot be written, e.g. to a full disk; if it need not arrive,
    print a warning and return False.
    """
    try:
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


def open_what_is_closed() -> None:
    """Give a standard stream that was closed before the start (`>&-`, as daemons do) its number.

    Else the next file to be opened, a checkpoint say, would get that number, and with it what any
    library prints. /dev/null takes the place, opened the wrong way round: reading stdin or printing
    to stdout is an error then, not an empty input or a result that is lost in silence. What is
    printed on a closed stderr may be lost.
    """
    flags = {"stdin": os.O_WRONLY, "stdout": os.O_RDONLY, "stderr": os.O_WRONLY}
    for number, name in enumerate(flags):
        try:
            os.fstat(number)
        except OSError:  # the lowest free number is the one that is given out
            os.set_inheritable(os.open(os.devnull, flags[name]), True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _discard_buffer(stream: TextIO) -> None:
    """Send what could not be written to /dev/null, so that it fails no more when Python ends."""
    with contextlib.suppress(OSError, ValueError):  # a test's stream has no number
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
