"""File locks, by which processes agree who writes.

They are the kernel's flock, which ends with its process. Lustre and others may be mounted without
it: there filelock writes a file that names the process, and stale ones are removed here.
"""

import contextlib
import errno
import fcntl
import platform
import threading
import time
import warnings
from pathlib import Path

import psutil
from filelock import AcquireReturnProxy, FileLock, SoftFileLock, Timeout

POLL_S = 0.05
ANOTHER = "another process"
REFUSED = (errno.ENOLCK, errno.EOPNOTSUPP)  # from a disk that has locks but grants none (NFS)
FILTERS = threading.Lock()  # for warning filters: threads would undo each other's
FIRST_PIDS = 0xEFFFFFFC  # the PID namespace that every Linux machine starts with


def take(path: Path, wait: bool = False) -> AcquireReturnProxy[FileLock]:
    """Acquire the lock and return it, as a context manager that releases it.

    Raise Timeout if another process holds it and `wait` is false, OSError if the file cannot be
    written or the disk grants no locks.
    """
    lock = FileLock(path, thread_local=False)
    while True:
        try:
            with FILTERS, warnings.catch_warnings():
                # filelock falls back to a file
                warnings.filterwarnings("ignore", "flock not supported")
                return lock.acquire(timeout=0)
        except Timeout:
            if isinstance(lock, SoftFileLock) and (not holder(path) or (wait and is_empty(path))):
                remove_stale(path, wait)
            elif wait:
                time.sleep(POLL_S)
            else:
                raise


def remove_stale(path: Path, wait: bool) -> None:
    """Remove a lock's file if its process no longer runs; raise as `take` does.

    To remove it, this process takes a second lock and looks again: another one may have removed the
    file, and taken the lock, in between. One race remains: if a disk can exchange two names,
    filelock takes over a stale file without that second lock, perhaps between the look and the
    removal. Lustre cannot exchange names.
    """
    with (
        take(path.with_name(f"{path.name}.stale"), wait),
        contextlib.suppress(FileNotFoundError),  # it was released: a new one is not ours
    ):
        if not holder_of(path) or (wait and is_empty(path)):
            path.unlink()


def is_empty(path: Path) -> bool:
    """Return whether a lock's file has been empty for a minute; no process holds such a lock.

    A flock leaves such files, on another machine that mounts the same disk with flock. A file that
    is itself the lock is written at once.
    """
    with contextlib.suppress(FileNotFoundError):
        found = path.stat()
        return not found.st_size and time.time() - found.st_mtime > 60
    return False


def holder(path: Path) -> str:
    """Return the holder of the lock, e.g. `process 7 on node-a` or `another process`; "" if free.

    Nothing is written, as the file may be another user's. A holder without a name is `another
    process`; one on another machine, or in another container, is assumed to run.
    """
    with contextlib.suppress(FileNotFoundError):
        return holder_of(path)
    return ""


def holder_of(path: Path) -> str:
    """Return the holder of this file, as `holder` does; raise FileNotFoundError if it is gone."""
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return ""
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    return ANOTHER
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        raise
    except OSError:
        return ANOTHER
    written = text.splitlines() if text.endswith("\n") else []  # else it is being written
    pid, host, *started = [*written, "", ""]
    if not pid.isdecimal():
        return "a process that left no name"
    return "" if host == here() and not runs(int(pid), started) else f"process {pid} on {host}"


def here() -> str:
    """Return filelock's name for this machine and the container's namespace of pids."""
    try:
        pids = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        pids = FIRST_PIDS
    return platform.node() + ("" if pids == FIRST_PIDS else f"?pidns-{pids:x}")


def runs(pid: int, started: list[str]) -> bool:
    """Return whether the process runs; one that `started` at another time only reuses its PID.

    filelock writes one number: the boot in the upper bits, below 2**64 the ticks until the start.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        return int(ticks) == int(started[0]) % 2**64
    return psutil.pid_exists(pid)
