from __future__ import annotations

import errno
import hashlib
import io
import os
import pickle
import random
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ddp_mnist.errors import CheckpointError, StorageError, one_line
from ddp_mnist.run.checkpoint import (
    DIGEST_BYTES,
    Damaged,
    from_bytes,
    newest_first,
    read_newest,
    save,
    step_of,
    to_bytes,
)


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
    return [step_of(path) for path in newest_first(run)]


def digested(raw: bytes) -> bytes:
    return raw + hashlib.sha256(raw).digest()


# --- What is written


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.flatten().view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_round_trip_is_equal_bit_for_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    special = [0.0, -0.0, float("nan"), float("-inf"), 1e-40, 1 / 3]
    tensors = {
        "random": torch.randn(7, 5, dtype=torch.float64).to(dtype),
        "special": torch.tensor(special, dtype=dtype),
        "transposed": torch.randn(3, 4, dtype=torch.float64).to(dtype).T,
        "scalar": torch.tensor(0.1, dtype=dtype),
        "empty": torch.empty(0, 3, dtype=dtype),
    }
    plain = {"a": [1, [0.1, [None, "數\n"]], {"b": True}], "c": None, "d": 2**60, 3: -0.0}
    read = from_bytes(to_bytes({"tensors": tensors, "plain": plain}), "here")
    assert read["plain"] == plain
    assert read["tensors"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read["tensors"][name].dtype == dtype
        assert read["tensors"][name].shape == tensor.shape
        assert bits(read["tensors"][name]) == bits(tensor)


def test_a_file_is_named_by_its_step_and_ends_with_its_digest(tmp_path: Path) -> None:
    save(tmp_path, 7, content(7), keep=2)
    save(tmp_path, 123_456_789, content(8), keep=2)
    assert names(tmp_path) == ["step-00000007.pt", "step-123456789.pt"]
    raw = at(tmp_path, 7).read_bytes()
    assert raw == to_bytes(content(7))
    assert raw[-DIGEST_BYTES:] == hashlib.sha256(raw[:-DIGEST_BYTES]).digest()
    assert torch.load(io.BytesIO(raw[:-DIGEST_BYTES]))["step"] == 7


def test_fault_33_the_newest_are_kept_by_step_whatever_the_clock_says(tmp_path: Path) -> None:
    for step in (1, 2, 3, 99_999_999, 100_000_000):
        save(tmp_path, step, content(step), keep=3)
        os.utime(at(tmp_path, step), (10**9 - step, 10**9 - step))  # each older than the last
    assert steps(tmp_path) == [100_000_000, 99_999_999, 3]
    raw, step, warnings = read_newest(tmp_path)
    assert (from_bytes(raw, "")["step"], step, warnings) == (100_000_000, 100_000_000, [])
    save(tmp_path, 100_000_001, content(), keep=2)
    assert steps(tmp_path) == [100_000_001, 100_000_000]


def test_a_step_that_is_saved_again_is_replaced(tmp_path: Path) -> None:
    for word in ("first", "second"):
        save(tmp_path, 5, {"word": word}, keep=2)
    assert names(tmp_path) == ["step-00000005.pt"]
    assert from_bytes(read_newest(tmp_path)[0], "") == {"word": "second"}


STRAYS = [
    ".step-00000009.pt.123-456.tmp",
    "step-00000009.pt.damaged",
    "step-00000009.pt.tmp",
    "step-00000009.pt~",
    "step-00000009.pt.old.pt",
    "step-0000009.pt",
    "step--0000009.pt",
    "step-0000000x.pt",
    "old-step-00000009.pt",
    "model.pt",
]


def test_fault_10_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    place(tmp_path, {})
    for stray in STRAYS:
        (tmp_path / "checkpoints" / stray).write_bytes(to_bytes(content(9)))
    assert newest_first(tmp_path) == []
    for step in (1, 2, 3):
        save(tmp_path, step, content(step), keep=2)
    assert steps(tmp_path) == [3, 2]
    assert read_newest(tmp_path) == (to_bytes(content(3)), 3, [])
    assert names(tmp_path) == sorted([*STRAYS, "step-00000002.pt", "step-00000003.pt"])


def test_fault_10_a_folder_named_like_a_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    place(tmp_path, {1: to_bytes(content(1))})
    at(tmp_path, 9).mkdir()
    raw, step, _ = read_newest(tmp_path)
    assert (raw, step) == (to_bytes(content(1)), 1)


def test_fault_04_the_new_one_is_on_the_disk_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        save(tmp_path, step, content(step), keep=2)
    events: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def watched_fsync(fd: int) -> None:
        found = os.fstat(fd)
        if stat.S_ISDIR(found.st_mode):
            assert found.st_ino == (tmp_path / "checkpoints").stat().st_ino
            events.append("folder synced")
        else:
            assert found.st_size == len(to_bytes(content(3)))
            events.append("file synced")
        fsync(fd)

    def watched_replace(source: Path, target: Path) -> None:
        assert Path(source).parent == Path(target).parent
        assert Path(source).read_bytes() == to_bytes(content(3))
        assert not Path(target).exists()
        events.append(f"renamed to {Path(target).name}")
        replace(source, target)

    def watched_unlink(path: Path, **options: Any) -> None:
        if not Path(path).name.startswith("."):
            events.append(f"removed {Path(path).name}")
        unlink(path, **options)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    monkeypatch.setattr(os, "unlink", watched_unlink)
    save(tmp_path, 3, content(3), keep=2)
    assert events == [
        "file synced",
        "renamed to step-00000003.pt",
        "folder synced",
        "removed step-00000001.pt",
    ]
    assert names(tmp_path) == ["step-00000002.pt", "step-00000003.pt"]


# --- A disk that is full or broken


class HalfWritten(io.FileIO):
    def write(self, raw: Any) -> int:
        super().write(raw[: len(raw) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def refused(run: Path, reason: str) -> None:
    """Step 3 cannot be saved, and all is as it was."""
    before = {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()}
    with pytest.raises(StorageError) as told:
        save(run, 3, content(3), keep=2)
    assert one_line(told.value) == (
        f"ddp-mnist: error: {at(run, 3)}: cannot be written ({reason});"
        " free space or mend permissions, or use another --run-dir (code 5)"
    )
    assert {path.name: path.read_bytes() for path in (run / "checkpoints").iterdir()} == before


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has saved two checkpoints."""
    for step in (1, 2):
        save(tmp_path, step, content(step), keep=2)
    return tmp_path


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_fault_05_a_call_that_fails_leaves_the_older_ones_and_no_other(
    function: str, number: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, function, Mock(side_effect=OSError(number, os.strerror(number))))
        refused(run, os.strerror(number))
    assert read_newest(run) == (to_bytes(content(2)), 2, [])
    save(run, 3, content(3), keep=2)
    assert steps(run) == [3, 2]


def test_fault_05_a_disk_that_fills_up_half_way(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_mnist.run.folder.open", HalfWritten, raising=False)
    refused(run, "No space left on device")


def test_a_kernel_that_takes_only_a_part(run: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        refused(run, "File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(StorageError, match=f"^{tmp_path}/checkpoints: cannot be written"):
        save(tmp_path, 1, content(), keep=2)


# --- Damage


def passed_over(damaged: bytes, why: str, folder: Path) -> None:
    """`damaged` is not read, neither before an older whole one nor alone."""
    whole = to_bytes(content(1))
    beside, alone = folder / "beside", folder / "alone"
    place(beside, {1: whole, 2: damaged})
    assert read_newest(beside) == (whole, 1, [f"{at(beside, 2)}: {why}; going on from step 1"])
    assert names(beside) == ["step-00000001.pt", "step-00000002.pt.damaged"]
    assert at(beside, 2).with_suffix(".pt.damaged").read_bytes() == damaged
    assert read_newest(beside) == (whole, 1, [])
    place(alone, {2: damaged})
    with pytest.raises(CheckpointError) as told:
        read_newest(alone)
    assert told.value.code == 4
    assert str(told.value) == f"{at(alone, 2)}: {why}; begin the run anew in another --run-dir"
    with pytest.raises(Damaged, match=f"^{why}$"):
        from_bytes(damaged, "")


OTHER = "is damaged or cut short: its SHA-256 is another"


def test_fault_07_a_file_that_is_cut_short_is_passed_over(tmp_path: Path) -> None:
    raw = to_bytes(content(2))
    for part in range(20):
        size = [1, DIGEST_BYTES, DIGEST_BYTES + 1, len(raw) - DIGEST_BYTES, len(raw) - 1][part % 5]
        if part >= 5:
            size = len(raw) * (part - 4) // 16
        why = OTHER if size > DIGEST_BYTES else "is cut short"
        passed_over(raw[:size], why, tmp_path / str(part))


def test_fault_07_a_file_that_is_empty_is_passed_over(tmp_path: Path) -> None:
    passed_over(b"", "is empty", tmp_path)


def test_a_file_that_is_longer_is_passed_over(tmp_path: Path) -> None:
    passed_over(to_bytes(content(2)) + b"\0", OTHER, tmp_path)


def test_fault_07_one_bit_that_flipped_is_noticed(tmp_path: Path) -> None:
    raw = to_bytes(content(2))
    bits = random.Random(0).sample(range(len(raw) * 8), 190)
    bits += random.Random(1).sample(range((len(raw) - DIGEST_BYTES) * 8, len(raw) * 8), 10)
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        passed_over(bytes(damaged), OTHER, tmp_path / str(bit))


def test_each_damaged_one_is_told(tmp_path: Path) -> None:
    whole = to_bytes(content(2))
    place(tmp_path, {1: b"", 2: whole, 3: b"x", 4: b""})
    assert read_newest(tmp_path) == (
        whole,
        2,
        [
            f"{at(tmp_path, 4)}: is empty; going on from step 2",
            f"{at(tmp_path, 3)}: is cut short; going on from step 2",
        ],
    )
    assert names(tmp_path) == [
        *("step-00000001.pt", "step-00000002.pt"),
        *("step-00000003.pt.damaged", "step-00000004.pt.damaged"),
    ]


def test_fault_07_where_none_is_whole_all_stay_as_they_are(tmp_path: Path) -> None:
    place(tmp_path, {1: b"", 2: b"x", 3: b""})
    with pytest.raises(CheckpointError) as told:
        read_newest(tmp_path)
    assert str(told.value) == (
        f"{at(tmp_path, 3)}: is empty, and 2 older ones too; begin the run anew in another"
        " --run-dir"
    )
    assert steps(tmp_path) == [3, 2, 1]


def test_a_file_that_cannot_be_read_is_passed_over(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_bytes = Path.read_bytes

    def failing(path: Path) -> bytes:
        if path == at(run, 2):
            raise OSError(errno.EIO, "Input/output error")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    why = "cannot be read (Input/output error)"
    assert read_newest(run) == (
        to_bytes(content(1)),
        1,
        [f"{at(run, 2)}: {why}; going on from step 1"],
    )


@pytest.mark.parametrize("folder", [None, "checkpoints"])
def test_a_run_without_checkpoints(folder: str | None, tmp_path: Path) -> None:
    if folder:
        (tmp_path / folder).mkdir()
    with pytest.raises(CheckpointError) as told:
        read_newest(tmp_path)
    assert str(told.value) == (
        f"{tmp_path}: holds no complete checkpoint; begin it anew, or use --resume auto"
        f" --run-dir {tmp_path}"
    )
    assert told.value.code == 4


# --- Files that were made to run code


class Runs:
    """Its pickle calls the function when it is loaded."""

    def __init__(self, function: Callable[..., Any], argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> Any:
        return self.call


def zipped(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def legacy(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=False)
    return file.getvalue()


@pytest.mark.parametrize("write", [zipped, legacy, pickle.dumps])
@pytest.mark.parametrize("wrapped", ["bare", "list", "dict", "state"])
@pytest.mark.parametrize("function", [os.system, exec])
def test_fault_09_a_file_that_would_run_code_is_refused_and_runs_none(
    function: Callable[..., Any], wrapped: str, write: Callable[[Any], bytes], tmp_path: Path
) -> None:
    trace = tmp_path / "was_here"
    code = f"touch {trace}" if function is os.system else f"open({str(trace)!r}, 'w').close()"
    bad = Runs(function, code)
    raw = write(
        {
            "bare": bad,
            "list": [1, [bad]],
            "dict": {"weights": torch.ones(2), "a": {"b": bad}},
            "state": {**content(), "step": bad},
        }[wrapped]
    )
    with pytest.raises(CheckpointError) as told:
        from_bytes(digested(raw), "step 2 of run")
    assert told.value.code == 4
    assert str(told.value).startswith("step 2 of run: holds more than tensors and plain values, or")
    assert str(told.value).endswith("nothing of it was run; remove it to use the one before")
    with pytest.raises(Damaged, match=f"^{OTHER}$"):
        from_bytes(raw, "")
    place(tmp_path, {1: raw})
    with pytest.raises(CheckpointError, match=OTHER):
        read_newest(tmp_path)
    assert not trace.exists()
    pickle.loads(raw) if write is pickle.dumps else torch.load(io.BytesIO(raw), weights_only=False)
    assert trace.exists()  # it would have


@pytest.mark.parametrize("raw", [b"x", b"PK\3\4" + b"x" * 200, b"\x80\2.", b"\0" * 1000])
def test_garbage_with_a_digest_is_refused(raw: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"^here: holds more than .* or is no check"):
        from_bytes(digested(raw), "here")
