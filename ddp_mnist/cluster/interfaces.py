"""."""

from __future__ import annotations

import contextlib
import ipaddress
import socket


def address_towards(host: str, port: int) -> str | None:
    """This machine's address that packets to `host` leave from; None if no route leads there.

    A UDP socket is connected, which asks the routing table and sends nothing.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return None


def interface_towards(host: str, port: int) -> str | None:
    """The network interface that leads to `host`, e.g. eth0; None if no route leads there.

    gloo would instead advertise whatever address the host's own name resolves to, which on Debian
    is 127.0.1.1.
    """
    import psutil

    own = address_towards(host, port)
    if own is None:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            is_ip = entry.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and _ip(entry.address) == _ip(own):
                return name
    return None


def _ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(address.partition("%")[0])


def is_loopback(address: str) -> bool:
    return _ip(address).is_loopback


def is_own(host: str) -> bool:
    """Whether an address of `host` is one of this machine's; True if it cannot be told."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return True
    for family, kind, *_, place in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(place)
            return True
    return False
