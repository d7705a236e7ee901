import errno
import fcntl
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from filelock import Timeout

from ddp_mnist.errors import StorageError, UsageError
from ddp_mnist.locks import holder, take
from ddp_mnist.run.folder import RunFolder, in_use, read_json
from tests.chaos import flags_of, newest_step, wait_until
from tests.commands import REPOSITORY, Started

# A sitecustomize.py, which Python imports before all else: the disk is Lustre without -o flock.
NO_FLOCK = """
import errno, fcntl

def flock(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")

fcntl.flock = flock
"""
ELSEWHERE = "7\nnode-a\n"  # what a process on another machine has left, or has


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)


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
def test_fault_38_without_flock_another_machines_process_is_named_with_the_way_out(
    tmp_path: Path,
) -> None:
    (tmp_path / ".lock").write_text(ELSEWHERE)
    assert in_use(tmp_path)
    with pytest.raises(UsageError) as refused, RunFolder() as run:
        run.open(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: another run is writing there; wait until it has ended, or name another"
        f" --run-dir; if process 7 on node-a no longer runs, remove {tmp_path}/.lock"
    )
    (tmp_path / ".lock").unlink()
    with RunFolder() as run:
        run.open(tmp_path)
        assert in_use(tmp_path)
    assert not in_use(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_fault_38_a_disk_that_gives_no_locks_is_no_full_disk(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StorageError) as refused, RunFolder() as run:
        run.open(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path}: this disk gives no file locks ({os.strerror(number)}), without which two runs"
        " could write one folder; use a --run-dir on another disk, or mount this one with locks"
    )


def test_fault_38_a_killed_run_is_restarted_and_reported_without_flock(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_FLOCK)
    variables = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "OMP_NUM_THREADS": "1"}
    train = ["train", *flags_of("patient", Path("run"), "--cpu", "--epochs", "12")]
    command = ["-m", "ddp_mnist", "restart", "1", "--", "-m", "ddp_mnist", *train]
    started, run = Started(command, tmp_path, variables), tmp_path / "run"
    wait_until(lambda: newest_step(run))
    killed = int((run / ".lock").read_text().split()[0])
    os.kill(killed, signal.SIGKILL)
    ended = started.ended()
    assert (ended.code, ended.err) == (0, ""), ended.err
    assert "restart 1 of 1: the process that wrote the run folder was killed\n" in ended.out
    assert read_json(run / "summary.json")["resumed_from"] != []
    assert not (run / ".lock").exists()
