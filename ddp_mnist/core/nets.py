"""The nets: each is made for a number of classes and a shape, and returns logits [B, classes].

A net takes normalised images [B, C, H, W] in the dtype of its weights; wrappers.py has what takes
the pixels themselves. No net knows a rank, a device or a flag.
"""

import math
from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, int, int]  # channels, height, width
MNIST: Shape = (1, 28, 28)


def deeper(channels: int, shape: Shape, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    """Return blocks that reduce the maps of images of 56x56 or more to about 3x3; none for less.

    Without them a pixel of the last maps depends on 20x20: most of a digit, but little of a photo.
    """
    blocks = nn.Sequential()
    side = min(shape[1:]) // 8 - 1  # of the maps they get: 3 for MNIST
    while side >= 6:
        conv = nn.Conv2d(channels, channels, 3, padding=1)
        blocks.append(nn.Sequential(conv, nn.MaxPool2d(2), norm(channels), nn.ReLU()))
        side //= 2
    return blocks


group_norm = partial(nn.GroupNorm, 4)


def three_by_three(x: Tensor) -> Tensor:
    """Return a map [B, C, H, W] as 3x3, averaged if it is larger."""
    return x if x.shape[2:] == (3, 3) else F.adaptive_avg_pool2d(x, 3)


class CNN(nn.Module):
    """Two convolutions, the first of 6x6 with stride 2; 37,834 parameters for ten classes of MNIST.

    GroupNorm instead of BatchNorm: a sample's output does not depend on the batch it is in, so N
    processes compute what one process computes. Normalising after the pooling handles a quarter
    of the numbers. The first convolution has no padding, so it makes 12x12 of 28x28, which each
    pooling halves evenly; 14x14 would cost a third more, and the last pooling would drop the extra
    row and column. Larger images get further blocks; whatever their size, the head sees 3x3.
    """

    norm: Callable[[int], nn.Module] = staticmethod(group_norm)

    def __init__(self, classes: int = 10, shape: Shape = MNIST) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 32, 6, stride=2)
        self.norm1 = self.norm(32)
        self.conv2 = nn.Conv2d(32, 96, 3, padding=1)
        self.norm2 = self.norm(96)
        self.deeper = deeper(96, shape, self.norm)
        self.head = nn.Linear(96 * 3 * 3, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        x = F.relu(self.norm2(F.max_pool2d(self.conv2(x), 2)))
        return self.head(three_by_three(self.deeper(x)).flatten(1))


class CNNDeep(nn.Module):
    """Like CNN with two convolutions before each pooling: 130,378 parameters for ten classes.

    Four times the arithmetic. It is meant to be tested on nine views of an image: `ShiftedViews`.
    """

    def __init__(self, classes: int = 10, shape: Shape = MNIST) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 32, 6, stride=2)
        self.norm1 = group_norm(32)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1)
        self.norm2 = group_norm(32)
        self.conv3 = nn.Conv2d(32, 96, 3, padding=1)
        self.norm3 = group_norm(96)
        self.conv4 = nn.Conv2d(96, 96, 3, padding=1)
        self.norm4 = group_norm(96)
        self.deeper = deeper(96, shape, group_norm)
        self.head = nn.Linear(96 * 3 * 3, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.norm3(self.conv3(x)))
        x = F.relu(self.norm4(F.max_pool2d(self.conv4(x), 2)))
        return self.head(three_by_three(self.deeper(x)).flatten(1))


class MLP(nn.Module):
    """Two hidden layers of 128: the smallest net here."""

    def __init__(self, classes: int = 10, shape: Shape = MNIST) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(math.prod(shape), 128)
        self.hidden2 = nn.Linear(128, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.hidden2(F.relu(self.hidden1(x.flatten(1))))))


class CNNBatchNorm(CNN):
    """CNN with BatchNorm: each process normalises by its own share of the batch.

    So N processes do not train as one does, unless SyncBatchNorm makes the statistics global.
    """

    norm = nn.BatchNorm2d


MODELS: dict[str, Callable[[int, Shape], nn.Module]] = {
    "cnn": CNN,
    "cnn_deep": CNNDeep,
    "mlp": MLP,
    "cnn_bn": CNNBatchNorm,
}
