"""How the processes find each other, and what they tell each other outside of collectives.

All go through one small key-value store at the main address: torch.distributed's TCPStore, served
by rank 0 or by the launcher's agent. It listens on all interfaces without authentication, so the
main port belongs on a private network.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.interfaces import address_towards, is_own
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.store import POLL_S, Store, host_id, open_store
from ddp_mnist.errors import DdpMnistError, PeerError, UsageError


def meet(launch: Launch, timeout_s: float) -> Store:
    """Opens the store and returns once every rank has posted where it runs.

    Raises:
        PeerError: nobody answers at the main address, or not all came, within `timeout_s`.
        UsageError: the main port is in use, two processes have the same rank, or they were told
            different world sizes.
        FailedElsewhere: another rank found that out first, and says it.
    """
    if launch.world_size == 1 and not launch.agent_store:
        store = Store(dist.HashStore(), 0, 1)
        store.hosts = [host_id()]
        return store
    assert launch.main_host is not None and launch.main_port is not None
    c10d = open_store(
        launch.main_host,
        launch.main_port,
        serve=launch.rank == 0 and not launch.agent_store,
        timeout_s=timeout_s,
        who=f"rank {launch.rank} of {launch.world_size}",
    )
    store = Store(
        dist.PrefixStore(f"ddp_mnist/{launch.attempt}", c10d),
        launch.rank,
        launch.world_size,
        launch.agent_store,
        timeout_s,
    )
    _gather(store, timeout_s, f"{launch.main_host}:{launch.main_port}", "process")
    return store


def meet_machines(host: str, port: int, rank: int, machines: int, timeout_s: float) -> Store:
    """`meet` for machines that have started no process yet; machine 0 serves the store."""
    who = f"machine {rank} of {machines}"
    c10d = open_store(host, port, serve=rank == 0, timeout_s=timeout_s, who=who)
    store = Store(dist.PrefixStore("machines", c10d), rank, machines, patience_s=timeout_s)
    _gather(store, timeout_s, f"{host}:{port}", "machine")
    return store


def check_same(store: Store, facts: dict[str, Any], about: str = "facts") -> None:
    """Compares what every rank believes: configuration, data digest, package versions.

    DDP compares the shapes of the parameters and nothing else.

    Args:
        store: shared by all ranks.
        facts: this rank's, by the name that a person knows them by.
        about: another word for each comparison on one store.

    Raises:
        UsageError: names the first fact that differs, its values and their ranks.
    """
    store.set(f"{about}/{store.rank}", facts)

    def compare() -> str:
        everyone = [
            store.get(f"{about}/{rank}", store.patience_s) for rank in range(store.world_size)
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

    if difference := store.broadcast_from_rank0(about, compare):
        raise UsageError(difference)


def _gather(store: Store, timeout_s: float, address: str, unit: str) -> None:
    """Posts where this rank runs, and returns once all ranks have; raises as `meet` does."""
    with _while_rank_0_serves(address):
        if store.call("add", f"taken/{store.rank}", 1) > 1:
            raise UsageError(
                f"{address}: another {unit} came with rank {store.rank} before this one;"
                f" give each {unit} a rank of its own, 0 to {store.world_size - 1}"
            )
        host, _, port = address.rpartition(":")
        own_address = address_towards(host, int(port))
        store.set(f"here/{store.rank}", [host_id(), store.world_size, own_address])
        try:
            _wait_for_others(store, timeout_s, address, unit)
        except DdpMnistError as error:
            cause = first_cause(store, error)
            came = [rank for rank in range(store.world_size) if store.exists(f"here/{rank}")]
            store.shutdown(others=len(came) - 1)
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


def _wait_for_others(store: Store, timeout_s: float, address: str, unit: str) -> None:
    deadline = time.monotonic() + timeout_s
    missing = list(range(store.world_size))
    while missing := [rank for rank in missing if not store.exists(f"here/{rank}")]:
        store.raise_if_failed()
        if time.monotonic() > deadline:
            came = store.world_size - len(missing)
            plural = "processes" if unit == "process" else f"{unit}s"
            number = "rank" if unit == "process" else unit
            foreign = store.rank == 0 and not is_own(address.rpartition(":")[0])
            note = ", which is none of this machine's own" if foreign else ""
            raise PeerError(
                f"{address}: {came} of {store.world_size} {plural} came within {timeout_s:g} s;"
                f" missing: {number} {_some(missing)}; start them, or check that they use this"
                f" address{note}"
            )
        time.sleep(POLL_S)
    here = [store.get(f"here/{rank}") for rank in range(store.world_size)]
    store.hosts = [host for host, _, _ in here]
    store.addresses = [own_address for _, _, own_address in here]
    for rank, (_, world_size, _) in enumerate(here):
        if world_size != store.world_size:
            raise UsageError(
                f"{address}: rank {store.rank} was told of {store.world_size}, rank {rank} of"
                f" {world_size}; start every {unit} with the same number"
            )


def _some(ranks: list[int], most: int = 8) -> str:
    return ", ".join(map(str, ranks[:most])) + (" ..." if len(ranks) > most else "")
