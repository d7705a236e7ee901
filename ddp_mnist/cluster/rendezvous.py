"""How processes (or machines, before they start any) find each other and agree on the run.

A start can hang in three stages: connecting to the main port (main_port.py), meeting the others
(here), and opening the connections between all of them (`form_group` in world.py).
"""

import json
import time
import uuid
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.heartbeat import Heartbeat
from ddp_mnist.cluster.interfaces import address_towards
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.main_port import BY_LAUNCHER, open_store
from ddp_mnist.cluster.store import Place, Store, arrived_key, host_id, listed, name_of, point_key
from ddp_mnist.errors import DdpMnistError, PeerError, UsageError

# The store outlives a meeting: a process may train twice, and a launcher may restart it. So rank 0
# numbers the meetings, and a rank that waits in an older one follows it to the new one.
MEETINGS = "meetings"  # the key that counts them
OPEN = "open"  # the key of a meeting that rank 0 has begun; its value is the world size
seat_key, place_key = "seat/{}".format, "place/{}".format  # of a rank
# The first point: all have joined. Then rank 0 broadcasts whether they met in this meeting.
HERE, ALL_HERE, VERDICT, MET = arrived_key(0), point_key(0), point_key(1), "met"
GRACE_S = 0.5  # extra time for rank 0, which started a moment later, to say who is missing
# How often a waiting rank checks that its seat is still its own; at most a quarter of the time-out.
LOOK_S = 2.0
LATE_S = 5.0  # for rank 0 to say that all met, after the last one joined just in time


# Who meets, the plural, and what stands before the number: processes, or machines before these.
UNITS = {"process": ("processes", "rank"), "machine": ("machines", "machine")}


class Seat(NamedTuple):
    """What one rank tells the others when it joins a meeting."""

    token: str  # unique to this process and this call of `meet`
    host: str
    address: str | None  # its machine's, towards rank 0's machine


def meet(launch: Launch, timeout_s: float, patience_s: float | None = None) -> Store:
    """Return the store once all processes (or machines) have met in it.

    From then on they wait for each other for `patience_s`, or else as long. Raise PeerError if not
    all meet within `timeout_s`; UsageError if the main port is in use, if two have the same rank,
    or if they were given different world sizes; FailedElsewhere if another rank reports one of
    these.
    """
    rank, size = launch.rank, launch.world_size
    if launch.is_alone:
        here = host_id()
        return Store(dist.HashStore(), 0, 1, hosts=[here], place=Place(main_host=name_of(here)))
    host, port = launch.main_host, launch.main_port
    assert host and port
    unit = "machine" if launch.launcher == "machine" else "process"
    c10d = open_store(launch, f"{UNITS[unit][1]} {rank} of {size}", timeout_s)
    patience_s = patience_s or timeout_s
    busy_s = max(timeout_s, patience_s)  # the server may be, while all connect
    lobby = Store(dist.PrefixStore(unit, c10d), rank, size, launch.agent_store, busy_s)
    seat = Seat(uuid.uuid4().hex, host_id(), address_towards(host, port))
    where = f"{host}:{port}"
    deadline = time.monotonic() + timeout_s
    number = 0
    try:
        while True:
            number = _next_meeting(lobby, number)
            store = replace(lobby, c10d=dist.PrefixStore(str(number), lobby.c10d))
            if Meeting(store, number, seat, unit, where, timeout_s, deadline, patience_s).attend():
                return store
    except RuntimeError as error:
        raise PeerError(
            f"{where}: rank 0 or its launcher, which serves this port, ended before all had joined;"
            " see what it says, then start again"
        ) from error


def _next_meeting(lobby: Store, number: int) -> int:
    """Return the number of the next meeting after `number`; rank 0 begins it."""
    if lobby.rank > 0:
        return max(number + 1, lobby.call("add", MEETINGS, 0))
    number = lobby.call("add", MEETINGS, 1)
    # A rank that still waits in the meeting before this one moves on; none waits if all met there.
    lobby.call("compare_set", f"{number - 1}/{VERDICT}", "", json.dumps([MET, False]))
    return number


