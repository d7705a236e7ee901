"""The trackers get the numbers of metrics.jsonl; one that fails ends the run."""

import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate.tracking import TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.system.files import read_json
from ddp_mnist.training.checkpoint import newest_first
from ddp_mnist.verbs.verify.watch import just_train, proof_config, resumed
from tests.run_checks import metrics, status, stop, told_once, with_flags


def config_with(trackers: str) -> TrainConfig:
    return with_flags(proof_config(model="mlp"), trackers=trackers, checkpoint_every=10)


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """Return what all event files of the run hold, by name and step."""
    events = EventAccumulator(str(run / "tracking" / "ddp_mnist"), purge_orphaned_data=True)
    events.Reload()
    found = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    for name, points in found.items():
        steps = [point.step for point in points]
        assert steps == sorted(set(steps)) or name == "epoch", name  # which two lines have
    return {name: {point.step: point.value for point in found[name]} for name in found}


def logged(run: Path) -> dict[str, dict[int, Any]]:
    """Return what metrics.jsonl holds, by name and step, to be compared as float32."""
    found: dict[str, dict[int, Any]] = {}
    for line in metrics(run, "step"):
        for name, value in line.items():
            if name != "step" and value is not None:
                found.setdefault(name, {})[line["step"]] = pytest.approx(value, rel=1e-6)
    return found


def test_tensorboard_holds_what_metrics_jsonl_holds_also_after_a_resume(tmp_path: Path) -> None:
    """Of two processes one writes; steps that are done again are there once."""
    config = config_with("tensorboard")
    stop(config, tmp_path, step=35, size=2)
    time.sleep(1)  # TensorBoard sorts a run's files by the second in their names
    run = tmp_path / "run"
    assert scalars(run) == logged(run)
    assert len(list((run / "tracking" / "ddp_mnist").glob("events.*"))) == 1
    newest_first(run)[0].unlink()  # back to step 30, an epoch's last, before its validation
    run_world(1, just_train, resumed(config), folder=tmp_path)
    assert scalars(run) == logged(run)
    assert set(scalars(run)) >= {"loss", "accuracy", "lr", "images_per_second", "val_accuracy"}
    summary = read_json(run / "summary.json")
    assert summary["resumed_from"] == [30]
    assert scalars(run)["test_accuracy"] == {45: pytest.approx(summary["test_accuracy"])}


def train_with_one_that_fails_to(does: str, config: TrainConfig) -> Any:
    fails = Mock(side_effect=ConnectionError("no route to host\n..."))
    setattr(TensorBoardTracker, does, fails)
    return just_train(config)


@pytest.mark.parametrize(("does", "code"), [("start", 2), ("log", 5), ("finish", 5)])
def test_one_that_fails_ends_the_run_with_a_line(does: str, code: int, tmp_path: Path) -> None:
    given = (train_with_one_that_fails_to, does, config_with("tensorboard"))
    line = str(told_once(LocalWorld(2, *given, folder=tmp_path).outcomes(), code))
    assert line == "--trackers tensorboard: ConnectionError: no route to host"
    assert status(tmp_path / "run") == ("failed", code)
    assert line in (tmp_path / "run" / "traceback.txt").read_text()
