"""Checkpoints: one file per step, complete or absent, read without running any code from it.

A file is the output of torch.save, followed by its 32-byte SHA-256. torch.load does not check the
checksums inside the zip: of 200 flipped bits it loads 195 without an error.

TrainingRun.save decides the content: the run's id, how many lines metrics.jsonl had, and
`State.content`.
"""

import hashlib
import io
import os
import re
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.errors import CheckpointError, blame, reason
from ddp_mnist.system.files import storage_errors, write_atomically
from ddp_mnist.training.folder import CHECKPOINTS

DIGEST_BYTES = hashlib.sha256().digest_size
NAME = re.compile(r"step-(\d{8,})\.pt")
DAMAGED = "is damaged or cut short: its SHA-256 does not match"


def save(run: Path, step: int, content: dict[str, Any], keep: int) -> None:
    """Write the checkpoint of an optimizer step, then remove all but the `keep` newest.

    The file and its folder are on the disk before an older one is removed. The content may hold
    tensors, numbers, texts, None, and lists and dicts of these. Raise StorageError if it cannot be
    written; the older ones are then unchanged.
    """
    path = run / CHECKPOINTS / f"step-{step:08d}.pt"
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, to_bytes(content))
        for old in newest_first(run)[keep:]:
            old.unlink(missing_ok=True)


def newest_first(run: Path) -> list[Path]:
    """Return the checkpoints, sorted by step: clocks jump, and copying a folder changes times."""
    found = (run / CHECKPOINTS).glob("step-*.pt")
    files = [path for path in found if NAME.fullmatch(path.name) and path.is_file()]
    return sorted(files, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the optimizer steps taken when the checkpoint was made."""
    return int(path.stem.removeprefix("step-"))


def to_bytes(content: dict[str, Any]) -> bytes:
    """Return the content of a checkpoint's file."""
    file = io.BytesIO()
    torch.save(content, file)
    file.write(hashlib.sha256(file.getbuffer()).digest())
    return file.getvalue()


def is_whole(raw: bytes) -> bool:
    """Return whether `raw` ends with the digest of the rest, as `to_bytes` returned it."""
    return hashlib.sha256(memoryview(raw)[:-DIGEST_BYTES]).digest() == raw[-DIGEST_BYTES:]


def from_bytes(raw: bytes, where: object) -> dict[str, Any]:
    """Return the content that `to_bytes` was given, with all tensors on the CPU.

    Raise CheckpointError if it is incomplete, or holds more than tensors and plain values.
    """
    if not is_whole(raw):
        raise CheckpointError(f"{where}: {DAMAGED}; remove it to use the one before")
    with blame(str(where), CheckpointError):  # whatever a malicious file makes the parser raise
        file = io.BytesIO(memoryview(raw)[:-DIGEST_BYTES])
        return torch.load(file, map_location="cpu", weights_only=True)


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
