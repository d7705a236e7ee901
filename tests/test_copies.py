"""What a person copies from here stands alone: the textbook's file, one's own files."""

import re
import shutil
from pathlib import Path

import pytest

from tests.commands import (
    REPOSITORY,
    TORCHRUN,
    Ended,
    Started,
    all_succeed,
    fences_of,
    python,
    python_path,
    write_given,
)

pytestmark = pytest.mark.system


def test_the_textbooks_way_stands_alone_and_counts_rows_twice(tmp_path: Path) -> None:
    """Under the real launcher, on 3 processes: it needs nothing of this package."""
    source = (REPOSITORY / "docs" / "textbook_ddp.py").read_text()
    assert len(source.splitlines()) <= 80 and "ddp_mnist" not in source
    (tmp_path / "textbook_ddp.py").write_text(source)
    three = ["--standalone", "--nproc-per-node", "3", "textbook_ddp.py"]
    ended = python(*TORCHRUN, *three, folder=tmp_path, variables={"OMP_NUM_THREADS": "1"})
    printed = ended.succeeds()
    assert printed.count(" over 1401 rows, ") == 5  # of 1,400
    counts = re.findall(r"(\d+) of (\d+) rows right, accuracy (0\.\d{4})", printed)
    assert [int(seen) for _, seen, _ in counts] == [399, 397]
    for correct, seen, accuracy in counts:
        assert float(accuracy) == pytest.approx(int(correct) / int(seen), abs=5e-5)
    assert 0 <= int(counts[0][0]) - int(counts[1][0]) <= 2


def test_the_template_learns_on_processes_and_alone_and_resumes_where_it_was(
    tmp_path: Path,
) -> None:
    """In half precision on the CPU; a finished run has nothing left to do."""
    launchers = {"fp16": [*TORCHRUN, "--standalone", "--nproc-per-node", "2"], "bf16": []}
    checkpoints = [tmp_path / f"{precision}.pt" for precision in launchers]

    def train(*more: str) -> list[str]:
        started = []
        for (precision, launcher), file in zip(launchers.items(), checkpoints, strict=True):
            flags = ["--epochs", "1", "--precision", precision, "--checkpoint", str(file)]
            command = [*launcher, str(REPOSITORY / "docs" / "template_ddp.py"), *flags, *more]
            started.append(Started(command, tmp_path, {"OMP_NUM_THREADS": "1"}))
        return all_succeed(started)

    for out in train():
        [right] = re.findall(r"^epoch 1: loss [\d.]+, (\d+) of 397 rows right$", out, re.MULTILINE)
        assert int(right) >= 330
    before = [file.read_bytes() for file in checkpoints]
    for out, file in zip(train("--resume"), checkpoints, strict=True):
        assert out == f"resumed from {file}, which has 1 of 1 epochs\n"
    assert [file.read_bytes() for file in checkpoints] == before


def test_ones_own_loss_and_net_are_proven_and_some_folders_are_dispensable(tmp_path: Path) -> None:
    """Both are proven without an edit; then train needs none of what the README names."""
    fences = fences_of(Path("docs/your-data-your-model.md"))
    for fence in fences:
        if fence.body.startswith(("# own_net.py", "# own_loss.py")):
            write_given(fence, tmp_path)
    shutil.copytree(REPOSITORY / "ddp_mnist", tmp_path / "ddp_mnist")

    def run(*arguments: str) -> Ended:
        command = ["-m", "ddp_mnist", *arguments]
        return python(*command, folder=tmp_path, variables={"PYTHONPATH": python_path(tmp_path)})

    own = ("--model", "own_net:Net", "--loss", "own_loss:focal")
    ended = run("verify", *own, "--processes", "2")
    assert "all 10 checks passed" in ended.out, ended.out + ended.err

    shutil.rmtree(tmp_path / "ddp_mnist" / "verbs")
    (tmp_path / "ddp_mnist" / "api.py").unlink()  # it imports verbs
    # an editable install would find the folders where they still are
    finders = "[each for each in sys.meta_path if '__editable__' not in str(each)]"
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.meta_path[:] = {finders}\n")
    ended = run("train", *own, "--dataset", "digits", "--epochs", "10")
    accuracy = re.search(r"test accuracy (0\.\d+)", ended.out)
    assert (ended.code, bool(accuracy)) == (0, True), ended.err
    assert accuracy and float(accuracy[1]) > 0.8
    ended = run("evaluate")  # the flags of all verbs but train are in verbs/
    assert ended.code == 1
    assert "evaluate: ModuleNotFoundError: No module named 'ddp_mnist.verbs'" in ended.err
