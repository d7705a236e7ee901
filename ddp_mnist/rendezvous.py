"""How the processes find each other, and what they tell each other outside of collectives.

All go through one small key-value store at the main address: torch.distributed's TCPStore, served
by rank 0 or by the launcher's agent. It listens on all interfaces without authentication, so the
main port belongs on a private network.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_mnist.errors import DdpMnistError, FailedElsewhere, PeerError, UsageError
from ddp_mnist.launch import Launch, address_towards

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


class Board:
    """The store, with what this project posts on it.

    Every key is written by one rank. Waiting is polling, so that a failure that another rank
    posted ends the wait at once.

    Args:
        store: shared by all ranks.
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
        store: dist.Store,
        rank: int,
        world_size: int,
        served_by_launcher: bool = False,
        patience_s: float = 60.0,
    ) -> None:
        self.store = store
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

    def ask(self, method: str, *args: Any) -> Any:
        """A call of the store. Over a dead link torch's would wait for good.

        Raises:
            RuntimeError: the store is gone, or does not answer in time.
        """
        if self.unreachable:
            raise RuntimeError("the connection to the main address is gone")
        answer: list[Any] = []

        def call() -> None:
            try:
                answer.append(getattr(self.store, method)(*args))
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

    def post(self, key: str, value: Any) -> None:
        self.ask("set", key, json.dumps(value))

    def has(self, key: str) -> bool:
        return self.ask("check", [key])

    def read(self, key: str, within_s: float = math.inf) -> Any:
        """Waits for `key` for as long as it takes, or until a rank posts its failure.

        Raises:
            PeerError: it is not there within `within_s`.
        """
        deadline = time.monotonic() + within_s
        while not self.has(key):
            self._wait(deadline, f"no word of {key} from another process within {within_s:g} s")
        return json.loads(self.ask("get", key))

    def decided_by_rank_0(self, key: str, decide: Callable[[], Any]) -> Any:
        """Rank 0's answer on every rank. Others wait by polling, however long it takes."""
        if self.rank == 0:
            self.post(key, decide())
        return self.read(key)

    def wait_for_all(self, key: str, within_s: float = math.inf) -> None:
        """Returns once every rank has come here, however long it takes.

        Raises:
            PeerError: not all of them have within `within_s`.
        """
        deadline = time.monotonic() + within_s
        self.ask("add", key, 1)
        while (came := self.ask("add", key, 0)) < self.world_size:
            told = f"{came} of {self.world_size} processes came to '{key}' within {within_s:g} s"
            self._wait(deadline, told)

    def _wait(self, deadline: float, told: str) -> None:
        self.raise_if_failed()
        if time.monotonic() > deadline:
            raise PeerError(f"{told}; see what the others say, then start the run again")
        time.sleep(POLL_S)

    def leave(self) -> None:
        """Returns once every rank has come to its end; the one that serves the store goes last."""
        self.wait_for_all("end", within_s=self.patience_s)
        self.go_last(self.world_size - 1)

    def go_last(self, others: int, patience_s: float = 5) -> None:
        """Rank 0, which may serve the store, returns once `others` ranks have called this too.

        Those that are lost are not waited for. Whoever calls it again has gone already.
        """
        if self._went:
            return
        self._went = True
        awaited = others - len(self.lost)
        with contextlib.suppress(RuntimeError):  # the store is gone: nothing to keep up
            left = self.ask("add", "left", 1 if self.rank else 0)
            deadline = time.monotonic() + patience_s
            while self.rank == 0 and left < awaited and time.monotonic() < deadline:
                time.sleep(POLL_S / 10)
                left = self.ask("add", "left", 0)

    def claim_failure(self, message: str, code: int) -> dict[str, Any] | None:
        """Posts this rank's error as the run's. None if it is the first, else the first one."""
        mine = {"rank": self.rank, "message": message, "code": code, "lost": self.lost}
        try:
            first = json.loads(self.ask("compare_set", "failure", "", json.dumps(mine)))
        except RuntimeError:  # rank 0 served the store and is gone: nobody can be asked
            return None
        self.lost = first["lost"]
        return None if first["rank"] == self.rank else first

    def failure(self) -> dict[str, Any] | None:
        """The failure that was posted first: rank, message, code, lost. None if there is none."""
        try:
            return json.loads(self.ask("get", "failure")) if self.has("failure") else None
        except RuntimeError:
            return None

    def raise_if_failed(self) -> None:
        failure = self.failure()
        if failure and failure["rank"] != self.rank:
            raise FailedElsewhere(failure["message"], failure["code"])

    def silent_ranks(self, patience_s: float = 1.5) -> list[int]:
        """After a connection broke: the ranks that do not post that they are still here.

        Every survivor has to call this at about the same time. Once a rank has posted its failure,
        that is the better answer, and nothing is waited for.
        """
        self.patience_s = min(self.patience_s, 3.0)  # the time-out has passed already
        self.call_roll()
        try:
            deadline = time.monotonic() + patience_s
            while time.monotonic() < deadline:
                if failure := self.failure():
                    return failure["lost"]
                time.sleep(POLL_S)
            ranks = range(self.world_size)
            self.lost = [rank for rank in ranks if not self.has(f"survivor/{rank}")]
        except RuntimeError:
            self.lost = [] if self.served_by_launcher else [0]
        return self.lost

    def roll_is_called(self) -> bool:
        """Whether a rank is looking for silent ones, for which all have to answer."""
        with contextlib.suppress(RuntimeError):
            return self.has("roll call")
        return False

    def call_roll(self) -> None:
        """Asks all ranks whether they are still here, and answers for this one."""
        with contextlib.suppress(RuntimeError):
            self.post("roll call", True)
            self.post(f"survivor/{self.rank}", True)


