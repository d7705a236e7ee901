"""The patches, images in colour that are built in, are learned."""

from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.verbs.verify import watch
from tests.run_checks import with_flags


@pytest.mark.system
def test_the_default_recipe_learns_them_in_one_of_its_epochs(tmp_path: Path) -> None:
    flags = {"dataset": "patches", "run_dir": "run", "quiet": True, "epochs": 1}
    config = with_flags(TrainConfig(), **flags, cpu=True, mixed_precision="no")
    summary: Any = run_world(2, watch.just_train, config, folder=tmp_path, timeout_s=240)[0]
    assert summary["model"] == "cnn_deep"
    assert summary["test_accuracy"] >= 0.95
