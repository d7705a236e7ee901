from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddp_mnist import run_folder
from ddp_mnist.errors import DataError, FailedElsewhere, StorageError, UsageError
from ddp_mnist.run_folder import RunFolder, create, read_json, to_json, write_atomically


def make(run_dir: str | None, dataset: str, root: Path = Path("runs")) -> Path | None:
    """The folder of a run that began, and that nobody writes any more."""
    run = create(run_dir, dataset, root)
    run.release()
    return run.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- Which folder


def test_folders_are_numbered_and_latest_points_to_the_last(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    assert make(None, "digits", root) == root / "digits-001"
    assert make(None, "digits", root) == root / "digits-002"
    assert make(None, "mnist", root) == root / "mnist-001"
    assert names(root) == ["digits-001", "digits-002", "latest", "mnist-001"]
    latest = root / "latest"
    assert latest.is_symlink()
    assert latest.readlink() == Path("mnist-001")
    assert latest.resolve() == (root / "mnist-001").resolve()


def test_the_number_follows_the_highest_that_is_taken(tmp_path: Path) -> None:
    for name in ("digits-007", "digits-1000", "digits-x", "mnist-5000", "digits-2000-old"):
        (tmp_path / name).mkdir()
    assert make(None, "digits", tmp_path) == tmp_path / "digits-1001"


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        ("zalando-datasets--fashion_mnist", "zalando-datasets--fashion_mnist-001"),
        ("my data/數字 (new)", "my_data_new_-001"),
        ("a+b", "a_b-001"),
    ],
)
def test_a_data_sets_name_becomes_a_files_name(dataset: str, name: str, tmp_path: Path) -> None:
    assert make(None, dataset, tmp_path) == tmp_path / name


def test_by_default_runs_lie_in_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(None, "digits") == Path("runs/digits-001")
    assert (tmp_path / "runs" / "digits-001").is_dir()


def at_once(count: int, task: Callable[[], Any]) -> list[Any]:
    """What `count` threads got that ran the task side by side: results or exceptions."""
    outcomes: list[Any] = []
    start = threading.Barrier(count)

    def run() -> None:
        start.wait()
        try:
            outcomes.append(task())
        except Exception as error:
            outcomes.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_runs_that_begin_at_once_get_folders_of_their_own(tmp_path: Path) -> None:
    made = at_once(20, lambda: make(None, "digits", tmp_path))
    expected = [tmp_path / f"digits-{number:03d}" for number in range(1, 21)]
    assert sorted(made) == expected
    assert names(tmp_path) == [*(path.name for path in expected), "latest"]
    assert (tmp_path / "latest").resolve() in {path.resolve() for path in made}


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert make(str(folder), "digits") == folder
    assert names(folder) == ["status.json"]
    other = tmp_path / "c"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    assert make(str(other), "digits") == other  # holds no run
    assert names(other) == ["notes.txt", "status.json"]


def test_a_new_folder_says_at_once_that_the_run_began(tmp_path: Path) -> None:
    for folder in (make(str(tmp_path / "run"), "digits"), make(None, "digits", tmp_path)):
        assert folder
        assert read_json(folder / "status.json") == FRESH


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(UsageError) as told:
        create(str(tmp_path), "digits")
    assert str(told.value) == (
        f"--run-dir {tmp_path}: holds a run already; name another folder, or go on with that run:"
        f" --resume {tmp_path}"
    )
    assert told.value.code == 2
    assert (tmp_path / "status.json").read_text() == "{}"


def test_of_runs_that_begin_at_once_in_one_folder_one_goes_on(tmp_path: Path) -> None:
    outcomes = at_once(20, lambda: create(str(tmp_path / "run"), "digits"))
    assert sum(isinstance(outcome, RunFolder) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, UsageError) for outcome in outcomes) == 19


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StorageError) as told:
        create(str(file / "run"), "digits")
    assert str(told.value).startswith(f"{file}/run: cannot be written (Not a directory); ")
    with pytest.raises(StorageError, match=f"^{file}: cannot be written \\(File exists\\); "):
        create(str(file), "digits")
    with pytest.raises(StorageError, match=f"^{file}: cannot be written"):
        create(None, "digits", file)
    with pytest.raises(StorageError, match="File name too long") as told:
        create(str(tmp_path / ("x" * 300)), "digits")
    assert told.value.code == 5
    assert names(tmp_path) == ["file"]


def test_a_folder_that_is_read_only_is_noticed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, _: str) -> None:  # chmod would not stop root
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(run_folder, "open", refuse, raising=False)
    with pytest.raises(StorageError, match=f"^{tmp_path}/.*: cannot be written \\(Permission den"):
        create(str(tmp_path), "digits")


