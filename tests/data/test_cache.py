import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache as caching
from ddp_mnist.data.decode_all import data_digest
from ddp_mnist.data.groups import NONE
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import StorageError
from ddp_mnist.system.text import printable, reason
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.chaos import wait_until
from tests.data_sets import LABELS, PIXELS, TEST, TRAIN, of, save_to_disk, write_idx, write_parquet
from tests.run_checks import told_once, with_flags

# --- What is loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_idx(tmp_path / "small")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def load(folder: Path, cache: Path, **options: Any) -> ImageData:
    return caching.load(str(folder), str(cache), **options)


def whole_folders(cache: Path) -> list[Path]:
    return [path for path in cache.iterdir() if path.suffix not in (".lock", ".tmp")]


def cached_folder(cache: Path) -> Path:
    [folder] = whole_folders(cache)
    return folder


def same(a: ImageData, b: ImageData) -> bool:
    names = ("name", "source", "digest", "classes", "image_format")
    arrays = (np.array_equal(a.images, b.images), np.array_equal(a.targets, b.targets))
    return all(arrays) and all(getattr(a, name) == getattr(b, name) for name in names)


def test_the_first_time_it_is_read_and_then_cached(folder: Path, cache: Path) -> None:
    images = load(folder, cache)
    assert of(images, "test").images.tolist() == PIXELS[TRAIN:, None].tolist()
    assert of(images, "train").labels.tolist() == LABELS[:TRAIN]
    assert images.image_format.notes == images.warnings == []
    about = {"name": "small", "source": f"folder:{folder}", "digest": images.digest}
    assert images.describe() == {**about, "train_rows": TRAIN, "test_rows": TEST, "val_rows": 0}
    before = cached_folder(cache).stat()
    second = load(folder, cache)
    assert cached_folder(cache).stat() == before
    assert same(images, second)
    assert not load(folder, cache, refresh=True).warnings
    assert cached_folder(cache).stat().st_mtime_ns != before.st_mtime_ns
    # of other sizes too, one of which train may choose
    small, own = ImageOptions(size=(14, 14)), cached_folder(cache)
    load(folder, cache, options=small)
    [place] = {*whole_folders(cache)} - {own}
    another = shutil.copytree(own, own.with_name(f"{own.name[:-8]}2-{own.name[-8:]}"))
    load(folder, cache, refresh=True)
    assert not caching.cached(str(folder), str(cache), small)
    assert (another / "about.json").exists()  # whose name begins alike
    shutil.rmtree(place)
    shutil.rmtree(another)
    write_idx(folder, train_labels=[3, *LABELS[1:TRAIN]])  # a change in the folder is seen
    third = load(folder, cache)
    assert of(third, "train").labels[0] == 3
    assert third.digest != images.digest


def test_folders_of_one_name_or_of_strange_names(tmp_path: Path, cache: Path) -> None:
    for name in ("a/numbers", "n" * 250, "zahlen ü*?[x]", os.fsdecode(b"\xff\xfe")):
        folder = write_idx(tmp_path / name)
        assert load(folder, cache).name == printable(folder.name)
    other = write_idx(tmp_path / "b" / "numbers", train_labels=LABELS[:TRAIN][::-1])
    assert of(load(other, cache), "train").labels.tolist() == LABELS[:TRAIN][::-1]
    images = load(tmp_path / "a" / "numbers", cache)
    assert (of(images, "train").labels.tolist(), images.warnings) == (LABELS[:TRAIN], [])


