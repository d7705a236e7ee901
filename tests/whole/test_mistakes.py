"""`train --inject` makes the mistake that it names, and says so in all that the run leaves."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.config.mistakes import MISTAKES
from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import CheckpointError, UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify.watch import just_train, proof_config, resumed
from tests.commands import Typed
from tests.run_checks import metrics, what_it_says, with_flags


def config(fault: str | None, run_dir: str = "run", **flags: Any) -> TrainConfig:
    """Return two epochs of the digits on two processes."""
    return with_flags(proof_config(run_dir, model="mlp", inject=fault), **{"epochs": 2, **flags})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Yield the folder of a run with a fault, and what rank 0 printed."""
    folder = tmp_path_factory.mktemp("inject")
    [said, _] = run_world(2, what_it_says, config("schedule", quiet=False), folder=folder)
    yield folder / "run", said


def test_a_run_with_a_fault_says_so_in_all_that_it_leaves(
    run: tuple[Path, str], typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, said = run
    line = f"WRONG ON PURPOSE, --inject schedule: {MISTAKES['schedule'].what}"
    lines = said.splitlines()
    assert line in lines[:2]  # the cache may say first that it read the digits
    assert (lines[-1], said.count(line)) == (line, 2)
    assert read_json(folder / "config.json")["recipe"]["inject"] == "schedule"
    summary = read_json(folder / "summary.json")
    assert (summary["inject"], summary["notes"][0]) == ("schedule", line)
    monkeypatch.chdir(folder.parent)
    assert typed("evaluate", "run").out.startswith(f"{line}\n")
    assert typed("export", "run", "--format", "safetensors").code == 0
    assert f"\n**{line}**\n" in (folder / "export" / "README.md").read_text()


def test_a_resumed_run_keeps_its_fault(run: tuple[Path, str], tmp_path: Path) -> None:
    folder = shutil.copytree(run[0], tmp_path / "run")
    other = resumed(config("schedule"), epochs=3, inject="epoch")
    [outcome] = LocalWorld(1, just_train, other, folder=folder.parent).outcomes()
    assert isinstance(outcome, CheckpointError)
    assert re.match("--inject epoch: .* was made with schedule; leave it as", str(outcome))
    more = resumed(config(None), epochs=3)
    [summary, _] = run_world(2, just_train, more, folder=folder.parent)
    assert (summary["inject"], summary["epochs"]) == ("schedule", 3)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_run_too_small_for_a_fault_is_refused(name: str) -> None:
    """Nothing would be wrong in it. The digits have 15 steps an epoch."""
    fault = MISTAKES[name]
    refused = rf"^--inject {name}: in so small a run it changes nothing; least: "
    for processes, epochs in ((1, 1), (1, 2), (2, 1)):
        recipe = Recipe(inject=name, epochs=epochs)
        enough = processes >= fault.processes and epochs >= fault.epochs
        if enough and 15 * epochs >= fault.steps:
            resolve_recipe(recipe, 1437, processes)
        else:
            with pytest.raises(UsageError, match=refused):
                resolve_recipe(recipe, 1437, processes)


def test_batchnorm_takes_a_net_that_has_it(tmp_path: Path) -> None:
    assert TrainConfig.from_flags({"inject": "batchnorm"}).recipe.model == "cnn_bn"
    without = config("batchnorm")
    [outcome, _] = LocalWorld(2, just_train, without, folder=tmp_path).outcomes()
    line = "--inject batchnorm: mlp has no BatchNorm; use --model cnn_bn or leave it out"
    assert str(outcome) == line


def test_padded_rows_are_counted(tmp_path: Path) -> None:
    """287 rows for validation are filled up to 288 on two processes, and all of them counted."""
    run_world(2, just_train, config("padding", epochs=1), folder=tmp_path)
    [line] = metrics(tmp_path / "run", "val_accuracy")
    correct = {rows: line["val_accuracy"] * rows for rows in (287, 288)}
    assert correct[288] == pytest.approx(round(correct[288]))
    assert correct[287] != pytest.approx(round(correct[287]))
