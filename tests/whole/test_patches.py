"""The patches, images in colour that are built in, are learned."""

from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.verbs.verify import watch


@pytest.mark.system
def test_the_default_recipe_learns_them_in_one_of_its_epochs(tmp_path: Path) -> None:
    config = TrainConfig(
        RunFlags(dataset="patches", run_dir="run", quiet=True),
        Recipe(epochs=1),
        Distribution(cpu=True, mixed_precision="no"),
    )
    summary: Any = run_world(2, watch.just_train, config, folder=tmp_path, timeout_s=240)[0]
    assert summary["model"] == "cnn_deep"
    assert summary["test_accuracy"] >= 0.95
