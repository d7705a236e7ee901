"""The processes, or the machines before them, find each other and agree on what they run."""

import json
import time
import uuid
from dataclasses import replace
from textwrap import shorten
from typing import Any, NamedTuple

import torch.distributed as dist

from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.heartbeat import Heartbeat, beat_every_s
from ddp_mnist.cluster.interfaces import address_towards, is_own
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.store import GONE, POLL_S, Store, host_id, open_store
from ddp_mnist.errors import DdpMnistError, PeerError, UsageError

# What meets: its plural, and what its number is called.
WORDS = {"process": ("processes", "rank"), "machine": ("machines", "machine")}

# The store outlives a meeting: a process may train twice, and a launcher start it again. So rank 0
# numbers the meetings, and those who wait in an older one follow it into the new one.
MEETINGS = "meetings"  # the key that counts them
MET = "met"  # the key of a meeting under which rank 0 says who has come, by rank


class Seat(NamedTuple):
    """One rank in a meeting."""

    token: str  # of this process and meeting alone
    size: int  # the world size that it was given
    host: str
    address: str | None  # of its machine, towards rank 0's


def meet(launch: Launch, timeout_s: float) -> Store:
    """Return the store once every process, or machine, has written there where it runs.

    Raise PeerError if not all meet within `timeout_s`, UsageError if the main port is in use, two
    have the same rank or they were given different world sizes, FailedElsewhere if another rank
    reports that.
    """
    rank, size = launch.rank, launch.world_size
    if size == 1 and not launch.agent_store:
        return Store(dist.HashStore(), 0, 1, hosts=[host_id()])
    host, port = launch.main_host, launch.main_port
    assert host is not None and port is not None
    unit = "machine" if launch.launcher == "machine" else "process"
    serve, who = rank == 0 and not launch.agent_store, f"{WORDS[unit][1]} {rank} of {size}"
    c10d = open_store(host, port, serve=serve, timeout_s=timeout_s, who=who)
    lobby = Store(dist.PrefixStore(unit, c10d), rank, size, launch.agent_store, timeout_s)
    seat = Seat(uuid.uuid4().hex, size, host_id(), address_towards(host, port))
    store, number, deadline = None, 0, time.monotonic() + timeout_s
    try:
        while True:
            newest = lobby.call("add", MEETINGS, 0)
            if rank == 0 and store is None:  # it opens the next one
                newest += 1
            if newest > number:
                if store is not None and store.heartbeat:
                    store.heartbeat.stop()
                number, store = newest, _sit_down(lobby, newest, seat, f"{host}:{port}", unit)
                if rank == 0:
                    lobby.call("add", MEETINGS, 1)
            if store is None and time.monotonic() > deadline:
                raise PeerError(
                    f"{host}:{port}: {WORDS[unit][1]} 0 did not come to meet this one within"
                    f" {timeout_s:g} s; start it, or check that it uses this address"
                )
            if store is not None and _all_have_come(store, seat, launch, unit, deadline):
                return store
            time.sleep(POLL_S)
    except BaseException as error:
        if store is not None and store.heartbeat:  # else its seat would look taken
            store.heartbeat.stop()
        if not isinstance(error, RuntimeError):
            raise
        raise PeerError(
            f"{host}:{port}: rank 0, which serves this port, ended before all had come;"
            " see what it says, then start again"
        ) from error


def _sit_down(lobby: Store, number: int, seat: Seat, where: str, unit: str) -> Store | None:
    """Take this rank's seat in a meeting; return the store under its number, None if it is over.

    Raise UsageError if a living process has the seat.
    """
    rank = lobby.rank
    store = replace(lobby, c10d=dist.PrefixStore(str(number), lobby.c10d))
    before = replace(lobby, c10d=dist.PrefixStore(str(number - 1), lobby.c10d))
    dead = _left_by_the_dead(before if rank == 0 else store, where, unit)
    if rank > 0 and (store.exists(MET) or store.failure() is not None):
        return None
    store.heartbeat = Heartbeat(store.c10d, rank, lobby.world_size, store.patience_s)
    dead, mine = "" if rank == 0 else dead, json.dumps(seat)
    while json.loads(store.call("compare_set", f"here/{rank}", dead, mine)) != list(seat):
        dead = _left_by_the_dead(store, where, unit)  # another came at once
    store.heartbeat.start()
    return store


