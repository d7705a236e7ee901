from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddp_mnist.errors import DataError, FailedElsewhere, Preempted, StorageError, UsageError
from ddp_mnist.run.folder import (
    RunFolder,
    create_run_folder,
    in_use,
    lock_existing,
    lock_folder,
    read_json,
    reserve,
    to_json,
    unlock,
    write_atomically,
)


def make(run_dir: str | None, dataset: str, root: Path = Path("runs")) -> Path | None:
    """The folder of a run that began, and that nobody writes any more."""
    run = create_run_folder(run_dir, dataset, root)
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


def test_fault_14_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{}")
    with pytest.raises(UsageError) as told:
        create_run_folder(str(tmp_path), "digits")
    assert str(told.value) == (
        f"--run-dir {tmp_path}: holds a run already; name another folder, or go on with that run:"
        f" --resume {tmp_path}"
    )
    assert told.value.code == 2
    assert (tmp_path / "status.json").read_text() == "{}"


def test_fault_14_of_runs_that_begin_at_once_in_one_folder_one_goes_on(tmp_path: Path) -> None:
    outcomes = at_once(20, lambda: create_run_folder(str(tmp_path / "run"), "digits"))
    assert sum(isinstance(outcome, RunFolder) for outcome in outcomes) == 1
    assert sum(isinstance(outcome, UsageError) for outcome in outcomes) == 19


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(StorageError) as told:
        create_run_folder(str(file / "run"), "digits")
    assert str(told.value).startswith(f"{file}/run: cannot be written (Not a directory); ")
    with pytest.raises(StorageError, match=f"^{file}: cannot be written \\(File exists\\); "):
        create_run_folder(str(file), "digits")
    with pytest.raises(StorageError, match=f"^{file}: cannot be written"):
        create_run_folder(None, "digits", file)
    with pytest.raises(StorageError, match="File name too long") as told:
        create_run_folder(str(tmp_path / ("x" * 300)), "digits")
    assert told.value.code == 5
    assert names(tmp_path) == ["file"]


def test_fault_06_a_folder_that_is_read_only_is_noticed_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, _: str) -> None:  # chmod would not stop root
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("ddp_mnist.run.folder.open", refuse, raising=False)
    with pytest.raises(StorageError, match=f"^{tmp_path}/.*: cannot be written \\(Permission den"):
        create_run_folder(str(tmp_path), "digits")


def test_a_reserved_folder_is_empty_and_the_latest_once_a_run_begins(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "runs"
    assert [reserve("a/b", root), reserve("a/b", root)] == [root / "a_b-001", root / "a_b-002"]
    assert names(root) == ["a_b-001", "a_b-002"]
    assert names(root / "a_b-002") == []
    assert make(str(root / "a_b-002"), "a/b", root) == root / "a_b-002"
    assert (root / "latest").readlink() == Path("a_b-002")
    assert make(str(root / "mine"), "a/b", root) == root / "mine"
    assert (root / "latest").readlink() == Path("mine")
    make(str(tmp_path / "elsewhere"), "a/b", root)
    assert (root / "latest").readlink() == Path("mine")
    assert "latest" not in names(tmp_path)


def test_a_place_where_nothing_can_be_reserved(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"^{tmp_path}/file: cannot be written"):
        reserve("digits", tmp_path / "file")


def test_a_run_that_saved_nothing_can_begin_again(tmp_path: Path) -> None:
    killed = create_run_folder(str(tmp_path), "digits")
    killed.append_metrics(25, {"loss": 0.5})
    killed.status(phase="training", step=30)
    killed.release()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="holds a run already"):
        create_run_folder(str(tmp_path), "digits")
    assert read_json(tmp_path / "status.json")["step"] == 30
    run = create_run_folder(str(tmp_path), "digits", begin_again=True)
    assert run.path == tmp_path
    assert read_json(tmp_path / "status.json") == FRESH
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""
    assert names(tmp_path) == [".lock", "metrics.jsonl", "notes.txt", "status.json"]
    run.release()


def test_a_run_that_began_and_ended_meanwhile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(path: Path) -> RunFolder:
        (path / "status.json").write_text("{}")
        return lock_existing(path)

    monkeypatch.setattr("ddp_mnist.run.folder.lock_existing", late)
    with pytest.raises(UsageError, match="holds a run already"):
        create_run_folder(str(tmp_path), "digits")
    assert names(tmp_path) == ["status.json"]  # and no lock
    assert (tmp_path / "status.json").read_text() == "{}"


