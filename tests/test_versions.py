import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from ddp_mnist.run.versions import code_digest, git_commit, package_versions


def test_versions_are_those_of_all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = package_versions()
    packages = {"torch", "torchvision", "accelerate", "datasets", "evaluate", "safetensors"}
    assert found.keys() == packages | {"python"}
    assert all(found[package] == version(package) for package in packages)
    assert torch.__version__.startswith(found["torch"].partition("+")[0])
    monkeypatch.setattr("ddp_mnist.run.versions.PACKAGES", ("no-such-package",))
    assert package_versions()["no-such-package"] == "missing"


def test_the_codes_digest_changes_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert code_digest() == code_digest()
    monkeypatch.setattr("ddp_mnist.run.versions.__file__", str(tmp_path / "summary.py"))
    (tmp_path / "train.py").write_text("a = 1\n")
    before = code_digest()
    (tmp_path / "notes.txt").write_text("no code")
    assert code_digest() == before
    (tmp_path / "train.py").write_text("a = 2\n")
    assert code_digest() != before
    assert len(before) == 16


def test_the_commit_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    code = tmp_path / "ddp_mnist" / "summary.py"
    code.parent.mkdir()
    code.write_text("a = 1\n")
    monkeypatch.setattr("ddp_mnist.run.versions.__file__", str(code))
    assert git_commit() is None  # no checkout
    git("init", "-q")
    git("commit", "-qm", "somebody else's", "--allow-empty")
    assert git_commit() is None  # in a checkout, but not a part of it
    git("add", "ddp_mnist")
    git("commit", "-qm", "ours")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert git_commit() == commit
    assert len(commit) == 40
    code.write_text("a = 2\n")
    assert git_commit() == commit + "+"
    monkeypatch.setenv("PATH", "")
    assert git_commit() is None  # no git
