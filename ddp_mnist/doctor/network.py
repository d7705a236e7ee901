"""The way between machines, before a process starts: name, route, who is there, ports."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from ddp_mnist.cluster.interfaces import (
    address_towards,
    interface_towards,
    is_loopback,
    is_own,
    own_addresses,
)
from ddp_mnist.cluster.nodes import Node, check_agreement, meet_others
from ddp_mnist.cluster.store import Store
from ddp_mnist.errors import DdpMnistError, reason
from ddp_mnist.verify.results import FAIL, CheckResult, failed, from_error, passed, warned

CONNECT_S = 5.0
PASSED_ON = "DDP_MNIST_DOCTOR_WAY"  # what was found on the way, for the processes that follow


def examine_way(node: Node, timeout_s: float) -> Iterator[CheckResult]:
    """One machine's part, in the order in which things have to work; ends at the first FAIL."""
    for examine in (main_address, route):
        finding = examine(node)
        yield finding
        if finding.status == FAIL:
            return
    where = f"{node.main_process_ip}:{node.main_process_port}"
    try:
        clock = time.monotonic()
        store = meet_others(node, timeout_s)
        met_s = time.monotonic() - clock
        yield passed("meeting", f"{node.num_machines} machines met at {where} in {met_s:.1f} s")
    except DdpMnistError as error:
        yield from_error("meeting", error)
        return
    try:
        check_agreement(store, node)
        findings = list(connections(store))
        store.close()
        yield from findings
    except DdpMnistError as error:
        yield from_error("connections", error)
    except RuntimeError as error:  # of the store, which machine 0 serves
        text = f"machine 0 went away ({str(error).splitlines()[0]})"
        yield failed("connections", text, "see what it says there, then start again")


def pass_on(findings: list[CheckResult]) -> None:
    """To the processes that this one starts, or becomes."""
    os.environ[PASSED_ON] = json.dumps([asdict(finding) for finding in findings])


def passed_on() -> list[CheckResult]:
    """What this machine found before its processes were started; [] without that."""
    return [CheckResult(**each) for each in json.loads(os.environ.get(PASSED_ON, "[]"))]


def main_address(node: Node) -> CheckResult:
    """Whether the main address is one, and machine 0's."""
    host, port = node.main_process_ip, node.main_process_port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        fix = f"add {host} to /etc/hosts or DNS, or give an address: MAIN_PROCESS_IP=192.168.1.201"
        return failed("main address", f"{host} has no address ({reason(error)})", fix)
    addresses = sorted({str(entry[4][0]) for entry in found})
    shown = host if addresses == [host] else f"{host} is {', '.join(addresses)}"
    mine, is_mine = own_addresses(), any(map(is_own, addresses))
    if node.machine_rank == 0 and not is_mine:
        fix = f"on machine 0, give one of its own: {', '.join(sorted(mine))}"
        return failed("main address", f"{shown}, which is no address of this machine", fix)
    if node.machine_rank == 0 and all(map(is_loopback, addresses)):
        fix = f"give the other machines one of {', '.join(sorted(mine)) or 'its addresses'}"
        return warned("main address", f"{shown}, which only this machine can reach", fix)
    if node.machine_rank > 0 and is_mine:
        fix = "give the address of machine 0, unless both run on this machine"
        return warned("main address", f"{shown}, which is this machine's own", fix)
    return passed("main address", shown)


def route(node: Node) -> CheckResult:
    host, port = node.main_process_ip, node.main_process_port
    own, interface = address_towards(host, port), interface_towards(host, port)
    if own is None:
        fix = "bring up the interface of that network, or give another address of machine 0"
        return failed("route", f"none from this machine to {host}", fix)
    return passed("route", f"to {host} over {interface}, from {own}")


def connections(store: Store) -> Iterator[CheckResult]:
    """Each machine connects to each other, at a port that the system chose, as gloo and NCCL do.

    The main port may be open in a firewall that drops all others.
    """
    others = [a for rank, a in enumerate(store.addresses) if rank != store.rank and a]
    own = store.addresses[store.rank]
    if (own is None or is_loopback(own)) and others:
        own = address_towards(others[0], 1)
    family = socket.AF_INET6 if own and ":" in own else socket.AF_INET
    with socket.socket(family) as server:
        server.bind(("", 0))
        server.listen()
        store.set(f"listens/{store.rank}", [own, server.getsockname()[1]])
        ranks = [rank for rank in range(store.world_size) if rank != store.rank]
        places = [store.get(f"listens/{rank}", store.patience_s) for rank in ranks]
        with ThreadPoolExecutor(len(ranks)) as pool:  # one deadline for all of them
            reasons = list(pool.map(lambda place: refusal(*place), places))
        unreached = [
            (rank, *place, why)
            for rank, place, why in zip(ranks, places, reasons, strict=True)
            if why
        ]
        store.set(f"reached/{store.rank}", not unreached)
        store.barrier("connections", within_s=store.patience_s + CONNECT_S)
    if unreached:
        rank, address, port, why = unreached[0]
        yield failed(
            "connections",
            f"machine {rank} cannot be reached at {address}:{port} ({why})",
            "open all TCP ports between the machines in firewalls and security groups",
        )
        return
    deaf = [r for r in range(store.world_size) if not store.get(f"reached/{r}", store.patience_s)]
    if deaf:
        shown = ", ".join(map(str, deaf))
        fix = "see what it says there"
        yield failed("connections", f"machine {shown} cannot reach all others", fix)
    else:
        yield passed("connections", f"to {store.world_size - 1} other machines, at ports of theirs")


def refusal(address: str | None, port: int) -> str:
    """Why no connection is made within CONNECT_S; "" if one is."""
    if address is None:
        return "it has no address"
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return ""
    except OSError as error:
        return reason(error)