def _left_by_the_dead(meeting: Store, where: str, unit: str) -> str:
    """Return what is written at this rank's seat in a meeting; "" if nobody came there.

    Raise UsageError if its process beats. That none does is known after two beats.
    """
    rank, last = meeting.rank, meeting.world_size - 1
    if not meeting.exists(f"here/{rank}"):
        return ""
    written, beat = (meeting.call("get", f"{key}/{rank}") for key in ("here", "beat"))
    deadline = time.monotonic() + 2 * beat_every_s(meeting.patience_s)
    while time.monotonic() < deadline and not meeting.exists(f"{GONE}/{rank}"):
        if meeting.call("get", f"beat/{rank}") != beat:
            raise UsageError(
                f"{where}: another {unit} came with rank {rank} before this one;"
                f" give each {unit} a rank of its own, 0 to {last}"
            )
        time.sleep(POLL_S)
    return written.decode()


def _all_have_come(store: Store, seat: Seat, launch: Launch, unit: str, deadline: float) -> bool:
    """Return whether the meeting is complete, which rank 0 says; the store knows the hosts then.

    Raise as `meet` does, after this rank has told the others why it leaves.
    """
    size, seats = store.world_size, [f"here/{rank}" for rank in range(store.world_size)]
    try:
        here = list[Seat]()
        if store.rank == 0 and store.call("check", seats):
            here = [Seat(*json.loads(each)) for each in store.call("multi_get", seats)]
        elif store.rank > 0 and store.exists(MET):
            here = [Seat(*each) for each in store.get(MET)]
        # Rank 0's was there before the meeting had a number. It may be dead, and the others started
        # anew by a launcher, which gives all the same size.
        early = [] if store.served_by_launcher else [Seat(*store.get(seats[0]))]
        for rank, other in enumerate(here or early):
            if other.size != size:
                raise UsageError(
                    f"{launch.main_host}:{launch.main_port}: rank {store.rank} was given {size} as"
                    f" the number of all, rank {rank} {other.size}; start every {unit} with the"
                    " same number"
                )
        if seat in here:
            if store.rank == 0:
                store.set(MET, here)
            store.hosts = [each.host for each in here]
            store.addresses = [each.address for each in here]
            assert store.heartbeat
            store.heartbeat.watch()
            return True
        store.raise_if_failed()
        if time.monotonic() > deadline:
            raise _missing(store, launch, unit)
    except DdpMnistError as error:
        cause = first_cause(store, error)
        store.lost = [rank for rank, key in enumerate(seats) if not store.exists(key)]
        store.shutdown()
        raise cause from None
    return False


def _missing(store: Store, launch: Launch, unit: str) -> PeerError:
    """Return the error that names who has not come."""
    size, (units, number) = store.world_size, WORDS[unit]
    missing = [rank for rank in range(size) if not store.exists(f"here/{rank}")]
    foreign = store.rank == 0 and not is_own(str(launch.main_host))
    note = ", which is none of this machine's own" if foreign else ""
    absent = shorten(", ".join(map(str, missing)), 40, placeholder=" ...")
    where, came = f"{launch.main_host}:{launch.main_port}", size - len(missing)
    return PeerError(
        f"{where}: {came} of {size} {units} came within {store.patience_s:g} s; missing: {number}"
        f" {absent}; start them, or check that they use this address{note}"
    )


def check_same(store: Store, facts: dict[str, Any], about: str = "facts") -> None:
    """Raise UsageError that names the first of the ranks' `facts` that differs.

    DDP compares the shapes of the parameters and nothing else. The keys are names that a person
    knows; each comparison on a store needs another `about`.
    """
    everyone = store.all_gather(about, facts)
    for key, value in everyone[0].items():
        odd = [rank for rank, theirs in enumerate(everyone) if theirs.get(key) != value]
        if odd:
            others = shorten(", ".join(map(str, odd)), 40, placeholder=" ...")
            raise UsageError(
                f"{key}: rank 0 has {value}, rank {others} has {everyone[odd[0]].get(key)};"
                " start every process with the same flags, data and packages"
            )
