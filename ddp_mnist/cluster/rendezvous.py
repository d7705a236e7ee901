"""Processes, or machines before they start any, find each other and agree on what they run."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.heartbeat import Heartbeat, beat_key, meeting_beat_s
from ddp_mnist.cluster.interfaces import address_towards, is_own
from ddp_mnist.cluster.launch import CAN_JOIN, Launch
from ddp_mnist.cluster.store import (
    FAILURE,
    Place,
    Store,
    all_arrived_key,
    allow_open_files,
    broadcast_key,
    host_id,
    listed,
    name_of,
    open_store,
    poll,
    waiting,
)
from ddp_mnist.errors import DdpMnistError, PeerError, UsageError

# The store outlives a meeting: a process may train twice, and a launcher may restart it. So rank 0
# numbers the meetings, and whoever waits in an older one follows it into the new one.
MEETINGS = "meetings"  # the key that counts them
OPEN = "open"  # the key of a meeting that rank 0 has begun; its value is the world size
MET, FIRST_BROADCAST = "met", broadcast_key(0)  # once rank 0 has written each rank's place
MOVED = b"moved"  # its value if rank 0 began another meeting before all had come
ALL_ARRIVED = all_arrived_key(0)
seat_key = "here/{}".format  # of a rank
place_key = "place/{}".format
GRACE_S = 0.5  # for rank 0, which started a moment later, to name who is missing
LOOK_S = 1.0  # between two looks for who is missing, with `on_wait`
LATE_S = 5.0  # for one that came at the last moment, and for the rank that names the missing
BY_LAUNCHER = f"see what the others say, then start again; if machines join or leave, {CAN_JOIN}"


class Unit(NamedTuple):
    """What meets, in words: processes, or machines before they start any."""

    name: str
    plural: str
    called: str  # before its number


PROCESS, MACHINE = Unit("process", "processes", "rank"), Unit("machine", "machines", "machine")


class Seat(NamedTuple):
    """What one rank tells the others when it joins a meeting."""

    token: str  # unique to this process and this call of `meet`
    size: int  # the world size that it was given
    host: str
    address: str | None  # of its machine, towards rank 0's


def meet(launch: Launch, timeout_s: float, on_wait: Callable[[str], object] | None = None) -> Store:
    """Return the store once every process, or machine, has written there where it runs.

    `on_wait` is called about once a second with a line that says who is missing; ranks without it
    are spared the look at every seat. Raise PeerError if not all meet within `timeout_s`,
    UsageError if the main port is in use, two have the same rank or they were given different world
    sizes, FailedElsewhere if another rank reports one of these.
    """
    rank, size = launch.rank, launch.world_size
    if launch.is_alone:
        here = host_id()
        return Store(dist.HashStore(), 0, 1, hosts=[here], place=Place(main_host=name_of(here)))
    host, port = launch.main_host, launch.main_port
    assert host is not None and port is not None
    unit = MACHINE if launch.launcher == "machine" else PROCESS
    serve, who = rank == 0 and not launch.agent_store, f"{unit.called} {rank} of {size}"
    server, fix = "rank 0", "is rank 0 running, is the address right, is the port open?"
    if launch.agent_store:
        server, fix = "the launcher of machine 0", BY_LAUNCHER
    allow_open_files(size, serve)
    c10d = open_store(
        host, port, serve=serve, timeout_s=timeout_s, who=who, fix=fix, on_wait=on_wait or bool
    )
    lobby = Store(dist.PrefixStore(unit.name, c10d), rank, size, launch.agent_store, timeout_s)
    seat = Seat(uuid.uuid4().hex, size, host_id(), address_towards(host, port))
    where, deadline, number = f"{host}:{port}", time.monotonic() + timeout_s, 0
    try:
        while True:
            number = _next_meeting(lobby, number)
            store = replace(lobby, c10d=dist.PrefixStore(str(number), lobby.c10d))
            if Meeting(store, number, seat, unit, where, deadline, on_wait).attend():
                return store
    except RuntimeError as error:
        raise PeerError(
            f"{where}: {server}, which serves this port, ended before all had come;"
            " see what it says, then start again"
        ) from error


def _next_meeting(lobby: Store, number: int) -> int:
    """Return the number of the next meeting after `number`, which rank 0 begins."""
    if lobby.rank > 0:
        return max(number + 1, lobby.call("add", MEETINGS, 0))
    number = lobby.call("add", MEETINGS, 1)
    if number > 1:  # no change if all had met there: its first broadcast is written
        lobby.call("compare_set", f"{number - 1}/{FIRST_BROADCAST}", "", MOVED.decode())
    return number


@dataclass
class Meeting:
    """A meeting as one rank attends it. Its methods raise as `meet` does."""

    store: Store  # the meeting's own keys
    number: int
    seat: Seat
    unit: Unit
    where: str  # the main address, with which each error begins
    deadline: float  # time.monotonic() by which all have to be there
    on_wait: Callable[[str], object] | None = None  # is called with a line on who is missing

    def attend(self) -> bool:
        """Return whether all, and this process among them, have met; else another meeting follows.

        Before it raises, this rank tells the others why it leaves.
        """
        store = self.store
        if store.rank == 0:
            store.set(OPEN, self.seat.size)
        elif not store.wait(OPEN, self.deadline - time.monotonic()):
            called, fix = self.unit.called, "start it, or check that it uses this address"
            again = f"; a meeting is over: is there a second {called} {store.rank}?"
            raise PeerError(
                f"{self.where}: {called} 0 did not come to meet this one within"
                f" {store.patience_s:g} s; {self._fix(fix)}{again if self.number > 1 else ''}"
            )
        elif store.exists(FIRST_BROADCAST):
            return False
        was_counted = self._take_seat()
        assert store.heartbeat
        try:
            self._refuse_other_size()
            store.arrive(counts=not was_counted)
            met = self._lead() if store.rank == 0 else self._follow()
        except DdpMnistError as error:
            cause = first_cause(store, error)
            store.shutdown(all_met=False)
            raise cause from None
        except BaseException:
            store.heartbeat.stop()  # else its seat would look taken
            raise
        if met:
            store.heartbeat.watch()
        else:
            store.heartbeat.stop()
        return met

    def _take_seat(self) -> bool:
        """Take this rank's seat; return whether it was taken over from a dead process.

        Raise UsageError if a living process has the seat.
        """
        store, mine, left = self.store, json.dumps(self.seat), ""
        key = seat_key(store.rank)
        while (taken := store.call("compare_set", key, left, mine).decode()) != mine:
            self._refuse_if_alive()
            left = taken
        store.heartbeat = Heartbeat(
            store.c10d, store.rank, self.seat.size, store.patience_s, when_silent=store.name_silent
        )
        store.heartbeat.start()
        return bool(left)

    def _refuse_if_alive(self) -> None:
        """Raise UsageError if another process of this rank beats, within the time of two beats."""
        store, key = self.store, beat_key(self.store.rank)

        def beat() -> bytes:
            return store.call("get", key) if store.exists(key) else b""

        before, name = beat(), self.unit.name
        if poll(lambda: beat() != before, 2 * meeting_beat_s(store.patience_s)):
            raise UsageError(
                f"{self.where}: another {name} came with rank {store.rank} before this one;"
                f" give each {name} a rank of its own, 0 to {store.world_size - 1}"
            )

    def _refuse_other_size(self) -> None:
        """Raise UsageError if rank 0 was given another world size.

        Processes of a launcher are not checked: it gave them theirs, and what rank 0 wrote may be
        from before a restart.
        """
        store, mine = self.store, self.seat.size
        if store.rank == 0 or store.served_by_launcher:
            return
        size = json.loads(store.call("get", OPEN))
        if size != mine:
            raise UsageError(
                f"{self.where}: rank {store.rank} was given {mine} as the number of all, rank 0"
                f" {size}; start every {self.unit.name} with the same number"
            )

    def _lead(self) -> bool:
        """Wait for all as rank 0, and write each rank's place."""
        store, ranks = self.store, range(self.seat.size)
        self._wait_for(ALL_ARRIVED, self.deadline)
        store.raise_if_failed()
        found = store.call("multi_get", [seat_key(rank) for rank in ranks])
        seats = [Seat(*json.loads(each)) for each in found]
        store.hosts = [seat.host for seat in seats]
        places = _places(seats)
        store.place = places[0]
        answers = [json.dumps([s.token, place]) for s, place in zip(seats, places, strict=True)]
        store.call("multi_set", [place_key(rank) for rank in ranks], answers)
        store.broadcast_from_rank0(MET, bool)
        return True

    def _follow(self) -> bool:
        """Wait for this rank's place, which rank 0 writes."""
        store = self.store
        self._wait_for(FIRST_BROADCAST, self.deadline + GRACE_S)
        found = store.call("get", FIRST_BROADCAST)
        if found == MOVED:
            return False
        store.receive(MET, found)
        token, place = json.loads(store.call("get", place_key(store.rank)))
        store.place = Place(*place)
        return token == self.seat.token  # else it took over a dead process's seat too late

    def _wait_for(self, key: str, deadline: float) -> None:
        """Return once `key` is written; at the deadline raise PeerError, which names the missing.

        Only the first rank to notice looks at every seat. If all are taken, the last one has just
        come.
        """
        store, size = self.store, self.store.world_size
        while self.on_wait and time.monotonic() < deadline - LOOK_S:
            if store.wait(key, LOOK_S):
                return
            if missing := self._missing():
                self.on_wait(waiting(deadline, f"{self.unit.called} {listed(missing)}"))
        if store.wait(key, deadline - time.monotonic()):
            return
        first = store.call("compare_set", "first to notice", "", str(store.rank))
        if first != b"%d" % store.rank and store.wait(FAILURE, LATE_S):
            store.raise_if_failed()
        missing = self._missing()
        if not missing and store.wait(key, LATE_S):
            return
        absent = f"; missing: {self.unit.called} {listed(missing)}"
        lost = absent if missing else ", but one of them is lost"
        foreign = store.rank == 0 and not is_own(self.where.rpartition(":")[0])
        note = ", which is none of this machine's own" if foreign else ""
        fix = self._fix(f"start them, or check that they use this address{note}")
        raise PeerError(
            f"{self.where}: {size - len(missing)} of {size} {self.unit.plural} came within"
            f" {store.patience_s:g} s{lost}; {fix}"
        )

    def _missing(self) -> list[int]:
        return [rank for rank in range(self.seat.size) if not self.store.exists(seat_key(rank))]

    def _fix(self, by_hand: str) -> str:
        """Return what to do about missing ranks: by hand, unless a launcher starts them."""
        return BY_LAUNCHER if self.store.served_by_launcher else by_hand


