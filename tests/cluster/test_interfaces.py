import psutil

from ddp_mnist.cluster import interfaces


def test_the_interface_towards_an_address() -> None:
    assert interfaces.interface_towards("127.0.0.1", 9) == "lo"
    assert interfaces.interface_towards("localhost", 9) == "lo"
    addresses = [a.address for a in psutil.net_if_addrs()["lo"]]
    assert interfaces.interface_towards("::1", 9) == ("lo" if "::1" in addresses else None)
    for host in ("no.such.host.invalid", "a..b", "x" * 70, "256.1.1.1.1"):
        assert interfaces.interface_towards(host, 9) is None
