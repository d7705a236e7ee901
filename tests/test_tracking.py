"""What --trackers names gets the numbers of metrics.jsonl; what cannot be used is said at once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_mnist.cluster.local import LocalWorld, run_world
from ddp_mnist.errors import UsageError
from ddp_mnist.run.console import Console
from ddp_mnist.run.tracking import Guarded, named
from ddp_mnist.verify.watch import just_train, proof_config, resumed, train_until


@pytest.mark.parametrize("name", sorted(set(LOGGER_TYPE_TO_CLASS) - {"tensorboard"}))
def test_a_tracker_that_is_not_installed_says_how(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_mnist.run.tracking.get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(UsageError, match=f"^--trackers {name}: its package is not installed; pip"):
        named(f"tensorboard,{name}")


def test_a_tracker_that_nobody_knows_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^--trackers tensorbord: choose .*mean tensorboard\?$"):
        named("tensorbord")


def test_names_are_separated_by_commas() -> None:
    assert named(None) == named("") == named(" , ") == []
    assert named(" tensorboard,") == ["tensorboard"]


def test_one_that_fails_is_left_out_and_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    service = Mock()
    service.name = "wandb"
    tracker = Guarded(service, Console(True))
    tracker.log({"loss": 1.0, "best": None}, 25)
    service.log.assert_called_once_with({"loss": 1.0}, step=25)
    service.log.side_effect = ConnectionError("no route\nto host")
    tracker.log({"loss": 0.5}, 50)
    tracker.log({"loss": 0.4}, 75)
    tracker.finish()
    assert service.log.call_count == 2
    service.finish.assert_not_called()
    assert capsys.readouterr().out == (
        "--trackers wandb: failed (no route to host); left out from here on, metrics.jsonl has"
        " everything\n"
    )


def config_with(trackers: str, **recipe: Any) -> Any:
    config = proof_config(**recipe)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, trackers=trackers))


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """By name and step, of all event files of the run."""
    events = EventAccumulator(str(run / "tracking" / "ddp_mnist"), purge_orphaned_data=True)
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in names}


def logged(run: Path) -> dict[str, dict[int, Any]]:
    """The same of metrics.jsonl, as float32."""
    found: dict[str, dict[int, Any]] = {}
    for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()):
        for name, value in line.items():
            if name != "step" and value is not None:
                found.setdefault(name, {})[line["step"]] = pytest.approx(value, rel=1e-6)
    return found


def test_tensorboard_holds_what_metrics_jsonl_holds_also_after_a_resume(tmp_path: Path) -> None:
    """Two processes; one of them writes. Steps that are done again are there once."""
    config = config_with("tensorboard")
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, checkpoint_every=10))
    run_world(2, just_train, config, folder=tmp_path)
    run = tmp_path / "run"
    assert scalars(run) == logged(run)
    assert set(scalars(run)) >= {"loss", "accuracy", "lr", "images_per_second", "val_accuracy"}
    result = json.loads((run / "summary.json").read_text())["test_accuracy"]
    assert scalars(run)["test_accuracy"] == {45: pytest.approx(result)}
    assert len(list((run / "tracking" / "ddp_mnist").glob("events.*"))) == 1

    again = dataclasses.replace(config, run=dataclasses.replace(config.run, run_dir="again"))
    LocalWorld(1, train_until, again, 20, folder=tmp_path).outcomes()
    run_world(1, just_train, resumed(again), folder=tmp_path)
    assert scalars(tmp_path / "again") == logged(tmp_path / "again")
    config_file = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config_file["run"]["trackers"] == "tensorboard"  # taken over, not typed again


def test_a_wrong_name_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"^--trackers tensorbord: choose from"):
        run_world(2, just_train, config_with("tensorbord"), folder=tmp_path)
    dry = config_with("tensorbord")
    dry = dataclasses.replace(dry, run=dataclasses.replace(dry.run, dry_run=True))
    with pytest.raises(Exception, match=r"^--trackers tensorbord: choose from"):
        run_world(1, just_train, dry, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Broken(TensorBoardTracker):
    def start(self) -> None:
        raise RuntimeError("no licence\nhere")


def train_with_a_broken_one(config: Any) -> str:
    LOGGER_TYPE_TO_CLASS["tensorboard"] = Broken
    with pytest.raises(UsageError) as refused:
        just_train(config)
    return str(refused.value)


def test_one_that_cannot_be_started_ends_the_run_with_a_line(tmp_path: Path) -> None:
    [line] = run_world(1, train_with_a_broken_one, config_with("tensorboard"), folder=tmp_path)
    assert line == (
        "--trackers tensorboard: cannot be started (no licence here); mend that, or leave it out"
    )
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)
