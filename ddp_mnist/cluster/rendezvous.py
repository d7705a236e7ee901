"""How the processes, or the machines before them, find each other, and agree on what they run."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.interfaces import address_towards, is_own
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.store import POLL_S, Store, host_id, open_store
from ddp_mnist.errors import DdpMnistError, PeerError, UsageError


def meet(launch: Launch, timeout_s: float) -> Store:
    """Return the store once every rank has written there which machine it runs on.

    Raises:
        PeerError: nobody answers at the main address, or not all came, within `timeout_s`.
        UsageError: the main port is in use, two processes have the same rank, or they were given
            different world sizes.
        FailedElsewhere: another rank found that out first, and reports it.
    """
    if launch.world_size == 1 and not launch.agent_store:
        store = Store(dist.HashStore(), 0, 1)
        store.hosts = [host_id()]
        return store
    assert launch.main_host is not None and launch.main_port is not None
    rank, world_size = launch.rank, launch.world_size
    host, port, by_launcher = launch.main_host, launch.main_port, launch.agent_store
    serve, who = rank == 0 and not by_launcher, f"rank {rank} of {world_size}"
    c10d = open_store(host, port, serve=serve, timeout_s=timeout_s, who=who)
    prefixed = dist.PrefixStore(f"ddp_mnist/{launch.attempt}", c10d)
    store = Store(prefixed, rank, world_size, by_launcher, timeout_s)
    _gather(store, timeout_s, host, port, "process")
    return store


def meet_machines(host: str, port: int, rank: int, machines: int, timeout_s: float) -> Store:
    """`meet` for machines that have started no process yet; machine 0 serves the store."""
    who = f"machine {rank} of {machines}"
    c10d = open_store(host, port, serve=rank == 0, timeout_s=timeout_s, who=who)
    store = Store(dist.PrefixStore("machines", c10d), rank, machines, patience_s=timeout_s)
    _gather(store, timeout_s, host, port, "machine")
    return store


def check_same(store: Store, facts: dict[str, Any], about: str = "facts") -> None:
    """Compare the ranks' configuration, data digest, package versions and the like.

    DDP compares the shapes of the parameters and nothing else.

    Args:
        store: shared by all ranks.
        facts: this rank's, by the name that a person knows them by.
        about: another word for each comparison on one store.

    Raises:
        UsageError: names the first fact that differs, its values and their ranks.
    """
    everyone = store.all_gather(about, facts)
    for key, value in everyone[0].items():
        odd = [rank for rank, theirs in enumerate(everyone) if theirs.get(key) != value]
        if odd:
            raise UsageError(
                f"{key}: rank 0 has {value}, rank {_shown(odd)} has {everyone[odd[0]].get(key)};"
                " start every process with the same flags, data and packages"
            )


def _gather(store: Store, timeout_s: float, host: str, port: int, unit: str) -> None:
    """Write where this rank runs, and return once all ranks have; raise as `meet` does."""
    address = f"{host}:{port}"
    try:
        if store.call("add", f"taken/{store.rank}", 1) > 1:
            raise UsageError(
                f"{address}: another {unit} came with rank {store.rank} before this one;"
                f" give each {unit} a rank of its own, 0 to {store.world_size - 1}"
            )
        here = [host_id(), store.world_size, address_towards(host, port)]
        store.set(f"here/{store.rank}", here)
        try:
            _wait_for_others(store, timeout_s, address, unit)
            _read_places(store, address, unit)
        except DdpMnistError as error:
            cause = first_cause(store, error)
            came = [rank for rank in range(store.world_size) if store.exists(f"here/{rank}")]
            store.shutdown(others=len(came) - 1)
            raise cause from None
    except RuntimeError as error:
        raise PeerError(
            f"{address}: rank 0, which serves this port, ended before all had come;"
            " see what it says, then start again"
        ) from error


def _wait_for_others(store: Store, timeout_s: float, address: str, unit: str) -> None:
    deadline = time.monotonic() + timeout_s
    missing = list(range(store.world_size))
    while missing := [rank for rank in missing if not store.exists(f"here/{rank}")]:
        store.raise_if_failed()
        if time.monotonic() > deadline:
            came = store.world_size - len(missing)
            units, number = ("processes", "rank") if unit == "process" else ("machines", "machine")
            foreign = store.rank == 0 and not is_own(address.rpartition(":")[0])
            note = ", which is none of this machine's own" if foreign else ""
            raise PeerError(
                f"{address}: {came} of {store.world_size} {units} came within {timeout_s:g} s;"
                f" missing: {number} {_shown(missing)}; start them, or check that they use this"
                f" address{note}"
            )
        time.sleep(POLL_S)


def _read_places(store: Store, address: str, unit: str) -> None:
    here = [store.get(f"here/{rank}") for rank in range(store.world_size)]
    store.hosts = [host for host, _, _ in here]
    store.addresses = [own_address for _, _, own_address in here]
    for rank, (_, world_size, _) in enumerate(here):
        if world_size != store.world_size:
            raise UsageError(
                f"{address}: rank {store.rank} was given {store.world_size} as the number of all,"
                f" rank {rank} {world_size}; start every {unit} with the same number"
            )


def _shown(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (" ..." if len(ranks) > most else "")
