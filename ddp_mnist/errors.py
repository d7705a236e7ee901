"""The failures that end the program, each with its exit code and its one line.

The user sees one line on stderr: what was typed or found, where, and what to do; or, for what a
library raised, its own words and where the whole traceback lies.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError

from ddp_mnist.system.text import causes, printable, reason

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # no write there can succeed
TOO_MANY = (errno.EMFILE, errno.ENFILE)  # open files, of this process or of the machine
MORE_FILES = "raise the limit of open files, e.g. ulimit -n 65536"
LACKING = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)  # a disk does not have this service


class DdpMnistError(Exception):
    """An expected failure. Its message begins with what was typed and ends with what to do."""

    code = 1  # the exit code
    agreed = False  # whether the ranks have agreed that this one prints it
    blamed = False  # whether the words are a library's, see `blame`; its traceback is kept
    traceback_file = ""  # where that is, if it has been written
    where = ""  # the rank that failed and its machine, if rank 0 raises it for another machine

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
    """A signal stopped the program, and this process says so; a run is saved by then."""

    code = 143
    agreed = True  # raised on one rank alone


class FailedElsewhere(DdpMnistError):
    """Another rank failed first and prints why; this one ends silently with the same code."""

    code = 6


class Stopped(KeyboardInterrupt):
    """A stop signal, of whatever kind, before there is anything to save."""

    def __init__(self, message: str, code: int = 130) -> None:  # none in a pickle
        super().__init__(message)
        self.code = code


# All that is not 0; after signals as well
CODES = (*range(1, 8), 129, 130, 143)


@contextlib.contextmanager
def blame(typed: str, kind: type[DdpMnistError], fix: str = "") -> Iterator[None]:
    """Raise `kind` for any other error of the block: what was typed, and the error's own words.

        with blame("--dataset photos", DataError):
            ...

    The words are those of the first cause, as libraries wrap the system's errors. For a full or
    read-only disk it is a StorageError, whatever the `kind`. The user's code may call sys.exit(),
    which is an error here too.
    """
    try:
        yield
    except DdpMnistError:
        raise
    except (Exception, SystemExit) as error:
        raise blamed(typed, kind, error, fix) from error


def blamed(typed: str, kind: type[DdpMnistError], error: BaseException, fix: str) -> DdpMnistError:
    """Return the error that `blame` raises."""
    *_, root = causes(error)
    why, name = reason(root), type(root).__name__
    is_systems = bool(getattr(root, "strerror", None))  # whose words say it all
    if isinstance(root, UnpicklingError):  # torch's advice is to run what is in the file
        why = "it holds more than tensors, or is damaged; nothing in it was run"
    elif is_systems:
        file = os.fsdecode(getattr(root, "filename", None) or "")
        *_, last = typed.split(": ")
        is_told = file in typed or str(Path(file).parent) in typed or file.endswith(f"/{last}")
        why = why if is_told else f"{file}: {why}"
    elif why != name:
        why = f"{name}: {why}"
    kind = {StorageError.code: StorageError, UsageError.code: UsageError}.get(exit_code(root), kind)
    fix = MORE_FILES if getattr(root, "errno", None) in TOO_MANY else fix
    found = kind("; ".join(filter(None, [f"{typed}: {why}", fix])))
    found.blamed = not is_systems
    found.agreed = getattr(error, "agreed", False)
    return found


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error, which may be a library's or the system's."""
    if isinstance(error, DdpMnistError | Stopped):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return 130
    number = getattr(error, "errno", None)
    return StorageError.code if number in FULL else UsageError.code if number in TOO_MANY else 1


def one_line(error: DdpMnistError) -> str:
    """Return the line to print, e.g. `ddp-mnist: error: --epochs 0: must be ... (code 2)`."""
    traceback = "; --debug shows the traceback" if error.blamed else ""
    if error.traceback_file:
        traceback = f"; the traceback is in {error.traceback_file}"
    return f"ddp-mnist: error: {printable(str(error) + traceback)} (code {error.code})"
