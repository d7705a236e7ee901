import gzip
import hashlib
import os
import re
import socket
import struct
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import cache, tables
from ddp_mnist.data.sources import Source, find_source
from ddp_mnist.data.splits import rows_of_splits
from ddp_mnist.errors import DataError, DdpMnistError, UsageError, one_line
from tests.data_sets import (
    GREY,
    LABELS,
    PIXELS,
    PNGS,
    SPLITS,
    TEST,
    TRAIN,
    cells_of,
    encoded,
    named,
    of,
    read,
    save_to_disk,
    table_of,
    write_idx,
    write_images,
    write_parquet,
    write_split,
)
from tests.hub import Hub, commit_of

# datasets and huggingface_hub read their environment at import: not before conftest.py set it.

# --- Which source


def test_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder is the same under any spelling."""
    (here / "sub" / "numbers").mkdir(parents=True)
    (here / "d" / "e:f@1").mkdir(parents=True)
    (here / "link").symlink_to("sub/numbers")
    monkeypatch.setenv("HOME", str(here))
    folder = str(here.resolve() / "sub" / "numbers")
    for dataset, source in {
        "mnist": Source("mnist", "hub", "ylecun/mnist"),
        "fashion_mnist": Source("fashion_mnist", "hub", "zalando-datasets/fashion_mnist"),
        "digits": Source("digits", "digits", "sklearn.datasets.load_digits"),
        "patches": Source("patches", "patches", "sklearn.datasets.load_sample_images"),
        "someone/some-set_2.0": Source("someone--some-set_2.0", "hub", "someone/some-set_2.0"),
        "a/b:c": Source("a--b--c", "hub", "a/b:c"),
        "a/b:c+1 d@refs/pr/1": Source("a--b--c+1 d--refs--pr--1", "hub", "a/b:c+1 d@refs/pr/1"),
        "a/b@v1.0": Source("a--b--v1.0", "hub", "a/b@v1.0"),
        "d/e:f@1": Source("e:f@1", "folder", str(here.resolve() / "d" / "e:f@1")),
        "./sub/..": Source(here.name, "folder", str(here.resolve())),
        **dict.fromkeys(
            ("sub/numbers", "./sub/numbers/", folder, "link"),
            Source("numbers", "folder", folder),
        ),
    }.items():
        assert find_source(dataset) == source


def test_a_name_or_path_that_is_none(here: Path) -> None:
    (here / "loop").symlink_to("loop")
    (here / "train.parquet").touch()
    names = ["mnits", "auto", "a/b:", "a/b@", "a/b@1:c", "a:b/c", "C:\\x", "é/1", "", " ", "a b/c"]
    paths = ["/nowhere", "./x", "./a:b", "a/b/c", "a/b:c/d", "~nobody-here/x", "loop/x/y"]
    for datasets, error, word in (
        (names, UsageError, "choose from mnist, fashion_mn"),
        (paths, DataError, "check the path"),
        (("train.parquet",), DataError, "give the folder it lies in"),
        (("/" + "x" * 300,), DataError, "File name too long"),
    ):
        for dataset in datasets:
            with pytest.raises(error) as caught:
                find_source(dataset)
            assert str(caught.value).startswith(f"--dataset {dataset}: ")
            assert word in str(caught.value)


# --- Good data


DIGESTS = {
    "digits": "8e2677c402f596a4357f5de7c89b826f1421b6a3ce3f4c6e876e9d9e7688a1ce",
    "patches": "df4ac473d91f6ebe49826b62d6b201f9d637047bba1d2736686835c1272be88a",
}


@pytest.mark.parametrize("name", DIGESTS)
def test_what_comes_with_scikit_learn_is_the_same_bytes_on_every_machine(name: str) -> None:
    images, is_digits = cache.load(name), name == "digits"
    assert images.digest == DIGESTS[name]
    assert not {*of(images, "train").keys.tolist()} & {*of(images, "test").keys.tolist()}
    assert images.image_format.bright_on_black == images.image_format.digit_photos == is_digits
    assert images.image_format.notes == ["the 8x8 digits were enlarged to 28x28"] * is_digits
    for torch_seed in range(2 * is_digits):
        torch.manual_seed(torch_seed)
        train, validation, test = rows_of_splits(images.hold_out(287))
        assert validation.rows[:5].tolist() == [1, 2, 13, 17, 24]  # in every version
        assert sorted([*train.rows.tolist(), *validation.rows.tolist()]) == list(range(1437))
        assert torch.equal(test.targets[test.rows], of(images, "test").labels)


def with_words(folder: Path) -> None:
    words = ["four", "one", "three", "two"]  # sorted, as classes are
    for split, rows in SPLITS.items():
        write_split(folder, split, label=[words[label] for label in LABELS[rows]])


Writer = Callable[[Path], object]
GOOD: dict[str, tuple[Writer, list[str]]] = {
    "parquet": (write_parquet, list("0123")),
    # of more classes than rows have
    "parquet with metadata": (lambda f: write_parquet(f, "0123456789"), list("0123456789")),
    "words": (with_words, ["four", "one", "three", "two"]),
    "save_to_disk": (save_to_disk, list("wxyz")),
    "images": (write_images, ["ant", "bee", "cat", "dog"]),
    "idx": (write_idx, list("0123456789")),
    "idx in raw": (lambda f: write_idx(f / "raw", gz=True), list("0123456789")),
    "idx of torchvision": (lambda f: write_idx(f / "MNIST/raw", dot="."), list("0123456789")),
}


@pytest.mark.parametrize("how", GOOD)
def test_every_format_gives_what_was_written(how: str, tmp_path: Path) -> None:
    write, classes = GOOD[how]
    write(tmp_path)
    decoded = read(tmp_path)
    assert (decoded.classes, decoded.image_format.notes) == (classes, [])
    for split, rows in SPLITS.items():
        images, labels, _ = of(decoded, split)
        assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
        order = list(range(rows.start, rows.stop))
        if how == "images":  # are read class by class, in the order of names
            order.sort(key=LABELS.__getitem__)
        assert np.array_equal(images, PIXELS[order, None])
        assert labels.tolist() == [LABELS[row] for row in order]


SWAPPED = ("label=a,group=b", "group=a,label=b")
FINE = "fine; not used: coarse (else label=coarse)"
SOURCE = "label; not used: labels, source (else label=labels)"


@pytest.mark.parametrize(
    ("columns", "image", "label", "notes"),
    [
        ("mask image label", "image", "label", ["image; not used: mask (else image=mask)"]),
        ("mask img fine coarse", "img", "fine", ["img; not used: mask (else image=mask)", FINE]),
        ("photo source labels label", "photo", "label", [SOURCE]),
        ("img labels writer", "img", "labels", []),
    ],
)
def test_a_column_is_known_by_its_name_then_by_its_type(
    columns: str, image: str, label: str, notes: list[str]
) -> None:
    """Of several that could be it; all but these declare their classes."""
    found_image, found_labels, said = columns_among(columns)
    assert (found_image, found_labels) == (image, [label])
    short = (note.partition("column ")[2].replace("train --columns ", "") for note in said)
    assert [*short] == notes


def columns_among(columns: str, options: ImageOptions = AS_THEY_ARE) -> Any:
    """Return what is found among columns of which most declare their classes."""
    import datasets

    kinds = dict.fromkeys(("mask", "image", "img", "photo"), datasets.Image())
    kinds |= {"label": datasets.Value("int64"), "writer": datasets.Value("string")}
    of_classes = datasets.ClassLabel(names=["scan", "web"])
    features = {name: kinds.get(name, of_classes) for name in columns.split()}
    return tables.find_columns(SimpleNamespace(features=features), "here", options)


NAMED: dict[str, tuple[str, list[str]]] = {  # columns that there are, those of images and labels
    "label=coarse": ("img fine coarse", ["img", "coarse"]),
    "label=Writer": ("img label writer", ["img", "writer"]),
    "image=mask, label = coarse": ("mask image label coarse", ["mask", "coarse"]),
}


@pytest.mark.parametrize("typed", NAMED)
def test_a_column_that_is_named_is_that_one(typed: str) -> None:
    columns, [image, label] = NAMED[typed]
    assert columns_among(columns, named(typed)) == (image, [label], [])


NOT_THERE = {
    "label=species": "label=species: here has no such column, only 'img', 'fine'; correct it",
    "label=FINE": "label=FINE: here has no such column, only 'img', 'fine', 'Fine'",
    "label=fin": "label=fin: here has no such column, only 'img', 'fine'; did you mean fine?",
    "lable=fine": "lable=fine: no column is for lable; choose from image, label, group; did you",
    "split=fine": "split=fine: no column is for split; choose from image, label, group",
    "image=fine": "image=fine: is not a column for image: img (Image(",
    "label": "label: must be USE=COLUMN,..., each once, e.g. label=species,group=animal",
    "label=": "label=: must be USE=COLUMN",
    "label=fine,label=img": "label=fine,label=img: must be USE=COLUMN,..., each once",
    "label=fine,group=fine": "label=fine,group=fine: must be USE=COLUMN,..., each once",
}


@pytest.mark.parametrize("typed", NOT_THERE)
def test_a_column_that_is_not_there_and_a_use_that_is_none(typed: str) -> None:
    with pytest.raises(UsageError, match=f"^--columns {re.escape(NOT_THERE[typed])}"):
        columns_among("img fine Fine" if "FINE" in typed else "img fine", named(typed))


@pytest.mark.parametrize("make", [write_idx, write_images, None])
def test_what_has_no_table_has_no_columns_to_name(make: Writer | None, tmp_path: Path) -> None:
    dataset = str(tmp_path) if make else "digits"
    if make:
        make(tmp_path)
    words = f"^--columns label=y: --dataset {dataset} has no table that is used; .*leave it out$"
    with pytest.raises(UsageError, match=words):
        find_source(dataset).listing(named("label=y"))
    listing = find_source(dataset).listing(replace(named("label=y"), test_size=0))
    assert len(listing.classes) > 1  # these are no table's either, so a run may be evaluated here


def test_a_run_is_not_evaluated_by_another_column_but_needs_no_group() -> None:
    options = replace(named("label=coarse,group=site"), test_size=0)
    with pytest.raises(UsageError, match=r"^--columns label=coarse: here has no such column"):
        columns_among("img label", options)
    assert columns_among("img label coarse", options)[1] == ["coarse"]


def test_named_columns_of_a_saved_table(tmp_path: Path) -> None:
    """Groups in each split, and no other reading of the same table from the cache."""
    import datasets

    features = datasets.Features(
        photo=datasets.Image(), a=datasets.Value("string"), b=datasets.Value("string")
    )
    pixels = [{"bytes": png, "path": None} for png in PNGS[:8]]
    columns = {"photo": pixels, "a": [*"xyxyxyxy"], "b": [*"11223344"]}
    table = datasets.Dataset.from_dict(columns, features=features)
    splits = {"train": table, "test": table}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "t")
    one, other = (cache.load(str(tmp_path / "t"), options=named(f"{x}")) for x in SWAPPED)
    assert (one.classes, one.group_names) == (["x", "y"], [*"1234"])
    assert (other.classes, other.group_names) == ([*"1234"], ["x", "y"])
    table.rename_column("b", "group").save_to_disk(tmp_path / "v")
    found = find_source(str(tmp_path / "v")).listing(named("label=group"))
    assert (found.classes, {*found.groups}) == ([*"1234"], {""})  # a column has one use
    splits["test"] = table.rename_column("b", "c")
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "u")
    words = (
        "^--columns group=b: --dataset .*/u: split test has no such column, only 'photo', 'a', 'c'"
    )
    with pytest.raises(UsageError, match=words):
        find_source(str(tmp_path / "u")).listing(named("label=a,group=b"))


def test_a_parquet_file_of_paths_is_known_by_the_name_of_its_column(tmp_path: Path) -> None:
    pq.write_table(pa.table({"photo": ["0.png"], "label": ["a"]}), tmp_path / "all.parquet")
    known = [tables.has_images(tmp_path / "all.parquet", name) for name in ("photo", "image")]
    assert known == [True, False]


@pytest.mark.system
def test_real_mnist(mnist: Path) -> None:
    images = cache.load(str(mnist))
    assert len(of(images, "train").labels) == 60_000
    assert of(images, "test").labels[:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert of(images, "test").labels.bincount().tolist() == counts
    # with its header this is t10k-images-idx3-ubyte, whose MD5 is known
    original = struct.pack(">4I", 0x803, 10_000, 28, 28)
    original += of(images, "test").images.numpy().tobytes()
    assert hashlib.md5(original).hexdigest() == "2646ac647ad5339dbf082846283269ea"
    assert images.image_format == replace(GREY, characters=True)


# --- What is not taken


def test_what_a_folder_of_images_leaves_out_is_said(tmp_path: Path) -> None:
    write_images(tmp_path)
    names = "train/ant/00.RAW train/a.docx .DS_Store extra/cat/1.png other/cat/1.png .old/1.png"
    names += " train/__MACOSX/1.png train/ant/._1.png"
    for name in names.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(PNGS[0])
    (tmp_path / "metadata.csv").write_text("filename,camera\ntrain/ant/00.png,X1\n")
    assert (found := read(tmp_path)).classes == ["ant", "bee", "cat", "dog"]
    assert found.image_format.notes == [
        "files without the suffix of an image were left out: .docx (1), .RAW (1)",
        "metadata.csv has no column file_name and label, only 'filename', 'camera', and was not"
        " used (if called otherwise, give train --columns file_name=ITS_NAME,label=ITS_NAME)",
        "3 of 20 images were left out, as extra/cat/1.png",
    ]


def test_a_split_that_is_not_used_is_not_read_and_their_order_says_nothing(tmp_path: Path) -> None:
    """It may have no labels, and images of another size, in colour or damaged."""
    import datasets

    plain, own = read(write_parquet(tmp_path / "plain")), tmp_path / "own"
    odd = [encoded(np.zeros((5, 40, 3), np.uint8)), *[b"damaged"] * (TEST - 1)]
    splits = {
        "test": table_of("test"),
        "unsupervised": table_of("test", image=cells_of(odd), label=[-1] * TEST),
        "train": table_of("train"),
    }
    tables = {split: datasets.Dataset(table) for split, table in splits.items()}
    datasets.DatasetDict(tables).save_to_disk(str(own))
    for reading in (AS_THEY_ARE, ImageOptions((28, 28), grey=True, for_evaluation=True)):
        decoded = read(own, reading)
        assert decoded.image_format.notes == ["split unsupervised is not used"]
        assert decoded.digest == plain.digest


# --- Faults: of a good folder, how it is spoilt, and words that the error has to have

TRAIN_FILE = "train-00000-of-00001.parquet"
BEE = "train/bee/05.png"
IMAGES, IDX_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
HEADER, SIZE = (
    f"{IMAGES}: ValueError: {fault}" for fault in ("its header is", "cannot reshape array of size")
)


def cut(name: str, size: int) -> Writer:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def with_header(*numbers: int) -> Writer:
    def write(folder: Path) -> None:
        content = (folder / IMAGES).read_bytes()[16:]
        (folder / IMAGES).write_bytes(struct.pack(">4i", *numbers) + content)

    return write


def rewritten(*splits: str, names: str = "", **columns: Any) -> Writer:
    """Return what writes splits of a folder of parquet anew, with other columns."""

    def write(folder: Path) -> None:
        for split in splits:
            write_split(folder, split, names, **columns)

    return write


def removed(name: str) -> Writer:
    return lambda folder: (folder / name).unlink()


def not_in_utf_8(folder: Path) -> None:
    (folder / BEE).rename(folder / os.fsdecode(b"train/bee/\xe9.png"))


def linked(folder: Path, name: str) -> None:
    (folder / name).rename(folder.with_name("away"))
    (folder / name).symlink_to(folder.with_name("away"))


def pointers(folder: Path) -> None:
    for file in folder.iterdir():
        file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 1734\n")


IN_OTHER_ORDER = partial(save_to_disk, test_names="zyxw")
MISTAKES: dict[str, tuple[Writer, Writer]] = {
    "ArrowInvalid: Parquet magic bytes not found": (write_parquet, cut(TRAIN_FILE, 900)),
    "no label column among image (": (write_parquet, rewritten("train", "test", label=None)),
    "5 of 5 rows have no label in column label: row 0 has none, row 1": (
        write_parquet,
        rewritten("test", label=None),
    ),
    "3 of 12 rows have no index of a class in column label: row 3 is 3, row 7": (
        write_parquet,
        rewritten("train", names="xyz"),
    ),
    "needs the split train, found: test;": (write_parquet, removed(TRAIN_FILE)),
    "train/bee is a link to a folder or to": (write_images, partial(linked, name="train/bee")),
    "has a name that is not UTF-8; rename it": (write_images, not_in_utf_8),
    "column label is ClassLabel(names=['w', 'x', 'y', 'z']) in": (save_to_disk, IN_OTHER_ORDER),
    f"{SIZE} 9407 into shape (12,28,28); fetch": (write_idx, cut(IMAGES, -1)),
    f"{HEADER} 00000b03": (write_idx, with_header(0xB03, TRAIN, 28, 28)),
    f"{HEADER} 00000803 ffffffff": (write_idx, with_header(0x803, -1, 28, 28)),
    f"{SIZE} 785 into shape (1,28,28)": (write_idx, with_header(0x803, 1, 28, 28)),
    f"{SIZE} 9408 into shape (2147483647,28,28)": (
        write_idx,
        with_header(0x803, 2**31 - 1, 28, 28),
    ),
    "parquet is a pointer of Git LFS: git lfs pull": (write_parquet, pointers),
    "has only 3 of MNIST's four IDX files; fetch": (write_idx, removed(IDX_LABELS)),
    "5 images but 1 labels;": (write_idx, partial(write_idx, test_labels=[1])),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("words", MISTAKES)
def test_fault_26_a_fault_in_a_folder_is_named(words: str, tmp_path: Path) -> None:
    write, spoil = MISTAKES[words]
    folder = tmp_path / "it"
    write(folder)
    spoil(folder)
    with pytest.raises(DataError) as caught:
        read(folder)
    message = one_line(caught.value)
    assert message.startswith(f"ddp-mnist: error: --dataset {folder}: ")
    assert "\n" not in message and message.endswith(" (code 3)")
    assert words in message


def test_no_more_of_a_packed_file_is_unpacked_than_its_header_says(tmp_path: Path) -> None:
    file = write_idx(tmp_path, gz=True) / f"{IMAGES}.gz"
    file.write_bytes(gzip.compress(struct.pack(">4i", 0x803, 10, 28, 28) + bytes(50_000_000)))
    tracemalloc.start()
    with pytest.raises(
        DataError, match=r"ubyte.gz: ValueError: cannot reshape array of size 7841 "
    ):
        read(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_errors_name_a_folder_as_it_was_typed(here: Path) -> None:
    (write_images(here / "photos") / BEE).write_bytes(b"hello")
    with pytest.raises(DataError, match=f"^--dataset photos: 1 of 17 .* be read: {BEE} "):
        read("photos")
    with pytest.raises(DdpMnistError, match=r"^--dataset phtos: .*; did you mean photos\?$"):
        read("phtos")


def test_a_change_behind_a_link_in_a_saved_folder_is_seen(tmp_path: Path) -> None:
    linked(folder := save_to_disk(tmp_path / "it"), "train")
    (folder / "train" / "circle").symlink_to(folder)
    before = find_source(str(folder)).fingerprint
    assert of(read(folder), "train").labels.tolist() == LABELS[:TRAIN]
    (folder / "train" / "more").touch()
    assert find_source(str(folder)).fingerprint != before


def test_a_folder_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where HF_HUB_OFFLINE is unset and its README points elsewhere."""
    import datasets

    no_sockets = Mock(side_effect=AssertionError("a socket was opened"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_sockets)
    monkeypatch.setattr(socket.socket, "connect", no_sockets)
    assert np.array_equal(of(read(write_parquet(tmp_path)), "test").images[:, 0], PIXELS[TRAIN:])
    config = "{config_name: it, data_files: 'hf://datasets/some/one/train.parquet'}"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- {config}\n---\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path)
    assert "a socket was opened" not in str(caught.value)
    assert datasets.config.HF_HUB_OFFLINE is False


