import subprocess
from pathlib import Path

import pytest

from ddp_mnist.training.versions import code_digest, git_commit, package_versions


def test_timms_version_counts_where_it_builds_the_net() -> None:
    assert "timm" in package_versions("timm:resnet18")
    assert "timm" not in {*package_versions("cnn"), *package_versions()}


def test_the_codes_digest_changes_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_mnist.training.versions.__file__", str(tmp_path / "a" / "b.py"))
    (tmp_path / "train.py").write_text("a = 1\n")
    before = code_digest()
    (tmp_path / "train.py").write_text("a = 2\n")
    assert code_digest() != before


def test_the_commit_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "ddp_mnist" / "summary.py"
    code.parent.mkdir()
    code.write_text("a = 1\n")
    monkeypatch.setattr("ddp_mnist.training.versions.__file__", str(code))
    assert git_commit() is None  # no checkout
    who = "-c user.name=t -c user.email=t@t -c commit.gpgsign=false"
    script = f"git init -q && git add . && git {who} commit -qm ours && git rev-parse HEAD"
    commit = subprocess.check_output(script, shell=True, cwd=tmp_path, text=True).strip()
    assert git_commit() == commit
    code.write_text("a = 2\n")
    assert git_commit() == commit + "+"
