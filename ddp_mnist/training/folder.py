"""The run folder: who may write it, how its run ended, and the files in it.

One process writes it, the one that holds its lock.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from traceback import format_exception
from typing import Any

import numpy as np
from filelock import FileLock

from ddp_mnist import errors
from ddp_mnist.config.flag_fields import flag_values
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.errors import CheckpointError, StorageError, UsageError, blame
from ddp_mnist.system import files
from ddp_mnist.system.console import warn
from ddp_mnist.system.locks import HeldError, take
from ddp_mnist.system.text import finite, quoted, reason

CONFIG, METRICS, MODEL = "config.json", "metrics.jsonl", "model.safetensors"
STATUS, SUMMARY, CHECKPOINTS, LOCK = "status.json", "summary.json", "checkpoints", ".lock"
TRAINED_ON = "trained_on.npy"  # the keys of the images, see data/held_out.py
UNKNOWN = np.uint64(0)  # a key for images that are not known, which --weights has seen
TRACEBACK = "traceback.txt"  # of an error that nobody foresaw, or in a library's words
FOLDER_KEY = "run folder"  # the broadcast of its path
RUNS = Path("runs")  # where run folders are numbered
LATEST = "latest"  # a link to the newest run
# What other commands read of config.json, besides flags; earlier versions did not write all
OF_A_RUN = {"digest": str, "test_share": float | int, "left_out": list, "own_code": dict}
STARTING = {"state": "running", "exit_code": None, "phase": "starting", "step": 0, "error": None}


class RunFolder(contextlib.AbstractContextManager["RunFolder"]):
    """A run's files, and in status.json how the run ended, whatever ended it.

    It has no path until `create` or `open` sets one, which only rank 0 does; without a path no
    method writes a file. As a context manager it frees the folder at the end.
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self.run_id = self.config_sha256 = ""  # of the run, once it has them
        self.step = 0  # the last step that the run is known to have taken
        self.metrics_lines = 0  # number of this run's lines in metrics.jsonl
        self.metrics_sha256 = hashlib.sha256()  # of these
        self.log_to_trackers: Callable[[dict[str, Any], int], None] | None = None  # tracking.py
        self._lock: FileLock | None = None
        self._number = 0  # of the lock's file: that of another file if the folder was replaced
        self._status: dict[str, Any] = dict(STARTING)
        self._began = False

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Record the error that ended the run, if it began, with the process's exit code."""
        try:
            if error is not None:  # else `finished` has been called
                self.record_end(error)
        finally:
            self.release()

    def record_end(self, error: BaseException) -> None:
        """Record the error that ends the run, if it began."""
        if self._began:
            is_expected = isinstance(error, errors.DdpMnistError | KeyboardInterrupt)
            text = (str(error) or "interrupted") if is_expected else repr(error)
            state = "preempted" if isinstance(error, errors.Preempted) else "failed"
            self.record_outcome(state, errors.exit_code(error), text)
            if getattr(error, "blamed", not is_expected):
                with contextlib.suppress(StorageError):  # the first error counts
                    self.write_bytes(TRACEBACK, "".join(format_exception(error)).encode())
                    error.traceback_file = f"{self.path}/{TRACEBACK}"  # type: ignore[attr-defined]

    def create(self, run_dir: str | None, dataset: str, begin_again: bool = False) -> None:
        """Make and open `run_dir`, or else runs/<dataset>-<NNN> with the next free number.

        Raise UsageError if the folder holds another program's files or a run; `begin_again` allows
        a run that saved nothing. Raise StorageError if the folder cannot be made or written.
        """
        with files.storage_errors(Path(run_dir or RUNS)):
            path = make_run_folder(dataset) if run_dir is None else resolve_link(Path(run_dir))
            path.mkdir(parents=True, exist_ok=True)
        self.open(path)
        names = (CONFIG, METRICS, MODEL, SUMMARY, CHECKPOINTS, TRAINED_ON)
        there = {each.name for each in path.iterdir()}  # a link to nothing too
        others = ", ".join(name for name in names if name in there)
        if (path / STATUS).exists():  # a run writes it first: without it, no run is here
            last = files.read_if_whole(path / STATUS)
            lost = last.get("state") == "preempted"  # which saved: is its disk not there?
            free = begin_again and not lost and not any((path / CHECKPOINTS).glob("step-*.pt"))
            held = f"a run already (to resume it: --resume {quoted(path)})"
            if lost and begin_again:
                held = f"a run that saved at step {last.get('step')}, but no checkpoint"
            elif free and last.get("step"):
                warn(f"{path}: begins again, as no checkpoint of its {last['step']} steps is there")
        else:
            free = not others
            held = f"files that no run wrote and that would be overwritten ({others})"
        if not free:
            raise UsageError(f"--run-dir {path}: holds {held}; name another folder")
        self.cut_metrics(0)
        try:
            self.begin()
        except StorageError:
            self.release()
            if run_dir is None:
                path.rmdir()  # it was made just now
            raise
        if path.parent == RUNS:
            _link(RUNS / LATEST, path)

    def open(self, path: Path) -> None:
        """Lock the folder of a run, and remove files that a killed process left half-written.

        Raise UsageError if another process is writing it, StorageError if it cannot be written.
        """
        with files.storage_errors(path):
            try:
                self._lock, self.path = take(path / LOCK).lock, path
                self._number = (path / LOCK).stat().st_ino
            except HeldError as error:
                raise UsageError(
                    f"{path}: another run is writing there ({error}); wait until it has ended, or"
                    " name another --run-dir"
                ) from None
            for leftover in [
                *path.glob(files.LEFTOVER),
                *(path / CHECKPOINTS).glob(files.LEFTOVER),
            ]:
                if leftover.is_file():
                    leftover.unlink()

    def begin(self) -> None:
        """Write that the run is running. From now on its end is recorded; before, nothing is."""
        self._began = True
        self.status()

    def release(self) -> None:
        """Let other processes write the folder."""
        lock, self._lock = self._lock, None  # a second call must not unlink the next run's
        if lock:
            with contextlib.suppress(OSError):  # unlinked first: waiters see it, and retry
                Path(lock.lock_file).unlink()
            lock.release()

    def status(self, **changes: Any) -> None:
        """Replace status.json, with the step, and changes of state, exit_code, phase or error."""
        of_run = {"run_id": self.run_id} if self.run_id else {}
        self._status |= {"step": self.step, **of_run, **changes}
        self.write_json(STATUS, self._status)

    def finished(self) -> None:
        """Record that the run ended well; after that, ranks may fail to say goodbye."""
        self.status(state="finished", exit_code=0, phase="done")

    def record_outcome(self, state: str, exit_code: int, error: str) -> None:
        """Write the error that ended the run to status.json; if that fails, drop the new error."""
        with contextlib.suppress(StorageError):
            self.status(state=state, exit_code=exit_code, error=error)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Replace the file atomically, with its digest in it. Raise StorageError."""
        whole = files.sealed(content)
        self.write_bytes(name, files.to_json(whole).encode())
        if name == CONFIG:
            self.config_sha256 = whole[files.SEAL]

    def write_bytes(self, name: str, content: bytes) -> None:
        """Replace the file atomically. Raise StorageError."""
        if self.path:
            self.check_ours()
            with files.storage_errors(self.path / name):
                files.write_atomically(self.path / name, content)

    def write_keys(self, keys: np.ndarray) -> str:
        """Write the keys of the images that the run is trained on, uint64. Return the SHA-256."""
        np.save(file := io.BytesIO(), keys)
        self.write_bytes(TRAINED_ON, file.getvalue())
        return hashlib.sha256(file.getvalue()).hexdigest()

    def check_ours(self) -> None:
        """Raise StorageError if the folder or its lock was removed: another run may write there."""
        if self.path and self._lock:
            with files.storage_errors(self.path / LOCK):
                number = (self.path / LOCK).stat().st_ino
            if number != self._number:
                raise StorageError(f"{self.path}: was removed, and is another run's folder now")

    def log(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one JSON object as a line to metrics.jsonl, and log it to the trackers."""
        self.step = step
        self.metrics_lines += 1
        if self.path:
            path = self.path / METRICS
            self.check_ours()
            line = (json.dumps(finite({"step": step, **metrics})) + "\n").encode()
            with files.storage_errors(path), open(path, "ab", opener=files.no_link) as file:
                file.write(line)
            self.metrics_sha256.update(line)
        if self.log_to_trackers:
            self.log_to_trackers(metrics, step)

    def lines_at(self, step: int) -> list[dict[str, Any]]:
        """Return the lines of metrics.jsonl on a step."""
        if not (self.path and (path := self.path / METRICS).exists()):
            return []
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if line["step"] == step]

    def cut_metrics(self, count: int, sha256: str = "") -> list[str]:
        """Cut off all but the first `count` lines: the others' steps are about to be repeated.

        Return a line for the console if it has fewer. Raise CheckpointError if their `sha256` was
        another one.
        """
        self.metrics_lines, self.metrics_sha256 = 0, hashlib.sha256()
        if self.path and (path := self.path / METRICS).exists():
            with (
                files.storage_errors(path),
                open(files.regular(path), "r+b", opener=files.no_link) as file,
            ):
                lines = file.read().splitlines(keepends=True)[:count]
                # A crash of the machine may have truncated the last one.
                kept = b"".join(line for line in lines if line.endswith(b"\n"))
                self.metrics_lines = kept.count(b"\n")
                self.metrics_sha256.update(kept)
                are_whole = sha256 and self.metrics_lines == count
                if are_whole and self.metrics_sha256.hexdigest() != sha256:
                    fix = "put it back, or move it away, to continue without its lines"
                    raise CheckpointError(f"{path}: {files.CHANGED}; {fix}")
                file.truncate(len(kept))
        lost = count - self.metrics_lines
        return [f"{self.path}/{METRICS}: lacks {lost} lines of earlier steps"] if lost else []


