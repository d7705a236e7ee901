"""Data sets larger than what a process may take of the memory, or than a disk has room for."""

import re
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache, decode_all
from ddp_mnist.errors import StorageError, one_line
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.data_sets import cells_of, encoded, folder_of, of, picture
from tests.run_checks import with_flags

# --- A disk that another program fills up meanwhile


def load_on_a_disk_that_is_filled(own: Path, cache_dir: Path, call: int) -> Any:
    """Return the train images; the disk is full but for 64 KB before they have room, or after."""
    original = decode_all.allocate

    def fill() -> None:
        (cache_dir / "other").write_bytes(bytes(shutil.disk_usage(cache_dir).free - 2**16))

    def then_fill(*given: Any) -> Any:
        if call == 0:
            fill()
        found = original(*given)
        if call == 1:
            fill()
        return found

    with patch.object(decode_all, "allocate", then_fill):
        reading = ImageOptions(size=(500, 1000))
        return of(cache.load(str(own), str(cache_dir), reading), "train").images.numpy()


# 20 MB have room for the four images of a split, 1.5 MB each, twice.
@pytest.mark.parametrize("small_disk", ["20m"], indirect=True)
def test_no_disk_that_fills_up_ends_the_process_without_a_word(
    small_disk: Path, tmp_path: Path
) -> None:
    """A file has its room before it is written through the memory, where a full disk is SIGBUS."""
    images = [picture((1000, 500), (50 + n, 0, 0)) for n in range(4)]
    own, run = folder_of(tmp_path / "own", *images), load_on_a_disk_that_is_filled
    with pytest.raises(StorageError) as raised:
        run_world(1, run, own, small_disk, 0, folder=tmp_path)
    assert re.fullmatch(
        rf"ddp-mnist: error: {small_disk}: the cache cannot be written \(8 images of 500x1000 in"
        r" colour take 12 MB, and there is no space left; .* --image-size\); .* \(code 5\)",
        one_line(raised.value),
    )
    (small_disk / "other").unlink()
    assert {path.suffix for path in small_disk.iterdir()} <= {".lock"}
    [found] = run_world(1, run, own, small_disk, 1, folder=tmp_path)
    assert shutil.disk_usage(small_disk).free < 2**16
    for place, number in enumerate((0, 2, 1, 3)):  # in the order of the classes a and b
        assert np.array_equal(found[place], np.asarray(images[number]).transpose(2, 0, 1))


# --- More images than a process may take of the memory

LIMIT = 1.5e9  # bytes
COUNT, SIDE = 20_000, 224  # 3 GB
NET = """
from torch import nn

def net(classes, shape):
    pool = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Conv2d(3, 8, 8, 8), nn.ReLU(), pool, nn.Flatten(), nn.Linear(32, 4))
"""


def write_large(folder: Path) -> int:
    """Write noise around one of four colours, of 5 bits, as PNG into parquet; return its bytes."""
    folder.mkdir()
    stream = np.random.default_rng(0)
    noise = stream.integers(0, 32, (100, SIDE, SIDE, 3), dtype=np.uint8)
    colours = np.array([(90, 0, 0), (0, 90, 0), (0, 0, 90), (90, 90, 0)], np.uint8)
    files = [encoded(each + colours[n % 4], compress_level=1) for n, each in enumerate(noise)]
    table = pa.table({"image": cells_of(files * 10), "label": [n % 4 for n in range(1000)]})
    for split, parts in (("train", COUNT // 1000 - 1), ("test", 1)):
        path = folder / f"{split}-00000-of-00001.parquet"
        with pq.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as file:
            for _ in range(parts):
                file.write_table(table)
    return sum(len(file) for file in files) * COUNT // 100


def watched(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Return what the function returns, and the highest anonymous memory.

    The system drops pages of a mapped file where memory is short: what a process really takes is
    anonymous.
    """
    done, peaks = threading.Event(), [0]

    def look() -> None:
        while not done.wait(0.1):
            status = Path("/proc/self/status").read_text()
            peaks.append(int(status.partition("RssAnon:")[2].split()[0]) * 1024)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        found = function(*arguments)
    finally:
        done.set()
        watcher.join()
    return found, max(peaks)


def read_it(place: str, cache_dir: str) -> tuple[int, ...]:
    return tuple(cache.load(place, cache_dir).images.shape)


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what memory is whose")
def test_three_gigabytes_of_pixels_in_half_as_much_memory(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Read, trained on two processes, validated and tested; at the peak of each of them."""
    place, cache_dir = tmp_path / "large", tmp_path / "cache"
    assert write_large(place) > LIMIT  # no copy of the files fits either
    (tmp_path / "cheap.py").write_text(NET)
    options: dict[str, Any] = {"folder": tmp_path, "timeout_s": 1800}
    [built] = run_world(1, watched, read_it, str(place), str(cache_dir), **options)
    assert built[0] == (COUNT, 3, SIDE, SIDE)
    cheap = proof_config(model="cheap:net", epochs=1, batch_size=256, val_size=1000)
    places = {"dataset": str(place), "cache_dir": str(cache_dir)}
    config = with_flags(cheap, **places, mixed_precision="no")
    ranks = run_world(2, watched, just_train, config, **options)
    assert ranks[0][0]["test_accuracy"] == 1
    peaks = [peak for _, peak in (built, *ranks)]  # of reading, rank 0, rank 1
    record_property("details", ", ".join(f"{peak / 1e6:.0f} MB" for peak in peaks))
    assert max(peaks) < LIMIT, peaks
