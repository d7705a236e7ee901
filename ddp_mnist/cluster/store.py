"""The store through which processes exchange JSON, by key, outside of collectives.

It is torch.distributed's TCPStore at the main address, served by rank 0 or by the launcher's agent.
It listens on all interfaces without authentication, so the main port belongs on a private network.
"""

import contextlib
import json
import math
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_mnist.cluster.heartbeat import Heartbeat
from ddp_mnist.cluster.interfaces import why_port_is_taken
from ddp_mnist.deadline import with_deadline
from ddp_mnist.errors import FailedElsewhere, PeerError, UsageError, reason

POLL_S = 0.05
SERVED: dict[int, dist.TCPStore] = {}  # by port; DDP's reducer holds each to the end
GONE = "gone"  # the keys under which each rank says that it has left
LIVENESS = "liveness requested"  # the key for which every rank has to answer


def host_id() -> str:
    """Return a name that differs between machines, and between network namespaces on one machine.

    Cloned machines share a host name, and the first namespace has one number on all of them: only
    the boot id tells them apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        boot, network = "", 0
    return f"{platform.node()}/{boot}/{network}"


@dataclass(eq=False)
class Store:
    """The key-value store that all ranks share.

    A key that holds a rank's value is written by that rank alone. Waiting is polling, so that it
    ends at once when another rank reports its failure; for a rank that lives it may take as long as
    that works. Calls raise RuntimeError when the store is gone or does not answer in time.
    """

    c10d: dist.Store
    rank: int
    world_size: int
    served_by_launcher: bool = False  # and ends with it; else with rank 0
    patience_s: float = 60.0  # how long one call may take
    hosts: list[str] = field(default_factory=list)  # per rank its `host_id`, once all have met
    addresses: list[str | None] = field(default_factory=list)  # of their machines, towards rank 0's
    lost: list[int] = field(default_factory=list)  # the ranks that are known to be dead
    unreachable = False  # nobody serves the store any more, or the link to it is dead
    heartbeat: Heartbeat | None = None  # from this rank's seat in the meeting on
    signalled: float | None = None  # time.monotonic() when a stop signal came to this process

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of torch's store, which over a dead link would wait for good."""
        if self.unreachable:
            raise RuntimeError("the connection to the main address is gone")
        try:
            return with_deadline(lambda: getattr(self.c10d, method)(*args), self.patience_s)
        except (RuntimeError, TimeoutError) as error:
            self.unreachable = True
            late = "timed out: " if isinstance(error, TimeoutError) else ""
            raise RuntimeError(f"{late}{error}") from None

    def set(self, key: str, value: Any) -> None:
        self.call("set", key, json.dumps(value))

    def exists(self, key: str) -> bool:
        return self.call("check", [key])

    def get(self, key: str, within_s: float = math.inf) -> Any:
        """Return the value of `key` as soon as it is there.

        Raise as `raise_if_failed` does, and PeerError after `within_s`.
        """
        self._wait(lambda: self.exists(key), f"no word of {key} from another process", within_s)
        return json.loads(self.call("get", key))

    def broadcast_from_rank0(self, key: str, decide: Callable[[], Any]) -> Any:
        """Return on every rank what `decide` returns on rank 0, however long it takes."""
        if self.rank == 0:
            self.set(key, decide())
        return self.get(key)

    def all_gather(self, key: str, mine: Any, within_s: float = math.inf) -> list[Any]:
        """Return each rank's value, by rank, on every rank; raise as `get` does."""
        self.set(f"{key}/{self.rank}", mine)
        keys = [f"{key}/{rank}" for rank in range(self.world_size)]
        return self.broadcast_from_rank0(key, lambda: [self.get(k, within_s) for k in keys])

    def barrier(self, key: str) -> None:
        """Return once every rank has come here; raise as `raise_if_failed` does."""
        self.call("add", key, 1)
        self._wait(lambda: self.call("add", key, 0) >= self.world_size)

    def _wait(
        self, is_there: Callable[[], bool], missing: str = "", within_s: float = math.inf
    ) -> None:
        deadline = time.monotonic() + within_s
        while not is_there():
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise PeerError(
                    f"{missing} within {within_s:g} s; see what the others say, then start again"
                )
            time.sleep(POLL_S)

    def close(self) -> None:
        """Return once every rank has come to its end; the one that serves the store leaves last."""
        self.barrier("end")
        self.shutdown()

    def shutdown(self, patience_s: float = 5) -> None:
        """Leave the store: rank 0, which may serve it, once the others have left or are lost."""
        if self.heartbeat:
            self.heartbeat.stop()
        with contextlib.suppress(RuntimeError):  # the store is gone: nobody needs rank 0
            self.set(f"{GONE}/{self.rank}", True)
            others = set(range(self.world_size)) - set(self.lost)
            deadline = time.monotonic() + patience_s
            while self.rank == 0 and time.monotonic() < deadline:
                if self.call("check", [f"{GONE}/{rank}" for rank in others]):
                    return
                time.sleep(POLL_S / 10)

    def report_failure(self, message: str, code: int) -> dict[str, Any] | None:
        """Record this rank's error as the run's. Return None, or the one that came before it."""
        mine = {"rank": self.rank, "message": message, "code": code, "lost": self.lost}
        try:
            first = json.loads(self.call("compare_set", "failure", "", json.dumps(mine)))
        except RuntimeError:  # rank 0 served the store and is dead
            return None
        self.lost = first["lost"]
        return None if first["rank"] == self.rank else first

    def failure(self) -> dict[str, Any] | None:
        """Return the failure reported first: rank, message, code, lost. None if there is none."""
        with contextlib.suppress(RuntimeError):
            return json.loads(self.call("get", "failure")) if self.exists("failure") else None
        return None

    def raise_if_failed(self) -> None:
        """Raise FailedElsewhere if another rank has reported its failure, PeerError if one died."""
        failure = self.failure()
        if failure and failure["rank"] != self.rank:
            raise FailedElsewhere(failure["message"], failure["code"])
        if self.heartbeat and (silent := self.heartbeat.silent):
            self.lost = silent
            raise self.lost_contact(silent, f"no sign of life for {self.heartbeat.timeout_s:g} s")

    def lost_contact(self, lost: list[int], why: str, more: str = "") -> PeerError:
        """Return the error that names the lost ranks; `more` follows its advice."""
        who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
        if self.unreachable and self.served_by_launcher:
            who = "the launcher and a rank"
        return PeerError(
            f"lost contact with {who} of {self.world_size} ({why}); see what that process says,"
            f" then start the run again{more}"
        )

    def request_liveness(self) -> None:
        """Request an answer from every rank, and answer for this one."""
        with contextlib.suppress(RuntimeError):
            self.set(LIVENESS, True)
            self.set(f"alive/{self.rank}", True)

    def find_dead_ranks(self, patience_s: float = 1.5) -> list[int]:
        """Return the ranks that do not answer after a connection broke.

        Every survivor has to call this at about the same time. A failure that a rank reports ends
        the search: it says which ranks are lost.
        """
        self.patience_s = min(self.patience_s, 3.0)  # the time-out has passed already
        self.request_liveness()
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not self.unreachable:
            if failure := self.failure():
                return failure["lost"]
            time.sleep(POLL_S)
        try:
            ranks = range(self.world_size)
            self.lost = [rank for rank in ranks if not self.exists(f"alive/{rank}")]
        except RuntimeError:
            self.lost = [] if self.served_by_launcher else [0]
        return self.lost


