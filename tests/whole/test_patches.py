"""Images in colour train as digits do: N processes as one, a resumed run as the unbroken one."""

from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.verbs.verify import watch
from tests.data_sets import flat, write_noise
from tests.run_checks import apart, stop, with_flags

STEPS = 12  # two epochs of 144 train rows


def proof(run_dir: str) -> TrainConfig:
    """Return two epochs in float64, with augmentation."""
    config = watch.proof_config(run_dir, model="mlp", epochs=2, batch_size=24, augment=True)
    return with_flags(config, dataset="few", checkpoint_every=4)


def test_two_processes_equal_one_and_a_resumed_run_the_unbroken_one(tmp_path: Path) -> None:
    write_noise(tmp_path / "few" / "train", *flat(180))
    write_noise(tmp_path / "few" / "test", *flat(20), seed=1)
    [one] = run_world(1, watch.train_and_watch, proof("one"), folder=tmp_path)
    two = run_world(2, watch.train_and_watch, proof("two"), folder=tmp_path)
    assert len(one.images) == STEPS
    assert watch.per_step(two) == watch.per_step([one])
    assert apart(tmp_path / "two", tmp_path / "one") < 1e-9

    stopped_at = stop(proof("broken"), tmp_path, step=7, size=2, by=1)
    [again, _] = run_world(2, watch.just_train, watch.resumed(proof("broken")), folder=tmp_path)
    assert again["resumed_from"] == [stopped_at]
    assert watch.what_stays(tmp_path / "broken") == watch.what_stays(tmp_path / "two")


@pytest.mark.system
def test_the_default_recipe_learns_them_in_two_of_its_epochs(tmp_path: Path) -> None:
    config = TrainConfig(
        RunFlags(dataset="patches", run_dir="run", quiet=True),
        Recipe(epochs=2),
        Distribution(cpu=True, mixed_precision="no"),
    )
    summary: Any = run_world(2, watch.just_train, config, folder=tmp_path, timeout_s=240)[0]
    assert summary["model"] == "cnn_deep"
    assert summary["test_accuracy"] >= 0.95
