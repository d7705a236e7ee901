import os
from unittest.mock import patch

import psutil
import pytest

from ddp_mnist.cluster import interfaces
from ddp_mnist.cluster.launch import Launch


def test_the_interface_towards_an_address() -> None:
    assert interfaces.interface_towards("127.0.0.1", 9) == "lo"
    assert interfaces.interface_towards("localhost", 9) == "lo"
    addresses = [a.address for a in psutil.net_if_addrs()["lo"]]
    assert interfaces.interface_towards("::1", 9) == ("lo" if "::1" in addresses else None)
    for host in ("no.such.host.invalid", "a..b", "x" * 70, "256.1.1.1.1"):
        assert interfaces.interface_towards(host, 9) is None


GLOO = "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("host", "towards", "before", "after"),
    [
        ("127.0.0.1", "lo", {}, {GLOO: "lo"}),
        ("unknown", None, {}, {}),
        ("h", "eth1", {GLOO: "mine"}, {GLOO: "mine", "NCCL_SOCKET_IFNAME": "=eth1"}),
    ],
)
def test_the_interface_that_leads_to_rank_0_is_chosen(
    host: str, towards: str | None, before: dict[str, str], after: dict[str, str]
) -> None:
    launch = Launch("tcp", 0, 2, main_host=host, main_port=9)
    with (
        patch.object(interfaces, "interface_towards", lambda *_: towards),
        patch.dict(os.environ, before, clear=True),
    ):
        interfaces.choose_interface(launch, None, None)
        assert os.environ == after