# --- The Hub

OUT_OF_REACH = "not in the cache, and the Hub cannot be reached"
DEADLINE_S = 15


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Let this process try the network, and a Hub at the endpoint that it is called with.

    `datasets` also calls hosts that no endpoint moves (counters of downloads, its viewer): a name
    that is not this machine's is not looked up. Hugging Face's own caches are empty.
    """
    import datasets
    import huggingface_hub

    look_up = socket.getaddrinfo

    def look_up_here(host: str, *args: Any, **options: Any) -> Any:
        if host != "127.0.0.1":
            raise socket.gaierror(-2, "Name or service not known")
        return look_up(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    ours, theirs = datasets.config, huggingface_hub.constants
    monkeypatch.setattr(ours, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(theirs, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(ours, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(theirs, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))

    def set_endpoint(url: str) -> None:
        monkeypatch.setattr(ours, "HF_ENDPOINT", url)
        monkeypatch.setattr(theirs, "ENDPOINT", url)
        template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(theirs, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return set_endpoint


def test_fault_28_the_hub_is_read_once_and_the_caches_do_without_it(
    endpoint: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First ours, without the libraries, then Hugging Face's; in none, `auto` is the digits."""
    ours, fresh = str(tmp_path / "ours"), str(tmp_path / "fresh")
    nobody = f"http://127.0.0.1:{free_port()}"
    endpoint(nobody)
    start = time.monotonic()
    name, [why, instead] = cache.choose("auto", ours)
    assert time.monotonic() - start < DEADLINE_S
    assert name == "digits" and instead.startswith("INSTEAD OF MNIST")
    assert OUT_OF_REACH in why and "Connection refused" in why

    def check_mnist(folder: str) -> None:
        images = cache.load("mnist", folder)
        assert (images.source, images.warnings) == ("hub:ylecun/mnist", [])
        assert np.array_equal(of(images, "train").images[:, 0].numpy(), PIXELS[:TRAIN])
        assert of(images, "test").labels.tolist() == LABELS[TRAIN:]

    with Hub("ylecun/mnist", write_parquet(tmp_path / "hub", "wxyz")).running() as hub:
        endpoint(hub.endpoint)
        check_mnist(ours)
        for name in hub.files["main"]:
            assert sum(r.startswith("GET") and r.endswith(f"/{name}") for r in hub.requests) == 1
        assert cache.choose("auto", ours) == ("mnist", [])
        with pytest.raises(DataError, match=r"^--dataset a/b: not on the Hub, or not visible to y"):
            cache.load("a/b", ours)  # which is not blamed on the cache
        assert not list(Path(ours).glob("*.tmp"))
    endpoint(nobody)
    check_mnist(fresh)
    for library in ("datasets", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, library, None)  # cannot be imported
    check_mnist(ours)