def first_cause(board: Board, error: BaseException) -> BaseException:
    """`error`, marked to be told, if this rank is the first to fail; else a silent stand-in."""
    if isinstance(error, FailedElsewhere) or getattr(error, "agreed", False):
        return error
    if isinstance(error, KeyboardInterrupt):  # it reached every rank: local rank 0 tells it
        board.claim_failure("interrupted", 130)
        return error
    code = getattr(error, "code", 1)
    failure = board.claim_failure(str(error) or type(error).__name__, code)
    if failure is not None:
        return FailedElsewhere(failure["message"], failure["code"])
    if isinstance(error, DdpMnistError):
        error.agreed = True
    return error


def meet(launch: Launch, timeout_s: float) -> Board:
    """Opens the store and returns once every rank has posted where it runs.

    Raises:
        PeerError: nobody answers at the main address, or not all came, within `timeout_s`.
        UsageError: the main port is in use, two processes have the same rank, or they were told
            different world sizes.
        FailedElsewhere: another rank found that out first, and says it.
    """
    if launch.world_size == 1 and not launch.agent_store:
        board = Board(dist.HashStore(), 0, 1)
        board.hosts = [host_id()]
        return board
    assert launch.main_host is not None and launch.main_port is not None
    store = open_store(
        launch.main_host,
        launch.main_port,
        serve=launch.rank == 0 and not launch.agent_store,
        timeout_s=timeout_s,
        who=f"rank {launch.rank} of {launch.world_size}",
    )
    board = Board(
        dist.PrefixStore(f"ddp_mnist/{launch.attempt}", store),
        launch.rank,
        launch.world_size,
        launch.agent_store,
        timeout_s,
    )
    _gather(board, timeout_s, f"{launch.main_host}:{launch.main_port}", "process")
    return board


def meet_machines(host: str, port: int, rank: int, machines: int, timeout_s: float) -> Board:
    """`meet` for machines that have started no process yet; machine 0 serves the store."""
    who = f"machine {rank} of {machines}"
    store = open_store(host, port, serve=rank == 0, timeout_s=timeout_s, who=who)
    board = Board(dist.PrefixStore("machines", store), rank, machines, patience_s=timeout_s)
    _gather(board, timeout_s, f"{host}:{port}", "machine")
    return board


