"""."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_mnist.errors import FailedElsewhere, PeerError, UsageError, reason

POLL_S = 0.05


def host_id() -> str:
    """A name that differs between machines, and between network namespaces on one machine.

    Cloned machines share a host name, and the first namespace has one number on all of them: only
    the boot tells them apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        boot, network = "", 0
    return f"{platform.node()}/{boot}/{network}"


class Store:
    """The store, with what this project posts on it.

    Every key is written by one rank. Waiting is polling, so that a failure that another rank
    posted ends the wait at once.

    Args:
        c10d: torch.distributed's store, shared by all ranks.
        rank, world_size: this process and how many there are.
        hosts: one `host_id` per rank, once all are known.
        addresses: this machine's own address towards the main one, per rank, where there is one.
        lost: the ranks that are known to be gone.
        served_by_launcher: the store goes with the launcher, else with rank 0.
        unreachable: nobody serves the store any more, or the link to it is dead.
        patience_s: how long one call of the store may take.
        signalled: time.monotonic() when a stop signal came to this process; None before.
    """

    def __init__(
        self,
        c10d: dist.Store,
        rank: int,
        world_size: int,
        served_by_launcher: bool = False,
        patience_s: float = 60.0,
    ) -> None:
        self.c10d = c10d
        self.rank = rank
        self.world_size = world_size
        self.hosts: list[str] = []
        self.addresses: list[str | None] = []
        self.lost: list[int] = []
        self.served_by_launcher = served_by_launcher
        self.unreachable = False
        self.patience_s = patience_s
        self.signalled: float | None = None
        self._went = False

    def call(self, method: str, *args: Any) -> Any:
        """A call of the store. Over a dead link torch's would wait for good.

        Raises:
            RuntimeError: the store is gone, or does not answer in time.
        """
        if self.unreachable:
            raise RuntimeError("the connection to the main address is gone")
        answer: list[Any] = []

        def call() -> None:
            try:
                answer.append(getattr(self.c10d, method)(*args))
            except RuntimeError as error:
                answer.append(error)

        thread = threading.Thread(target=call, daemon=True)  # it can be left behind
        thread.start()
        thread.join(self.patience_s)
        if not answer or isinstance(answer[0], RuntimeError):
            self.unreachable = True
            timed_out = RuntimeError(f"timed out: no answer within {self.patience_s:g} s")
            raise answer[0] if answer else timed_out
        return answer[0]

    def set(self, key: str, value: Any) -> None:
        self.call("set", key, json.dumps(value))

    def exists(self, key: str) -> bool:
        return self.call("check", [key])

    def get(self, key: str, within_s: float = math.inf) -> Any:
        """Waits for `key` for as long as it takes, or until a rank posts its failure.

        Raises:
            PeerError: it is not there within `within_s`.
        """
        deadline = time.monotonic() + within_s
        while not self.exists(key):
            self._wait(deadline, f"no word of {key} from another process within {within_s:g} s")
        return json.loads(self.call("get", key))

    def broadcast_from_rank0(self, key: str, decide: Callable[[], Any]) -> Any:
        """Rank 0's answer on every rank. Others wait by polling, however long it takes."""
        if self.rank == 0:
            self.set(key, decide())
        return self.get(key)

    def barrier(self, key: str, within_s: float = math.inf) -> None:
        """Returns once every rank has come here, however long it takes.

        Raises:
            PeerError: not all of them have within `within_s`.
        """
        deadline = time.monotonic() + within_s
        self.call("add", key, 1)
        while (came := self.call("add", key, 0)) < self.world_size:
            told = f"{came} of {self.world_size} processes came to '{key}' within {within_s:g} s"
            self._wait(deadline, told)

    def _wait(self, deadline: float, told: str) -> None:
        self.raise_if_failed()
        if time.monotonic() > deadline:
            raise PeerError(f"{told}; see what the others say, then start the run again")
        time.sleep(POLL_S)

    def close(self) -> None:
        """Returns once every rank has come to its end; the one that serves the store goes last."""
        self.barrier("end", within_s=self.patience_s)
        self.shutdown(self.world_size - 1)

    def shutdown(self, others: int, patience_s: float = 5) -> None:
        """Rank 0, which may serve the store, returns once `others` ranks have called this too.

        Those that are lost are not waited for. Whoever calls it again has gone already.
        """
        if self._went:
            return
        self._went = True
        awaited = others - len(self.lost)
        with contextlib.suppress(RuntimeError):  # the store is gone: nothing to keep up
            left = self.call("add", "left", 1 if self.rank else 0)
            deadline = time.monotonic() + patience_s
            while self.rank == 0 and left < awaited and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
                left = self.call("add", "left", 0)

    def report_failure(self, message: str, code: int) -> dict[str, Any] | None:
        """Posts this rank's error as the run's. None if it is the first, else the first one."""
        mine = {"rank": self.rank, "message": message, "code": code, "lost": self.lost}
        try:
            first = json.loads(self.call("compare_set", "failure", "", json.dumps(mine)))
        except RuntimeError:  # rank 0 served the store and is gone: nobody can be asked
            return None
        self.lost = first["lost"]
        return None if first["rank"] == self.rank else first

    def failure(self) -> dict[str, Any] | None:
        """The failure that was posted first: rank, message, code, lost. None if there is none."""
        try:
            return json.loads(self.call("get", "failure")) if self.exists("failure") else None
        except RuntimeError:
            return None

    def raise_if_failed(self) -> None:
        failure = self.failure()
        if failure and failure["rank"] != self.rank:
            raise FailedElsewhere(failure["message"], failure["code"])

    def find_dead_ranks(self, patience_s: float = 1.5) -> list[int]:
        """After a connection broke: the ranks that do not post that they are still here.

        Every survivor has to call this at about the same time. Once a rank has posted its failure,
        that is the better answer, and nothing is waited for.
        """
        self.patience_s = min(self.patience_s, 3.0)  # the time-out has passed already
        self.request_liveness()
        try:
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if failure := self.failure():
                    return failure["lost"]
                time.sleep(POLL_S)
            ranks = range(self.world_size)
            self.lost = [rank for rank in ranks if not self.exists(f"survivor/{rank}")]
        except RuntimeError:
            self.lost = [] if self.served_by_launcher else [0]
        return self.lost

    def liveness_requested(self) -> bool:
        """Whether a rank is looking for silent ones, for which all have to answer."""
        with contextlib.suppress(RuntimeError):
            return self.exists("roll call")
        return False

    def request_liveness(self) -> None:
        """Asks all ranks whether they are still here, and answers for this one."""
        with contextlib.suppress(RuntimeError):
            self.set("roll call", True)
            self.set(f"survivor/{self.rank}", True)