CARD_OF_TWO = """---
configs:
- config_name: all
  data_files: [{split: train, path: train*}, {split: test, path: test*}]
- config_name: few
  data_files: [{split: train, path: train*}, {split: test, path: few*}]
---
"""


def test_a_configuration_and_a_revision_are_data_sets_of_their_own(
    endpoint: Callable[[str], None], tmp_path: Path
) -> None:
    """In our cache and, without the Hub, in that of `datasets`, which does not ask for them."""
    for folder, few in (("old", 4), ("new", 3)):
        write_parquet(tmp_path / folder, "wxyz")
        pq.write_table(table_of("test", "wxyz")[:few], tmp_path / folder / "few.parquet")
        (tmp_path / folder / "README.md").write_text(CARD_OF_TWO)
    expected = {"a/b:few": 3, "a/b:few@v1": 4, "a/b:all@v1": TEST}
    if str(tmp_path).isascii():  # `datasets` cuts its lock's name to letters, not bytes
        expected[f"a/b:few@{commit_of('v1')}"] = 4
    place = str(tmp_path / "cache")

    def count(cache_dir: str) -> dict[str, int]:
        found = {name: cache.load(name, cache_dir) for name in expected}
        assert [images.source for images in found.values()] == [f"hub:{name}" for name in expected]
        return {name: len(of(images, "test").labels) for name, images in found.items()}

    with Hub("a/b", tmp_path / "new", v1=tmp_path / "old").running() as hub:
        endpoint(hub.endpoint)
        assert count(place) == expected
        assert len(list(Path(place).glob("hub-a--b-*/about.json"))) == len(expected)
        for name, error in (
            (
                "a/b@v1",
                "has several configurations: all, few; name one of them, as --dataset a/b:all@v1",
            ),
            ("a/b:x@v1", "ValueError: BuilderConfig 'x' not found. Available: ['all', 'few']"),
            (
                "a/b:few@v2",
                "not on the Hub, or not visible to you; check id and revision, or",
            ),
        ):
            with pytest.raises(DataError) as caught:
                cache.load(name, place)
            assert str(caught.value).startswith(f"--dataset {name}: {error}")
    endpoint(f"http://127.0.0.1:{free_port()}")
    assert count(place) == count(str(tmp_path / "fresh")) == expected
    for name in ("a/b", "a/b:few@v2"):
        with pytest.raises(DataError, match=OUT_OF_REACH):
            cache.load(name, place)


