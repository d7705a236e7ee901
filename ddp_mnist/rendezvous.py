"""How the processes find each other, and what they tell each other outside of collectives.

All go through one small key-value store at the main address: torch.distributed's TCPStore, served
by rank 0 or by the launcher's agent. It listens on all interfaces without authentication, so the
main port belongs on a private network.
"""

from __future__ import annotations

import json
import platform
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_mnist.errors import FailedElsewhere, PeerError, UsageError
from ddp_mnist.launch import Launch

POLL_S = 0.05


def host_id() -> str:
    """A name that differs between machines, and between network namespaces on one machine."""
    try:
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        network = 0
    return f"{platform.node()}/{network}"


class Board:
    """The store, with what this project posts on it.

    Every key is written by one rank. Waiting is polling, so that a failure that another rank
    posted ends the wait at once.

    Args:
        store: shared by all ranks.
        rank, world_size: this process and how many there are.
        hosts: one `host_id` per rank, once all are known.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size
        self.hosts: list[str] = []

    def post(self, key: str, value: Any) -> None:
        self.store.set(key, json.dumps(value))

    def has(self, key: str) -> bool:
        return self.store.check([key])

    def read(self, key: str) -> Any:
        """Waits for `key` for as long as it takes, or until a rank posts its failure."""
        while not self.has(key):
            self.raise_if_failed()
            time.sleep(POLL_S)
        return json.loads(self.store.get(key))

    def decided_by_rank_0(self, key: str, decide: Callable[[], Any]) -> Any:
        """Rank 0's answer on every rank. Others wait by polling, however long it takes."""
        if self.rank == 0:
            self.post(key, decide())
        return self.read(key)

    def wait_for_all(self, key: str) -> None:
        """Returns once every rank has come here, however long it takes."""
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.world_size:
            self.raise_if_failed()
            time.sleep(POLL_S)

    def leave(self) -> None:
        """Returns once every rank has come to its end; the one that serves the store goes last."""
        self.wait_for_all("end")
        if self.rank != 0:
            self.store.add("left", 1)
        deadline = time.monotonic() + 5
        while self.rank == 0 and time.monotonic() < deadline:
            if self.store.add("left", 0) == self.world_size - 1:
                return
            time.sleep(POLL_S / 10)

    def claim_failure(self, message: str, code: int) -> dict[str, Any] | None:
        """Posts this rank's error as the run's. None if it is the first, else the first one."""
        mine = {"rank": self.rank, "message": message, "code": code}
        try:
            first = json.loads(self.store.compare_set("failure", "", json.dumps(mine)))
        except RuntimeError:  # rank 0 served the store and is gone: nobody can be asked
            return None
        return None if first["rank"] == self.rank else first

    def failure(self) -> dict[str, Any] | None:
        """The failure that was posted first: rank, message, code. None if there is none."""
        try:
            return json.loads(self.store.get("failure")) if self.has("failure") else None
        except RuntimeError:
            return None

    def raise_if_failed(self) -> None:
        failure = self.failure()
        if failure and failure["rank"] != self.rank:
            raise FailedElsewhere(failure["message"], failure["code"])

    def silent_ranks(self, patience_s: float = 1.5) -> list[int]:
        """After a connection broke: the ranks that do not post that they are still here."""
        try:
            self.post(f"survivor/{self.rank}", True)
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                time.sleep(POLL_S)
            ranks = range(self.world_size)
            return [rank for rank in ranks if not self.has(f"survivor/{rank}")]
        except RuntimeError:
            return [0]  # rank 0 served the store


def meet(launch: Launch, timeout_s: float) -> Board:
    """Opens the store and returns once every rank has posted where it runs.

    Raises:
        PeerError: nobody answers at the main address, or not all came, within `timeout_s`.
        UsageError: the main port is in use, or two processes have the same rank.
    """
    if launch.world_size == 1 and not launch.agent_store:
        return Board(dist.HashStore(), 0, 1)
    assert launch.main_host is not None and launch.main_port is not None
    store = open_store(
        launch.main_host,
        launch.main_port,
        serve=launch.rank == 0 and not launch.agent_store,
        timeout_s=timeout_s,
        who=f"rank {launch.rank} of {launch.world_size}",
    )
    board = Board(
        dist.PrefixStore(f"ddp_mnist/{launch.attempt}", store), launch.rank, launch.world_size
    )
    _gather(board, timeout_s, f"{launch.main_host}:{launch.main_port}", "process")
    return board


