import errno
import functools
import hashlib
import io
import os
import pickle
import random
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ddp_mnist.core.checkpoint import DAMAGED, DIGEST_BYTES, to_bytes
from ddp_mnist.errors import CheckpointError
from ddp_mnist.training import checkpoint
from ddp_mnist.training.checkpoint import from_bytes, newest_first, read_newest, save

END = DIGEST_BYTES  # the digest, behind the rest


def content(step: int = 0) -> dict[str, Any]:
    return {"step": step, "weights": torch.arange(500, dtype=torch.float64) + step, "none": None}


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}.pt"


def place(run: Path, files: dict[int, bytes]) -> None:
    (run / "checkpoints").mkdir(parents=True)
    for step, raw in files.items():
        at(run, step).write_bytes(raw)


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def steps(run: Path) -> list[int]:
    return [checkpoint.step_of(path) for path in newest_first(run)]


def digested(raw: bytes) -> bytes:
    return raw + hashlib.sha256(raw).digest()


# --- What is written


def test_a_file_is_named_by_its_step_and_ends_with_its_digest(tmp_path: Path) -> None:
    for number in (6, 7):  # a step that is saved again is replaced
        save(tmp_path, 7, content(number), keep=2)
    save(tmp_path, 123_456_789, content(8), keep=2)
    assert names(tmp_path) == ["step-00000007.pt", "step-123456789.pt"]
    raw = at(tmp_path, 7).read_bytes()
    assert raw == to_bytes(content(7))
    assert raw[-END:] == hashlib.sha256(raw[:-END]).digest()
    assert torch.load(io.BytesIO(raw[:-END]))["step"] == 7


def test_fault_33_the_newest_are_kept_by_step_whatever_the_clock_says(tmp_path: Path) -> None:
    for step in (1, 2, 3, 99_999_999, 100_000_000):
        save(tmp_path, step, content(step), keep=3)
        os.utime(at(tmp_path, step), (10**9 - step, 10**9 - step))  # each older than the last
    assert steps(tmp_path) == [100_000_000, 99_999_999, 3]
    raw, step, warnings = read_newest(tmp_path)
    assert (from_bytes(raw, "")["step"], step, warnings) == (100_000_000, 100_000_000, [])
    save(tmp_path, 100_000_001, content(), keep=2)
    assert steps(tmp_path) == [100_000_001, 100_000_000]


STRAYS = [
    *(".step-00000009.pt.123-456.tmp", "step-00000009.pt.damaged", "step-00000009.pt~"),
    *("step-00000009.pt.old.pt", "step-0000009.pt", "step-0000000x.pt", "old-step-00000009.pt"),
]


def test_fault_10_files_and_folders_of_other_names_are_left_alone(tmp_path: Path) -> None:
    place(tmp_path, {})
    for stray in STRAYS:
        (tmp_path / "checkpoints" / stray).write_bytes(to_bytes(content(9)))
    at(tmp_path, 9).mkdir()  # named like a checkpoint
    assert newest_first(tmp_path) == []
    for step in (1, 2, 3):
        save(tmp_path, step, content(step), keep=2)
    assert steps(tmp_path) == [3, 2]
    assert read_newest(tmp_path) == (to_bytes(content(3)), 3, [])
    left = [*STRAYS, "step-00000002.pt", "step-00000003.pt", "step-00000009.pt"]
    assert names(tmp_path) == sorted(left)


def test_fault_04_the_new_one_is_on_the_disk_before_an_older_one_goes(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, content(step), keep=2)
    events: list[tuple[str, int, list[str]]] = []

    def watched(name: str) -> Callable[..., None]:
        does = getattr(os, name)

        def watch(place: Any, *more: Any) -> None:
            found = os.stat(place)  # noqa: PTH116  # a file's number, or its path
            size = 0 if stat.S_ISDIR(found.st_mode) else found.st_size
            whole = [each for each in names(tmp_path) if not each.startswith(".")]
            events.append((name, size, whole))
            does(place, *more)

        return watch

    calls: Any = {name: watched(name) for name in ("fsync", "replace", "unlink")}
    with patch.multiple(os, **calls):
        save(tmp_path, 3, content(3), keep=2)
    first, second, third = (f"step-0000000{step}.pt" for step in (1, 2, 3))
    assert events == [
        ("fsync", size := len(to_bytes(content(3))), [first, second]),
        ("replace", size, [first, second]),
        ("fsync", 0, [first, second, third]),
        ("unlink", size, [first, second, third]),
    ]
    assert names(tmp_path) == [second, third]