def test_a_revision_alone_does_not_stand_for_another(
    endpoint: Callable[[str], None], tmp_path: Path
) -> None:
    for folder in ("old", "new"):
        write_parquet(tmp_path / folder, "wxyz")
    with Hub("c/d", tmp_path / "new", v1=tmp_path / "old", v2=tmp_path / "new").running() as hub:
        endpoint(hub.endpoint)
        assert len(of(cache.load("c/d@v1"), "test").labels) == TEST
    endpoint(f"http://127.0.0.1:{free_port()}")
    for name in ("c/d@v2", "c/d"):
        with pytest.raises(DataError, match=OUT_OF_REACH):
            cache.load(name)


@pytest.mark.parametrize("who", ["hub", "name server"])
def test_fault_28_nothing_cached_and_a_hub_that_does_not_answer(
    who: str, endpoint: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tenth of the patience; no time-out of a request covers a name server."""
    assert 2 * tables.HUB_TIMEOUT_S < DEADLINE_S
    monkeypatch.setattr(tables, "HUB_TIMEOUT_S", tables.HUB_TIMEOUT_S / 10)
    end = threading.Event()
    if who == "name server":
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: end.wait(60))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connecting works, no answer comes
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        endpoint(f"http://{address if who == 'hub' else 'hub.invalid'}")
        start = time.monotonic()
        with pytest.raises(DataError) as caught:
            read("mnist")
    end.set()
    assert 0.4 < time.monotonic() - start < DEADLINE_S
    assert OUT_OF_REACH in str(caught.value)
    assert str(caught.value).endswith(f"; {tables.OFFLINE_FIX}")
