"""The processes, or the machines before them, find each other and agree on what they run."""

import time
from textwrap import shorten
from typing import Any

import torch.distributed as dist

from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.heartbeat import Heartbeat
from ddp_mnist.cluster.interfaces import address_towards, is_own
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.store import GONE, POLL_S, Store, host_id, open_store
from ddp_mnist.errors import DdpMnistError, PeerError, UsageError

# What meets: its plural, and what its number is called.
WORDS = {"process": ("processes", "rank"), "machine": ("machines", "machine")}


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
    store = Store(c10d, rank, size, launch.agent_store, timeout_s)
    try:
        # The store outlives a meeting: a process may train twice, and a launcher start it again.
        attempt = f"{unit}/{launch.attempt}"
        meeting = store.call("add", f"{attempt}/came/{rank}", 1)
        if meeting > 1 and not store.exists(f"{attempt}/{meeting - 1}/{GONE}/{rank}"):
            raise UsageError(
                f"{host}:{port}: another {unit} came with rank {rank} before this one;"
                f" give each {unit} a rank of its own, 0 to {size - 1}"
            )
        store.c10d = dist.PrefixStore(f"{attempt}/{meeting}", c10d)
        store.heartbeat = Heartbeat(store.c10d, rank, size, timeout_s)
        store.set(f"here/{rank}", [host_id(), size, address_towards(host, port)])
        try:
            _wait_for_others(store, launch, unit, timeout_s)
        except DdpMnistError as error:
            cause = first_cause(store, error)
            store.lost = [other for other in range(size) if not store.exists(f"here/{other}")]
            store.shutdown()
            raise cause from None
        store.heartbeat.start()
    except RuntimeError as error:
        raise PeerError(
            f"{host}:{port}: rank 0, which serves this port, ended before all had come;"
            " see what it says, then start again"
        ) from error
    return store


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


def _wait_for_others(store: Store, launch: Launch, unit: str, timeout_s: float) -> None:
    """Return once all ranks have written where they run, and read it."""
    where, size = f"{launch.main_host}:{launch.main_port}", store.world_size
    deadline = time.monotonic() + timeout_s
    missing = list(range(size))
    while missing := [rank for rank in missing if not store.exists(f"here/{rank}")]:
        store.raise_if_failed()
        if time.monotonic() > deadline:
            foreign = store.rank == 0 and not is_own(str(launch.main_host))
            note = ", which is none of this machine's own" if foreign else ""
            units, number = WORDS[unit]
            absent = shorten(", ".join(map(str, missing)), 40, placeholder=" ...")
            raise PeerError(
                f"{where}: {size - len(missing)} of {size} {units} came within {timeout_s:g} s;"
                f" missing: {number} {absent}; start them, or check that they use this"
                f" address{note}"
            )
        time.sleep(POLL_S)
    here = [store.get(f"here/{rank}") for rank in range(size)]
    store.hosts = [host for host, _, _ in here]
    store.addresses = [own_address for _, _, own_address in here]
    for rank, (_, theirs, _) in enumerate(here):
        if theirs != size:
            raise UsageError(
                f"{where}: rank {store.rank} was given {size} as the number of all, rank {rank}"
                f" {theirs}; start every {unit} with the same number"
            )
