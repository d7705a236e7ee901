"""The run folder: who may use it, and files that are replaced whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_mnist.errors import DdpMnistError, StorageError, UsageError

CONFIG, METRICS, MODEL = "config.json", "metrics.jsonl", "model.safetensors"
STATUS, SUMMARY = "status.json", "summary.json"
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
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path else None
        self._status = dict(FIRST_STATUS)

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

    def append_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """One JSON object per line in metrics.jsonl."""
        self._status["step"] = step
        if self.path:
            path = self.path / METRICS
            with storage_errors(path), open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")

    @contextlib.contextmanager
    def told_how_it_ended(self) -> Iterator[None]:
        """Whatever ends the block ends up in status.json, with the exit code it will have."""
        try:
            self.status()
            yield
        except DdpMnistError as error:
            self._ended(error.code, str(error))
            raise
        except KeyboardInterrupt:
            self._ended(130, "interrupted")
            raise
        except BaseException as error:
            self._ended(1, repr(error))
            raise
        self.status(state="finished", exit_code=0, phase="done")

    def _ended(self, code: int, message: str) -> None:
        with contextlib.suppress(StorageError):  # the first error is the one to be told
            self.status(state="failed", exit_code=code, error=message)


def create(run_dir: str | None, dataset: str, root: Path = Path("runs")) -> Path:
    """Makes a new run folder: `run_dir`, else runs/<dataset>-<NNN> with the next free number.

    The folder holds a status.json from then on, which makes it a run's.

    Raises:
        UsageError: the folder holds a run already.
        StorageError: it cannot be made or written.
    """
    if run_dir is not None:
        path = Path(run_dir)
        with storage_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            try:
                _claim(path)
            except FileExistsError:
                raise UsageError(
                    f"--run-dir {run_dir}: holds a run already; name another folder"
                ) from None
            return path
    with storage_errors(root):
        root.mkdir(parents=True, exist_ok=True)
        path = _next_free(root, re.sub(r"[^A-Za-z0-9._-]+", "_", dataset))
        _claim(path)
        latest = root / f".latest-{path.name}"
        latest.symlink_to(path.name)
        os.replace(latest, root / "latest")
        return path


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


def _claim(path: Path) -> None:
    """Of two runs that begin in one folder at once, the second gets a FileExistsError."""
    with open(path / STATUS, "x") as file:
        file.write(to_json(FIRST_STATUS))


def to_json(content: dict[str, Any]) -> str:
    """Indented, but a list of numbers stays on one line."""
    text = json.dumps(content, indent=2, ensure_ascii=False)
    # Only a list spread over lines begins so; a bracket in a text is followed by no line break.
    lists = re.compile(r"\[\n\s*([^\[\]{}\"]+?)\s+\]")
    return lists.sub(lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text) + "\n"


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{error.filename or path}: cannot be written ({error.strerror});"
            " free space or mend permissions, or use another --run-dir"
        ) from error
