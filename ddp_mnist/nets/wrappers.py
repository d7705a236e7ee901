"""What stands between the pixels and a net, and between its logits and the test."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.task import Classification, Task


class Normalised(nn.Module):
    """A net that takes pixels: uint8 [B, C, H, W] get mean 0 and deviation 1 per channel.

    They are converted to the dtype of the net's weights, so float32, float64 and autocast take the
    same pixels. Mean and deviation are not buffers: DDP would broadcast those in each step.
    """

    def __init__(self, net: nn.Module, image_format: ImageFormat) -> None:
        super().__init__()
        self.net = net
        self.mean, self.std = image_format.mean, image_format.std  # per channel, as shares of 255

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(next(self.net.parameters()).dtype)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            x[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
        return self.net(x)


class GreyAsColour(nn.Module):
    """A net for colour images that is given grey ones, as three equal channels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.expand(-1, 3, -1, -1))


def with_test_time_augmentation(net: nn.Module, name: str, task: Task) -> nn.Module:
    """Return the net `name` as it is evaluated and used: cnn_deep gets several views of a class.

    Numbers may change with a view.
    """
    return ShiftedViews(net) if name == "cnn_deep" and isinstance(task, Classification) else net


class ShiftedViews(nn.Module):
    """The mean of a net's logits over nine views of an image, each moved by up to a pixel.

    This test-time augmentation fixes one error in ten, and does not slow down training.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self.net(view) for view in shifted(images)]).mean(0)


def shifted(images: Tensor) -> list[Tensor]:
    """Return [B, C, H, W] moved by -1, 0 and 1 pixel in both directions; zeros move in."""
    height, width = images.shape[2:]
    padded = F.pad(images, (1, 1, 1, 1))
    rows = [padded[:, :, top : top + height] for top in range(3)]
    return [view[..., left : left + width] for view in rows for left in range(3)]
