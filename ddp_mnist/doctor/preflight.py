"""Checks between machines, before a process starts: name, who is there."""

import time
from collections.abc import Callable, Iterator

from ddp_mnist.cluster import interfaces
from ddp_mnist.cluster.nodes import Node, meet_machines
from ddp_mnist.cluster.store import listed
from ddp_mnist.errors import DdpMnistError, reason
from ddp_mnist.verbs.check_result import FAIL, WARN, CheckResult, check, failed, from_error, passed


def check_node(
    node: Node, timeout_s: float, show: Callable[[str], object] = bool
) -> Iterator[CheckResult]:
    """Yield one machine's results in the order in which things have to work, up to a FAIL.

    Before it waits, `show` is called with a line on whom it waits for.
    """
    yield (address := main_address(node))
    if address.status == FAIL or node.num_machines == 1:
        return
    others = [rank for rank in range(node.num_machines) if rank != node.machine_rank]
    who = f"machine{'s' * (len(others) > 1)} {listed(others)}"
    where = f"{node.main_process_ip}:{node.main_process_port}"
    show(f"waiting up to {timeout_s:g} s for {who} at {where}")
    clock = time.monotonic()
    try:
        meet_machines(node, timeout_s)
    except DdpMnistError as error:
        yield from_error("meeting", error)
    except RuntimeError as error:  # of the store, which machine 0 serves
        text = f"machine 0 went away ({reason(error)})"
        yield failed("meeting", text, "see what it says there, then start again")
    else:
        text = f"{node.num_machines} machines connected at {where}"
        yield passed("meeting", f"{text} in {time.monotonic() - clock:.1f} s")


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
    status, problem = WARN, ""
    fix = "give the address of machine 0, unless both run on this machine"
    if is_own and not is_first:
        problem = ", which is this machine's own"
    elif is_first and not is_own:
        status, problem = FAIL, ", which is no address of this machine"
        fix = f"on machine 0, give one of its own: {shown}"
    elif is_first and all(map(interfaces.is_loopback, addresses)):
        problem = ", which only this machine can reach"
        fix = f"give the other machines one of {shown}"
    return check("main address", problem, text + problem, fix, status)
