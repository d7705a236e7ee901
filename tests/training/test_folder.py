import contextlib
import errno
import json
import os
import stat
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.errors import DataError, FailedElsewhere, Preempted, StorageError, UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.system.locks import is_held
from ddp_mnist.training.folder import RUNS, RunFolder, make_run_folder
from tests.chaos import wait_until
from tests.ranks import at_once

pytestmark = pytest.mark.usefixtures("here")
FRESH = {"state": "running", "exit_code": None, "phase": "starting", "step": 0, "error": None}
FULL = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))


def create(run_dir: Path | str | None, dataset: str = "digits", **options: bool) -> Path | None:
    """Return the folder of a run that began, and that nobody writes any more."""
    run = RunFolder()
    try:
        run.create(str(run_dir) if run_dir else None, dataset, **options)
    finally:
        run.release()
    return run.path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- Which folder


def test_folders_are_numbered_and_latest_points_to_the_last() -> None:
    for dataset, name in (
        ("digits", "digits-001"),
        ("digits", "digits-002"),
        ("mnist", "mnist-001"),
        ("zalando-datasets--fashion_mnist", "zalando-datasets--fashion_mnist-001"),
        ("my data/數字 (new)", "my_data_new_-001"),
        ("a+b", "a_b-001"),
    ):
        assert create(None, dataset) == RUNS / name
        assert (RUNS / "latest").readlink() == Path(name)
        assert read_json(RUNS / name / "status.json") == FRESH
    for name in ("digits-007", "digits-1000", "digits-x", "mnist-5000", "digits-2000-old"):
        (RUNS / name).mkdir()
    assert create(None) == Path("runs/digits-1001")


def test_runs_that_begin_at_once_get_folders_of_their_own() -> None:
    made = at_once(*[lambda: create(None)] * 20)
    expected = [RUNS / f"digits-{number:03d}" for number in range(1, 21)]
    assert sorted(made) == expected
    assert names(RUNS) == [*(path.name for path in expected), "latest"]
    assert (RUNS / "latest").resolve() in {path.resolve() for path in made}


def test_a_reserved_folder_or_one_that_the_person_names(tmp_path: Path) -> None:
    """It is the latest once a run begins there, if it lies beside the others."""
    (RUNS / "mine").mkdir(parents=True)
    (RUNS / "mine" / "notes.txt").touch()
    assert [make_run_folder("a/b"), make_run_folder("a/b")] == [RUNS / "a_b-001", RUNS / "a_b-002"]
    assert names(RUNS) == ["a_b-001", "a_b-002", "mine"] and names(RUNS / "a_b-002") == []
    for path in (RUNS / "a_b-002", RUNS / "mine", tmp_path / "else" / "where"):
        assert create(path, "a/b") == path
        assert (RUNS / "latest").readlink() == Path("mine" if path.parent != RUNS else path.name)
        assert names(path) == [*["notes.txt"] * (path.name == "mine"), "status.json"]
        assert read_json(path / "status.json") == FRESH


def test_a_run_that_cannot_begin_leaves_neither_a_folder_nor_a_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert create(None) == RUNS / "digits-001"
    (own := RUNS / "mine").mkdir()
    with monkeypatch.context() as context:
        context.setattr("os.fsync", FULL)
        for given in (None, str(own)):
            with pytest.raises(StorageError, match=r"status.json: cannot be written \(No space"):
                create(given)
    assert names(RUNS) == ["digits-001", "latest", "mine"]
    assert (RUNS / "latest").readlink() == Path("digits-001")
    assert create(None) == RUNS / "digits-002"


def test_fault_06_a_place_that_cannot_be_written_is_noticed_before_training(tmp_path: Path) -> None:
    file = tmp_path / "runs"
    file.touch()
    for make, line in (
        (lambda: create(file / "run"), f"{file}/run: cannot be written \\(Not a directory\\); "),
        (lambda: create(None), "runs: cannot be written"),
    ):
        with pytest.raises(StorageError, match=f"^{line}.*another --run-dir"):
            make()
    assert names(tmp_path) == ["runs"]


