"""Images in colour train as digits do: N processes as one, a resumed run as the unbroken one."""

import signal
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.run import RunFlags, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.verify import watch
from tests.training import with_flags

STEPS = 58  # an epoch of 4,240 train rows


def proof(run_dir: str) -> TrainConfig:
    """Return an epoch in float64 of the default net, with augmentation."""
    return with_flags(
        watch.proof_config(run_dir, epochs=1, augment=True), dataset="patches", checkpoint_every=8
    )


def test_train_and_test_patches_come_from_different_parts() -> None:
    patches = cache.load("patches")
    assert patches.classes == ["china", "flower"]
    assert list(patches.train_images.shape) == [5300, 3, 32, 32]
    assert list(patches.test_images.shape) == [1700, 3, 32, 32]
    train, test = (
        {image.numpy().tobytes() for image in images}
        for images in (patches.train_images, patches.test_images)
    )
    assert not train & test
    assert patches.image_format.mean == (0.4322, 0.4297, 0.3759)
    assert patches.image_format.std == (0.3575, 0.2837, 0.3097)


def test_two_processes_equal_one_and_a_resumed_run_the_unbroken_one(tmp_path: Path) -> None:
    [one] = run_world(1, watch.train_and_watch, proof("one"), folder=tmp_path)
    two = run_world(2, watch.train_and_watch, proof("two"), folder=tmp_path)
    assert len(one.images) == STEPS
    assert watch.per_step(two) == watch.per_step([one])
    runs = (watch.weights_of(tmp_path / name) for name in ("two", "one"))
    assert watch.largest_difference(*runs) < 1e-9

    broken = (watch.train_until, proof("broken"), 20, signal.SIGTERM, 1)
    outcomes = LocalWorld(2, *broken, folder=tmp_path).outcomes()
    assert [getattr(outcome, "code", outcome) for outcome in outcomes] == [143, 143]
    [again, _] = run_world(2, watch.just_train, watch.resumed(proof("broken")), folder=tmp_path)
    assert len(again["resumed_from"]) == 1
    assert watch.what_stays(tmp_path / "broken") == watch.what_stays(tmp_path / "two")


@pytest.mark.parametrize("size", [1, 2])
def test_the_default_run_learns_them(size: int, tmp_path: Path) -> None:
    config = TrainConfig(
        RunFlags(dataset="patches", run_dir="run", quiet=True),
        distribution=Distribution(cpu=True, mixed_precision="no"),
    )
    summary: Any = run_world(size, watch.just_train, config, folder=tmp_path)[0]
    assert summary["test_accuracy"] >= 0.95