# --- Who may write it

HOLDER = """
import sys, time
from pathlib import Path
from ddp_mnist.run_folder import lock_folder
lock = lock_folder(Path(sys.argv[1]))
print("holds it", flush=True)
time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, which has `tmp_path` to itself."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"holds it\n"
        yield process
        process.kill()


@pytest.mark.usefixtures("holder")
def test_a_folder_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    leftover = tmp_path / ".status.json.1-1.tmp"
    leftover.touch()
    for take in (
        lambda: lock_folder(tmp_path),
        lambda: lock_existing(tmp_path),
        lambda: create_run_folder(str(tmp_path), "digits"),
        lambda: create_run_folder(str(tmp_path), "digits", begin_again=True),
    ):
        assert in_use(tmp_path)
        started = time.monotonic()
        with pytest.raises(UsageError) as told:
            take()
        assert time.monotonic() - started < 2
        assert str(told.value) == (
            f"{tmp_path}: another run is writing there; wait until it has ended, or name another"
            " --run-dir"
        )
        assert told.value.code == 2
    assert names(tmp_path) == [".lock", leftover.name]


def test_the_kernel_frees_the_folder_of_a_killed_process(
    holder: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    assert in_use(tmp_path)
    holder.kill()
    holder.wait()
    assert names(tmp_path) == [".lock"]
    run = lock_existing(tmp_path)
    assert in_use(tmp_path)
    run.release()
    assert not in_use(tmp_path)
    assert names(tmp_path) == []


def test_to_ask_whether_a_folder_is_in_use_leaves_nothing_there(tmp_path: Path) -> None:
    assert not in_use(tmp_path / "gone")
    assert not in_use(tmp_path)
    assert names(tmp_path) == []
    (tmp_path / ".lock").touch()  # of a process that was killed
    assert not in_use(tmp_path)
    assert names(tmp_path) == [".lock"]


@contextlib.contextmanager
def may_only_read(folder: Path) -> Iterator[None]:
    """As somebody else than the folder's owner, who is root where the tests run as root."""
    modes = {path: path.stat().st_mode for path in (folder, *folder.iterdir())}
    for path in modes:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_folder_that_may_only_be_read_can_be_asked_too() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own belongs to one user
        folder = Path(place)
        lock = lock_folder(folder)
        with may_only_read(folder):
            assert in_use(folder)
        unlock(lock)
        (folder / ".lock").touch()  # of a process that was killed
        with may_only_read(folder):
            assert not in_use(folder)
        assert names(folder) == [".lock"]


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "model.safetensors", "summary.json", "checkpoints"]
)
@pytest.mark.parametrize("begin_again", [False, True])
def test_files_of_something_else_are_not_written_over(
    name: str, begin_again: bool, tmp_path: Path
) -> None:
    if name == "checkpoints":
        (tmp_path / name).mkdir()
        file = tmp_path / name / "step-00000001.pt"
    else:
        file = tmp_path / name
    file.write_text("a model of the Hub")
    with pytest.raises(UsageError) as refused:
        create_run_folder(str(tmp_path), "digits", begin_again=begin_again)
    assert str(refused.value) == (
        f"--run-dir {tmp_path}: holds files that are not of a run and would be written over"
        f" ({name}); name another folder"
    )
    assert file.read_text() == "a model of the Hub"
    assert names(tmp_path) == [name]


def test_a_folder_called_latest_stays_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/latest", "./runs/latest", str(tmp_path / "runs" / "latest")):
        with pytest.raises(UsageError, match=f"--run-dir {name}: is the name of the link"):
            create_run_folder(name, "digits")
    assert names(tmp_path) == []

    (tmp_path / "runs" / "latest").mkdir(parents=True)  # as `cp -rL` leaves it
    run = create_run_folder(None, "digits")
    run.release()
    assert names(tmp_path / "runs") == ["digits-001", "latest"]
    assert run.warnings == [
        "runs/latest: is not a symlink and was left alone; move it away to let it point to"
        " runs/digits-001"
    ]
    assert not (tmp_path / "runs" / "latest").is_symlink()


def test_to_begin_again_through_latest_is_to_begin_where_it_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert make(None, "digits") == Path("runs/digits-001")
    run = create_run_folder("runs/latest", "digits", begin_again=True)
    run.release()
    assert run.path == Path("runs/digits-001")
    assert Path("runs/latest").readlink() == Path("digits-001")


