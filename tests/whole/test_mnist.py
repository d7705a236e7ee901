"""The real MNIST: skipped where its folder is not."""

from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.verbs.verify.watch import just_train


@pytest.mark.soak
def test_one_epoch_on_two_processes_with_twenty_seeds(
    mnist: Path, tmp_path: Path, record_property: Any
) -> None:
    accuracies = []
    for seed in range(20):
        config = TrainConfig(
            RunFlags(dataset=str(mnist), run_dir=f"run-{seed}", seed=seed, quiet=True),
            Recipe(epochs=1),
            Distribution(cpu=True, mixed_precision="auto"),
        )
        summary = run_world(2, just_train, config, folder=tmp_path, timeout_s=240)[0]
        assert summary["test_count"] == 10_000
        accuracies.append(summary["test_accuracy"])
    mean = sum(accuracies) / len(accuracies)
    record_property("details", f"mean {mean:.4f}, lowest {min(accuracies):.4f}")
    assert mean >= 0.992
    assert min(accuracies) >= 0.99