def test_fault_49_a_disk_that_cannot_flush_folders_or_make_links_is_used_with_a_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flush = os.fsync

    def flush_files(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(number)

    monkeypatch.setattr(os, "fsync", flush_files)
    monkeypatch.setattr(Path, "symlink_to", Mock(side_effect=PermissionError(1, "Not permitted")))
    with RunFolder() as folder:
        folder.create(None, "digits")
        folder.finished()
    assert read_json(here / "runs" / "digits-001" / "status.json")["state"] == "finished"
    flushed, linked = capsys.readouterr().err.splitlines()
    assert "this disk cannot flush folders (Invalid argument): a power cut may lose" in flushed
    assert "runs/latest: cannot be made a link to runs/digits-001 (Not permitted)" in linked


# --- Folders that hold something


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "model.safetensors", "summary.json", "checkpoints"]
)
def test_files_of_another_program_are_not_written_over(name: str, tmp_path: Path) -> None:
    file = tmp_path / (name if "." in name else f"{name}/step-00000001.pt")
    file.parent.mkdir(exist_ok=True)
    file.write_text("a model of the Hub")
    for begin_again in (False, True):
        with pytest.raises(UsageError, match=f"^--run-dir .*overwritten \\({name}\\); name"):
            create(tmp_path, begin_again=begin_again)
    assert file.read_text() == "a model of the Hub"
    assert names(tmp_path) == [name]


def test_fault_14_a_folder_that_holds_a_run_is_refused_unless_it_saved_nothing() -> None:
    path = Path("runs/digits-001")
    with contextlib.suppress(KeyboardInterrupt), RunFolder() as stopped:
        stopped.create(None, "digits")
        stopped.log(25, {"loss": 0.5})
        stopped.step = 30
        stopped.status(phase="training")
        raise KeyboardInterrupt
    (path / "notes.txt").write_text("mine")
    refusal = f"^--run-dir {path}: holds a run already .*--resume {path}.; name another"
    with pytest.raises(UsageError, match=refusal):
        create(path)
    assert read_json(path / "status.json")["step"] == 30
    assert names(path) == ["metrics.jsonl", "notes.txt", "status.json"]  # and no lock
    assert create("runs/latest", begin_again=True) == path  # where the link leads
    assert read_json(path / "status.json") == FRESH
    assert (path / "metrics.jsonl").read_bytes() == b""
    assert names(path) == ["metrics.jsonl", "notes.txt", "status.json"]
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "step-00000030.pt").touch()
    with pytest.raises(UsageError, match=refusal):
        create(path, begin_again=True)


# --- Who may write it


def hold_the_lock() -> None:
    run = RunFolder()
    run.open(Path())
    Path("ready").touch()
    time.sleep(60)