@dataclass
class Meeting:
    """One rank's view of a meeting. Its methods raise as `meet` does."""

    store: Store  # the meeting's own keys
    number: int
    seat: Seat
    unit: str  # process or machine
    where: str  # the main address, which begins each error
    timeout_s: float
    deadline: float  # time.monotonic() by which all must have joined, after the time-out
    patience_s: float  # the store's, once all have met

    def attend(self) -> bool:
        """Return whether all have met, including this process; if not, another meeting follows.

        Before it raises, this rank tells the others why it leaves.
        """
        store, called = self.store, UNITS[self.unit][1]
        if store.rank == 0:
            store.set(OPEN, store.world_size)
        elif not store.wait(OPEN, self.deadline - time.monotonic()):
            fix = self._fix("start it, or check that it uses this address")
            again = f"; a meeting is over: is there a second {called} {store.rank}?"
            raise PeerError(
                f"{self.where}: {called} 0 did not meet this one within"
                f" {self.timeout_s:g} s; {fix}{again if self.number > 1 else ''}"
            )
        elif store.exists(VERDICT):
            return False
        store.set(seat_key(store.rank), self.seat)
        try:
            self._refuse_other_size()
            return self._come_together()
        except DdpMnistError as error:
            if error.agreed:
                raise
            cause = first_cause(store, error)
            if store.rank == 0:  # which waits for the others in order to tell them
                store.lost = store.absent(HERE)
            store.shutdown()
            raise cause from None

    def _refuse_other_size(self) -> None:
        """Raise UsageError if rank 0 was given another world size.

        Processes of a launcher are not checked: the launcher set their world size, and rank 0's
        entry may date from before a restart.
        """
        store, mine = self.store, self.store.world_size
        size = mine if store.served_by_launcher else json.loads(store.call("get", OPEN))
        if size != mine:
            raise UsageError(
                f"{self.where}: rank {store.rank} was given {mine} as the number of all, rank 0"
                f" {size}; start every {self.unit} with the same number"
            )

    def _come_together(self) -> bool:
        """Wait until all have joined and rank 0 has given this rank its place.

        The place goes to the process that took the seat last.
        """
        store = self.store
        heartbeat = Heartbeat(store, self.patience_s)
        store.arrive()
        if store.rank == 0:
            self._wait_for(ALL_HERE, self.deadline)
            store.raise_if_failed()
            self._give_places()
        else:
            self._wait_for(VERDICT, self.deadline + GRACE_S)
        if not store.broadcast_from_rank0(MET, lambda: True):
            return False
        token, place = json.loads(store.call("get", place_key(store.rank)))
        if token != self.seat.token:
            self._refuse_second()
            return False  # it took the seat of a dead process too late
        store.place, store.heartbeat = Place(*place), heartbeat
        store.patience_s = self.patience_s
        heartbeat.start()
        return True

    def _give_places(self) -> None:
        store, ranks = self.store, range(self.store.world_size)
        found = store.call("multi_get", [seat_key(rank) for rank in ranks])
        seats = [Seat(*json.loads(each)) for each in found]
        store.hosts = [seat.host for seat in seats]
        given = zip(seats, _places(seats), strict=True)
        answers = [json.dumps([seat.token, place]) for seat, place in given]
        store.call("multi_set", [place_key(rank) for rank in ranks], answers)

    def _wait_for(self, key: str, deadline: float) -> None:
        """Return once `key` is written.

        If it is not, raise PeerError, which names the missing ranks.

        Every rank does so after its deadline, and the first report counts. If no rank is missing by
        then, the last one has just arrived.
        """
        store, (plural, called) = self.store, UNITS[self.unit]
        look_s = min(LOOK_S, self.timeout_s / 4)
        while (left := deadline - time.monotonic()) > 0:
            if store.wait(key, min(look_s, left), answer_s=left):
                return
            self._refuse_second()
        missing = store.absent(HERE)
        if not missing and store.wait(key, LATE_S):
            return
        came = f"{store.world_size - len(missing)} of {store.world_size} {plural} came"
        lost = f"; missing: {called} {listed(missing)}" if missing else ", but one of them is lost"
        fix = self._fix("start them, or check that they use this address")
        raise PeerError(f"{self.where}: {came} within {self.timeout_s:g} s{lost}; {fix}")

    def _refuse_second(self) -> None:
        """Raise UsageError if another process of this rank has taken its seat.

        It may be meant to replace this one. So the others are not told, and keep waiting.
        """
        store, name = self.store, self.unit
        if json.loads(store.call("get", seat_key(store.rank)))[0] != self.seat.token:
            error = UsageError(
                f"{self.where}: another {name} joined as rank {store.rank} after this one;"
                f" give each {name} its own rank, 0 to {store.world_size - 1}"
            )
            error.agreed = True
            raise error

    def _fix(self, by_hand: str) -> str:
        """Return the advice on missing ranks: start them by hand, unless a launcher does."""
        return BY_LAUNCHER if self.store.served_by_launcher else by_hand


def _places(seats: list[Seat]) -> list[Place]:
    """Return each rank's Place."""
    here, so_far = Counter(seat.host for seat in seats), Counter[str]()
    main, places = name_of(seats[0].host), list[Place]()
    for _, host, own in seats:
        elsewhere = (seat.address for seat in seats if seat.host != host and seat.address)
        place = Place(so_far[host], here[host], len(here), main, own, next(elsewhere, None))
        places.append(place)
        so_far[host] += 1
    return places


def check_same(store: Store, facts: dict[str, Any], about: str = "facts") -> None:
    """Raise a UsageError that names the first of the `facts` that differs between ranks.

    DDP compares the shapes of the parameters and nothing else. The keys are names that users know,
    the values JSON's types.
    """
    if difference := store.decide_for_all(about, facts, first_difference):
        raise UsageError(difference)


def first_difference(everyone: list[dict[str, Any]]) -> str | None:
    """Return a line that names the first fact that differs from rank 0's, and the ranks."""
    ours = everyone[0]
    for key in dict.fromkeys(key for facts in everyone for key in facts):
        odd = [rank for rank, facts in enumerate(everyone) if facts.get(key) != ours.get(key)]
        if odd:
            return (
                f"{key}: rank 0 has {ours.get(key)}, rank {listed(odd)} has"
                f" {everyone[odd[0]].get(key)}; start every process with the same flags, data and"
                " packages"
            )
    return None
