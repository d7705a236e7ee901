"""The run folder: who may use it, and files that are replaced whole or not at all.

One process writes it: the one that holds its lock, which the kernel takes back when that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ddp_mnist.errors import DdpMnistError, Preempted, StorageError, UsageError

CONFIG, METRICS, MODEL = "config.json", "metrics.jsonl", "model.safetensors"

STATUS, SUMMARY, CHECKPOINTS, LOCK = "status.json", "summary.json", "checkpoints", ".lock"

LATEST = "latest"  # a link, beside the runs

LEFTOVER = ".*.[0-9]*-[0-9]*.tmp"  # of a process that was killed as it wrote

FIRST_STATUS: dict[str, Any] = {
    "state": "running",
    "exit_code": None,
    "phase": "starting",
    "step": 0,
    "error": None,
}


class RunFolder:
    """A run's files. Only rank 0 has one on disk; on other ranks every method does nothing.

    Args:
        path: the folder, or None on ranks that do not write.
        lock: this process's, if it has the folder to itself; released when the run has ended.

    Attributes:
        metrics_lines: how many lines of this run metrics.jsonl holds.
        trackers: what else is told the metrics, see tracking.py.
        warnings: what the person should know about the folder, in lines.
    """

    def __init__(self, path: str | Path | None, lock: FileLock | None = None) -> None:
        self.path = Path(path) if path else None
        self._lock = lock
        self.metrics_lines = 0
        self.trackers: list[Any] = []
        self.warnings: list[str] = []
        self._status = dict(FIRST_STATUS)

    @property
    def step(self) -> int:
        """The last that this run is known to have taken."""
        return int(self._status["step"])

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Replaces the file atomically. Raises StorageError."""
        # A path may hold bytes that are no UTF-8; backslashreplace makes them JSON's \udcXX.
        self.write_bytes(name, to_json(content).encode(errors="backslashreplace"))

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replaces the file atomically. Raises StorageError."""
        if self.path:
            with storage_errors(self.path / name):
                write_atomically(self.path / name, content)

    def status(self, **changes: Any) -> None:
        """Replaces status.json: state, exit_code, phase, step, error."""
        self._status |= changes
        self.write_json(STATUS, self._status)

    def reached(self, step: int) -> None:
        """What status.json will say when it is written next."""
        self._status["step"] = step

    def append_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """One JSON object per line in metrics.jsonl, and the same to the trackers."""
        self.reached(step)
        if self.path:
            path = self.path / METRICS
            with storage_errors(path), open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.metrics_lines += 1
        for tracker in self.trackers:
            tracker.log(metrics, step)

    def cut_metrics(self, count: int) -> None:
        """Takes off all but the first `count` lines: those of steps that are done again."""
        self.metrics_lines = 0
        if self.path and (self.path / METRICS).exists():
            path = self.path / METRICS
            with storage_errors(path):
                lines = path.read_bytes().splitlines(keepends=True)[:count]
                kept = [
                    line for line in lines if line.endswith(b"\n")
                ]  # after a crash of the machine one may be torn
                os.truncate(path, sum(map(len, kept)))
            self.metrics_lines = len(kept)

    @contextlib.contextmanager
    def record_outcome(self) -> Iterator[None]:
        """Whatever ends the block ends up in status.json, with the exit code it will have."""
        try:
            self.status()
            yield
            self.status(state="finished", exit_code=0, phase="done")
        except Preempted as stop:
            self.ended("preempted", stop.code, str(stop))
            raise
        except DdpMnistError as error:
            self.ended("failed", error.code, str(error))
            raise
        except KeyboardInterrupt:
            self.ended("failed", 130, "interrupted")
            raise
        except BaseException as error:
            self.ended("failed", 1, repr(error))
            raise
        finally:
            self.release()

    def release(self) -> None:
        """Others may write the folder from now on."""
        if self._lock:
            unlock(self._lock)

    def ended(self, state: str, code: int, message: str) -> None:
        with contextlib.suppress(StorageError):  # the first error is the one to be told
            self.status(state=state, exit_code=code, error=message)


def create_run_folder(
    run_dir: str | None, dataset: str, root: Path = Path("runs"), begin_again: bool = False
) -> RunFolder:
    """Makes a new run folder: `run_dir`, else runs/<dataset>-<NNN> with the next free number.

    The folder holds a status.json from then on, which makes it a run's. To `begin_again` in one
    whose run saved nothing is allowed.

    Raises:
        UsageError: the folder holds a run already, or files of something else.
        StorageError: it cannot be made or written.
    """
    with storage_errors(Path(run_dir or root)):
        path = reserve(dataset, root) if run_dir is None else without_link(Path(run_dir))
    if path.absolute() == (root / LATEST).absolute():
        raise UsageError(
            f"--run-dir {run_dir}: is the name of the link to the run that began last; name another"
            " folder, or leave it out"
        )
    with storage_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    _refuse_a_run(path, begin_again)
    run = lock_existing(path)
    try:
        _refuse_a_run(path, begin_again)  # one that began and ended since
        run.cut_metrics(0)
        if path.parent == root:
            run.warnings += _point_latest_to(path)
        run.status()
    except BaseException:
        run.release()
        raise
    return run


def lock_existing(path: Path) -> RunFolder:
    """The folder of a run that has ended in whatever way, without what a killed one left half done.

    Raises:
        UsageError: another process is writing it.
        StorageError: it cannot be written.
    """
    run = RunFolder(path, lock_folder(path))
    try:
        with storage_errors(path):
            for leftover in [*path.glob(LEFTOVER), *(path / CHECKPOINTS).glob(LEFTOVER)]:
                if leftover.is_file():
                    leftover.unlink()
    except StorageError:
        run.release()
        raise
    return run


def without_link(path: Path) -> Path:
    """What runs/latest leads to now, as it may lead elsewhere before a run has ended."""
    return path.parent / path.readlink() if path.is_symlink() else path


def _refuse_a_run(path: Path, begin_again: bool) -> None:
    """Raises UsageError if the folder holds a run, or another program's files with a run's names.

    To begin again is right if the run saved nothing.
    """
    # A run's first file is status.json, so these are not a run's without it.
    ours = (CONFIG, METRICS, MODEL, SUMMARY, CHECKPOINTS)
    theirs = [name for name in ours if (path / name).exists()]
    if theirs and not (path / STATUS).exists():
        raise UsageError(
            f"--run-dir {path}: holds files that are not of a run and would be written over"
            f" ({', '.join(theirs)}); name another folder"
        )
    saved_nothing = begin_again and not any((path / CHECKPOINTS).glob("step-*.pt"))
    if (path / STATUS).exists() and not saved_nothing:
        raise UsageError(
            f"--run-dir {path}: holds a run already; name another folder, or go on with that run:"
            f" --resume {path}"
        )


def reserve(dataset: str, root: Path = Path("runs")) -> Path:
    """Makes the empty folder runs/<dataset>-<NNN>, with the next free number.

    Raises:
        StorageError: it cannot be made.
    """
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        return _next_free(root, re.sub(r"[^A-Za-z0-9._-]+", "_", dataset))


def _point_latest_to(path: Path) -> list[str]:
    """Makes runs/latest a link to the run that began last; or returns why it stays as it is."""
    latest, link = path.with_name(LATEST), path.with_name(f".{LATEST}-{path.name}")
    if latest.exists() and not latest.is_symlink():  # made one by a copy, as `scp -r` makes it
        return [
            f"{latest}: is not a symlink and was left alone; move it away to let it point to {path}"
        ]
    with storage_errors(link):
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, latest)
    return []


def lock_folder(path: Path) -> FileLock:
    """Raises UsageError if another process has it, StorageError if there can be no lock."""
    lock = FileLock(path / LOCK, thread_local=False)
    with storage_errors(path):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(
                f"{path}: another run is writing there; wait until it has ended, or name another"
                " --run-dir"
            ) from None
    return lock


def unlock(lock: FileLock) -> None:
    """The file goes while it is locked: whoever has it open then finds it gone, and retries."""
    with contextlib.suppress(OSError):
        Path(lock.lock_file).unlink()
    lock.release()


def in_use(path: Path) -> bool:
    """Whether a process is writing this run folder; True if that cannot be told.

    The lock is tried through a file that is open for reading only, so that a run which belongs to
    somebody else can be asked too. Nothing is written.
    """
    try:
        with open(path / LOCK, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # it is locked; or it may not be read, or the disk knows no locks
        return True
    return False


def _next_free(root: Path, stem: str) -> Path:
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    taken = [int(m[1]) for p in root.iterdir() if (m := pattern.fullmatch(p.name))]
    number = max(taken, default=0)
    while True:
        number += 1
        path = root / f"{stem}-{number:03d}"
        with contextlib.suppress(FileExistsError):  # another run took the number just now
            path.mkdir()
            return path


def to_json(content: dict[str, Any]) -> str:
    """Indented, but a list of numbers stays on one line."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    # Only a list spread over lines begins so; a bracket in a text is followed by no line break.
    lists = re.compile(r"\[\n\s*([^\[\]{}\"]+?)\s+\]")
    return lists.sub(lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one, never a part; a crash of the machine included."""
    # A signal's thread may write the same file as the main thread.
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if hasattr(os, "O_DIRECTORY"):  # not on Windows, which has no such call
        folder = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the new name is on the disk too
        finally:
            os.close(folder)


@contextlib.contextmanager
def storage_errors(path: Path, flag: str = "--run-dir") -> Iterator[None]:
    """An OSError becomes a StorageError; `flag` names the place."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or path}: cannot be written ({error.strerror});"
            f" free space or mend permissions, or use another {flag}"
        ) from error
