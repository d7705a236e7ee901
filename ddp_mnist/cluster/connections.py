"""The TCP connections of this process: kept alive while nothing is said, and ended on purpose."""

import contextlib
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

# Firewalls of clouds forget a connection that is silent for some minutes; the system's own probes
# would begin after two hours. So many of them may stay unanswered: who is lost, others decide.
PROBE_S, PROBES = 10, 127
Connection = tuple[int, int]  # its descriptor and inode, as descriptors are used again


def _connected() -> Iterator[tuple[Connection, socket.socket]]:
    """Yield each TCP connection, with a duplicate that is closed after its turn."""
    for number in (int(each.name) for each in Path("/dev/fd").iterdir()):
        with contextlib.suppress(OSError):  # closed meanwhile, no socket, or not connected
            found = os.fstat(number)
            if stat.S_ISSOCK(found.st_mode):
                with socket.socket(fileno=os.dup(number)) as duplicate:
                    if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                        duplicate.getpeername()
                        yield (number, found.st_ino), duplicate


def keep_alive() -> set[Connection]:
    """Let the system probe each connection, so that none idles. Return them."""
    options = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": PROBES}
    found = set[Connection]()
    for connection, duplicate in _connected():
        with contextlib.suppress(OSError):  # it ends this moment
            duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if hasattr(socket, name):  # not all systems have them
                    duplicate.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            found.add(connection)
    return found


def shut_down(connections: Iterable[Connection]) -> None:
    """End these connections: whatever waits on one gets an error, here and at the other end."""
    for connection, duplicate in _connected():
        if connection in connections:
            with contextlib.suppress(OSError):  # the other end has gone this moment
                duplicate.shutdown(socket.SHUT_RDWR)