def meet_machines(host: str, port: int, rank: int, machines: int, timeout_s: float) -> Board:
    """`meet` for machines that have started no process yet; machine 0 serves the store."""
    who = f"machine {rank} of {machines}"
    store = open_store(host, port, serve=rank == 0, timeout_s=timeout_s, who=who)
    board = Board(dist.PrefixStore("machines", store), rank, machines)
    _gather(board, timeout_s, f"{host}:{port}", "machine")
    return board


def check_same(board: Board, facts: dict[str, Any]) -> None:
    """Compares what every rank believes: configuration, data digest, package versions.

    DDP compares the shapes of the parameters and nothing else.

    Raises:
        UsageError: names the first fact that differs, its values and their ranks.
    """
    board.post(f"facts/{board.rank}", facts)

    def compare() -> str:
        everyone = [board.read(f"facts/{rank}") for rank in range(board.world_size)]
        for key in facts:
            values = [theirs.get(key) for theirs in everyone]
            odd = [rank for rank, value in enumerate(values) if value != values[0]]
            if odd:
                return (
                    f"{key}: rank 0 has {values[0]}, rank {_some(odd)} has {values[odd[0]]};"
                    " start every process with the same flags, data and packages"
                )
        return ""

    if difference := board.decided_by_rank_0("facts", compare):
        raise UsageError(difference)


def open_store(host: str, port: int, *, serve: bool, timeout_s: float, who: str) -> dist.TCPStore:
    """Serves the store on `port`, or connects to the one at `host`:`port`.

    Plain sockets are tried first: TCPStore retries in C++, prints warnings as it does, and cannot
    be interrupted.
    """
    if serve:
        _refuse_used_port(port)
        host = "localhost"  # its own server, whatever name or address the others see it under
    else:
        _wait_for_answer(host, port, timeout_s, who)
    return dist.TCPStore(
        host,
        port,
        is_master=serve,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
    )


def _refuse_used_port(port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"port {port}: cannot be opened here ({error.strerror.lower()});"
                " end what uses it, or give every process another port"
            ) from None


def _wait_for_answer(host: str, port: int, timeout_s: float, who: str) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left = deadline - time.monotonic()
            with socket.create_connection((host, port), timeout=max(0.1, min(5.0, left))):
                return
        except OSError as error:
            if time.monotonic() >= deadline:
                reason = (error.strerror or str(error)).lower()
                raise PeerError(
                    f"{host}:{port}: {who} reached nobody there within {timeout_s:g} s ({reason});"
                    " is rank 0 running, is the address right, is the port open?"
                ) from None
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))


def _gather(board: Board, timeout_s: float, address: str, unit: str) -> None:
    """Posts where this rank runs and waits until all have; after `timeout_s` says who has not."""
    if board.store.add(f"taken/{board.rank}", 1) > 1:
        raise UsageError(
            f"{address}: another {unit} came with rank {board.rank} before this one;"
            f" give each {unit} a rank of its own, 0 to {board.world_size - 1}"
        )
    board.post(f"here/{board.rank}", host_id())
    deadline = time.monotonic() + timeout_s
    missing = list(range(board.world_size))
    while missing := [rank for rank in missing if not board.has(f"here/{rank}")]:
        board.raise_if_failed()
        if time.monotonic() > deadline:
            came = board.world_size - len(missing)
            plural = "processes" if unit == "process" else f"{unit}s"
            raise PeerError(
                f"{address}: {came} of {board.world_size} {plural} came within {timeout_s:g} s;"
                f" missing: rank {_some(missing)}; start them, or check that they use this address"
            )
        time.sleep(POLL_S)
    board.hosts = [board.read(f"here/{rank}") for rank in range(board.world_size)]


def _some(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (" ..." if len(ranks) > most else "")
