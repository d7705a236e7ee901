"""The main port, where rank 0 or the launcher's agent serves the store and others connect.

The store listens on all interfaces without authentication, so the main port belongs on a private
network.
"""

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ddp_mnist.cluster.interfaces import why_port_is_taken
from ddp_mnist.cluster.launch import CAN_JOIN, Launch
from ddp_mnist.errors import PeerError, UsageError, reason
from ddp_mnist.system.deadline import with_deadline

SERVED: dict[int, dist.TCPStore] = {}  # by port; DDP's reducer holds each until the end
BY_HAND = "is rank 0 running, is the address right, is the port open?"
BY_LAUNCHER = f"see what the others say, then start again; if machines join or leave, {CAN_JOIN}"
OnWait = Callable[[str], object] | None  # called with a line that says what the wait is for


def open_store(launch: Launch, who: str, timeout_s: float, on_wait: OnWait) -> dist.TCPStore:
    """Return the store at the main address; this process serves it if that is its task.

    Raise UsageError if the port is in use; PeerError if nothing answers there, or something that
    is not a store.
    """
    assert launch.main_host and launch.main_port
    serve = launch.rank == 0 and not launch.agent_store
    if serve:
        return serve_store(launch.main_port, timeout_s)
    where, deadline = (launch.main_host, launch.main_port), time.monotonic() + timeout_s
    shown = "{}:{}".format(*where)
    while True:  # plain sockets first: TCPStore retries in C++, and prints warnings as it does
        left = max(0.1, min(5.0, deadline - time.monotonic()))
        try:
            with socket.create_connection(where, timeout=left):
                break
        except (OSError, UnicodeError) as error:  # UnicodeError: a name such as a..b
            if time.monotonic() >= deadline:
                why = f"reached nobody there within {timeout_s:g} s ({reason(error)})"
                fix = BY_LAUNCHER if launch.agent_store else BY_HAND
                raise PeerError(f"{shown}: {who} {why}; {fix}") from None
        if on_wait:
            on_wait(waiting(deadline, f"rank 0 at {shown}"))
        time.sleep(min(0.2, left))
    try:  # TCPStore's own time-out is shorter, unless what answers is not a store
        return with_deadline(partial(_tcp_store, *where, timeout_s), timeout_s + 1)
    except (RuntimeError, TimeoutError) as error:
        raise PeerError(
            f"{shown}: {who} found something there that is not rank 0 ({reason(error)});"
            " is the address right, is the port used by another program?"
        ) from None


def serve_store(port: int, timeout_s: float) -> dist.TCPStore:
    """Serve the store on `port` until this process ends. Raise UsageError if the port is in use."""
    if port not in SERVED:  # otherwise this process is training a second time
        why = why_port_is_taken(port)  # TCPStore would retry, as above
        try:
            if not why:
                # It connects to itself at localhost, whatever address the others use.
                SERVED[port] = _tcp_store("localhost", port, timeout_s, is_master=True)
        except RuntimeError as error:
            why = reason(error)
        if why:
            raise UsageError(
                f"port {port}: cannot be opened here ({why}); stop the program that uses it, or"
                " give every process another port"
            )
    return SERVED[port]


def _tcp_store(host: str, port: int, timeout_s: float, is_master: bool = False) -> dist.TCPStore:
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=is_master, timeout=timeout, wait_for_workers=False)


def waiting(deadline: float, who: str) -> str:
    """Return a line about waiting for `who` until the `deadline`, a time.monotonic()."""
    return f"waiting up to {max(0, deadline - time.monotonic()):.0f} s for {who} ..."
