import os
from unittest.mock import patch

import psutil
import pytest
import torch.distributed as dist

from ddp_mnist.cluster import interfaces, world
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import choose_interface

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("host", "towards", "before", "after"),
    [
        ("127.0.0.1", "lo", {}, {GLOO: "lo"}),
        ("unknown", None, {}, {}),
        ("h", "eth1", {GLOO: "mine"}, {GLOO: "mine", NCCL: "=eth1"}),
    ],
)
def test_choose_interface(
    host: str, towards: str | None, before: dict[str, str], after: dict[str, str]
) -> None:
    launch = Launch("tcp", 0, 2, main_host=host, main_port=9)
    with (
        patch.object(world, "interface_towards", lambda *_: towards),
        patch.dict(os.environ, before),
    ):
        for name in {GLOO, NCCL} - {*before}:
            os.environ.pop(name, None)
        choose_interface(launch, Store(dist.HashStore(), 0, 2))
        assert {name: os.environ[name] for name in (GLOO, NCCL) if name in os.environ} == after


def test_the_interface_towards_an_address() -> None:
    assert interfaces.interface_towards("127.0.0.1", 9) == "lo"
    assert interfaces.interface_towards("localhost", 9) == "lo"
    addresses = [a.address for a in psutil.net_if_addrs()["lo"]]
    assert interfaces.interface_towards("::1", 9) == ("lo" if "::1" in addresses else None)
    for host in ("no.such.host.invalid", "a..b", "x" * 70, "256.1.1.1.1"):
        assert interfaces.interface_towards(host, 9) is None
