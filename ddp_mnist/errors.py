"""The expected failures, each with its exit code and its one line.

The user sees one line on stderr: what was typed or found, where, and what to do. A traceback means
a bug in this package.
"""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence


class DdpMnistError(Exception):
    """An expected failure. Its message begins with what was typed and ends with what to do."""

    code = 1  # the exit code
    agreed = False  # whether the ranks have agreed that this one prints it

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code


class CheckFailed(DdpMnistError):
    """A proof or a check did not hold."""


class UsageError(DdpMnistError):
    """A flag or a configuration is wrong, or the environment contradicts it."""

    code = 2


class DataError(DdpMnistError):
    """The data set is missing, damaged or not the requested one."""

    code = 3


class CheckpointError(DdpMnistError):
    """A finished run or a checkpoint cannot be read, or does not fit the flags."""

    code = 4


class StorageError(DdpMnistError):
    """A folder cannot be written, or the disk is full."""

    code = 5


class PeerError(DdpMnistError):
    """Another process was lost, never arrived, or did not answer in time."""

    code = 6


class DivergedError(DdpMnistError):
    """The loss, the gradients or the weights are no longer finite numbers."""

    code = 7


class Preempted(DdpMnistError):
    """A signal stopped the run: all ranks agreed, and it is saved."""

    code = 143
    agreed = True  # raised on rank 0 alone


class FailedElsewhere(DdpMnistError):
    """Another rank failed first and prints why; this one ends silently with the same code."""

    code = 6


def one_line(error: DdpMnistError) -> str:
    """Return the line to print, e.g. `ddp-mnist: error: --epochs 0: must be ... (code 2)`."""
    return f"ddp-mnist: error: {printable(str(error))} (code {error.code})"


def printable(text: str) -> str:
    """Return one line without terminal control characters, which file names may contain."""
    words = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in words)


def shown_name(name: str) -> str:
    """Return a class's name as it is printed: in quotes if it would not be seen whole."""
    return name if name and printable(name) == name else repr(name)


def joined(names: Iterable[str], columns: int) -> str:
    """Return the names with commas between them, cut to so many columns by a final `...`."""
    return textwrap.shorten(", ".join(names), columns, placeholder=" ...")


def first_of(names: Sequence[str], most: int) -> list[str]:
    """Return at most so many of the names, and then `...` if there are more."""
    return [*names[:most], "..."] if len(names) > most else [*names]


def reason(error: BaseException) -> str:
    """Return, in one short line, why something failed, as the system or a library puts it.

    NCCL's errors begin with their place in the source; their reason, if any, follows `Last error:`
    or `NCCL Last Error:`.
    """
    text = getattr(error, "strerror", None) or str(error)
    parts = re.split(r"(?:nccl )?last error:", text, flags=re.IGNORECASE)
    text = next((part.strip() for part in parts[::-1] if part.strip()), type(error).__name__)
    return text.splitlines()[0][:200].rstrip("/. ")


def root_reason(error: BaseException) -> str:
    """Return the reason at the bottom of the chain; libraries wrap the system's error."""
    return reason([*causes(error)][-1])


def did_you_mean(typed: str, legal: Iterable[str]) -> str:
    """Return e.g. `; did you mean cnn?`, to end an error with; "" if no legal word is similar."""
    import difflib  # needed only for a wrong word

    near = difflib.get_close_matches(typed.lower(), legal, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then what caused it, and so on down to the first cause."""
    yield error
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        yield from causes(cause)