def test_the_digest_is_that_of_the_data_not_of_the_place(tmp_path: Path, cache: Path) -> None:
    everywhere = [
        load(write_idx(tmp_path / "a"), cache),
        load(write_idx(tmp_path / "b", gz=True), cache),
        load(write_idx(tmp_path / "c" / "MNIST" / "raw").parents[1], tmp_path / "other"),
        load(write_parquet(tmp_path / "d", "0123456789"), cache),
        load(tmp_path / "d", cache, options=ImageOptions(size=(28, 28))),
    ]
    assert len(same_data := {images.digest for images in everywhere}) == 1
    smaller = load(tmp_path / "a", cache, options=ImageOptions((14, 14)))
    [keys] = {tuple(images.keys.tolist()) for images in everywhere}
    assert len(set(keys)) == TRAIN + TEST
    assert tuple(smaller.keys.tolist()) == keys
    pixel = PIXELS[:TRAIN].copy()
    pixel[7, 13, 13] ^= 1
    others = {
        smaller.digest,
        load(write_idx(tmp_path / "pixel", train_images=pixel), cache).digest,
        load(write_idx(tmp_path / "label", test_labels=[0, 1, 2, 3, 1]), cache).digest,
        load(write_idx(tmp_path / "order", train_images=PIXELS[:TRAIN][::-1]), cache).digest,
        load(write_parquet(tmp_path / "classes"), cache).digest,
        load(save_to_disk(tmp_path / "names"), cache).digest,
        load(save_to_disk(tmp_path / "other", "wxyZ", "wxyZ"), cache).digest,
    }
    assert len(same_data | others) == 8


def test_each_way_to_read_a_folder_has_its_own_cache(folder: Path, cache: Path) -> None:
    """A folder of the cache under the name of another is not taken for that."""
    ways = [ImageOptions(), ImageOptions((14, 14)), ImageOptions(for_evaluation=True)]
    for _ in range(2):
        shapes = [load(folder, cache, options=way).images.shape[1:] for way in ways]
        assert shapes == [(1, 28, 28), (1, 14, 14), (3, 28, 28)]
    one, *others = whole_folders(cache)
    for other in others:
        shutil.rmtree(other)
        shutil.copytree(one, other)
    assert [load(folder, cache, options=way).images.shape[1:] for way in ways] == shapes


def test_all_that_decides_what_is_trained_and_held_out_is_in_the_digest() -> None:
    """The keys too, which differ where only images at full size do, and groups, if any."""
    images, one = np.zeros((4, 1, 2, 2), np.uint8), np.arange(4, dtype=np.uint64)
    rows, nothing = {"train": np.arange(3), "test": np.arange(3, 4)}, np.full(4, NONE)
    parts: tuple[Any, ...] = (images, np.arange(4), one, nothing, rows, ["a", "b"])
    others = (images + 1, np.zeros(4, int), one[::-1], one, {"train": np.arange(4)}, ["a", "c"])
    changed = [[*parts[:n], other, *parts[n + 1 :]] for n, other in enumerate(others)]
    assert len({data_digest(*each) for each in ([*parts], *changed)}) == 7


# --- A damaged cache


