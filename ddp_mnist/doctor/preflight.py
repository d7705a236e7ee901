"""Checks between machines, before a process starts: name, route, who is there, ports."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ddp_mnist.cluster import interfaces
from ddp_mnist.cluster.nodes import Node, meet_others
from ddp_mnist.cluster.store import Store
from ddp_mnist.errors import DdpMnistError, reason
from ddp_mnist.run.results import FAIL, WARN, CheckResult, check, failed, from_error, passed

CONNECT_S = 5.0


def check_node(node: Node, timeout_s: float) -> Iterator[CheckResult]:
    """Yield one machine's results in the order in which things have to work, up to a FAIL."""
    for step in (main_address, route):
        result = step(node)
        yield result
        if result.status == FAIL:
            return
    if node.num_machines == 1:
        return  # there is no other to meet
    name, clock = "meeting", time.monotonic()
    try:
        store = meet_others(node, timeout_s)
        where = f"{node.main_process_ip}:{node.main_process_port}"
        text = f"{node.num_machines} machines connected at {where}"
        yield passed(name, f"{text} in {time.monotonic() - clock:.1f} s")
        name = "connections"
        result = connections(store)
        store.close()
        yield result
    except DdpMnistError as error:
        yield from_error(name, error)
    except RuntimeError as error:  # of the store, which machine 0 serves
        text = f"machine 0 went away ({reason(error)})"
        yield failed(name, text, "see what it says there, then start again")


def main_address(node: Node) -> CheckResult:
    """Check that the main address is one, and machine 0's."""
    host = node.main_process_ip
    try:
        addresses = interfaces.addresses_of(host)
    except (OSError, UnicodeError) as error:
        fix = f"add {host} to /etc/hosts or DNS, or give an address: MAIN_PROCESS_IP=192.168.1.201"
        return failed("main address", f"{host} has no address ({reason(error)})", fix)
    text = host if addresses == [host] else f"{host} is {', '.join(addresses)}"
    shown = ", ".join(sorted(interfaces.own_addresses())) or "its addresses"
    is_first, is_own = node.machine_rank == 0, interfaces.is_own(host)
    status, problem, fix = (
        WARN,
        "",
        "give the address of machine 0, unless both run on this machine",
    )
    if is_own and not is_first:
        problem = ", which is this machine's own"
    elif is_first and not is_own:
        status, problem = FAIL, ", which is no address of this machine"
        fix = f"on machine 0, give one of its own: {shown}"
    elif is_first and all(map(interfaces.is_loopback, addresses)):
        problem = ", which only this machine can reach"
        fix = f"give the other machines one of {shown}"
    return check("main address", problem, text + problem, fix, status)


def route(node: Node) -> CheckResult:
    """Check that packets to the main address leave by an interface of this machine."""
    place = (node.main_process_ip, node.main_process_port)
    own, by = interfaces.address_towards(*place), interfaces.interface_towards(*place)
    text = f"to {place[0]} over {by}, from {own}"
    text = text if own else f"none from this machine to {place[0]}"
    fix = "bring up the interface of that network, or give another address of machine 0"
    return check("route", own is None, text, fix)


def connections(store: Store) -> CheckResult:
    """Check that each machine reaches each other at a port that the system chose.

    gloo and NCCL connect so; the main port may be open in a firewall that drops all others.
    """
    ranks = [rank for rank in range(store.world_size) if rank != store.rank]
    own = store.addresses[store.rank]
    elsewhere = [address for rank in ranks if (address := store.addresses[rank])]
    if elsewhere and (own is None or interfaces.is_loopback(own)):
        own = interfaces.address_towards(elsewhere[0], 1)
    with socket.socket(socket.AF_INET6 if own and ":" in own else socket.AF_INET) as server:
        server.bind(("", 0))
        server.listen()
        listening = store.all_gather("listens", [own, server.getsockname()[1]])
        places = [listening[rank] for rank in ranks]
        with ThreadPoolExecutor(len(ranks)) as pool:  # one deadline for all of them
            refusals = list(pool.map(lambda place: refusal(*place), places))
        store.barrier("connections", within_s=store.patience_s + CONNECT_S)
    reached = store.all_gather("reached", not any(refusals))
    fix = "open all TCP ports between the machines in firewalls and security groups"
    for rank, (address, port), why in zip(ranks, places, refusals, strict=True):
        if why:
            text = f"machine {rank} cannot be reached at {address}:{port} ({why})"
            return failed("connections", text, fix)
    cut = ", ".join(str(rank) for rank in ranks if not reached[rank])
    text = f"to {len(ranks)} other machines, at ports of theirs"
    text = f"machine {cut} cannot reach all others" if cut else text
    return check("connections", cut, text, "see what it says there")


def refusal(address: str | None, port: int) -> str:
    """Return why no connection is made within CONNECT_S; "" if one is."""
    if address is None:
        return "it has no address"
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S):
            return ""
    except OSError as error:
        return reason(error)
