from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_mnist import summary
from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.run_folder import RunFolder


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "process", "1 process"),
        (2, "process", "2 processes"),
        (0, "thread", "0 threads"),
        (1, "machine", "1 machine"),
        (1234, "machine", "1,234 machines"),
    ],
)
def test_count(number: int, noun: str, text: str) -> None:
    assert summary.count(number, noun) == text


def test_versions_are_those_of_all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = summary.versions()
    packages = {"torch", "torchvision", "accelerate", "datasets", "evaluate", "safetensors"}
    assert found.keys() == packages | {"python"}
    assert all(found[package] == version(package) for package in packages)
    assert torch.__version__.startswith(found["torch"].partition("+")[0])
    monkeypatch.setattr(summary, "PACKAGES", ("no-such-package",))
    assert summary.versions()["no-such-package"] == "missing"


def test_the_codes_digest_changes_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert summary.code_digest() == summary.code_digest()
    monkeypatch.setattr(summary, "__file__", str(tmp_path / "summary.py"))
    (tmp_path / "train.py").write_text("a = 1\n")
    before = summary.code_digest()
    (tmp_path / "notes.txt").write_text("no code")
    assert summary.code_digest() == before
    (tmp_path / "train.py").write_text("a = 2\n")
    assert summary.code_digest() != before
    assert len(before) == 16


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(folder), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_the_commit_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "ddp_mnist"
    package.mkdir()
    code = package / "summary.py"
    code.write_text("a = 1\n")
    monkeypatch.setattr(summary, "__file__", str(code))
    assert summary.git_commit() is None  # no checkout
    git(tmp_path, "init", "-q")
    (tmp_path / "readme").touch()
    git(tmp_path, "add", "readme")
    git(tmp_path, "commit", "-qm", "somebody else's")
    assert summary.git_commit() is None  # in a checkout, but not a part of it
    git(tmp_path, "add", "ddp_mnist")
    git(tmp_path, "commit", "-qm", "ours")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert len(commit) == 40
    assert summary.git_commit() == commit
    code.write_text("a = 2\n")
    assert summary.git_commit() == commit + "+"


def test_no_commit_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert summary.git_commit() is None


def world(device: str = "cpu", processes: int = 1) -> Any:
    accelerator = SimpleNamespace(device=torch.device(device), num_processes=processes)
    return SimpleNamespace(accelerator=accelerator, precision="bf16", backend="gloo")


@pytest.mark.parametrize(
    ("device", "shown"), [("cpu", "cpu"), ("cpu:1", "cpu"), ("cuda:1", "cuda:1")]
)
def test_device(device: str, shown: str) -> None:
    assert summary.device(world(device)) == shown


def test_facts_are_what_has_to_be_equal() -> None:
    images: Any = SimpleNamespace(digest="abc")
    config = TrainConfig(Run(dataset="digits"), Recipe(epochs=3), Distribution(backend="auto"))
    facts = summary.facts(config, world(), images)
    assert facts["--dataset"] == "digits"
    assert facts["--epochs"] == 3
    assert facts["--seed"] == 0
    # what is in effect, not what was asked for
    assert (facts["--mixed-precision"], facts["--backend"]) == ("bf16", "gloo")
    assert facts["the data's digest"] == "abc"
    assert facts["the code's digest"] == summary.code_digest()
    assert facts["torch"] == version("torch")
    for may_differ in ("run-dir", "cache-dir", "quiet", "rank", "local-rank", "world-size"):
        assert f"--{may_differ}" not in facts
    other = TrainConfig(
        Run(dataset="digits", run_dir="x", cache_dir="y", quiet=True),
        Recipe(epochs=3),
        Distribution(rank=1, world_size=2, local_rank=1, init_method="tcp://h:1"),
    )
    assert summary.facts(other, world(), images) == facts


def test_progress_line() -> None:
    line = {"epoch": 1, "loss": 0.51234, "lr": 0.0099, "images_per_second": 12345.6}
    assert summary.progress_line(line, 25, 3810, 10) == (
        "epoch  2/10  step   25/3810  loss 0.5123  rate 0.00990  12,346 images/s"
    )


def test_last_lines(tmp_path: Path) -> None:
    outcome = {
        "test_accuracy": 0.99123,
        "test_count": 10_000,
        "dataset": {"name": "mnist"},
        "world_size": 2,
        "train_seconds": 12.34,
    }
    assert summary.last_lines(outcome, RunFolder(tmp_path)).splitlines() == [
        "test accuracy 0.9912 on 10,000 images of mnist, 2 processes, 12.3 s of training",
        f"written to {tmp_path}",
    ]