# By what is wrong, the file in which it is, and what makes it so; None removes it.
DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "truncated": ("images.npy", lambda content: content[:-1]),
    "garbage in the header": ("targets.npy", lambda content: b"?" * 20 + content[20:]),
    "no keys": ("keys.npy", lambda _: None),
    "null": ("about.json", lambda _: b"null"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_built_again(damage: str, folder: Path, cache: Path) -> None:
    whole = load(folder, cache)
    name, spoil = DAMAGES[damage]
    file = cached_folder(cache) / name
    spoilt = spoil(file.read_bytes())
    file.unlink()  # `whole` is mapped from it
    if spoilt is not None:
        file.write_bytes(spoilt)
    assert same(load(folder, cache), whole)


def test_another_format_is_decoded_once_more_and_takes_the_place_of_the_old_one(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, old = load(folder, cache), cached_folder(cache).stat()
    monkeypatch.setattr(caching, "CACHE_FORMAT", caching.CACHE_FORMAT + 1)
    assert same(load(folder, cache), images)
    assert (new := cached_folder(cache).stat()) != old
    assert same(load(folder, cache), images)
    assert cached_folder(cache).stat() == new


# --- Which data set


def test_fault_28_auto_falls_back_for_a_lack_of_data_only(cache: Path) -> None:
    """Not if the cache cannot be written. Without a Hub: tests/data/test_sources.py."""
    cache.touch()
    with pytest.raises(StorageError):
        caching.choose("auto", str(cache))


# --- Where the cache lies


def test_which_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("DDP_MNIST_CACHE", "~/there")
    assert caching.cache_folder("here") == Path("here")
    assert caching.cache_folder(None) == Path("/home/me/there")
    monkeypatch.delenv("DDP_MNIST_CACHE")
    assert caching.cache_folder(None) == Path("/home/me/.cache/ddp_mnist")
    with pytest.raises(StorageError, match=r"^~nobody-here/x: .*; use --cache-dir or DDP_MNIST_C"):
        caching.cache_folder("~nobody-here/x")


def test_fault_29_a_cache_that_cannot_be_added_to(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is read-only, or fills up at the end; one that is a file: test_one_line.py."""
    written, other = load(folder, cache), write_idx(tmp_path / "other")
    for call, number in (("take", errno.EROFS), ("Path.rename", errno.ENOSPC)):
        error = OSError(number, os.strerror(number))
        line = rf"^{cache}: the cache cannot be written \({reason(error)}\); use --cache-dir or DDP"
        with monkeypatch.context() as disk, pytest.raises(StorageError, match=line):
            disk.setattr(f"ddp_mnist.data.cache.{call}", Mock(side_effect=error))
            load(other, cache)
        assert same(load(folder, cache), written)
        assert cached_folder(cache)  # and no other
        assert not list(cache.glob("*.tmp"))


# --- Several processes


def slow_load(folder: str, cache: str) -> tuple[str, list[str]]:
    """Load; leave a line and take some time where decoding begins."""

    def tell(_: str) -> None:
        with open("log", "a") as file:
            file.write("read\n")
        time.sleep(0.5)

    images = caching.load(folder, cache, log=tell)
    return images.digest, images.warnings


def test_fault_30_several_processes_build_one_cache_once(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    results = run_world(2, slow_load, str(folder), str(cache), folder=tmp_path)
    assert (tmp_path / "log").read_text() == "read\n"
    assert results == [(load(folder, cache).digest, [])] * 2


def get_stuck(folder: str, cache: str) -> None:
    """Stop for good when all is written but has no name yet."""

    def stop(*_: Any) -> None:
        Path("log").touch()
        time.sleep(600)

    Path.rename = stop  # type: ignore[assignment]
    caching.load(folder, cache)


def test_fault_30_a_killed_builder_leaves_nothing_behind(
    folder: Path, cache: Path, tmp_path: Path
) -> None:
    world = LocalWorld(1, get_stuck, str(folder), str(cache), folder=tmp_path)
    wait_until((tmp_path / "log").exists, timeout_s=30)
    world.processes[0].kill()
    world.outcomes()
    assert not whole_folders(cache)
    images = load(folder, cache)
    assert (of(images, "train").labels.tolist(), images.warnings) == (LABELS[:TRAIN], [])
    assert not list(cache.glob("*.tmp"))


# --- What is in it is what was written


def train_on(files: list[str], caches: list[str]) -> Any:
    """Train as this rank types it: with its own data set and cache."""
    rank = int(os.environ["RANK"])
    config = proof_config(epochs=1, model="mlp", batch_size=8, val_size=0, grad_accum=1)
    return just_train(with_flags(config, dataset=files[rank], cache_dir=caches[rank]))


def test_fault_22_fault_56_ranks_with_another_cache_or_data_set_than_they_say_do_not_train(
    tmp_path: Path,
) -> None:
    for name in ("a", "b"):
        caching.load("digits", str(tmp_path / name))
    [targets] = tmp_path.glob("b/*/targets.npy")
    labels = np.load(targets)
    labels[:800] = (labels[:800] + 1) % 10
    np.save(targets, labels)
    places = [str(tmp_path / name) for name in ("a", "b")]
    outcomes = LocalWorld(2, train_on, ["digits"] * 2, places, folder=tmp_path).outcomes()
    line = str(told_once(outcomes, 3))
    assert line.startswith(f"--dataset digits: {targets} was changed or damaged since it was")
    shutil.rmtree(targets.parent)  # as the line says
    outcomes = LocalWorld(2, train_on, ["digits", "patches"], places, folder=tmp_path).outcomes()
    assert re.match(r"the data's digest: rank 0 has \w+, rank 1 has", str(told_once(outcomes, 2)))
    assert not (tmp_path / "run").exists()
    shutil.copytree(write_idx(tmp_path / "here"), tmp_path / "there")  # each has its own place
    own = [str(tmp_path / name) for name in ("here", "there")]
    found = run_world(2, train_on, own, places, folder=tmp_path)
    assert found[0]["dataset"]["source"] == f"folder:{tmp_path}/here"
