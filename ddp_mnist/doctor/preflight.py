"""Checks between machines, before a process starts: name, route, who is there, ports."""

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
    addresses_of,
    interface_towards,
    is_loopback,
    is_own,
    own_addresses,
)
from ddp_mnist.cluster.nodes import Node, meet_others
from ddp_mnist.cluster.store import Store
from ddp_mnist.errors import DdpMnistError, reason
from ddp_mnist.verify.results import FAIL, CheckResult, failed, from_error, passed, warned

CONNECT_S = 5.0
PASSED_ON = "DDP_MNIST_DOCTOR_PREFLIGHT"  # results of it, for the processes that follow


def check_node(node: Node, timeout_s: float) -> Iterator[CheckResult]:
    """Yield one machine's results in the order in which things have to work, up to a FAIL."""
    for check in (main_address, route):
        result = check(node)
        yield result
        if result.status == FAIL:
            return
    where = f"{node.main_process_ip}:{node.main_process_port}"
    name, clock = "meeting", time.monotonic()
    try:
        store = meet_others(node, timeout_s)
        seconds = time.monotonic() - clock
        yield passed(name, f"{node.num_machines} machines connected at {where} in {seconds:.1f} s")
        name = "connections"
        result = connections(store)
        store.close()
        yield result
    except DdpMnistError as error:
        yield from_error(name, error)
    except RuntimeError as error:  # of the store, which machine 0 serves
        text = f"machine 0 went away ({reason(error)})"
        yield failed(name, text, "see what it says there, then start again")


def pass_on(results: list[CheckResult]) -> None:
    """Leave the results to the processes that this one starts, or becomes."""
    os.environ[PASSED_ON] = json.dumps([asdict(result) for result in results])


def passed_on() -> list[CheckResult]:
    """Return what this machine found before its processes were started; [] without that."""
    return [CheckResult(**each) for each in json.loads(os.environ.get(PASSED_ON, "[]"))]


def main_address(node: Node) -> CheckResult:
    """Check that the main address is one, and machine 0's."""
    name, host = "main address", node.main_process_ip
    try:
        addresses = addresses_of(host)
    except (OSError, UnicodeError) as error:
        fix = f"add {host} to /etc/hosts or DNS, or give an address: MAIN_PROCESS_IP=192.168.1.201"
        return failed(name, f"{host} has no address ({reason(error)})", fix)
    text = host if addresses == [host] else f"{host} is {', '.join(addresses)}"
    shown = ", ".join(sorted(own_addresses())) or "its addresses"
    is_mine = is_own(host)
    if node.machine_rank > 0 and is_mine:
        fix = "give the address of machine 0, unless both run on this machine"
        return warned(name, f"{text}, which is this machine's own", fix)
    if node.machine_rank > 0:
        return passed(name, text)
    if not is_mine:
        fix = f"on machine 0, give one of its own: {shown}"
        return failed(name, f"{text}, which is no address of this machine", fix)
    if all(map(is_loopback, addresses)):
        fix = f"give the other machines one of {shown}"
        return warned(name, f"{text}, which only this machine can reach", fix)
    return passed(name, text)


def route(node: Node) -> CheckResult:
    host, port = node.main_process_ip, node.main_process_port
    own, interface = address_towards(host, port), interface_towards(host, port)
    if own is None:
        fix = "bring up the interface of that network, or give another address of machine 0"
        return failed("route", f"none from this machine to {host}", fix)
    return passed("route", f"to {host} over {interface}, from {own}")


def connections(store: Store) -> CheckResult:
    """Check that each machine reaches each other at a port that the system chose.

    gloo and NCCL connect so; the main port may be open in a firewall that drops all others.
    """
    ranks = [rank for rank in range(store.world_size) if rank != store.rank]
    own = store.addresses[store.rank]
    elsewhere = [address for rank in ranks if (address := store.addresses[rank])]
    if elsewhere and (own is None or is_loopback(own)):
        own = address_towards(elsewhere[0], 1)
    with socket.socket(socket.AF_INET6 if own and ":" in own else socket.AF_INET) as server:
        server.bind(("", 0))
        server.listen()
        store.set(f"listens/{store.rank}", [own, server.getsockname()[1]])
        places = [store.get(f"listens/{rank}", store.patience_s) for rank in ranks]
        with ThreadPoolExecutor(len(ranks)) as pool:  # one deadline for all of them
            refusals = list(pool.map(lambda place: refusal(*place), places))
        store.set(f"reached/{store.rank}", not any(refusals))
        store.barrier("connections", within_s=store.patience_s + CONNECT_S)
    for rank, (address, port), why in zip(ranks, places, refusals, strict=True):
        if why:
            text = f"machine {rank} cannot be reached at {address}:{port} ({why})"
            fix = "open all TCP ports between the machines in firewalls and security groups"
            return failed("connections", text, fix)
    if cut := [str(rank) for rank in ranks if not store.get(f"reached/{rank}", store.patience_s)]:
        text = f"machine {', '.join(cut)} cannot reach all others"
        return failed("connections", text, "see what it says there")
    return passed("connections", f"to {len(ranks)} other machines, at ports of theirs")


def refusal(address: str | None, port: int) -> str:
    """Return why no connection is made within CONNECT_S; "" if one is."""
    if address is None:
        return "it has no address"
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return ""
    except OSError as error:
        return reason(error)
