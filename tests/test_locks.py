import errno
import os
import signal
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import SoftFileLock, Timeout

from ddp_mnist.errors import StorageError, UsageError
from ddp_mnist.run.folder import RunFolder, read_json, writer_of
from ddp_mnist.system import locks
from ddp_mnist.system.locks import here, holder, take
from tests.chaos import flags_of, newest_step, wait_until
from tests.commands import REPOSITORY, Started
from tests.data_sets import folder_of, load, picture

# A sitecustomize.py, which Python imports before all else: the disk is Lustre without -o flock.
NO_FLOCK = """
import errno, fcntl

def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

fcntl.flock = flock
"""
ELSEWHERE = "7\nnode-a\n"  # what a process on another machine has left, or has


def killed_process(lock: Path) -> int:
    """Return the number of a process that was killed while it held the lock."""
    pid = os.fork()
    if not pid:
        take(lock)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lock.exists()
    return pid


@pytest.mark.parametrize("exchanges", [True, False])  # whether the disk swaps two names at once
@pytest.mark.usefixtures("no_flock")
def test_fault_38_without_flock_a_lock_is_held_freed_and_freed_for_the_killed(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr("filelock._soft.exchange_names", lambda *_: False)
    lock = tmp_path / "lock"
    assert holder(lock) == ""
    with take(lock):
        assert holder(lock).startswith(f"process {os.getpid()} on ")
        with pytest.raises(Timeout):
            take(lock)
    assert not lock.exists()
    killed_process(lock)
    assert holder(lock) == ""
    with take(lock):
        assert holder(lock).startswith(f"process {os.getpid()} on ")
    killed_process(lock)
    with take(lock, wait=True):
        pass


@pytest.mark.usefixtures("no_flock")
def test_of_many_that_find_a_killed_ones_file_one_takes_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All judge the old file before the first of them removes it."""

    def holder_and_then(path: Path) -> str:
        found = holder(path)
        time.sleep(0.1)
        return found

    def outcome(_: int) -> Any:
        try:
            return take(lock)
        except Timeout as error:
            return error

    monkeypatch.setattr("filelock._soft.exchange_names", lambda *_: False)
    monkeypatch.setattr(locks, "holder", holder_and_then)
    lock = tmp_path / "lock"
    killed_process(lock)
    with ThreadPoolExecutor(4) as pool:
        outcomes = list(pool.map(outcome, range(4)))
    [taken] = [each for each in outcomes if not isinstance(each, Timeout)]
    assert holder(lock).startswith(f"process {os.getpid()} on ")
    taken.lock.release()
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_lock_that_another_takes_during_a_look_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was there when the lock was refused, and gone when its content was to be read."""
    lock = tmp_path / "lock"
    another = SoftFileLock(lock)

    def opened(*_: Any) -> Any:
        another.acquire()
        raise FileNotFoundError(lock)

    monkeypatch.setattr(locks, "open", opened, raising=False)
    locks.remove_stale(lock, wait=False)
    assert lock.exists()
    another.release()


@pytest.mark.usefixtures("no_flock")
def test_without_flock_nobody_waits_for_the_empty_file_that_a_flock_has_left(
    tmp_path: Path,
) -> None:
    """Its process is not known: who would not wait, as for a run's folder, is told of it."""
    lock = tmp_path / "lock"
    lock.touch()
    os.utime(lock, (time.time() - 61, time.time() - 61))
    with pytest.raises(Timeout):
        take(lock)
    with take(lock, wait=True):
        assert holder(lock) == f"process {os.getpid()} on {here()}"
    assert not [*tmp_path.iterdir()]


@pytest.mark.usefixtures("no_flock")
def test_without_flock_datasets_reads_and_says_nothing(tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own", picture(), picture(right=(0, 0, 250)))
    with warnings.catch_warnings(action="error"):
        images = load(own)
    assert len(images.train_labels) == 2


@pytest.mark.usefixtures("no_flock")
def test_without_flock_the_lock_of_a_number_that_another_process_has_now_is_free(
    tmp_path: Path,
) -> None:
    """filelock writes the process, the machine and when the process started, each on a line."""
    lock, own = tmp_path / "lock", os.getpid()
    with SoftFileLock(lock):
        pid, host, started = lock.read_text().splitlines()
    assert (int(pid), host) == (own, here())
    for written, who in (
        (f"{own}\n{host}\n{started}\n", f"process {own} on {host}"),
        (f"{own}\n{host}\n{int(started) - 1}\n", ""),
        (f"{own}\n{host}\n", f"process {own} on {host}"),  # as filelock wrote it before
        (f"{own}\nnode-a\n{int(started) - 1}\n", f"process {own} on node-a"),
        (f"filelock/break\n{own}\n", "a process that left no name"),
        (f"{own}\n{host}\n{started[:-1]}", "a process that left no name"),  # half of it
        ("", "a process that left no name"),
    ):
        lock.write_text(written)
        assert holder(lock) == who


@pytest.mark.usefixtures("no_flock")
def test_a_lock_says_nothing_of_flock_and_leaves_the_filters_of_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        before = list(warnings.filters)
        with take(tmp_path / "lock"):
            assert warnings.filters == before
    assert heard == []


@pytest.mark.usefixtures("no_flock")
def test_fault_38_without_flock_another_machines_process_is_named_with_the_way_out(
    tmp_path: Path,
) -> None:
    (tmp_path / ".lock").write_text(ELSEWHERE)
    assert writer_of(tmp_path)
    with pytest.raises(UsageError) as refused, RunFolder() as run:
        run.open(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: another run is writing there; wait until it has ended, or name another"
        f" --run-dir; if process 7 on node-a no longer runs, remove {tmp_path}/.lock"
    )
    (tmp_path / ".lock").unlink()
    with RunFolder() as run:
        run.open(tmp_path)
        assert writer_of(tmp_path)
    assert not writer_of(tmp_path)


@pytest.mark.parametrize("no_flock", [errno.ENOLCK, errno.EOPNOTSUPP], indirect=True)
def test_fault_38_a_disk_that_gives_no_locks_is_no_full_disk(no_flock: int, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as refused, RunFolder() as run:
        run.open(tmp_path)
    why = os.strerror(no_flock)
    assert str(refused.value) == (
        f"{tmp_path}: this disk gives no file locks ({why}), without which two runs could write one"
        " folder; use a --run-dir on another disk, or mount this one with locks"
    )


@pytest.mark.system
def test_fault_38_a_killed_run_is_restarted_and_reported_without_flock(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_FLOCK)
    variables = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    train = ["train", *flags_of("patient", Path("run"), "--cpu", "--epochs", "12")]
    command = ["-m", "ddp_mnist", "restart", "1", "--", "-m", "ddp_mnist", *train]
    started, run = Started(command, tmp_path, variables), tmp_path / "run"
    wait_until(lambda: newest_step(run))
    killed = int((run / ".lock").read_text().split()[0])
    os.kill(killed, signal.SIGKILL)
    printed = started.ended().succeeds()
    assert "restart 1 of 1: the process that wrote the run folder was killed\n" in printed
    assert read_json(run / "summary.json")["resumed_from"] != []
    assert not (run / ".lock").exists()
