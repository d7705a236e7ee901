"""Checkpoints in a run folder: one file per step, complete or absent.

RecordedRun.save decides the content: the run's id, how many lines metrics.jsonl had, and
`State.content`.
"""

import os
import re
from pathlib import Path
from typing import Any

from ddp_mnist.core import checkpoint
from ddp_mnist.core.checkpoint import DAMAGED, is_whole
from ddp_mnist.errors import CheckpointError, blame
from ddp_mnist.system.files import storage_errors, write_atomically
from ddp_mnist.system.text import reason
from ddp_mnist.training.folder import CHECKPOINTS

NAME = re.compile(r"step-(\d{8,})\.pt")


def save(run: Path, step: int, content: dict[str, Any], keep: int) -> None:
    """Write the checkpoint of an optimizer step, then remove all but the `keep` newest.

    The file and its folder are on the disk before an older one is removed. The content may hold
    tensors, numbers, texts, None, and lists and dicts of these. Raise StorageError if it cannot be
    written; the older ones are then unchanged.
    """
    path = file_of(run, step)
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, checkpoint.to_bytes(content))
        for old in newest_first(run)[keep:]:
            old.unlink(missing_ok=True)


def file_of(run: Path, step: int) -> Path:
    return run / CHECKPOINTS / f"step-{step:08d}.pt"


def newest_first(run: Path) -> list[Path]:
    """Return the checkpoints, sorted by step: clocks jump, and copying a folder changes times."""
    found = (run / CHECKPOINTS).glob("step-*.pt")
    files = [path for path in found if NAME.fullmatch(path.name) and path.is_file()]
    return sorted(files, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the optimizer steps taken when the checkpoint was made."""
    return int(path.stem.removeprefix("step-"))


def from_bytes(raw: bytes, where: object) -> dict[str, Any]:
    """Return the content of a checkpoint's file, with all tensors on the CPU.

    Raise CheckpointError if it is incomplete, or holds more than tensors and plain values.
    """
    with blame(str(where), CheckpointError):  # whatever a malicious file makes the parser raise
        return checkpoint.from_bytes(raw)


def read_newest(run: Path) -> tuple[bytes, int, list[str]]:
    """Return the bytes of the newest whole checkpoint, its step, and a line for each one skipped.

    Skipped ones are renamed, so that they are not tried again. Raise CheckpointError if no
    checkpoint is complete.
    """
    skipped: dict[Path, str] = {}
    for path in newest_first(run):
        try:
            if is_whole(raw := path.read_bytes()):
                break
            skipped[path] = DAMAGED
        except OSError as error:
            skipped[path] = f"cannot be read ({reason(error)})"
    else:
        found = ", ".join(f"{path.name} {why}" for path, why in skipped.items())
        raise CheckpointError(
            f"{run}: holds no complete checkpoint ({found or 'it has none'}); put it back, or start"
            " again in another --run-dir"
        )
    step = step_of(path)
    with storage_errors(path):
        for bad in skipped:
            os.replace(bad, bad.with_name(f"{bad.name}.damaged"))
    lines = [f"{bad}: {why}; resuming from step {step}" for bad, why in skipped.items()]
    return raw, step, lines
