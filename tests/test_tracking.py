"""The trackers get the numbers of metrics.jsonl; one that cannot be used is refused at once."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.run import TrainConfig
from ddp_mnist.errors import UsageError
from ddp_mnist.run.checkpoint import newest_first
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import read_json
from ddp_mnist.run.tracking import Trackers, known_trackers
from ddp_mnist.verify.watch import just_train, proof_config, resumed
from tests.training import metrics, status, stop, with_flags


def test_names_are_separated_by_commas_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_mnist.run.tracking.get_available_trackers", lambda: ["tensorboard"])
    assert known_trackers(None) == known_trackers("") == known_trackers(" , ") == []
    assert known_trackers(" tensorboard,") == ["tensorboard"]
    with pytest.raises(UsageError, match=r"^--trackers tensorbord: choose .*mean tensorboard\?$"):
        known_trackers("tensorbord")
    for name in set(LOGGER_TYPE_TO_CLASS) - {"tensorboard"}:
        with pytest.raises(UsageError, match=f"^--trackers {name}: its package is not .*; pip"):
            known_trackers(f"tensorboard,{name}")


def test_one_that_fails_is_left_out_and_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    service, other = Mock(), Mock()
    service.name = "wandb"
    trackers = Trackers([service, other], Console(True))
    trackers.log({"loss": 1.0, "best": None}, 25)
    service.log.assert_called_once_with({"loss": 1.0}, step=25)
    service.log.side_effect = ConnectionError("no route to host\nat ...")
    trackers.log({"loss": 0.5}, 50)
    trackers.log({"loss": 0.4}, 75)
    assert service.log.call_count == 2
    assert other.log.call_count == 3
    assert capsys.readouterr().out == (
        "--trackers wandb: failed (no route to host); left out from here on, metrics.jsonl has"
        " everything\n"
    )


def config_with(trackers: str) -> TrainConfig:
    return with_flags(proof_config(model="mlp"), trackers=trackers, checkpoint_every=10)


def scalars(run: Path) -> dict[str, dict[int, float]]:
    """Return what all event files of the run hold, by name and step."""
    events = EventAccumulator(str(run / "tracking" / "ddp_mnist"), purge_orphaned_data=True)
    events.Reload()
    names = events.Tags()["scalars"]
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in names}


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
    stop(config, tmp_path, step=25, size=2)
    run = tmp_path / "run"
    assert scalars(run) == logged(run)
    assert len(list((run / "tracking" / "ddp_mnist").glob("events.*"))) == 1
    newest_first(run)[0].unlink()  # back to step 20
    run_world(1, just_train, resumed(config), folder=tmp_path)
    assert scalars(run) == logged(run)
    assert set(scalars(run)) >= {"loss", "accuracy", "lr", "images_per_second", "val_accuracy"}
    summary = read_json(run / "summary.json")
    assert summary["resumed_from"] == [20]
    assert scalars(run)["test_accuracy"] == {45: pytest.approx(summary["test_accuracy"])}
    taken_over = read_json(run / "config.json")["run"]  # not typed again
    assert taken_over["trackers"] == "tensorboard"


def test_a_wrong_name_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"^--trackers tensorbord: choose from"):
        run_world(2, just_train, config_with("tensorbord"), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


class Broken(TensorBoardTracker):
    def start(self) -> None:
        raise RuntimeError("no licence\n...")


def train_with_a_broken_one(config: Any) -> str:
    LOGGER_TYPE_TO_CLASS["tensorboard"] = Broken
    with pytest.raises(UsageError) as refused:
        just_train(config)
    return str(refused.value)


def test_one_that_cannot_be_started_ends_the_run_with_a_line(tmp_path: Path) -> None:
    [line] = run_world(1, train_with_a_broken_one, config_with("tensorboard"), folder=tmp_path)
    assert line.startswith("--trackers tensorboard: cannot be started (no licence); fix that")
    assert status(tmp_path / "run") == ("failed", 2)
