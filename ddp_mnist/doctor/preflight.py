"""Checks between machines before training starts: the main address, and who is missing."""

import time
from collections.abc import Iterator

from ddp_mnist.cluster import interfaces
from ddp_mnist.cluster.nodes import Node, meet_machines
from ddp_mnist.cluster.store import listed
from ddp_mnist.errors import DdpMnistError, reason
from ddp_mnist.run.console import count
from ddp_mnist.verbs.check_result import FAIL, CheckResult, failed, passed, warned


def check_node(node: Node, timeout_s: float) -> Iterator[CheckResult | str]:
    """Yield one machine's results in the order in which things have to work, up to a FAIL.

    Before a wait, yield a line that names the machines waited for.
    """
    yield (address := main_address(node))
    if address.status == FAIL or node.num_machines == 1:
        return
    others = [rank for rank in range(node.num_machines) if rank != node.machine_rank]
    where = f"{node.main_process_ip}:{node.main_process_port}"
    yield f"waiting up to {timeout_s:g} s for machine {listed(others)} at {where}"
    clock = time.monotonic()
    try:
        meet_machines(node, timeout_s)
    except DdpMnistError as error:
        yield CheckResult.from_error("meeting", error)
    except RuntimeError as error:  # from the store, which machine 0 serves
        text = f"machine 0 went away ({reason(error)})"
        yield failed("meeting", text, "see what it says there, then start again")
    else:
        text = f"{count(node.num_machines, 'machine')} connected at {where}"
        yield passed("meeting", f"{text} in {time.monotonic() - clock:.1f} s")


def main_address(node: Node) -> CheckResult:
    """Check that the main address can be resolved, and is machine 0's."""
    host = node.main_process_ip
    try:
        addresses = interfaces.addresses_of(host)
    except (OSError, UnicodeError) as error:
        fix = f"add {host} to /etc/hosts or DNS, or give an address: MAIN_PROCESS_IP=192.168.1.201"
        return failed("main address", f"{host} has no address ({reason(error)})", fix)
    text = f"{host} is {', '.join(addresses)}" if addresses != [host] else host
    is_first, is_own = node.machine_rank == 0, interfaces.is_own(host)
    own = ", ".join(sorted(interfaces.own_addresses())) or "its addresses"
    if is_own and not is_first:
        fix = "give the address of machine 0, unless both run on this machine"
        return warned("main address", f"{text}, which is this machine's own", fix)
    if is_first and not is_own:
        fix = f"on machine 0, give one of its own: {own}"
        return failed("main address", f"{text}, which is not an address of this machine", fix)
    if is_first and all(map(interfaces.is_loopback, addresses)):
        fix = f"give the other machines one of {own}"
        return warned("main address", f"{text}, which only this machine can reach", fix)
    return passed("main address", text)
