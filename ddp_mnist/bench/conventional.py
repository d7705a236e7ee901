"""MNIST as most people train it: what the time of our whole command is compared with.

    python -m ddp_mnist.bench.conventional FOLDER

The recipe is that of PyTorch's own MNIST example: torchvision's data set, each image a PIL image
that becomes a normalised tensor in Python; two convolutions, dropout, Adadelta at 1.0 that falls
by 0.7 an epoch, batch 64. FOLDER holds MNIST/raw/ with the four IDX files. One line of JSON an
epoch: {"epoch", "test_accuracy"}.

Source of the recipe: https://github.com/pytorch/examples/tree/main/mnist
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import MNIST

EPOCHS = 4  # it is near 99 % by then


def make_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU()),
        *(nn.MaxPool2d(2), nn.Dropout(0.25), nn.Flatten()),
        *(nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def accuracy(net: nn.Module, loader: DataLoader, device: str) -> float:
    net.eval()
    right = 0
    with torch.no_grad():
        for images, labels in loader:
            right += int((net(images.to(device)).argmax(1) == labels.to(device)).sum())
    return right / len(loader.dataset)  # type: ignore[arg-type]


def main(folder: str, epochs: int = EPOCHS) -> None:
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    to_tensor = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    train = DataLoader(MNIST(folder, transform=to_tensor), batch_size=64, shuffle=True)
    test = DataLoader(MNIST(folder, train=False, transform=to_tensor), batch_size=1000)
    net = make_net().to(device)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(epochs):
        net.train()
        for images, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(net(images.to(device)), labels.to(device)).backward()
            optimizer.step()
        schedule.step()
        line = {"epoch": epoch + 1, "test_accuracy": accuracy(net, test, device)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