def open_store(host: str, port: int, *, serve: bool, timeout_s: float, who: str) -> dist.TCPStore:
    """Serves the store on `port`, or connects to the one at `host`:`port`.

    Plain sockets are tried first: TCPStore retries in C++, prints warnings as it does, and cannot
    be interrupted. Where something else than a store answers it would wait for good, so it is
    opened in a thread that can be left behind.
    """
    if serve:
        _refuse_used_port(port)
        host = "localhost"  # its own server, whatever name or address the others see it under
    else:
        _wait_for_answer(host, port, timeout_s, who)
    outcome: list[dist.TCPStore | RuntimeError] = []

    def connect() -> None:
        timeout = timedelta(seconds=timeout_s)
        try:
            outcome.append(
                dist.TCPStore(host, port, is_master=serve, timeout=timeout, wait_for_workers=False)
            )
        except RuntimeError as error:
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s + 1)  # its own time-out comes first, where it keeps one
    if outcome and isinstance(outcome[0], dist.TCPStore):
        return outcome[0]
    reason = str(outcome[0]).splitlines()[0] if outcome else "no answer"
    if serve:  # it was free a moment ago
        raise _port_in_use(port, reason)
    raise PeerError(
        f"{host}:{port}: {who} found something there that is not rank 0 ({reason});"
        " is the address right, is the port used by another program?"
    )


def _refuse_used_port(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise _port_in_use(port, reason(error)) from None


def _port_in_use(port: int, reason: str) -> UsageError:
    return UsageError(
        f"port {port}: cannot be opened here ({reason}); end what uses it, or give every process"
        " another port"
    )


def _wait_for_answer(host: str, port: int, timeout_s: float, who: str) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left = deadline - time.monotonic()
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, left))):
                return
        except (OSError, UnicodeError) as error:  # the latter for a name such as a..b
            if time.monotonic() >= deadline:
                why = reason(error)
                raise PeerError(
                    f"{host}:{port}: {who} reached nobody there within {timeout_s:g} s ({why});"
                    " is rank 0 running, is the address right, is the port open?"
                ) from None
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
