"""The nets take uint8 images [B, 28, 28] and give logits [B, classes].

Each normalises its input into the dtype of its own weights, so the same pixels feed float32,
float64 and autocast. None knows a rank, a device or a flag.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Goes up when a net computes something else with the same weights: older ones are then refused.
VERSION = 2

# Mean and standard deviation of MNIST's 60,000 train images, as shares of 255.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081


def normalise(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Bring uint8 pixels of any shape, in 0..255, to mean 0 and deviation 1 (on MNIST)."""
    return images.to(dtype).mul_(1 / (255 * PIXEL_STD)).sub_(PIXEL_MEAN / PIXEL_STD)


class CNN(nn.Module):
    """Two convolutions, the first of 6x6 with stride 2; 37,834 parameters for ten classes.

    GroupNorm instead of BatchNorm: a sample's output does not depend on the batch it is in, so N
    processes compute what one process computes. Normalising after the pooling visits a quarter of
    the numbers. Without padding the first convolution leaves 12x12, so each pooling halves evenly:
    14x14 would cost a third more, and the last pooling would drop what it is spent on.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 6, stride=2)
        self.norm1: nn.Module = nn.GroupNorm(4, 32)
        self.conv2 = nn.Conv2d(32, 96, 3, padding=1)
        self.norm2: nn.Module = nn.GroupNorm(4, 96)
        self.head = nn.Linear(96 * 3 * 3, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = normalise(images.unsqueeze(1), self.head.weight.dtype)
        x = F.relu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        x = F.relu(self.norm2(F.max_pool2d(self.conv2(x), 2)))
        return self.head(x.flatten(1))


class CNNDeep(nn.Module):
    """Like CNN with two convolutions before each pooling: 130,378 parameters for ten classes.

    Four times the arithmetic. At test time it sees nine views of an image, see ShiftedViews.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 6, stride=2)
        self.norm1 = nn.GroupNorm(4, 32)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        self.conv3 = nn.Conv2d(32, 96, 3, padding=1)
        self.norm3 = nn.GroupNorm(4, 96)
        self.conv4 = nn.Conv2d(96, 96, 3, padding=1)
        self.norm4 = nn.GroupNorm(4, 96)
        self.head = nn.Linear(96 * 3 * 3, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = normalise(images.unsqueeze(1), self.head.weight.dtype)
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(F.max_pool2d(self.conv2(x), 2)))
        x = F.relu(self.norm3(self.conv3(x)))
        x = F.relu(self.norm4(F.max_pool2d(self.conv4(x), 2)))
        return self.head(x.flatten(1))


class MLP(nn.Module):
    """Two hidden layers of 128: the smallest thing that learns."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(28 * 28, 128)
        self.hidden2 = nn.Linear(128, 128)
        self.head = nn.Linear(128, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = normalise(images, self.head.weight.dtype).flatten(1)
        return self.head(F.relu(self.hidden2(F.relu(self.hidden1(x)))))


class CNNBatchNorm(CNN):
    """CNN with BatchNorm: each process normalises by its own share of the batch.

    N processes are therefore not one process, unless --sync-bn makes the statistics global.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__(classes)
        self.norm1 = nn.BatchNorm2d(32)
        self.norm2 = nn.BatchNorm2d(96)


class ResNet18(nn.Module):
    """torchvision's ResNet-18 (11 million parameters, BatchNorm) with one input channel."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        from torchvision.models import resnet18  # over a second, so only where it is used

        self.net = resnet18(num_classes=classes)
        self.net.conv1 = nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        return self.net(normalise(images.unsqueeze(1), self.net.fc.weight.dtype))


MODELS: dict[str, type[nn.Module]] = {
    "cnn": CNN,
    "cnn_deep": CNNDeep,
    "mlp": MLP,
    "cnn_bn": CNNBatchNorm,
    "resnet18": ResNet18,
}


# --- At test time


def with_test_views(net: nn.Module, name: str) -> nn.Module:
    """Return the net `name` of MODELS as it is evaluated and used: cnn_deep sees several views."""
    return ShiftedViews(net) if name == "cnn_deep" else net


class ShiftedViews(nn.Module):
    """The mean of a net's logits over nine views of an image, each moved by up to a pixel.

    This test-time augmentation fixes one error in ten and costs training nothing.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return torch.stack([self.net(view) for view in shifted(images)]).mean(0)


def shifted(images: Tensor) -> list[Tensor]:
    """Return [B, H, W] moved by -1, 0 and 1 pixel in both directions; zeros move in."""
    height, width = images.shape[1:]
    padded = F.pad(images, (1, 1, 1, 1))
    rows = [padded[:, top : top + height] for top in range(3)]
    return [view[:, :, left : left + width] for view in rows for left in range(3)]
