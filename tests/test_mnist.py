"""The real MNIST: skipped where its folder is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.local_world import run_world
from tests.training import just_train


def train_mnist(mnist: Path, seed: int, processes: int, epochs: int, folder: Path) -> float:
    config = TrainConfig(
        Run(dataset=str(mnist), run_dir="run", seed=seed, quiet=True),
        Recipe(epochs=epochs),
        Distribution(cpu=True, mixed_precision="auto"),
    )
    summary = run_world(processes, just_train, config, folder=folder, timeout_s=240)[0]
    assert summary["test_count"] == 10_000
    assert summary["dataset"]["train_rows"] == 60_000
    return summary["test_accuracy"]


def test_one_epoch_on_two_processes(mnist: Path, tmp_path: Path) -> None:
    assert train_mnist(mnist, 0, 2, 1, tmp_path) >= 0.985


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_two_epochs_with_five_seeds(mnist: Path, seed: int, processes: int, tmp_path: Path) -> None:
    assert train_mnist(mnist, seed, processes, 2, tmp_path) >= 0.990
