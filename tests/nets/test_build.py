import pytest
import torch

from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.nets.build import build_net, has_batch_norm, is_known
from ddp_mnist.task import Classification
from tests.data_sets import COLOUR, GREY

SQUEEZENET = "torchvision:squeezenet1_1"


@pytest.mark.parametrize("image_format", [GREY, COLOUR])
@pytest.mark.parametrize("name", ["cnn", "cnn_bn", "torchvision:resnet18", SQUEEZENET])
def test_a_net_for_any_channels_and_size(name: str, image_format: ImageFormat) -> None:
    net = build_net(name, Classification([*"abcdefg"]), image_format).eval()
    images = torch.randint(0, 256, (3, *image_format.shape), dtype=torch.uint8)
    with torch.no_grad():
        assert list(net(images).shape) == [3, 7]
    assert has_batch_norm(net) == (name in ("cnn_bn", "torchvision:resnet18"))
    assert is_known(name)  # no file of it is kept with the weights
