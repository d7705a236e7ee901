"""What stands between the pixels and a net, and between its logits and the test."""

from collections.abc import Sequence
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # SyncBatchNorm too


class Normalised(nn.Module):
    """A net that takes pixels: uint8 [B, C, H, W] get mean 0 and standard deviation 1 per channel.

    They are converted to the dtype of the net's weights, so float32, float64 and autocast take the
    same pixels. Mean and deviation, fractions of 255 for each channel, are not buffers: DDP would
    broadcast those in each step. With `shifted_views`, the net is evaluated by `ShiftedViews`.
    """

    kept = ""  # what computes in training as it does in a test, see `hold_still`

    def __init__(
        self,
        net: nn.Module,
        mean: Sequence[float],
        std: Sequence[float],
        shifted_views: bool = False,
    ) -> None:
        super().__init__()
        self.net = net
        self.mean, self.std, self.shifted_views = mean, std, shifted_views

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        for module in self.net.modules():
            if self.kept == "body" or (self.kept and isinstance(module, BatchNorm)):
                module.training = False
        return self

    def forward(self, images: Tensor) -> Tensor:
        x = images.to(next(self.net.parameters()).dtype, copy=True)
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            x[:, channel].mul_(1 / (255 * std)).sub_(mean / std)
        return self.net(x)


def last_layer(net: nn.Module) -> str:
    """Return the name of the layer that gives the outputs: the one registered last."""
    return [*net.state_dict()][-1].rpartition(".")[0]


def hold_still(net: Normalised, what: str) -> Normalised:
    """Keep a part of a net that starts from trained weights as it is, and return the net.

    `statistics`: BatchNorm normalises by those that it has, so N processes train as one. `body`:
    all but the last layer, which alone is trained. "": nothing.
    """
    net.kept = what
    if what == "body":
        head = last_layer(net)
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(name.startswith(f"{head}."))
    return net


def as_tested(net: Normalised, model: nn.Module | None = None) -> nn.Module:
    """Return the net, or the `model` that wraps it, as it is tested and used after training."""
    model = model or net
    return ShiftedViews(model) if net.shifted_views else model


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
