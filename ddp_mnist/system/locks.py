"""File locks, by which processes agree who writes: filelock's, with a word about crashes.

They are the kernel's flock, which ends with its process. On a disk without it filelock falls back
to a file, with a warning; a crash, or a machine that is gone, may leave that file behind.
"""

import contextlib
import fcntl
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, SoftFileLock, Timeout

LEFT_S = 600.0  # to wait for a lock that is a file


class HeldError(OSError):
    """Another process holds the lock."""


def take(path: Path, wait: bool = False) -> AcquireReturnProxy[FileLock]:
    """Acquire the lock and return it, as a context manager that releases it.

    Raise HeldError if another process holds it and `wait` is false, or if the lock is a file that
    stays too long; OSError if it cannot be written or the disk grants no locks.
    """
    lock = FileLock(path, thread_local=False)
    with contextlib.suppress(Timeout):
        return lock.acquire(timeout=0)
    is_file = isinstance(lock, SoftFileLock)
    if wait:
        with contextlib.suppress(Timeout):
            return lock.acquire(timeout=LEFT_S if is_file else -1)
    left = f"; if none runs, a crash left {path}: remove it" if is_file else ""
    raise HeldError(f"another process holds its lock{left}")


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock, or may hold it; nothing is written."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # it is held, cannot be asked, or may not be read
        return not isinstance(error, FileNotFoundError)
    return False