def _places(seats: list[Seat]) -> list[Place]:
    """Return the place of each rank."""
    here, so_far = Counter(seat.host for seat in seats), Counter[str]()
    first = dict[str, str]()  # the first address of each host; two hosts are enough
    for seat in seats:
        if seat.address and len(first) < 2:
            first.setdefault(seat.host, seat.address)
    places = []
    for seat in seats:
        elsewhere = next((first[host] for host in first if host != seat.host), None)
        index, main = so_far[seat.host], name_of(seats[0].host)
        places.append(Place(index, here[seat.host], len(here), main, seat.address, elsewhere))
        so_far[seat.host] += 1
    return places


def check_same(store: Store, facts: dict[str, Any], about: str = "facts") -> None:
    """Raise UsageError that names the first of the ranks' `facts` that differs.

    DDP compares the shapes of the parameters and nothing else. The keys are names that a person
    knows. Each rank sends a digest, and its facts only if the digest differs from rank 0's.
    """
    facts = json.loads(json.dumps(facts))  # as the others send theirs
    mine, odd = digest(facts), list[int]()

    def compare(digests: list[str]) -> str | None:
        odd.extend(rank for rank, theirs in enumerate(digests) if theirs != mine)
        return mine if odd else None

    def explain() -> str:
        keys = [f"{about}/{rank}" for rank in odd]
        theirs = [json.loads(each) for each in store.call("multi_get", keys)]
        return first_difference(facts, dict(zip(odd, theirs, strict=True)))

    expected = store.decide_for_all(about, mine, compare)
    if expected is None:
        return
    if mine != expected:
        store.set(f"{about}/{store.rank}", facts)
    raise UsageError(store.broadcast_from_rank0(f"{about} that differ", explain))


def digest(facts: dict[str, Any]) -> str:
    return blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()


def first_difference(ours: dict[str, Any], theirs: dict[int, dict[str, Any]]) -> str:
    """Return the line that names the first of rank 0's facts that differs, and on which ranks."""
    for key in ours | next(iter(theirs.values())):
        odd = [rank for rank, facts in theirs.items() if facts.get(key) != ours.get(key)]
        if odd:
            return (
                f"{key}: rank 0 has {ours.get(key)}, rank {listed(odd)} has"
                f" {theirs[odd[0]].get(key)}; start every process with the same flags, data and"
                " packages"
            )
    raise AssertionError("digests differ, and facts do not")
