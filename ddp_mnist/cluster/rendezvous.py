"""How processes (or machines, before they start any) find each other and agree on the run.

A start can hang in three stages: connecting to the main port (main_port.py), waiting until all have
joined (here), and opening the connections between all of them (`form_group` in world.py).
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
from ddp_mnist.cluster.store import RankInfo, Store, arrived_key, host_id, listed, name_of, sync_key
from ddp_mnist.errors import DdpMnistError, PeerError, UsageError

# The store outlives a rendezvous: a process may train twice, and a launcher may restart it. So rank
# 0 numbers the rounds, and a rank that waits in an older one follows it to the new one.
ROUNDS = "rounds"  # the key that counts them
OPEN = "open"  # the key of a round that rank 0 has begun; its value is the world size
# The first sync point is a barrier: all have joined. Then rank 0 broadcasts the round's result,
# whether they joined in this round.
JOINED, ALL_JOINED = arrived_key(0), sync_key(0)
RESULT, NAME_OF_RESULT = sync_key(1), "all joined"
GRACE_S = 0.5  # extra time for rank 0, which started a moment later, to say who is missing
# How often a waiting rank checks that its request still counts; at most a quarter of the time-out.
LOOK_S = 2.0
LATE_S = 5.0  # for rank 0 to say that all joined, after the last one did just in time
# Who joins, the plural, and what stands before the number: processes, or machines before these.
UNITS = {"process": ("processes", "rank"), "machine": ("machines", "machine")}


class JoinRequest(NamedTuple):
    """What one rank tells the others when it joins a round."""

    token: str  # unique to this process and this call of `join_store`
    host: str
    address: str | None  # its machine's, towards rank 0's machine


def request_key(rank: int) -> str:
    """Return the key of a rank's JoinRequest; a second process of that rank overwrites it."""
    return f"join/{rank}"


def join_store(launch: Launch, timeout_s: float, patience_s: float | None = None) -> Store:
    """Return the store once all processes (or machines) have joined it.

    From then on they wait for each other for `patience_s`, or else as long. Raise PeerError if not
    all join within `timeout_s`; UsageError if the main port is in use, if two have the same rank,
    or if they were given different world sizes; FailedElsewhere if another rank reports one of
    these.
    """
    rank, size = launch.rank, launch.world_size
    if launch.is_alone:
        here = host_id()
        alone = RankInfo(main_host=name_of(here))
        return Store(dist.HashStore(), 0, 1, hosts=[here], rank_info=alone)
    host, port = launch.main_host, launch.main_port
    assert host and port
    unit = "machine" if launch.launcher == "machine" else "process"
    c10d = open_store(launch, f"{UNITS[unit][1]} {rank} of {size}", timeout_s)
    patience_s = patience_s or timeout_s
    busy_s = max(timeout_s, patience_s)  # the server may be, while all connect
    all_rounds = Store(dist.PrefixStore(unit, c10d), rank, size, launch.agent_store, busy_s)
    request = JoinRequest(uuid.uuid4().hex, host_id(), address_towards(host, port))
    where = f"{host}:{port}"
    deadline = time.monotonic() + timeout_s
    number = 0
    try:
        while True:
            number = _next_round(all_rounds, number)
            store = replace(all_rounds, c10d=dist.PrefixStore(str(number), all_rounds.c10d))
            this = Round(store, number, request, unit, where, timeout_s, deadline, patience_s)
            if this.join():
                return store
    except RuntimeError as error:
        raise PeerError(
            f"{where}: rank 0 or its launcher, which serves this port, ended before all had joined;"
            " see what it says, then start again"
        ) from error


def _next_round(all_rounds: Store, number: int) -> int:
    """Return the number of the next round after `number`; rank 0 begins it."""
    if all_rounds.rank > 0:
        return max(number + 1, all_rounds.call("add", ROUNDS, 0))
    number = all_rounds.call("add", ROUNDS, 1)
    # A rank that still waits in the round before this one moves on; none waits if all joined it.
    failed = json.dumps([NAME_OF_RESULT, False])
    all_rounds.call("compare_set", f"{number - 1}/{RESULT}", "", failed)
    return number