def check_same(board: Board, facts: dict[str, Any], about: str = "facts") -> None:
    """Compares what every rank believes: configuration, data digest, package versions.

    DDP compares the shapes of the parameters and nothing else.

    Args:
        board: shared by all ranks.
        facts: this rank's, by the name that a person knows them by.
        about: another word for each comparison on one board.

    Raises:
        UsageError: names the first fact that differs, its values and their ranks.
    """
    board.post(f"{about}/{board.rank}", facts)

    def compare() -> str:
        everyone = [
            board.read(f"{about}/{rank}", board.patience_s) for rank in range(board.world_size)
        ]
        for key in facts:
            values = [theirs.get(key) for theirs in everyone]
            odd = [rank for rank, value in enumerate(values) if value != values[0]]
            if odd:
                return (
                    f"{key}: rank 0 has {values[0]}, rank {_some(odd)} has {values[odd[0]]};"
                    " start every process with the same flags, data and packages"
                )
        return ""

    if difference := board.decided_by_rank_0(about, compare):
        raise UsageError(difference)


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


def _gather(board: Board, timeout_s: float, address: str, unit: str) -> None:
    """Posts where this rank runs, and returns once all ranks have; raises as `meet` does."""
    with _while_rank_0_serves(address):
        if board.ask("add", f"taken/{board.rank}", 1) > 1:
            raise UsageError(
                f"{address}: another {unit} came with rank {board.rank} before this one;"
                f" give each {unit} a rank of its own, 0 to {board.world_size - 1}"
            )
        host, _, port = address.rpartition(":")
        own_address = address_towards(host, int(port))
        board.post(f"here/{board.rank}", [host_id(), board.world_size, own_address])
        try:
            _wait_for_others(board, timeout_s, address, unit)
        except DdpMnistError as error:
            cause = first_cause(board, error)
            came = [rank for rank in range(board.world_size) if board.has(f"here/{rank}")]
            board.go_last(others=len(came) - 1)
            raise cause from None


@contextlib.contextmanager
def _while_rank_0_serves(address: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerError(
            f"{address}: rank 0, which serves this port, went away before all had come;"
            " see what it says, then start again"
        ) from error


def is_own(host: str) -> bool:
    """Whether an address of `host` is one of this machine's; True if it cannot be told."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, *_, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(place)
            return True
    return False


def _wait_for_others(board: Board, timeout_s: float, address: str, unit: str) -> None:
    deadline = time.monotonic() + timeout_s
    missing = list(range(board.world_size))
    while missing := [rank for rank in missing if not board.has(f"here/{rank}")]:
        board.raise_if_failed()
        if time.monotonic() > deadline:
            came = board.world_size - len(missing)
            plural = "processes" if unit == "process" else f"{unit}s"
            number = "rank" if unit == "process" else unit
            foreign = board.rank == 0 and not is_own(address.rpartition(":")[0])
            note = ", which is none of this machine's own" if foreign else ""
            raise PeerError(
                f"{address}: {came} of {board.world_size} {plural} came within {timeout_s:g} s;"
                f" missing: {number} {_some(missing)}; start them, or check that they use this"
                f" address{note}"
            )
        time.sleep(POLL_S)
    here = [board.read(f"here/{rank}") for rank in range(board.world_size)]
    board.hosts = [host for host, _, _ in here]
    board.addresses = [own_address for _, _, own_address in here]
    for rank, (_, world_size, _) in enumerate(here):
        if world_size != board.world_size:
            raise UsageError(
                f"{address}: rank {board.rank} was told of {board.world_size}, rank {rank} of"
                f" {world_size}; start every {unit} with the same number"
            )


def reason(error: Exception) -> str:
    """What the system says, e.g. connection refused."""
    return (getattr(error, "strerror", None) or str(error)).lower()


def _some(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (" ..." if len(ranks) > most else "")
