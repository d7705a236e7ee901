"""The store through which processes exchange JSON, by key, outside of collectives.

It is torch.distributed's TCPStore at the main address; see main_port.py.
"""

import contextlib
import json
import math
import platform
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ddp_mnist.cluster.connections import Connection, keep_alive
from ddp_mnist.errors import CODES, FailedElsewhere, PeerError
from ddp_mnist.system.deadline import with_deadline
from ddp_mnist.system.text import joined

T = TypeVar("T")
FAILURE = "failure"  # the key of the failure that was reported first
SEARCH = "search"  # the key of the rank that looks for dead ones
FAILED = "failed"  # the value of a sync point that will never be reached
LEAVING_S = 5.0
CANCEL_S = 5.0  # for a wait that has timed out to return
SEARCH_S = 6.0  # the longest search for dead ranks


def host_id() -> str:
    """Return a name that differs between machines, and between network namespaces on a machine.

    Cloned machines share a host name, and the first namespace has the same number on each: only the
    boot id tells them apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        boot, network = "", 0
    return f"{platform.node()}/{boot}/{network}"


def name_of(host: str) -> str:
    """Return the machine's name, the first part of its `host_id`."""
    return host.partition("/")[0]


def sync_key(number: int) -> str:
    """Return the key of a sync point, see Store."""
    return f"sync/{number}"


def arrived_key(number: int) -> str:
    """Return the key of the ranks that have arrived at a barrier, see Store."""
    return f"arrived/{number}"


def beat_key(rank: int) -> str:
    """Return the key of a rank's last Beat."""
    return f"beat/{rank}"


def wake_key(rank: int) -> str:
    """Return the key that lets a rank's heartbeat beat at once."""
    return f"wake/{rank}"


class Beat(NamedTuple):
    """A sign of life, see heartbeat.py."""

    number: int = 0
    waited: int = 0  # for how many beats the rank has waited for others, in one and the same call
    place: str = ""  # where its main thread is, e.g. fit.py:94


class RankInfo(NamedTuple):
    """Where one rank runs among all."""

    local_rank: int = 0  # among the ranks of its machine
    local_world_size: int = 1
    num_machines: int = 1
    main_host: str = ""  # rank 0's name
    address: str | None = None  # of its machine, towards rank 0's
    other_address: str | None = None  # the address of another machine