def _link(latest: Path, path: Path) -> None:
    """Make `latest` a link to this run, or warn that it was left as it is."""
    link = latest.with_name(f".{LATEST}-{path.name}")
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, latest)
    except OSError as error:  # a disk without links, or a folder there, as `scp -r` leaves it
        warn(f"{latest}: cannot be made a link to {path} ({reason(error)})")
        link.unlink(missing_ok=True)


def make_run_folder(dataset: str) -> Path:
    """Make the empty folder runs/<dataset>-<NNN> with the next free number. Raise StorageError."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "_", dataset)
    pattern = re.compile(re.escape(stem) + r"-(\d+)")
    with files.storage_errors(RUNS):
        RUNS.mkdir(parents=True, exist_ok=True)
        taken = [int(m[1]) for path in RUNS.iterdir() if (m := pattern.fullmatch(path.name))]
        for number in itertools.count(max(taken, default=0) + 1):
            path = RUNS / f"{stem}-{number:03d}"
            with contextlib.suppress(FileExistsError):  # another run took the number just now
                path.mkdir()
                break
    return path


def name_a_run() -> str:
    """Return a hint for a path that holds no run: name one, or train first."""
    there = (RUNS / LATEST / STATUS).exists()
    return f"name one, e.g. {RUNS / LATEST}" if there else "there is none here yet, so train first"


def resolve_link(path: Path) -> Path:
    """Return the folder that runs/latest points to now; another run may change the link."""
    return path.parent / path.readlink() if path.is_symlink() else path


def read_config(run: Path) -> dict[str, Any]:
    """Return config.json, with flags as if they were typed.

    Raise CheckpointError if it is missing or damaged, and as `check_one_run` does.
    """
    with blame(f"{run}/{CONFIG}", CheckpointError):
        config = files.read_json(run / CONFIG)
        for group, kind in (("run", RunFlags), ("recipe", Recipe)):
            saved = config[group]
            try:
                made = flag_values(kind.from_flags(saved))
            except UsageError as error:  # which nobody typed now
                raise CheckpointError(f"{run}/{CONFIG}: {error}") from error
            config[group] = saved | {name: made[name] for name in saved.keys() & made.keys()}
        for name, kinds in OF_A_RUN.items():
            if not isinstance(config.get(name), kinds | None):
                raise ValueError(f"{name} makes no sense")
    check_one_run(run)
    return config


def check_one_run(run: Path) -> None:
    """Raise CheckpointError if files of two runs, or of two parts of one, lie in the folder.

    Files that are missing or damaged tell nothing.
    """
    found = {name: files.read_if_whole(run / name) for name in (CONFIG, SUMMARY, STATUS)}
    config, summary, status = found.values()
    runs = {str(each["run_id"]) for each in found.values() if "run_id" in each}
    is_of_one_part = True
    if summary and status.get("state") == "finished":
        is_of_one_part = summary.get("steps") == status.get("step")
        if config and "config" in summary:  # older files have no digest of it
            is_of_one_part &= summary["config"] == files.digest_of(config)
    if len(runs) > 1 or not is_of_one_part:
        fault = f"{', '.join(found)} are not of one run, or not of one part of it"
        raise CheckpointError(f"{run}: {fault}; put back those that belong together")


def trained_on(run: str | Path) -> np.ndarray:
    """Return the keys of the images that a run was trained on; none if they are not known.

    They are not if the file is missing, and of a run before format 13, whose keys were others.
    Raise CheckpointError if the file, or config.json, which has its digest, is damaged.
    """
    file, config = Path(run) / TRAINED_ON, Path(run) / CONFIG
    with blame(str(run), CheckpointError):
        expected = read_config(Path(run)).get("trained_on") if config.exists() else None
        if not expected or not file.exists():
            return np.zeros(0, np.uint64)
        raw = files.regular(file).read_bytes()
    if hashlib.sha256(raw).hexdigest() != expected:
        fix = "put it back, or remove it: what the run was trained on is then unknown"
        raise CheckpointError(f"{file}: {files.CHANGED}; {fix}")
    with blame(str(file), CheckpointError):
        return np.lib.format.read_array(io.BytesIO(raw), allow_pickle=False)