@dataclass
class Round:
    """One rank's view of a round of the rendezvous. Its methods raise as `join_store` does."""

    store: Store  # the round's own keys
    number: int
    request: JoinRequest
    unit: str  # process or machine
    where: str  # the main address, which begins each error
    timeout_s: float
    deadline: float  # time.monotonic() by which all must have joined, after the time-out
    patience_s: float  # the store's, once all have joined

    def join(self) -> bool:
        """Return whether all have joined, including this process; if not, another round follows.

        Before it raises, this rank tells the others why it leaves.
        """
        store, called = self.store, UNITS[self.unit][1]
        if store.rank == 0:
            store.set(OPEN, store.world_size)
        elif not store.wait(OPEN, self.deadline - time.monotonic()):
            fix = self._fix("start it, or check that it uses this address")
            again = f"; an earlier rendezvous is complete: is there a second {called} {store.rank}?"
            raise PeerError(
                f"{self.where}: {called} 0 did not join within {self.timeout_s:g} s;"
                f" {fix}{again if self.number > 1 else ''}"
            )
        elif store.exists(RESULT):
            return False
        store.set(request_key(store.rank), self.request)
        try:
            self._refuse_other_size()
            return self._wait_for_others()
        except DdpMnistError as error:
            if error.agreed:
                raise
            cause = first_cause(store, error)
            if store.rank == 0:  # which waits for the others in order to tell them
                store.lost = store.missing_ranks(JOINED)
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

    def _wait_for_others(self) -> bool:
        """Wait until all have joined and rank 0 has sent this rank its RankInfo.

        It is for the process whose request, of several with this rank, came last.
        """
        store = self.store
        heartbeat = Heartbeat(store, self.patience_s)
        store.enter_barrier()
        if store.rank == 0:
            self._wait_for(ALL_JOINED, self.deadline)
            store.raise_if_failed()
            self._send_rank_infos()
        else:
            self._wait_for(RESULT, self.deadline + GRACE_S)
        if not store.broadcast_from_rank0(NAME_OF_RESULT, lambda: True):
            return False
        token, rank_info = json.loads(store.call("get", f"rank_info/{store.rank}"))
        if token != self.request.token:
            self._refuse_second()
            return False  # it came too late to replace a dead process
        store.rank_info, store.heartbeat = RankInfo(*rank_info), heartbeat
        store.patience_s, store.reconnects = self.patience_s, True
        heartbeat.start()
        return True

    def _send_rank_infos(self) -> None:
        store, ranks = self.store, range(self.store.world_size)
        found = store.call("multi_get", [request_key(rank) for rank in ranks])
        requests = [JoinRequest(*json.loads(each)) for each in found]
        store.hosts = [request.host for request in requests]
        pairs = zip(requests, _rank_infos(requests), strict=True)
        answers = [json.dumps([request.token, rank_info]) for request, rank_info in pairs]
        store.call("multi_set", [f"rank_info/{rank}" for rank in ranks], answers)

    def _wait_for(self, key: str, deadline: float) -> None:
        """Return once `key` is written; if it is not, raise PeerError, which names missing ranks.

        Every rank does so after its deadline, and the first report counts. If no rank is missing by
        then, the last one has just arrived.
        """
        store, (plural, called) = self.store, UNITS[self.unit]
        look_s = min(LOOK_S, self.timeout_s / 4)
        while (left := deadline - time.monotonic()) > 0:
            if store.wait(key, min(look_s, left), answer_s=left):
                return
            self._refuse_second()
        missing = store.missing_ranks(JOINED)
        if not missing and store.wait(key, LATE_S):
            return
        came = f"{store.world_size - len(missing)} of {store.world_size} {plural} came"
        lost = f"; missing: {called} {listed(missing)}" if missing else ", but one of them is lost"
        fix = self._fix(
            "start them, or check that they use this address and that each has its own rank"
        )
        raise PeerError(f"{self.where}: {came} within {self.timeout_s:g} s{lost}; {fix}")

    def _refuse_second(self) -> None:
        """Raise UsageError if another process of this rank has joined after this one.

        It may be meant to replace this one. So the others are not told, and keep waiting.
        """
        store, name = self.store, self.unit
        if json.loads(store.call("get", request_key(store.rank)))[0] != self.request.token:
            error = UsageError(
                f"{self.where}: another {name} joined as rank {store.rank} after this one;"
                f" give each {name} its own rank, 0 to {store.world_size - 1}"
            )
            error.agreed = True
            raise error

    def _fix(self, by_hand: str) -> str:
        """Return the advice on missing ranks: start them by hand, unless a launcher does."""
        return BY_LAUNCHER if self.store.served_by_launcher else by_hand


def _rank_infos(requests: list[JoinRequest]) -> list[RankInfo]:
    """Return each rank's RankInfo."""
    sizes, so_far = Counter(request.host for request in requests), Counter[str]()
    main, found = name_of(requests[0].host), list[RankInfo]()
    for _, host, own in requests:
        others = (each.address for each in requests if each.host != host and each.address)
        found.append(RankInfo(so_far[host], sizes[host], len(sizes), main, own, next(others, None)))
        so_far[host] += 1
    return found


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
                f" {everyone[odd[0]].get(key)}; start every process with the same flags, data,"
                " code and packages"
            )
    return None
