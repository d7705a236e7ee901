"""The core, copied alone into a folder, trains as the whole package does."""

import importlib
import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.verbs.verify import watch
from tests.commands import MULTI_CPU, REPOSITORY, python, torchrun
from tests.data_sets import write_digits
from tests.run_checks import with_flags

STOPS_AT = 13  # of 20 steps


@pytest.fixture(scope="module")
def made(once: Callable[..., Path]) -> Path:
    """A folder with a copy under another name, and the digits as a data set of MNIST's kind."""

    def make(folder: Path) -> None:
        shutil.copytree(REPOSITORY / "ddp_mnist" / "core", folder / "my_trainer")
        write_digits(folder / "digits")

    return once("copied", make)


def train_copy(made: Path, run: str, *flags: str, stops: bool = False) -> None:
    """Train by the copy; with `stops`, rank 0 gets Ctrl-C and the others SIGTERM at STOPS_AT."""
    torch.set_num_threads(1)
    steps = itertools.count(1)

    def strike(*_: Any) -> None:
        if next(steps) == STOPS_AT:
            sent = signal.SIGTERM if int(os.environ["RANK"]) else signal.SIGINT
            os.kill(os.getpid(), sent)

    sys.path.insert(0, str(made))
    data = ["--dataset", str(made / "digits"), "--batch-size", "72", "--epochs", "2"]
    sys.argv = ["my_trainer", *data, "--checkpoint", f"{run}/checkpoint.pt", *flags]
    with watch.before_each_step(strike if stops else lambda *_: None):
        importlib.import_module("my_trainer.__main__").main()


def weights(run: Path) -> dict[str, torch.Tensor]:
    return torch.load(run / "checkpoint.model.pt")


def test_a_copy_on_n_processes_equals_one_and_resumed_equals_unbroken(
    made: Path, tmp_path: Path
) -> None:
    in_parts = ("--float64", "--grad-accum", "3")
    for size, flags in ((1, ("--float64",)), (2, in_parts), (3, ("--float64",))):
        run_world(size, train_copy, made, f"on-{size}", *flags, folder=tmp_path)
    alone, *others = (weights(tmp_path / f"on-{size}") for size in (1, 2, 3))
    assert max(watch.largest_difference(run, alone) for run in others) < 1e-9

    run = (made, "stopped", *in_parts)
    ended = LocalWorld(2, partial(train_copy, stops=True), *run, folder=tmp_path).outcomes()
    assert [str(outcome) for outcome in ended] == ["143", "143"]
    assert not (tmp_path / "stopped" / "checkpoint.model.pt").exists()
    another = LocalWorld(2, train_copy, *run, "--resume", "--seed", "1", folder=tmp_path)
    assert {*map(str, another.outcomes())} == {"seed was 0 as the run began, not 1"}
    run_world(2, train_copy, *run, "--resume", folder=tmp_path)
    again, unbroken = weights(tmp_path / "stopped"), others[0]
    assert all(torch.equal(again[name], unbroken[name]) for name in unbroken)
    (tmp_path / "stopped" / "checkpoint.pt").unlink()
    [error] = LocalWorld(1, train_copy, made, "stopped", "--resume", folder=tmp_path).outcomes()
    assert isinstance(error, FileNotFoundError)


def test_it_trains_to_the_weights_of_ddp_mnist_train_bit_for_bit(
    made: Path, tmp_path: Path
) -> None:
    """With the same recipe, and a validation split in neither."""
    run_world(1, train_copy, made, "core", folder=tmp_path)
    flags: dict[str, Any] = {"model": "cnn", "epochs": 2, "val_size": 0}
    plain = {"mixed_precision": "no", "dataset": str(made / "digits")}
    config = with_flags(watch.proof_config(**flags), **plain)
    run_world(1, watch.just_train, config, folder=tmp_path)
    ours, theirs = weights(tmp_path / "core"), watch.weights_of(tmp_path / "run")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.system
def test_under_launchers_it_learns_mnist_in_one_epoch(
    made: Path, mnist: Path, tmp_path: Path
) -> None:
    """Under accelerate launch; under torchrun the digits, which take a moment."""
    shutil.copytree(made / "my_trainer", tmp_path / "my_trainer")
    few = ["--dataset", str(made / "digits"), "--batch-size", "72", "--epochs", "6"]
    for start, data, count, least in (
        ([*MULTI_CPU, "--num_processes", "2"], ["--dataset", str(mnist)], "10,000", 0.99),
        (torchrun(2), few, "90", 0.9),
    ):
        command = [*start, "-m", "my_trainer", *data]
        ended = python(*command, folder=tmp_path, variables={"PYTHONPATH": ""})
        assert ended.code == 0, ended.err  # which has the bars of `datasets`
        [accuracy] = re.findall(rf"^test accuracy ([01]\.\d+) on {count} images", ended.out, re.M)
        assert float(accuracy) >= least