# --- How it goes

FRESH = {"state": "running", "exit_code": None, "phase": "starting", "step": 0, "error": None}


def test_status_of_a_run_that_finishes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    status = tmp_path / "status.json"
    with run.told_how_it_ended():
        assert read_json(status) == FRESH
        run.status(phase="training", step=15)
        assert read_json(status) == FRESH | {"phase": "training", "step": 15}
    assert read_json(status) == {
        "state": "finished",
        "exit_code": 0,
        "phase": "done",
        "step": 15,
        "error": None,
    }
    assert names(tmp_path) == ["status.json"]


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("--dataset x: no"), 3, "--dataset x: no"),
        (FailedElsewhere("rank 1 lost", 6), 6, "rank 1 lost"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError('a bug')"),
        (SystemExit(3), 1, "SystemExit(3)"),
    ],
)
def test_status_of_a_run_that_fails(
    error: BaseException, code: int, message: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path)
    with pytest.raises(type(error)) as told, run.told_how_it_ended():
        run.status(phase="validation", step=7)
        raise error
    assert told.value is error
    assert read_json(tmp_path / "status.json") == {
        "state": "failed",
        "exit_code": code,
        "phase": "validation",
        "step": 7,
        "error": message,
    }


def test_a_full_disk_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    run = RunFolder(tmp_path)
    with pytest.raises(DataError, match="the first"), run.told_how_it_ended():
        monkeypatch.setattr(run_folder.os, "fsync", full)
        raise DataError("the first")
    assert read_json(tmp_path / "status.json") == FRESH


def test_ranks_without_a_folder_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(None)
    with run.told_how_it_ended():
        run.write_json("x.json", {})
        run.write_bytes("x", b"")
        run.append_metrics(1, {"loss": 1.0})
    assert names(tmp_path) == []


def test_metrics_are_one_object_per_line(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.append_metrics(25, {"epoch": 0, "loss": 0.5})
    run.append_metrics(50, {"epoch": 0, "note": "數\n"})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 25, "epoch": 0, "loss": 0.5},
        {"step": 50, "epoch": 0, "note": "數\n"},
    ]
    assert lines[0] == '{"step": 25, "epoch": 0, "loss": 0.5}'


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "gone")
    for write in (
        lambda: run.append_metrics(1, {}),
        lambda: run.write_json("x.json", {}),
        lambda: run.write_bytes("x", b"1"),
    ):
        with pytest.raises(StorageError, match=f"^{tmp_path}/gone/.*No such file or directory"):
            write()


# --- Files


def test_a_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append((path.read_bytes(), Path(source).read_bytes(), Path(source).parent))
        replace(source, target)

    monkeypatch.setattr(run_folder.os, "replace", watched)
    write_atomically(path, b"new and longer")
    assert seen == [(b"old", b"new and longer", tmp_path)]
    assert path.read_bytes() == b"new and longer"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    run.write_bytes("model", b"old")
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(run_folder.os, function, full)
    with pytest.raises(StorageError) as told:
        run.write_bytes("model", b"new")
    assert str(told.value) == (
        f"{tmp_path}/model: cannot be written (No space left on device);"
        " free space or mend permissions, or use another --run-dir"
    )
    assert (tmp_path / "model").read_bytes() == b"old"
    assert names(tmp_path) == ["model"]


CONTENT = {
    "confusion": [[1, 0], [-2, 3.5]],
    "classes": ["a", "b [ 1,  2 ]"],
    "path": "runs/[  1\n  ]",
    "none": [],
    "mixed": [None, True, 1e-9],
    "nested": {"digest": "ab", "rows": [1]},
    "text": "数",
}


def test_json_is_what_went_in() -> None:
    assert json.loads(to_json(CONTENT)) == CONTENT


def test_lists_of_numbers_stay_on_one_line() -> None:
    lines = to_json(CONTENT).splitlines()
    assert "    [1, 0]," in lines
    assert "    [-2, 3.5]" in lines
    assert '  "mixed": [null, true, 1e-09],' in lines
    assert '    "rows": [1]' in lines
    assert '  "text": "数"' in lines
    assert to_json(CONTENT).endswith("\n}\n".replace("\n\n", "\n"))


def test_a_path_that_is_no_utf8_can_be_written_and_read(tmp_path: Path) -> None:
    content = {"run_dir": os.fsdecode(b"runs/\xff\xe4"), "数": 1}
    RunFolder(tmp_path).write_json("config.json", content)
    assert read_json(tmp_path / "config.json") == content
    (tmp_path / "config.json").read_bytes().decode("utf-8")
