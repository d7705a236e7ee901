"""Locks on files, through which processes agree who writes.

They are the kernel's flock, which a killed process frees. Lustre and others may be mounted without
it: there filelock writes a file that names the process, and we remove what a killed one left.
"""

import errno
import fcntl
import time
import warnings
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, SoftFileLock, Timeout
from filelock._identity import owner_is_stale
from filelock._soft import parse_lock_holder

POLL_S = 0.05
ANOTHER = "another process"
REFUSED = (errno.ENOLCK, errno.EOPNOTSUPP)  # by a disk that knows locks, and gives none (NFS)


def take(path: Path, wait: bool = False) -> AcquireReturnProxy[FileLock]:
    """Return the lock, taken; it is a context manager that frees it.

    Raise Timeout if another process has it and this one is not to `wait`, OSError if the file
    cannot be written or the disk gives no locks.
    """
    warnings.filterwarnings("ignore", "flock not supported")  # filelock's, on its way to a file
    lock = FileLock(path, thread_local=False)
    while True:
        try:
            return lock.acquire(timeout=0)
        except Timeout:
            if isinstance(lock, SoftFileLock) and not holder(path):
                path.unlink(missing_ok=True)
            elif wait:
                time.sleep(POLL_S)
            else:
                raise


def holder(path: Path) -> str:
    """Return who has the lock, e.g. `process 7 on node-a` or `another process`; "" if nobody has.

    Nothing is written, as the file may be another user's. What cannot be found out is `another
    process`; a process on another machine is taken to live.
    """
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return ""
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    return ANOTHER
            named = parse_lock_holder(file.read().decode(errors="replace"))
    except OSError as error:
        return "" if isinstance(error, FileNotFoundError) else ANOTHER
    if named is None:
        return "a process that left no name"
    return "" if owner_is_stale(*named) else f"process {named.pid} on {named.hostname}"
