"""The main port, where rank 0 or the launcher's agent serves the store and others connect.

The store has no authentication. It listens on all interfaces, so the main port belongs on a private
network; on loopback alone if that is where all look for it.
"""

import contextlib
import errno
import resource
import socket
import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ddp_mnist.cluster.interfaces import is_ipv4, loopback_of
from ddp_mnist.cluster.launch import CAN_JOIN, Launch
from ddp_mnist.errors import PeerError, UsageError
from ddp_mnist.system.deadline import with_deadline
from ddp_mnist.system.text import reason

SERVED: dict[int, dist.TCPStore] = {}  # by port; DDP's reducer holds each until the end
NO_WAY = (errno.EADDRNOTAVAIL, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT)
LO_IS_DOWN = "this machine cannot reach itself, is the interface lo up (ip link set lo up)?"
BY_HAND = "is rank 0 running, is the address right, is the port open?"
BY_LAUNCHER = f"see what the others say, then start again; if machines join or leave, {CAN_JOIN}"


def open_store(launch: Launch, who: str, timeout_s: float) -> dist.TCPStore:
    """Return the store at the main address; this process serves it if that is its task.

    Raise UsageError if the port is in use; PeerError if nothing answers there, or something that
    is not a store.
    """
    assert launch.main_host and launch.main_port
    if launch.rank == 0 and not launch.agent_store:
        return serve_store(launch.main_host, launch.main_port, timeout_s)
    where, deadline = (launch.main_host, launch.main_port), time.monotonic() + timeout_s
    shown = f"{launch.main_host}:{launch.main_port}"
    while True:  # plain sockets first: TCPStore retries in C++, and prints warnings as it does
        left = max(0.1, min(5.0, deadline - time.monotonic()))
        try:
            with socket.create_connection(where, timeout=left):
                break
        except (OSError, UnicodeError) as error:  # UnicodeError: a name such as a..b
            if time.monotonic() >= deadline:
                why = f"reached nobody there within {timeout_s:g} s ({reason(error)})"
                fix = BY_LAUNCHER if launch.agent_store else BY_HAND
                if loopback_of(launch.main_host) and getattr(error, "errno", None) in NO_WAY:
                    fix = LO_IS_DOWN
                raise PeerError(f"{shown}: {who} {why}; {fix}") from None
        time.sleep(min(0.2, left))
    try:  # TCPStore's own time-out is shorter, unless what answers is not a store
        return with_deadline(partial(_tcp_store, *where, timeout_s), timeout_s + 1)
    except (RuntimeError, TimeoutError) as error:
        raise PeerError(
            f"{shown}: {who} found something there that is not rank 0 ({reason(error)});"
            " is the address right, is the port used by another program?"
        ) from None


def serve_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Serve the store on `port` until this process ends. Raise UsageError if the port is in use.

    `host` is the name by which the other ranks reach it.
    """
    if port not in SERVED:  # otherwise this process is training a second time
        allow_open_files()
        own = loopback_of(host) or "127.0.0.1"  # it reaches itself so, whatever the others use
        try:
            with _listen(host, port) as server:
                socket.create_connection((own, port), 5).close()  # in Python's words, not in C++'s
                SERVED[port] = _tcp_store(own, port, timeout_s, server.detach())
        except (OSError, RuntimeError) as error:
            why = reason(error).partition(" (while")[0]  # Python adds the address
            if getattr(error, "errno", None) in NO_WAY:
                raise UsageError(f"{own}: not reached from here ({why}); {LO_IS_DOWN}") from None
            if isinstance(error, TimeoutError | ConnectionRefusedError):  # it listens by now
                fix = "let the firewall accept this machine's own traffic (lo)"
                fault = f"{own}:{port}: opened, but not reached from here ({why})"
                raise UsageError(f"{fault}; {fix}") from None
            raise UsageError(
                f"port {port}: cannot be opened here ({why}); stop the program that uses it, or"
                " give every process another port"
            ) from None
    return SERVED[port]


def allow_open_files() -> None:
    """Allow this process as many open files as it may ask for: each rank holds two of them."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # beyond what the system has
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `port` for all who reach this machine as `host`.

    On loopback that is this machine alone.

    torch's store looks up the name of each peer before it serves the next one. On a socket of IPv6,
    which it would open, a peer's 10.0.0.1 is ::ffff:10.0.0.1, a name that /etc/hosts cannot give:
    every connection then costs a question to the name server, and 10 s if none answers.
    """
    own = loopback_of(host)
    both = not own and not is_ipv4(host) and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in own else socket.AF_INET
    return socket.create_server((own, port), family=family, dualstack_ipv6=both)


def _tcp_store(host: str, port: int, timeout_s: float, served: int | None = None) -> dist.TCPStore:
    """Return a connection to the store, which this process serves on the socket `served`."""
    return dist.TCPStore(
        host,
        port,
        is_master=served is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=served,
    )
