"""What a run prints, and whether a run equals another."""

import contextlib
import dataclasses
import io
import json
import shutil
import signal
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core import recipe as core
from ddp_mnist.core.task import Classification, Task
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.nets.build import build_net
from ddp_mnist.system.files import read_json
from ddp_mnist.training import checkpoint, model_file
from ddp_mnist.training.folder import STATUS
from ddp_mnist.verbs.verify.watch import just_train, largest_difference, train_until, weights_of


def with_flags(config: TrainConfig, **flags: Any) -> TrainConfig:
    """Return `config` with these flags; `typed` is the set of those that a person gave."""
    groups = {}
    for name in ("run", "recipe", "distribution"):
        group = getattr(config, name)
        own = {flag: value for flag, value in flags.items() if hasattr(group, flag)}
        groups[name] = dataclasses.replace(group, **own)
    return dataclasses.replace(config, **groups, typed=flags.get("typed", config.typed))


def fit_recipe(**recipe: Any) -> core.Recipe:
    """Return a recipe of the core for the digits."""
    return core.Recipe(**{"epochs": 1, "batch_size": 72, "steps_per_epoch": 15, **recipe})


def net_that(does: str) -> str:
    """Return the file of a Net that first does this with its images `x`."""
    return f"""
import os

import torch

from ddp_mnist.core.nets import MLP


class Net(MLP):
    def forward(self, x):
        {does}
        return super().forward(x)
"""


def own_module(name: str, text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a module that the program imports anew, and make its folder the working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(folder)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    path = folder / f"{name}.py"
    path.write_text(text)
    return path


def untrained(run: Path, name: str, made: ImageFormat, task: Task, folder: Path) -> Path:
    """Return a copy of the run with another net, whose outputs are not all alike."""
    shutil.copytree(run, folder)
    torch.manual_seed(1)
    net = build_net(name, task, made)
    [*net.parameters()][-2].data *= 4
    net.train()(torch.randint(0, 256, (8, *made.shape), dtype=torch.uint8))  # for BatchNorm
    content = model_file.to_bytes(net.net.state_dict(), name, task, made)
    (folder / "model.safetensors").write_bytes(content)
    summary = read_json(folder / "summary.json") | {"model_sha256": sha256(content).hexdigest()}
    if not isinstance(task, Classification):
        summary |= {"classes": [], "score_name": "error", "test_error": 1.5}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def what_it_says(config: TrainConfig) -> str:
    """Return what this rank prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as console:
        just_train(config)
    return console.getvalue()


def rewrite_config(run: Path, text: str) -> None:
    """Replace config.json as if the run had written it so."""
    (run / "config.json").write_text(text)
    summary = read_json(run / "summary.json")
    del summary["config"]
    (run / "summary.json").write_text(json.dumps(summary))


def metrics(run: Path, kind: str = "loss") -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that have this key."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind in line]


def status(run: Path) -> tuple[str, int | None]:
    """Return how a run stands, and its exit code."""
    found = read_json(run / STATUS)
    return found["state"], found["exit_code"]


def told_once(outcomes: list[Any], code: int) -> Any:
    """Check that all ranks end with this code; return the error of the one that tells it."""
    assert [getattr(outcome, "code", outcome) for outcome in outcomes] == [code] * len(outcomes)
    [told] = [outcome for outcome in outcomes if outcome.agreed]
    return told


def stop(config: TrainConfig, folder: Path, step: int, size: int = 1, by: int = 0) -> int:
    """Send SIGTERM to rank `by` at `step`. Return the step at which the run stopped."""
    interrupted = (config, step, signal.SIGTERM, by)
    told_once(LocalWorld(size, train_until, *interrupted, folder=folder).outcomes(), 143)
    run = folder / str(config.run.run_dir)
    assert status(run) == ("preempted", 143)
    return checkpoint.step_of(checkpoint.newest_first(run)[0])


def apart(run: Path, other: Path) -> float:
    """Return the largest difference between the weights of two runs."""
    return largest_difference(weights_of(run), weights_of(other))


def check_equal(run: Path, one_process: Path, world_size: int, num_machines: int = 1) -> None:
    """Compare a proof's run with that of one process: world, learning rates, losses, weights."""
    summary = read_json(run / "summary.json")
    assert summary["world_size"] == world_size
    assert summary["num_machines"] == num_machines
    assert summary["backend"] == "gloo"
    assert summary["test_count"] == 360
    ours, theirs = metrics(run), metrics(one_process)
    assert len(ours) == 45
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs]
    # equal losses at every step: the same images were seen
    expected = [line["loss"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx(expected, rel=1e-9)
    assert apart(run, one_process) < 1e-9
