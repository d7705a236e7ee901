"""The real MNIST: skipped where its folder is not."""

from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local import run_world
from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.models import PIXEL_MEAN, PIXEL_STD
from ddp_mnist.verify.watch import just_train


def train_mnist(mnist: Path, seed: int, processes: int, epochs: int, folder: Path) -> float:
    config = TrainConfig(
        Run(dataset=str(mnist), run_dir="run", seed=seed, quiet=True),
        Recipe(epochs=epochs),
        Distribution(cpu=True, mixed_precision="auto"),
    )
    folder.mkdir(exist_ok=True)
    summary = run_world(processes, just_train, config, folder=folder, timeout_s=240)[0]
    assert summary["test_count"] == 10_000
    assert summary["dataset"]["train_rows"] == 60_000
    return summary["test_accuracy"]


def test_one_epoch_on_two_processes(mnist: Path, tmp_path: Path) -> None:
    assert train_mnist(mnist, 0, 2, 1, tmp_path) >= 0.99


def test_mean_and_deviation_are_those_that_the_nets_take_off(mnist: Path) -> None:
    pixels = cache.load(str(mnist)).train_images.double() / 255
    assert pixels.mean().item() == pytest.approx(PIXEL_MEAN, abs=1e-4)
    assert pixels.std().item() == pytest.approx(PIXEL_STD, abs=1e-4)


@pytest.mark.soak
def test_one_epoch_with_twenty_seeds(mnist: Path, tmp_path: Path, record_property: Any) -> None:
    accuracies = [train_mnist(mnist, seed, 2, 1, tmp_path / str(seed)) for seed in range(20)]
    mean = sum(accuracies) / len(accuracies)
    record_property("details", f"mean {mean:.4f}, lowest {min(accuracies):.4f}")
    assert mean >= 0.992
    assert min(accuracies) >= 0.99
