"""Data sets larger than what a process may take of the memory, or than a disk has room for."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.data import cache
from ddp_mnist.errors import StorageError, one_line
from tests.test_own_images import folder_of, picture

# --- A disk that another program fills up meanwhile


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount 20 MB: room for the four images of a split, 1.5 MB each, twice."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs Linux and root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def load_on_a_disk_that_is_filled(own: Path, cache_dir: Path, function: str, call: int) -> Any:
    """Return the train images; the disk is full but for 64 KB from that call of a function on."""
    original, calls = getattr(cache, function), iter(range(10))

    def then_fill(*given: Any) -> Any:
        found = original(*given)
        if next(calls) == call:
            (cache_dir / "other").write_bytes(bytes(shutil.disk_usage(cache_dir).free - 2**16))
        return found

    with patch.object(cache, function, then_fill):
        return cache.load(str(own), str(cache_dir)).train_images.numpy().copy()


def test_no_disk_that_fills_up_ends_the_process_without_a_word(
    small_disk: Path, tmp_path: Path
) -> None:
    """A file has its room before it is written through the memory, where a full disk is SIGBUS."""
    images = [picture((1000, 500), (50 + n, 0, 0)) for n in range(4)]
    own, run = folder_of(tmp_path / "own", *images), load_on_a_disk_that_is_filled
    for call in ("_check_space", 0), ("_allocate", 0):
        with pytest.raises(StorageError) as raised:
            run_world(1, run, own, small_disk, *call, folder=tmp_path)
        line = one_line(raised.value)
        assert line.startswith(
            f"ddp-mnist: error: {small_disk}: the cache cannot be written (No sp"
        )
        assert line.endswith("; use --cache-dir or DDP_MNIST_CACHE to put it elsewhere (code 5)")
        (small_disk / "other").unlink()
        assert [path.suffix for path in small_disk.iterdir()] == [".lock"]
    [found] = run_world(1, run, own, small_disk, "_allocate", 1, folder=tmp_path)
    assert shutil.disk_usage(small_disk).free < 2**16
    for place, number in enumerate((0, 2, 1, 3)):  # in the order of the classes a and b
        assert np.array_equal(found[place], np.asarray(images[number]).transpose(2, 0, 1))