def open_store(host: str, port: int, *, serve: bool, timeout_s: float, who: str) -> dist.TCPStore:
    """Serve the store on `port`, or connect to the one at `host`:`port`.

    Plain sockets try first: TCPStore retries in C++, and prints warnings as it does. Raise
    UsageError if the port to serve on is in use, PeerError if nobody, or no store, answers.
    """
    if serve and port in SERVED:  # by this process, which trains for a second time
        return SERVED[port]
    deadline = time.monotonic() + timeout_s
    while not serve:
        left = max(0.1, min(5.0, deadline - time.monotonic()))
        try:
            with socket.create_connection((host, port), timeout=left):
                break
        except (OSError, UnicodeError) as error:  # the latter for a name such as a..b
            if time.monotonic() >= deadline:
                raise PeerError(
                    f"{host}:{port}: {who} reached nobody there within {timeout_s:g} s ("
                    f"{reason(error)}); is rank 0 running, is the address right, is the port open?"
                ) from None
        time.sleep(min(0.2, left))
    if not (why := why_port_is_taken(port) if serve else ""):
        # Its own server is at localhost, whatever address the others know it by.
        place, timeout = "localhost" if serve else host, timedelta(seconds=timeout_s)
        store = partial(dist.TCPStore, place, port, is_master=serve, timeout=timeout)
        try:  # its own time-out comes first, unless what answers is no store
            opened = with_deadline(lambda: store(wait_for_workers=False), timeout_s + 1)
            if serve:
                SERVED[port] = opened
            return opened
        except (RuntimeError, TimeoutError) as error:
            why = reason(error)
    if serve:
        raise UsageError(
            f"port {port}: cannot be opened here ({why}); stop the program that uses it, or give"
            " every process another port"
        )
    raise PeerError(
        f"{host}:{port}: {who} found something there that is not rank 0 ({why});"
        " is the address right, is the port used by another program?"
    )