@dataclass(eq=False)
class Store:
    """The key-value store that all ranks share.

    How many calls a rank makes does not depend on the number of ranks. All pass the same sync
    points (barriers and broadcasts) in the same order, and count them, so each knows the key of the
    next:

        sync/N             once it is reached: by a barrier's last rank, or by rank 0, whose
                           broadcast is the value; the others wait for it
        arrived/N          the ranks that have arrived at barrier N
        value/NAME/RANK    what rank 0 decides on; it reads all of them once all have arrived

    A wait is one call, unless it takes minutes: a rank that fails writes FAILED where others wait.
    A call whose connection broke is made again, so each has the same effect if made twice.
    Calls raise RuntimeError when the store is gone or does not answer in time.
    """

    c10d: dist.Store
    rank: int
    world_size: int
    served_by_launcher: bool = False  # and ends with it; else with rank 0
    patience_s: float = 60.0  # how long one call may take
    reconnects: bool = False  # whether it makes a connection that is cut anew; once all have joined
    hosts: list[str] = field(default_factory=list)  # on rank 0, each rank's `host_id`
    rank_info: RankInfo = field(default_factory=RankInfo)  # of this rank, once all have joined
    lost: list[int] = field(default_factory=list)  # the ranks that never arrived, or are dead
    unreachable = ""  # why the server cannot be reached any more; a copy starts afresh
    left: threading.Event = field(default_factory=threading.Event)  # set once this rank has left
    heartbeat: threading.Thread | None = None  # runs from the rendezvous until this rank leaves
    sync_points: int = 0  # that this rank has passed, or waits for
    steps: int = 0  # that it has trained
    connections: set[Connection] = field(default_factory=set)  # to the group's other ranks
    record_end: Callable[[BaseException], object] = lambda _: None  # where the run is recorded
    received: dict[str, Any] = field(default_factory=dict)  # rank 0's broadcasts, by name

    def who(self, ranks: list[int]) -> str:
        """Return e.g. `rank 1 (host-b), 3 (host-c)` on rank 0; eight at most."""
        shown = ", ".join(f"{rank} ({name_of(self.hosts[rank])})" for rank in ranks[:8])
        return f"rank {shown}" + (" ..." if len(ranks) > 8 else "")

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of torch's store, with a deadline: a dead link would block forever."""
        return self._within(self.patience_s, lambda: getattr(self.c10d, method)(*args))

    def _within(self, seconds: float, function: Callable[[], T], again: bool = True) -> T:
        if self.unreachable:
            raise RuntimeError("the connection to the main address is gone")
        try:
            return with_deadline(function, seconds)
        except (RuntimeError, TimeoutError) as error:
            is_late = isinstance(error, TimeoutError)
            if self.reconnects and again and not is_late and self._reconnect():
                return self._within(seconds, function, again=False)
            no_sign = f"no sign of life for {self.patience_s:g} s"
            self.unreachable = no_sign if is_late else str(error)
            raise RuntimeError(self.unreachable) from None
        except KeyboardInterrupt:  # the connection is still busy with the interrupted call
            self.unreachable = "" if self._reconnect() else "the connection was interrupted"
            raise

    def _reconnect(self) -> bool:
        """Return whether the server is there, on a new connection; the old one may be cut."""
        server = self.c10d
        while isinstance(server, dist.PrefixStore):
            server = server.underlying_store
        try:
            if isinstance(server, dist.TCPStore):  # which would try a dead one again and again
                socket.create_connection((server.host, server.port), CANCEL_S).close()
            # torch asks for the name of the address: for seconds where no name server answers.
            self.c10d = with_deadline(self.c10d.clone, max(CANCEL_S, self.patience_s / 2))
            keep_alive()
        except (OSError, RuntimeError, TimeoutError):
            return False
        return True

    def set(self, key: str, value: Any) -> None:
        self.call("set", key, json.dumps(value))

    def read(self, key: str) -> Any:
        """Return the value of `key`; None if it has not been written."""
        return json.loads(self.call("get", key)) if self.exists(key) else None

    def exists(self, key: str) -> bool:
        return self.call("check", [key])

    def wait(self, key: str, within_s: float = math.inf, answer_s: float = 0) -> bool:
        """Return whether `key` was written within that time.

        It is one call, unless it takes minutes. The server may be busy with something else for
        `answer_s` before it says that the time is over.
        """
        deadline = time.monotonic() + within_s
        while True:
            seconds = max(0.1, min(self.patience_s / 2, deadline - time.monotonic()))
            # torch waits as long again if the system wakes it a moment early.
            longest_s = max(2 * seconds, answer_s) + CANCEL_S
            if self._within(longest_s, partial(self._is_written, key, seconds)):
                return True
            if time.monotonic() >= deadline:
                return False

    def _is_written(self, key: str, seconds: float) -> bool:
        with contextlib.suppress(dist.DistStoreError):  # not in time
            self.c10d.wait([key], timedelta(seconds=seconds))
            return True
        return False

    def is_first_here(self, key: str) -> bool:
        """Return whether this rank is the first of its machine to ask with this key."""
        place, mine = f"first/{host_id()}/{key}", str(self.rank)
        return self.call("compare_set", place, "", mine) == mine.encode()  # also if asked again

    def add_rank(self, key: str) -> None:
        """Append this rank to the ranks at `key`."""
        self.call("append", key, f"{self.rank} ")

    def missing_ranks(self, key: str) -> list[int]:
        """Return the ranks that are not yet among those at `key`; this one is."""
        there = set(self.call("get", key).split())
        return [rank for rank in range(self.world_size) if b"%d" % rank not in there]

    def broadcast_from_rank0(self, name: str, decide: Callable[[], Any]) -> Any:
        """Return, on every rank, the result of `decide` on rank 0, however long it takes.

        Raise as `raise_if_failed` does.
        """
        key = sync_key(self.sync_points)
        if self.rank == 0:
            found = self.call("compare_set", key, "", json.dumps([name, decide()]))
        else:
            self.wait(key)
            found = self.call("get", key)
        self._raise_if(found)
        sent, self.received[name] = json.loads(found)
        if sent != name:
            raise AssertionError(f"rank {self.rank} is at {name!r}, rank 0 at {sent!r}")
        self.sync_points += 1
        return self.received[name]

    def decide_for_all(
        self, name: str, mine: Any, decide: Callable[[list[Any]], Any], within_s: float = math.inf
    ) -> Any:
        """Return, on every rank, the result of `decide` on rank 0 from all ranks' values, by rank.

        Raise as `raise_if_failed` does; raise PeerError if a value has not arrived `within_s`.
        """
        # A name, and so its keys, may be used again: rank 0 has read them before it decides.
        keys = [f"value/{name}/{rank}" for rank in range(self.world_size)]
        self.set(keys[self.rank], mine)
        self.enter_barrier()

        def gather() -> Any:
            if not self._wait_for_all(within_s):
                late = self.who(self.missing_ranks(arrived_key(self.sync_points - 1)))
                raise PeerError(
                    f"no word of {name} from {late} within {within_s:g} s; see what it says, then"
                    " start again"
                )
            return decide([json.loads(found) for found in self.call("multi_get", keys)])

        return self.broadcast_from_rank0(name, gather)

    def barrier(self) -> None:
        """Return once every rank has arrived at it; raise as `raise_if_failed` does."""
        self.enter_barrier()
        self._wait_for_all()

    def enter_barrier(self) -> None:
        """Be counted at the next barrier, without waiting."""
        arrived = arrived_key(self.sync_points)
        self.add_rank(arrived)
        if not self.missing_ranks(arrived):
            self.call("compare_set", sync_key(self.sync_points), "", "all arrived")
        self.sync_points += 1

    def _wait_for_all(self, within_s: float = math.inf) -> bool:
        """Return whether every rank arrived at this rank's last barrier within that time."""
        key = sync_key(self.sync_points - 1)
        if not self.wait(key, within_s):
            return False
        self._raise_if(self.call("get", key))
        return True

    def _raise_if(self, found: bytes) -> None:
        """Raise as `raise_if_failed` does if the value is FAILED."""
        if found == FAILED.encode():
            self.raise_if_failed()
            raise RuntimeError("the connection to the main address is gone")

    def end_waits(self) -> None:
        """Write FAILED to the keys that others may wait for: those of the next two sync points."""
        number = max(0, self.sync_points - 1)
        while self.call("compare_set", sync_key(number), "", FAILED) != FAILED.encode():
            number += 1
        self.call("compare_set", sync_key(number + 1), "", FAILED)

    def close(self) -> None:
        """Leave once every rank is done; the rank that serves the store leaves last."""
        self.barrier()
        self.shutdown()

    def shutdown(self) -> None:
        """Leave the store; rank 0, which may serve it, waits LEAVING_S at most for the others."""
        self.left.set()
        with contextlib.suppress(RuntimeError):  # the store is gone: no rank needs rank 0
            if self.heartbeat:
                self.set(wake_key(self.rank), 1)
                self.heartbeat.join(1.0)  # a dead connection may hold it
            self.add_rank("left")
            deadline, pause_s = time.monotonic() + LEAVING_S, 0.01
            while self.rank == 0 and {*self.missing_ranks("left")} - {*self.lost}:
                if time.monotonic() >= deadline:
                    break
                time.sleep(pause_s)
                pause_s *= 2

    def report_failure(self, message: str, code: int) -> dict[str, Any] | None:
        """Record this rank's error as the run's. Return None, or the one reported before it."""
        mine = {"rank": self.rank, "message": message, "code": code, "lost": self.lost}
        try:
            first = self._failure_in(self.call("compare_set", FAILURE, "", json.dumps(mine)))
            self.end_waits()
            self.wake_all()
        except (RuntimeError, PeerError):  # the store's rank 0 is dead, or a stranger wrote
            return None
        self.lost = first["lost"]
        return None if first == mine else first

    def wake_all(self) -> None:
        """Let every rank's heartbeat beat at once."""
        ranks = range(self.world_size)
        self.call("multi_set", [wake_key(rank) for rank in ranks], ["1" for _ in ranks])

    def _failure_in(self, found: bytes) -> dict[str, Any]:
        """Return what a rank has reported. Raise PeerError if no rank of this run wrote that.

        The port has no password, and what is in this value decides how the run ends.
        """
        with contextlib.suppress(ValueError, TypeError, KeyError):
            failure = json.loads(found)
            ranks, known = [failure["rank"], *failure["lost"]], range(self.world_size)
            is_ours = all(type(rank) is int and rank in known for rank in ranks)
            if is_ours and failure["code"] in CODES and isinstance(failure["message"], str):
                return {name: failure[name] for name in ("rank", "message", "code", "lost")}
        raise PeerError(
            f"the store of the {self.world_size} ranks holds a failure that none of them reported;"
            " keep others from its port, then start the run again"
        )

    def failure(self) -> dict[str, Any] | None:
        """Return the failure reported first, if any: its rank, message, code and lost ranks."""
        with contextlib.suppress(RuntimeError):
            return self._failure_in(self.call("get", FAILURE)) if self.exists(FAILURE) else None
        return None

    def raise_if_failed(self) -> None:
        """Raise FailedElsewhere if another rank has reported its failure, PeerError if this one."""
        if failure := self.failure():
            self.lost = failure["lost"]
            mine = failure["rank"] == self.rank  # as its heartbeat does when a rank is lost
            raise (
                PeerError(failure["message"], failure["code"]) if mine else self.elsewhere(failure)
            )

    def elsewhere(self, failure: dict[str, Any]) -> FailedElsewhere:
        """Return the error of another rank; on rank 0 it names one of another machine."""
        error = FailedElsewhere(failure["message"], failure["code"])
        if self.hosts and self.hosts[failure["rank"]] != self.hosts[0]:
            error.where = self.who([failure["rank"]])
        return error

    def lost_contact(self, lost: list[int], why: str, more: str = "") -> PeerError:
        """Return the error that names the lost ranks; `more` follows its advice."""
        who = f"rank {listed(lost)}" if lost else "another rank"
        if self.unreachable and self.served_by_launcher:
            who = "the launcher and a rank"
        return PeerError(
            f"lost contact with {who} of {self.world_size} ({why}); see what that process says,"
            f" then resume the run or start it again{more}"
        )

    def addresses(self) -> str:
        """Return where rank 0 and this rank, or rank 1, said that they can be reached."""
        ends = (0, self.rank or 1)
        return ", ".join(f"rank {rank} is at {self.read(f'address/{rank}')}" for rank in ends)

    def find_dead_ranks(self, patience_s: float = 1.5) -> list[int]:
        """Return the ranks whose hearts do not beat, after a connection broke.

        The first rank to ask looks for them and reports a failure, which names them to the others.
        """
        self.patience_s = min(self.patience_s, 3.0)
        try:
            if self.exists(FAILURE):
                self.lost = self._failure_in(self.call("get", FAILURE))["lost"]
            elif (first := int(self.call("compare_set", SEARCH, "", str(self.rank)))) == self.rank:
                self.lost = self._silent_ranks(patience_s)
            elif self.wait(FAILURE, SEARCH_S + CANCEL_S):
                self.lost = self._failure_in(self.call("get", FAILURE))["lost"]
            else:
                self.lost = [first]
        except (RuntimeError, PeerError, ValueError):  # the last two: a stranger wrote
            self.lost = [] if self.served_by_launcher else [0]
        return self.lost

    def _silent_ranks(self, patience_s: float) -> list[int]:
        """Return the ranks that do not beat when they are woken.

        Many on few cores beat one after the other, so this waits until no more do.
        """
        ranks = range(self.world_size)
        before = self.call("multi_get", [beat_key(rank) for rank in ranks])
        self.wake_all()
        silent, ends = [*ranks], time.monotonic() + SEARCH_S
        until = time.monotonic() + patience_s
        while silent and time.monotonic() < min(until, ends):
            time.sleep(0.05)
            now = self.call("multi_get", [beat_key(rank) for rank in ranks])
            still = [rank for rank in silent if now[rank] == before[rank]]
            until = until if still == silent else time.monotonic() + patience_s
            silent = still
        return silent


def listed(ranks: Iterable[int]) -> str:
    """Return e.g. `1, 3, 7`, cut to 40 characters."""
    return joined(map(str, ranks), 40)