# --- Damage


def check_passed_over(damaged: bytes, folder: Path) -> None:
    """Assert that `damaged` is not read, neither before an older whole one nor alone."""
    whole = to_bytes(content(1))
    place(folder, {1: whole, 2: damaged})
    assert read_newest(folder) == (whole, 1, [f"{at(folder, 2)}: {DAMAGED}; resuming from step 1"])
    assert names(folder) == ["step-00000001.pt", "step-00000002.pt.damaged"]
    assert at(folder, 2).with_suffix(".pt.damaged").read_bytes() == damaged
    assert read_newest(folder) == (whole, 1, [])
    at(folder, 1).write_bytes(damaged)
    with pytest.raises(CheckpointError) as refused:
        read_newest(folder)
    assert at(folder, 1).read_bytes() == damaged
    found = f"({at(folder, 1).name} {DAMAGED})"
    assert str(refused.value).startswith(f"{folder}: holds no complete checkpoint {found}; put")
    with pytest.raises(CheckpointError, match=f"^here: ValueError: the checkpoint {DAMAGED}$"):
        from_bytes(damaged, "here")


def test_fault_07_another_length_or_one_bit_that_flipped_is_noticed(tmp_path: Path) -> None:
    raw = to_bytes(content(2))
    sizes = [0, 1, END, END + 1, len(raw) - END, len(raw) - 1]
    sizes += [len(raw) * part // 16 for part in range(1, 16)]
    for size in sizes:
        check_passed_over(raw[:size], tmp_path / f"{size} bytes")
    check_passed_over(raw + b"\0", tmp_path / "longer")
    bits = random.Random(0).sample(range(len(raw) * 8), 190)
    bits += random.Random(1).sample(range((len(raw) - END) * 8, len(raw) * 8), 10)
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        check_passed_over(bytes(damaged), tmp_path / f"bit {bit}")


def test_fault_07_each_damaged_one_is_reported(tmp_path: Path) -> None:
    whole = to_bytes(content(2))
    place(tmp_path, {1: b"", 2: whole, 3: b"x", 4: b"", 5: whole})
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path == at(tmp_path, 5):
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    with patch.object(Path, "read_bytes", failing):
        raw, step, lines = read_newest(tmp_path)
    assert (raw, step) == (whole, 2)
    reasons = {5: "cannot be read (Input/output error)", 4: DAMAGED, 3: DAMAGED}
    told = [f"{at(tmp_path, n)}: {why}; resuming from step 2" for n, why in reasons.items()]
    assert lines == told
    damaged = [f"step-0000000{number}.pt.damaged" for number in (3, 4, 5)]
    assert names(tmp_path) == ["step-00000001.pt", "step-00000002.pt", *damaged]


# --- Files that were made to run code


class Runs:
    """Its pickle runs the command when it is loaded."""

    def __init__(self, command: str) -> None:
        self.call = os.system, (command,)

    def __reduce__(self) -> Any:
        return self.call


def zipped(content: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


legacy = functools.partial(zipped, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [zipped, legacy, pickle.dumps])
@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_fault_09_a_file_that_would_run_code_is_refused_and_runs_none(
    write: Callable[[Any], bytes], tmp_path: Path
) -> None:
    trace = tmp_path / "was_here"
    raw = write({**content(), "step": {"a": Runs(f"touch {shlex.quote(str(trace))}")}})
    with pytest.raises(CheckpointError, match=r"^step 2 of run: ") as refused:
        from_bytes(digested(raw), "step 2 of run")
    assert "weights_only" not in str(refused.value)  # torch's advice to run what is in the file
    assert not trace.exists()
    pickle.loads(raw) if write is pickle.dumps else torch.load(io.BytesIO(raw), weights_only=False)
    assert trace.exists()  # it would have


def test_garbage_with_a_digest_is_refused() -> None:
    for raw in (b"x", b"PK\3\4" + b"x" * 200, b"\x80\2.", b"\0" * 1000):
        with pytest.raises(CheckpointError, match=r"^here: "):
            from_bytes(digested(raw), "here")