@pytest.mark.parametrize("error", [None, DataError("no"), KeyboardInterrupt()])
def test_the_folder_is_free_once_the_run_has_ended(
    error: BaseException | None, tmp_path: Path
) -> None:
    run = create_run_folder(str(tmp_path), "digits")
    with contextlib.suppress(DataError, KeyboardInterrupt), run.record_outcome():
        assert in_use(tmp_path)
        if error:
            raise error
    assert not in_use(tmp_path)
    assert names(tmp_path) == ["status.json"]


def test_never_do_two_hold_the_lock_although_its_file_comes_and_goes(tmp_path: Path) -> None:
    inside: list[int] = []
    most = []

    def take_and_leave() -> int:
        taken = 0
        for _ in range(200):
            with contextlib.suppress(UsageError):
                lock = lock_folder(tmp_path)
                inside.append(1)
                time.sleep(0)
                most.append(len(inside))
                inside.pop()
                unlock(lock)
                taken += 1
        return taken

    taken = at_once(8, take_and_leave)
    assert max(most) == 1
    assert sum(taken) == len(most)
    assert names(tmp_path) == []


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "other").mkdir()
    stays = ["status.json", "notes.tmp", ".hidden", "checkpoints/step-00000001.pt", ".x.tmp"]
    goes = [".status.json.12-34.tmp", "checkpoints/.step-00000002.pt.12-34.tmp"]
    for name in (*stays, *goes):
        (tmp_path / name).touch()
    lock_existing(tmp_path).release()
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(stays)


def test_a_folder_that_cannot_be_locked(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(StorageError, match=f"^{tmp_path}/.lock: cannot be written") as told:
        lock_existing(tmp_path)
    assert told.value.code == 5


# --- How it goes

FRESH = {"state": "running", "exit_code": None, "phase": "starting", "step": 0, "error": None}


def test_status_of_a_run_that_finishes(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    status = tmp_path / "status.json"
    with run.record_outcome():
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
    with pytest.raises(type(error)) as told, run.record_outcome():
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


@pytest.mark.parametrize(("signal", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_status_of_a_run_that_a_signal_stopped(signal: str, code: int, tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    stop = Preempted(f"{signal}: stopped after step 7 and saved", code)
    with pytest.raises(Preempted) as told, run.record_outcome():
        run.status(phase="training", step=7)
        raise stop
    assert told.value is stop
    assert read_json(tmp_path / "status.json") == {
        "state": "preempted",
        "exit_code": code,
        "phase": "training",
        "step": 7,
        "error": f"{signal}: stopped after step 7 and saved",
    }


def test_a_full_disk_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    run = RunFolder(tmp_path)
    with pytest.raises(DataError, match="the first"), run.record_outcome():
        monkeypatch.setattr(os, "fsync", full)
        raise DataError("the first")
    assert read_json(tmp_path / "status.json") == FRESH


def test_ranks_without_a_folder_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunFolder(None)
    with run.record_outcome():
        run.write_json("x.json", {})
        run.write_bytes("x", b"")
        run.append_metrics(1, {"loss": 1.0})
        run.cut_metrics(0)
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


def test_metrics_of_steps_that_are_done_again_are_cut_off(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.cut_metrics(0)
    assert names(tmp_path) == []
    for step in (25, 50, 75):
        run.append_metrics(step, {"note": "數"})
    assert run.metrics_lines == 3
    metrics = tmp_path / "metrics.jsonl"
    with open(metrics, "ab") as file:
        file.write(b'{"step": 100, "lo')  # killed here
    lines = metrics.read_bytes().splitlines(keepends=True)
    for asked, left in ((9, 3), (4, 3), (3, 3), (1, 1), (2, 1), (0, 0)):
        run.cut_metrics(asked)
        assert metrics.read_bytes() == b"".join(lines[:left])
        assert run.metrics_lines == left
    run.append_metrics(25, {"loss": 1.0})
    assert metrics.read_text() == '{"step": 25, "loss": 1.0}\n'
    assert run.metrics_lines == 1


def test_metrics_that_cannot_be_cut_are_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(tmp_path)
    run.append_metrics(1, {})
    broken = Mock(side_effect=OSError(errno.EIO, "Input/output error"))
    monkeypatch.setattr(os, "truncate", broken)
    with pytest.raises(StorageError, match=r"metrics.jsonl: cannot be written \(Input/outp"):
        run.cut_metrics(0)


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

    monkeypatch.setattr(os, "replace", watched)
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
    monkeypatch.setattr(os, function, full)
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
