from dataclasses import replace

import pytest

from ddp_mnist.core.task import Classification
from ddp_mnist.nets.build import build_net, gains_by_bf16
from tests.data_sets import GREY


@pytest.mark.parametrize(
    ("name", "gains"),
    [
        ("cnn", True),
        ("mlp", True),
        ("torchvision:resnet18", True),
        ("torchvision:convnext_tiny", True),  # depthwise, but for a small part
        ("torchvision:regnet_y_400mf", True),  # grouped, not depthwise
        ("torchvision:efficientnet_v2_s", True),
        ("torchvision:mobilenet_v3_small", False),
        ("torchvision:shufflenet_v2_x0_5", False),
    ],
)
def test_nets_that_a_cpu_trains_faster_in_bf16(name: str, gains: bool) -> None:
    """As they were measured: docs/benchmarks.md."""
    size = 28 if name in ("cnn", "mlp") else 96
    image_format = replace(GREY, shape=(3, size, size), mean=(0.5,) * 3, std=(0.2,) * 3)
    net = build_net(name, Classification([*"abc"]), image_format)
    assert gains_by_bf16(net, image_format.shape) is gains
    assert not any(module._forward_hooks for module in net.modules())
