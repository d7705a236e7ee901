"""Locks on a disk without flock, as Lustre may be mounted; test_folder.py has the others."""

import errno
import os
import signal
from pathlib import Path

import pytest

from ddp_mnist.errors import StorageError, UsageError
from ddp_mnist.system import locks
from ddp_mnist.system.locks import HeldError, is_held, take
from ddp_mnist.training.folder import RunFolder

pytestmark = pytest.mark.filterwarnings("ignore:flock not supported")
ELSEWHERE = "7\nnode-a\n"  # what a process on another machine has left, or has


@pytest.mark.usefixtures("no_flock")
def test_fault_38_without_flock_a_lock_is_held_freed_and_freed_for_the_killed(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "lock"
    with take(lock):
        assert is_held(lock)
        with pytest.raises(HeldError, match=r"^another process holds its lock; if none runs, a"):
            take(lock)
    assert not lock.exists()
    pid = os.fork()
    if not pid:
        take(lock)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert lock.exists()
    with take(lock, wait=True):
        assert is_held(lock)
    assert not is_held(lock)


@pytest.mark.usefixtures("no_flock")
def test_fault_38_without_flock_what_another_machine_has_left_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / ".lock"
    lock.write_text(ELSEWHERE)
    assert is_held(lock)
    with pytest.raises(UsageError) as refused, RunFolder() as run:
        run.open(tmp_path)
    assert f"; if none runs, a crash left {lock}: remove it)" in str(refused.value)
    monkeypatch.setattr(locks, "LEFT_S", 0.1)
    with pytest.raises(HeldError, match=f"a crash left {lock}: remove it$"):
        take(lock, wait=True)  # it does not wait for ever
    assert lock.read_text() == ELSEWHERE
    lock.unlink()
    with RunFolder() as run:
        run.open(tmp_path)
    assert not lock.exists()


@pytest.mark.parametrize("no_flock", [errno.ENOLCK, errno.EOPNOTSUPP], indirect=True)
def test_fault_38_a_disk_that_gives_no_locks_is_no_full_disk(no_flock: int, tmp_path: Path) -> None:
    with pytest.raises(StorageError) as refused, RunFolder() as run:
        run.open(tmp_path)
    assert refused.value.code == 5
    line = f"{tmp_path}: cannot be written ({os.strerror(no_flock)}); free space or fix permissions"
    assert str(refused.value) == f"{line}, or use another --run-dir"