@pytest.mark.usefixtures("flock")
def test_fault_14_a_folder_that_another_process_writes_is_refused_until_it_is_killed(
    tmp_path: Path,
) -> None:
    leftover = tmp_path / ".status.json.1-1.tmp"
    [holder] = LocalWorld(1, hold_the_lock, folder=tmp_path).processes
    wait_until((tmp_path / "ready").exists)  # it has removed what was left over
    (tmp_path / "ready").unlink()
    leftover.touch()
    for begin_again in (False, True):
        with pytest.raises(UsageError, match=f"^{tmp_path}: another run is writing there"):
            create(tmp_path, begin_again=begin_again)
        assert is_held(tmp_path / ".lock")
    holder.kill()
    holder.join()
    assert names(tmp_path) == [".lock", leftover.name]
    with RunFolder() as run:
        run.open(tmp_path)  # the kernel freed it
        assert is_held(tmp_path / ".lock")
    assert not is_held(tmp_path / ".lock")
    assert is_held(tmp_path)  # what cannot be opened may be held
    assert names(tmp_path) == []


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("has_flock", [True, False])
def test_never_do_two_hold_the_lock_although_its_file_comes_and_goes(
    has_flock: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not has_flock:
        request.getfixturevalue("no_flock")
    inside: list[int] = []
    most = []

    def take_and_leave() -> None:
        for _ in range(50):
            with contextlib.suppress(UsageError), RunFolder() as run:
                run.open(tmp_path)
                inside.append(1)
                time.sleep(0)
                most.append(len(inside))
                inside.pop()

    assert at_once(*[take_and_leave] * 8) == [None] * 8
    assert max(most) == 1
    assert names(tmp_path) == []


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    stays = [".hidden", ".x.tmp", "checkpoints/step-00000001.pt", "notes.tmp", "status.json"]
    goes = [".status.json.12-34.tmp", "checkpoints/.step-00000002.pt.12-34.tmp"]
    for name in (*stays, *goes):
        (tmp_path / name).touch()
    with RunFolder() as run:
        run.open(tmp_path)
    left = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == stays


# --- How the run ended


@pytest.mark.parametrize(
    ("error", "state", "code", "message"),
    [
        (None, "finished", 0, None),
        (FailedElsewhere("rank 1 lost", 6), "failed", 6, "rank 1 lost"),
        (KeyboardInterrupt(), "failed", 130, "interrupted"),
        (SystemExit(3), "failed", 1, "SystemExit(3)"),
        (Preempted("SIGTERM: saved", 143), "preempted", 143, "SIGTERM: saved"),
    ],
)
def test_how_a_run_ended_is_recorded_and_its_folder_free(
    error: BaseException | None, state: str, code: int, message: str | None, tmp_path: Path
) -> None:
    status = tmp_path / "status.json"
    expected = pytest.raises(type(error)) if error else contextlib.nullcontext()
    with expected as raised, RunFolder() as run:
        run.create(str(tmp_path), "digits")
        run.step = 7
        run.status(phase="validation")
        assert read_json(status) == FRESH | {"phase": "validation", "step": 7}
        assert is_held(tmp_path / ".lock")
        if error:
            raise error
        run.finished()
    assert not error or (raised and raised.value is error)
    phase = "validation" if error else "done"
    ended = {"state": state, "exit_code": code, "phase": phase, "step": 7, "error": message}
    assert read_json(status) == ended
    traceback = ["traceback.txt"] if code == 1 else []  # of what nobody foresaw
    assert names(tmp_path) == ["status.json", *traceback]


def test_a_full_disk_does_not_hide_the_first_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="the first"), RunFolder() as run:
        run.create(str(tmp_path), "digits")
        monkeypatch.setattr(os, "fsync", FULL)
        raise DataError("the first")
    assert read_json(tmp_path / "status.json") == FRESH
    assert names(tmp_path) == ["status.json"]


# --- Files


def test_metrics_of_steps_that_are_done_again_are_cut_off(tmp_path: Path) -> None:
    run, metrics = RunFolder(), tmp_path / "metrics.jsonl"
    run.path = tmp_path
    run.cut_metrics(0)
    assert names(tmp_path) == []
    for step in (25, 50, 75):
        run.log(step, {"epoch": 0, "note": "數\n"})
    lines = metrics.read_bytes().splitlines(keepends=True)
    written = [{"step": step, "epoch": 0, "note": "數\n"} for step in (25, 50, 75)]
    assert list(map(json.loads, lines)) == written
    assert run.metrics_lines == 3
    with open(metrics, "ab") as file:
        file.write(b'{"step": 100, "lo')  # killed here
    for count, left in ((9, 3), (4, 3), (3, 3), (1, 1), (2, 1), (0, 0)):
        run.cut_metrics(count)
        assert metrics.read_bytes() == b"".join(lines[:left])
        assert run.metrics_lines == left
    run.log(25, {"loss": 1.0})
    assert metrics.read_text() == '{"step": 25, "loss": 1.0}\n'
    assert run.metrics_lines == 1
