"""This machine's addresses, network interfaces and ports."""

import contextlib
import ipaddress
import os
import socket

import psutil

from ddp_mnist.cluster.launch import Launch
from ddp_mnist.system.text import reason


def address_towards(host: str, port: int) -> str | None:
    """Return the address from which this machine sends packets to `host`; None without a route.

    A UDP socket is connected, which consults the routing table and sends nothing.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def interface_towards(host: str, port: int) -> str | None:
    """Return the network interface that leads to `host`, e.g. eth0; None without a route.

    gloo would instead advertise whatever address the host's own name resolves to, which on Debian
    is 127.0.1.1.
    """
    own = _plain(address_towards(host, port) or "")
    return next((name for name, address in _interfaces() if address == own), None)


def choose_interface(launch: Launch, own: str | None, other: str | None) -> None:
    """Set gloo's and NCCL's interface to the one that leads to rank 0, unless a variable is set.

    On rank 0's own machine its name may resolve to loopback, so there the interface that leads to
    another machine is used. `own` is this machine's address towards rank 0's, `other` another's.
    """
    assert launch.main_host and launch.main_port
    is_rank_0s = own is None or is_loopback(own)
    towards = other if is_rank_0s and other else launch.main_host
    if interface := interface_towards(towards, launch.main_port):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if interface != "lo":
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # without =, eth10 too


def first_address(interface: str) -> str:
    """Return the address that gloo takes of an interface, its first; "no address" without one."""
    return next((address for name, address in _interfaces() if name == interface), "no address")


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach `address`."""
    return ipaddress.ip_address(address).is_loopback


def loopback_of(host: str) -> str:
    """Return the loopback address that `host` is on every machine; "" for all else.

    A machine's own name is none, even if it stands for one here: elsewhere it has another address.
    """
    with contextlib.suppress(OSError, ValueError):
        resolved = socket.getaddrinfo(host, None) if host == "localhost" else []
        found = {str(ip[0]) for *_, ip in resolved} or {host}
        return min(found) if all(map(is_loopback, found)) else ""  # 127.0.0.1 before ::1
    return ""


def is_ipv4(host: str) -> bool:
    """Return whether every machine reaches `host` by IPv4, as far as this one can tell.

    Its own name may stand for 127.0.1.1 here, as on Debian, and for other addresses elsewhere.
    """
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
        return all(k == socket.AF_INET and ip[0] != "127.0.1.1" for k, *_, ip in found)
    return False


def interfaces_up() -> dict[str, str]:
    """Return the interfaces that lead to other machines, each with one of its addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found = reversed(_interfaces())
    # eth0:vip is a label of eth0
    return {n: a for n, a in found if n.partition(":")[0] in up and not is_loopback(a)}


def why_port_is_taken(port: int) -> str | None:
    """Return why no server can listen at `port` of this machine; None if one can."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        return reason(error).partition(" (while")[0]  # Python adds the address
    return None


def _interfaces() -> list[tuple[str, str]]:
    """Return the name of each interface with each of its IP addresses."""
    found, ip = psutil.net_if_addrs().items(), (socket.AF_INET, socket.AF_INET6)
    return [(name, _plain(e.address)) for name, each in found for e in each if e.family in ip]


def _plain(address: str) -> str:
    """Return an IPv6 address without its zone, e.g. fe80::1%eth0."""
    return address.partition("%")[0]
