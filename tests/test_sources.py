from __future__ import annotations

import concurrent.futures
import gzip
import hashlib
import io
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddp_mnist.cluster.local import free_port
from ddp_mnist.data import sources
from ddp_mnist.data.decode import Decoded
from ddp_mnist.data.sources import Source, find_source
from ddp_mnist.errors import DataError, DdpMnistError, StorageError, UsageError, one_line, reason
from tests.hub import LOOPBACK_ONLY, Hub, as_json, hub_environment, silent_server

# datasets and huggingface_hub read their environment at import: not before conftest.py set it.

TRAIN, TEST = 12, 5
PIXELS = np.random.default_rng(0).integers(0, 256, (TRAIN + TEST, 28, 28), dtype=np.uint8)
LABELS = [row % 4 for row in range(TRAIN + TEST)]
SPLITS = {"train": slice(0, TRAIN), "test": slice(TRAIN, TRAIN + TEST)}


def read(folder: Path) -> Decoded:
    return find_source(str(folder)).read()


# --- Folders of every format


def encoded(pixels: Any, mode: str | None = None, kind: str = "PNG") -> bytes:
    """An image file of a Pillow image, or of an array, converted to `mode`."""
    image = pixels if isinstance(pixels, PIL.Image.Image) else PIL.Image.fromarray(pixels)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind)
    return file.getvalue()


PNGS = [encoded(pixels) for pixels in PIXELS]


def cells_of(files: Sequence[bytes | None]) -> pa.Array:
    cells = [None if file is None else {"bytes": file, "path": None} for file in files]
    return pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def write_split(folder: Path, split: str, *, hf: int = 0, **columns: Any) -> None:
    """A parquet file with the columns `image` and `label`; others, or None to leave one out.

    Args:
        folder: made if it is not there.
        split: train or test.
        hf: number of classes for Hugging Face's metadata (Image, ClassLabel), as MNIST has them.
        columns: lists or Arrow arrays in place of the good ones.
    """
    good = {"image": cells_of(PNGS[SPLITS[split]]), "label": LABELS[SPLITS[split]]}
    table = pa.table({k: v for k, v in (good | columns).items() if v is not None})
    if hf:
        import datasets

        names = [str(number) for number in range(hf)]
        label = datasets.ClassLabel(names=names)
        features = datasets.Features({"image": datasets.Image(), "label": label})
        table = table.cast(features.arrow_schema)
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def write_parquet(folder: Path, *, hf: int = 0) -> Path:
    for split in SPLITS:
        write_split(folder, split, hf=hf)
    return folder


def write_images(folder: Path) -> Path:
    """train/CLASS/*.png and test/CLASS/*.png, of the classes ant, bee, cat, dog."""
    for split, rows in SPLITS.items():
        for row in range(rows.start, rows.stop):
            file = folder / split / ("ant", "bee", "cat", "dog")[LABELS[row]] / f"{row:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(PNGS[row])
    return folder


def save_to_disk(folder: Path, train_names: str = "wxyz", test_names: str = "wxyz") -> Path:
    import datasets

    splits = {}
    for split, names in (("train", train_names), ("test", test_names)):
        label = datasets.ClassLabel(names=list(names))
        features = datasets.Features({"image": datasets.Image(), "label": label})
        columns = {"image": cells_of(PNGS[SPLITS[split]]), "label": LABELS[SPLITS[split]]}
        table = pa.table(columns).cast(features.arrow_schema)
        splits[split] = datasets.Dataset(table, info=datasets.DatasetInfo(features=features))
    datasets.disable_progress_bars()
    datasets.DatasetDict(splits).with_format("arrow").save_to_disk(str(folder))
    return folder


def write_idx(folder: Path, *, gz: bool = False, dot: str = "-", **changed: Any) -> Path:
    """MNIST's four files; `changed` has other train_images, train_labels, test_images, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, stem in (("train", "train"), ("test", "t10k")):
        images = np.asarray(changed.get(f"{split}_images", PIXELS[SPLITS[split]]))
        labels = np.asarray(changed.get(f"{split}_labels", LABELS[SPLITS[split]]))
        for kind, array in (("images", images), ("labels", labels)):
            content = struct.pack(f">{array.ndim + 1}I", 0x800 + array.ndim, *array.shape)
            content += array.astype(np.uint8).tobytes()
            name = f"{stem}-{kind}{dot}idx{array.ndim}-ubyte"
            path = folder / (f"{name}.gz" if gz else name)
            path.write_bytes(gzip.compress(content) if gz else content)
    return folder


def same_as_written(decoded: Decoded) -> bool:
    return all(
        np.array_equal(decoded.images[split], PIXELS[rows])
        and decoded.labels[split].tolist() == LABELS[rows]
        and (decoded.images[split].dtype, decoded.labels[split].dtype) == (np.uint8, np.int64)
        for split, rows in SPLITS.items()
    )


# --- Which source


@pytest.mark.parametrize(
    ("dataset", "source"),
    [
        ("mnist", Source("mnist", "hub", "ylecun/mnist")),
        (
            "fashion_mnist",
            Source("fashion_mnist", "hub", "zalando-datasets/fashion_mnist"),
        ),
        ("digits", Source("digits", "digits", "sklearn.datasets.load_digits")),
        ("someone/some-set_2.0", Source("someone--some-set_2.0", "hub", "someone/some-set_2.0")),
    ],
)
def test_names(dataset: str, source: Source) -> None:
    assert find_source(dataset) == source


def test_a_folder_is_found_under_any_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub" / "numbers").mkdir(parents=True)
    (tmp_path / "link").symlink_to("sub/numbers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = Source("numbers", "folder", str(tmp_path.resolve() / "sub" / "numbers"))
    for spelling in (tmp_path / "sub/numbers", "sub/numbers", "./sub/numbers/", "~/sub/numbers"):
        assert find_source(str(spelling)) == expected
    assert find_source("link") == expected
    assert find_source("./sub/..").place == str(tmp_path.resolve())


@pytest.mark.parametrize("dataset", ["mnits", "", " ", "MNIST", "a b/c", "/".join("é1")])
def test_an_unknown_name_is_a_usage_error(dataset: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_source(dataset)
    assert str(caught.value) == (
        f"--dataset {dataset}: no such folder; choose from mnist, auto, fashion_mnist, digits, a"
        " Hub id (owner/name) or a folder"
    )


@pytest.mark.parametrize(
    "dataset", ["/nowhere", "./nowhere", "a/b/c", "~nobody-here/x", "loop/x/y"]
)
def test_a_path_that_does_not_exist(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        find_source(dataset)
    assert str(caught.value) == f"--dataset {dataset}: there is no such folder; check the path"


def test_a_path_that_is_a_file_or_no_path(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    file.touch()
    with pytest.raises(DataError, match=r"train.parquet: is a file; give the folder it lies in$"):
        find_source(str(file))
    with pytest.raises(DataError, match=r"cannot be read \(.*name too long.*\); check its files$"):
        find_source("/" + "x" * 300)


# --- The digits


def test_digits() -> None:
    digits = find_source("digits").read()
    assert digits.classes == list("0123456789")
    assert digits.notes == ["the 8x8 digits were enlarged to 28x28"]
    assert {split: array.shape for split, array in digits.images.items()} == {
        "train": (1437, 28, 28),
        "test": (360, 28, 28),
    }
    every = np.concatenate([digits.images["train"], digits.images["test"]])
    assert (every.dtype, every.min(), every.max()) == (np.uint8, 0, 255)
    frame = np.ones((28, 28), dtype=bool)
    frame[1:-1, 1:-1] = False
    assert not every[:, frame].any()
    assert digits.labels["train"].dtype == digits.labels["test"].dtype == np.int64
    assert np.bincount(digits.labels["train"]).tolist() == [
        151,
        147,
        141,
        154,
        151,
        142,
        137,
        140,
        135,
        139,
    ]
    assert np.bincount(digits.labels["test"]).tolist() == [27, 35, 36, 29, 30, 40, 44, 39, 39, 41]
    # the same bytes on every machine
    assert (
        hashlib.sha256(every.tobytes()).hexdigest()
        == "fbade72e9c27027b1c97d5533cdc2dc87f94b43e80062cc9e3e1da25cccb4f31"
    )


def test_digits_are_scikit_learns_in_a_fixed_order() -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(1797)
    digits = find_source("digits").read()
    assert digits.labels["test"].tolist() == labels[order[:360]].tolist()
    assert digits.labels["train"].tolist() == labels[order[360:]].tolist()
    # the middle of each 3x3 block is the pixel itself, 0..16 brought to 0..255
    middles = digits.images["test"][:, 3::3, 3::3][:, :8, :8].reshape(360, 64)
    assert np.array_equal(middles, pixels[order[:360]].astype(int) * 255 // 16)


# --- Good folders


@pytest.mark.parametrize("hf", [0, 4])
def test_parquet_with_and_without_metadata(hf: int, tmp_path: Path) -> None:
    decoded = read(write_parquet(tmp_path, hf=hf))
    assert same_as_written(decoded)
    assert decoded.classes == ["0", "1", "2", "3"]
    assert decoded.notes == []


def test_declared_classes_may_be_more_than_those_met(tmp_path: Path) -> None:
    assert read(write_parquet(tmp_path, hf=10)).classes == list("0123456789")


def test_parquet_in_several_files_with_other_columns(tmp_path: Path) -> None:
    write_parquet(tmp_path)
    first = tmp_path / "train-00000-of-00001.parquet"
    table = pq.read_table(first).append_column("writer", [["me"] * TRAIN])
    first.unlink()
    for part, rows in enumerate((slice(0, 7), slice(7, TRAIN))):
        piece = table.slice(rows.start, rows.stop - rows.start)
        pq.write_table(piece, tmp_path / f"train-0000{part}-of-00002.parquet")
    assert same_as_written(read(tmp_path))


def test_images_in_folders_of_their_class(tmp_path: Path) -> None:
    decoded = read(write_images(tmp_path))
    assert decoded.classes == ["ant", "bee", "cat", "dog"]
    assert decoded.notes == []
    for split, rows in SPLITS.items():  # read class by class, in the order of names
        order = sorted(range(rows.start, rows.stop), key=lambda row: (LABELS[row], row))
        assert decoded.labels[split].tolist() == [LABELS[row] for row in order]
        assert np.array_equal(decoded.images[split], PIXELS[order])


def test_save_to_disk(tmp_path: Path) -> None:
    decoded = read(save_to_disk(tmp_path))
    assert same_as_written(decoded)
    assert decoded.classes == ["w", "x", "y", "z"]


def test_words_as_labels(tmp_path: Path) -> None:
    words = ["four", "one", "three", "two"]  # sorted, as classes are
    for split, rows in SPLITS.items():
        write_split(tmp_path, split, label=[words[label] for label in LABELS[rows]])
    decoded = read(tmp_path)
    assert same_as_written(decoded)
    assert decoded.classes == words


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("place", [".", "raw", "MNIST/raw"])
def test_idx_files(place: str, gz: bool, tmp_path: Path) -> None:
    write_idx(tmp_path / place, gz=gz, dot="." if gz else "-")
    decoded = read(tmp_path)
    assert same_as_written(decoded)
    assert decoded.classes == list("0123456789")
    assert decoded.notes == []


def test_real_mnist(mnist: Path, tmp_path: Path) -> None:
    """The 10,000 test images as both splits: decoding all 70,000 takes seconds."""
    file = next(mnist.rglob("test-*.parquet"))
    for split in SPLITS:
        (tmp_path / f"{split}.parquet").symlink_to(file)
    decoded = read(tmp_path)
    assert decoded.images["test"].shape == (10_000, 28, 28)
    assert decoded.labels["test"][:10].tolist() == [7, 2, 1, 0, 4, 1, 4, 9, 5, 9]
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert np.bincount(decoded.labels["test"]).tolist() == counts
    # with its header this is t10k-images-idx3-ubyte, whose MD5 is known
    original = struct.pack(">4I", 0x803, *decoded.images["test"].shape)
    original += decoded.images["test"].tobytes()
    assert hashlib.md5(original).hexdigest() == "2646ac647ad5339dbf082846283269ea"


# --- Conversions


def with_images(folder: Path, files: list[bytes]) -> Decoded:
    """A data set that begins with these images; what it decodes to."""
    write_parquet(folder)
    write_split(folder, "train", image=cells_of([*files, *PNGS[len(files) : TRAIN]]))
    return read(folder)


def one_colour(mode: str, colour: Any, side: int = 28) -> PIL.Image.Image:
    return PIL.Image.new(mode, (side, side), colour)


@pytest.mark.parametrize(
    ("image", "kind", "grey"),
    [
        (one_colour("RGB", (255, 0, 0), 32), "32x32 RGB", 76),  # ITU-R 601: 0.299 of red
        (one_colour("RGB", (0, 255, 0)), "28x28 RGB", 150),
        (one_colour("L", 200, 14), "14x14 L", 200),
        (one_colour("1", 1), "28x28 1", 255),
        (one_colour("RGBA", (0, 0, 255, 255)), "28x28 RGBA", 29),
        (one_colour("RGBA", (0, 0, 0, 0)), "28x28 RGBA", 255),  # transparent means paper
        (one_colour("RGB", (255, 0, 0)).quantize(2), "28x28 P", 76),
        (one_colour("LA", (0, 0)), "28x28 LA", 255),
        (one_colour("I;16", 0x8000), "28x28 I;16", 128),
        (one_colour("I;16", 0xFFFF), "28x28 I;16", 255),
        (one_colour("I;16", 0x00FF), "28x28 I;16", 0),
    ],
)
def test_every_mode_becomes_grey(
    image: PIL.Image.Image, kind: str, grey: int, tmp_path: Path
) -> None:
    decoded = with_images(tmp_path, [encoded(image)])
    assert set(decoded.images["train"][0].ravel().tolist()) == {grey}
    assert np.array_equal(decoded.images["train"][1:], PIXELS[1:TRAIN])
    assert decoded.notes == [f"images of {kind} became 28x28 grey"]


def test_a_transparent_colour_of_a_palette_is_paper(tmp_path: Path) -> None:
    file = io.BytesIO()
    PIL.Image.fromarray(np.zeros((28, 28), dtype=np.uint8)).convert("P").save(
        file, "PNG", transparency=0
    )
    assert with_images(tmp_path, [file.getvalue()]).images["train"][0].min() == 255


def test_large_images_keep_their_picture(tmp_path: Path) -> None:
    large = PIXELS[0].repeat(2, axis=0).repeat(2, axis=1)
    jpeg = encoded(np.full((28, 28), 90, dtype=np.uint8), kind="JPEG")
    decoded = with_images(tmp_path, [encoded(large), jpeg])
    shrunk = decoded.images["train"][0].astype(int)
    # a triangle filter blurs noise, and keeps what it is blurred from
    assert abs(shrunk.mean() - PIXELS[0].mean()) < 2
    assert np.corrcoef(shrunk.ravel(), PIXELS[0].ravel())[0, 1] > 0.9
    assert set(decoded.images["train"][1].ravel().tolist()) == {90}
    assert decoded.notes == ["images of 56x56 L became 28x28 grey"]


def test_mixed_sizes_are_told_in_one_line(tmp_path: Path) -> None:
    def squares(*sides: int) -> list[bytes]:
        return [encoded(one_colour("L", 7, side)) for side in sides]

    three = with_images(tmp_path, squares(20, 30, 40, 20, 30, 40))
    assert three.notes == ["images of 20x20 L, 30x30 L, 40x40 L became 28x28 grey"]
    five = with_images(tmp_path, squares(50, 20, 30, 40, 60, 60))
    assert five.notes == ["images of 20x20 L, 30x30 L, 40x40 L and 2 more kinds became 28x28 grey"]
    assert set(five.images["train"][:6].ravel().tolist()) == {7}


# --- Faults

Spoiler = Callable[[Path], object]
REMEDIES = ("add", "check", "correct", "fetch", "give", "label", "name", "put", "replace")


def refused(folder: Path) -> str:
    """What is said of a bad folder, after the checks that hold for all of them."""
    with pytest.raises(DdpMnistError) as caught:
        read(folder)
    message = str(caught.value)
    assert type(caught.value) is DataError
    assert "\n" not in message
    assert one_line(caught.value).endswith(" (code 3)")
    assert str(folder) in message.partition(": ")[0]
    assert message.rpartition("; ")[2].split()[0] in REMEDIES, message
    return message.replace(str(folder), "DIR").removeprefix("--dataset DIR: ")


def rewritten(name: str, change: Callable[[bytes], bytes]) -> Spoiler:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def removed(name: str) -> Spoiler:
    return lambda folder: (folder / name).unlink()


def split_with(split: str, *, hf: int = 0, **columns: Any) -> Spoiler:
    return lambda folder: write_split(folder, split, hf=hf, **columns)


def both(*, hf: int = 0, **columns: Any) -> Spoiler:
    """The same first five rows of columns in both splits."""

    def spoil(folder: Path) -> None:
        for split in SPLITS:
            write_split(folder, split, hf=hf, **{"image": cells_of(PNGS[:5]), **columns})

    return spoil


def with_row(row: int, file: bytes | None) -> pa.Array:
    return cells_of([*PNGS[:row], file, *PNGS[row + 1 : TRAIN]])


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:at] + bytes([content[at] ^ 0x55]) + content[at + 1 :]


def bad_text(values: list[bytes]) -> pa.Array:
    """Strings that are not UTF-8."""
    return pa.array(values, pa.binary()).view(pa.string())


TRAIN_FILE, TEST_FILE = "train-00000-of-00001.parquet", "test-00000-of-00001.parquet"
NEGATIVE = [0, 1, 2, -1, *LABELS[4:TRAIN]]
IN_TRAIN, IN_TEST = "split train, column", "split test, column"

PARQUET_FAULTS: dict[str, tuple[Spoiler, str]] = {
    "truncated": (rewritten(TRAIN_FILE, lambda content: content[:900]), f"{TRAIN_FILE} is damaged"),
    "without footer": (rewritten(TEST_FILE, lambda c: c[:-9]), f"{TEST_FILE} is damaged"),
    "garbage": (rewritten(TRAIN_FILE, lambda c: b"\x13" * len(c)), f"{TRAIN_FILE} is damaged"),
    "empty file": (rewritten(TEST_FILE, lambda _: b""), f"{TEST_FILE} is damaged"),
    "no image column": (both(image=None, label=[1, 2]), "no image column among label;"),
    "images that are words": (
        both(image=pa.array(["a.png"] * 5), label=[0] * 5),
        "no image column among image, label;",
    ),
    "no label column": (both(label=None), "no label column among image;"),
    "label column by another name": (
        both(label=None, digit=[0] * 5),
        "no label column among image, digit;",
    ),
    "test without images": (split_with("test", image=None), f"{IN_TEST} image: row 0 has no image"),
    "test without labels": (split_with("test", label=None), f"{IN_TEST} label: row 0 has no label"),
    "words in one split only": (
        split_with("test", label=list("abcde")),
        f"column label is string in {TEST_FILE} and int64 in {TRAIN_FILE};",
    ),
    "image of another type": (
        split_with("test", image=[1, 2, 3, 4, 5]),
        f"column image is int64 in {TEST_FILE} and struct<",
    ),
    "label -1": (split_with("train", label=NEGATIVE), f"{IN_TRAIN} label: row 3 has label -1;"),
    "all labels -1": (split_with("train", label=[-1] * TRAIN), "row 0 has label -1; give a whole"),
    "label -1 of declared classes": (
        split_with("train", hf=4, label=NEGATIVE),
        f"{IN_TRAIN} label: row 3 has label -1; give a whole number from 0 to 3",
    ),
    "label beyond declared classes": (
        split_with("train", hf=3),
        f"{IN_TRAIN} label: row 3 has label 3; give a whole number from 0 to 2",
    ),
    "label None": (
        split_with("train", label=[0, 1, None, *LABELS[3:TRAIN]]),
        f"{IN_TRAIN} label: row 2 has no label;",
    ),
    "labels all None": (both(label=[None] * 5), f"{IN_TRAIN} label: row 0 has no label;"),
    "huge label": (
        split_with("train", label=[0, 2**40, *LABELS[2:TRAIN]]),
        f"{IN_TRAIN} label: row 1 has label {2**40}; give a whole number from 0 to 999",
    ),
    "label too large for int64": (
        both(label=pa.array([0, 1, 2, 3, 2**64 - 1], pa.uint64())),
        f"{IN_TRAIN} label: row 4 has label {2**64 - 1};",
    ),
    "labels with a fraction": (both(label=[0.0, 1.0, 2.5, 3.0, 1.0]), "label: labels are float;"),
    "labels that are lists": (both(label=[[1]] * 5), "label: labels are list;"),
    "labels that are no text": (
        both(label=bad_text([b"a\xff"] * 5)),
        f"{IN_TRAIN} label: cannot be read (",
    ),
    "too many words": (
        both(image=cells_of(PNGS[:1] * 1001), label=[f"w{n}" for n in range(1001)]),
        "split train, column label: 1001 classes; give at most 1000",
    ),
    "test label above train's": (
        split_with("test", label=[0, 1, 7, 2, 3]),
        f"{IN_TEST} label: row 2 has label 7; give a whole number from 0 to 3",
    ),
    "test label that no train row has": (
        split_with("train", label=[0, 1, 3] * 4),
        f"{IN_TEST} label: row 2 has label 2, which no train row has;",
    ),
    "no rows in test": (
        split_with("test", image=cells_of([]), label=pa.array([], pa.int64())),
        f"{TEST_FILE} has no rows;",
    ),
    "no rows in train": (
        split_with("train", image=cells_of([]), label=pa.array([], pa.int64())),
        f"{TRAIN_FILE} has no rows;",
    ),
    "no test split": (removed(TEST_FILE), "needs the splits train and test, found: train;"),
    "no train split": (removed(TRAIN_FILE), "needs the splits train and test, found: test;"),
    "image cut short": (
        split_with("train", image=with_row(7, PNGS[7][:300])),
        f"{IN_TRAIN} image: row 7 is no readable image (image file is truncated);",
    ),
    "image damaged": (
        split_with("train", image=with_row(11, flipped(200)(PNGS[11]))),
        f"{IN_TRAIN} image: row 11 is no readable image (",
    ),
    "image that is none": (
        split_with("train", image=with_row(0, b"GIF, or so")),
        f"{IN_TRAIN} image: row 0 is no readable image (of no format that Pillow knows);",
    ),
    "image of unknown range": (
        split_with("train", image=with_row(4, encoded(one_colour("F", 0.5), kind="TIFF"))),
        f"{IN_TRAIN} image: row 4 is no readable image (mode F has no fixed range",
    ),
    "image None": (
        split_with("train", image=with_row(5, None)),
        f"{IN_TRAIN} image: row 5 has no image;",
    ),
    "image of no bytes": (
        split_with("train", hf=4, image=with_row(6, b"")),
        f"{IN_TRAIN} image: row 6 has no image;",
    ),
    "README that is no YAML": (
        lambda folder: (folder / "README.md").write_text("---\nconfigs: [\n---\n"),
        "cannot be read (",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("fault", PARQUET_FAULTS)
def test_fault_26_a_fault_in_parquet_is_named(fault: str, tmp_path: Path) -> None:
    spoil, expected = PARQUET_FAULTS[fault]
    spoil(write_parquet(tmp_path / "it"))
    assert expected in refused(tmp_path / "it")


def renamed(old: str, new: str) -> Spoiler:
    return lambda folder: (folder / old).rename(folder / new)


def emptied(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry)


def only_text(folder: Path) -> None:
    emptied(folder)
    (folder / "notes.txt").write_text("1\n2\n")


IMAGE_FAULTS: dict[str, tuple[Spoiler, str]] = {
    "broken file": (
        rewritten("train/bee/05.png", flipped(200)),
        "split train, column image: row 4 DIR/train/bee/05.png is no readable image (broken",
    ),
    "empty file": (
        rewritten("test/ant/12.png", lambda _: b""),
        "split test, column image: row 0 DIR/test/ant/12.png is no readable image (of no format",
    ),
    "no test images": (lambda f: shutil.rmtree(f / "test"), "found: train;"),
    "no classes": (
        lambda f: [p.rename(p.parent.parent / p.name) for p in f.rglob("*.png")],
        "split train, column label: row 0 has no label;",
    ),
    "class in test only": (
        renamed("test/dog", "test/Dog"),
        "split test, column label: row 0 has label Dog, which no train row has;",
    ),
    "nothing at all": (emptied, "the folder is empty;"),
    "other files": (only_text, "needs the splits train and test, found: train;"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("fault", IMAGE_FAULTS)
def test_fault_26_a_fault_among_image_files_is_named(fault: str, tmp_path: Path) -> None:
    spoil, expected = IMAGE_FAULTS[fault]
    spoil(write_images(tmp_path / "it"))
    assert expected in refused(tmp_path / "it")


def saved_test(labels: pa.Array | None) -> Spoiler:
    """Splits without declared classes, the test split with these labels."""

    def spoil(folder: Path) -> None:
        import datasets

        train = {"image": cells_of(PNGS[:TRAIN]), "label": pa.array(LABELS[:TRAIN])}
        test = {"image": cells_of(PNGS[TRAIN:])} | ({} if labels is None else {"label": labels})
        splits = {"train": pa.table(train), "test": pa.table(test)}
        shutil.rmtree(folder)
        saved = {split: datasets.Dataset(table) for split, table in splits.items()}
        datasets.DatasetDict(saved).save_to_disk(str(folder))

    return spoil


def split_alone(folder: Path) -> None:
    (folder / "dataset_dict.json").unlink()
    shutil.rmtree(folder / "test")


ARROW = "train/data-00000-of-00001.arrow"
SAVED_FAULTS: dict[str, tuple[Spoiler, str]] = {
    "cut short": (rewritten(ARROW, lambda content: content[:3000]), f"{ARROW} is damaged ("),
    "empty file": (rewritten(ARROW, lambda _: b""), f"{ARROW} is damaged ("),
    "missing file": (removed(ARROW), ARROW),
    "other class names in test": (
        lambda folder: save_to_disk(folder, test_names="zyxw"),
        "column label is ClassLabel(names=['w', 'x', 'y', 'z']) in train and ClassLabel(names=['",
    ),
    "labels with a fraction in test": (
        saved_test(pa.array([0.0, 1.0, 2.5, 3.0, 1.0])),
        "column label is Value('int64') in train and Value('float64') in test;",
    ),
    "test without labels": (saved_test(None), "split test has no column label;"),
    "a split alone": (
        split_alone,
        "needs the splits train and test, found: ",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("fault", SAVED_FAULTS)
def test_fault_26_a_fault_in_a_saved_data_set_is_named(fault: str, tmp_path: Path) -> None:
    spoil, expected = SAVED_FAULTS[fault]
    spoil(save_to_disk(tmp_path / "it"))
    assert expected in refused(tmp_path / "it")


IMAGES, IDX_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
NO_IDX = "is not an IDX file, or is cut short; fetch it again"
IDX_FAULTS: dict[str, tuple[Spoiler, str]] = {
    "cut short": (rewritten(IMAGES, lambda content: content[:-1]), f"DIR/{IMAGES}: {NO_IDX}"),
    "longer": (rewritten(IDX_LABELS, lambda c: c + b"0"), f"DIR/{IDX_LABELS}: {NO_IDX}"),
    "cut in the header": (rewritten(IMAGES, lambda c: c[:10]), f"DIR/{IMAGES}: {NO_IDX}"),
    "empty": (rewritten(IDX_LABELS, lambda _: b""), f"DIR/{IDX_LABELS}: {NO_IDX}"),
    "wrong magic": (rewritten(IMAGES, flipped(2)), f"DIR/{IMAGES}: {NO_IDX}"),
    "labels for images": (
        lambda f: shutil.copy(f / IDX_LABELS, f / IMAGES),
        f"DIR/{IMAGES}: {NO_IDX}",
    ),
    "sizes beyond all memory": (
        rewritten(IMAGES, lambda c: c[:4] + b"\xff" * 12 + c[16:]),
        f"DIR/{IMAGES}: {NO_IDX}",
    ),
    "three of four": (
        removed(IDX_LABELS),
        "of MNIST's four IDX files only 3 are there; fetch the others",
    ),
    "counts differ": (
        lambda f: write_idx(f, test_labels=LABELS[:3]),
        "DIR/t10k-images-idx3-ubyte: 5 images but 3 labels; fetch both files again",
    ),
    "no rows": (
        lambda f: write_idx(f, train_images=PIXELS[:0], train_labels=[]),
        f"DIR/{IMAGES}: 0 images but 0 labels; fetch",
    ),
    "other size": (
        lambda f: write_idx(f, train_images=PIXELS[:TRAIN, :14]),
        f"DIR/{IMAGES}: images must be 28x28; fetch",
    ),
    "test label that no train row has": (
        lambda f: write_idx(f, test_labels=[0, 1, 2, 77, 3]),
        "DIR/t10k-labels-idx1-ubyte: row 3 has label 77, which no train row has; correct",
    ),
}
GZ_FAULTS: dict[str, tuple[Spoiler, str]] = {
    "cut short": (rewritten(f"{IMAGES}.gz", lambda c: c[:-9]), f"DIR/{IMAGES}.gz: cannot be read"),
    "one byte": (rewritten(f"{IMAGES}.gz", flipped(100)), f"DIR/{IMAGES}.gz: cannot be read ("),
    "no deflate": (
        rewritten(f"{IMAGES}.gz", lambda c: c[:10] + b"\xff" + c[11:]),
        f"DIR/{IMAGES}.gz: cannot be read (Error -3 while decompressing data: invalid block type)",
    ),
    "no gzip": (rewritten(f"{IDX_LABELS}.gz", flipped(0)), f"DIR/{IDX_LABELS}.gz: cannot be read"),
    "empty": (rewritten(f"{IDX_LABELS}.gz", lambda _: b""), f"DIR/{IDX_LABELS}.gz: "),
}


@pytest.mark.parametrize("fault", IDX_FAULTS)
def test_fault_26_a_fault_in_idx_files_is_named(fault: str, tmp_path: Path) -> None:
    spoil, expected = IDX_FAULTS[fault]
    spoil(write_idx(tmp_path / "it"))
    assert expected in refused(tmp_path / "it")


@pytest.mark.parametrize("fault", GZ_FAULTS)
def test_fault_26_a_fault_in_packed_idx_files_is_named(fault: str, tmp_path: Path) -> None:
    spoil, expected = GZ_FAULTS[fault]
    spoil(write_idx(tmp_path / "it", gz=True))
    assert expected in refused(tmp_path / "it")


def test_a_folder_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run as root, who may read all: the refusal is put in by hand."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    source = find_source(str(write_idx(tmp_path)))
    monkeypatch.setattr(Path, "rglob", refuse)
    for use in (source.fingerprint, source.read):
        (tmp_path / IMAGES).unlink(missing_ok=True)
        with pytest.raises(DataError, match=r"^--dataset .*[;,:] .*; (check|fetch) ") as caught:
            use()
        assert str(tmp_path) in str(caught.value)


def failing_with(code: int, text: str) -> Callable[..., None]:
    """An OSError, wrapped as datasets wraps it."""

    def fail(*_: Any, **__: Any) -> None:
        try:
            raise OSError(code, text)
        except OSError as error:
            raise RuntimeError("while writing a table") from error

    return fail


def test_fault_29_no_space_to_unpack_a_folder_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = failing_with(28, "No space left on device")
    monkeypatch.setattr("datasets.load_dataset", full)
    with pytest.raises(StorageError) as caught:
        read(write_parquet(tmp_path))
    assert str(caught.value) == (
        f"{tempfile.gettempdir()}: cannot be written (No space left on device); set TMPDIR to"
        " another folder"
    )


@pytest.mark.parametrize("code", [28, 13, 30])
def test_no_place_for_what_comes_from_the_hub(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_mnist.data.sources.why_out_of_reach", lambda _: "")
    monkeypatch.setattr("datasets.load_dataset", failing_with(code, "Refused"))
    with pytest.raises(StorageError) as caught:
        find_source("mnist").read()
    home = os.environ["HF_HOME"]
    expected = f"{home}: cannot be written (Refused); set HF_HOME to another folder"
    assert str(caught.value) == expected


def test_a_folder_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where HF_HUB_OFFLINE is unset and its README points elsewhere."""

    def no_sockets(*_: Any) -> None:
        raise AssertionError("a socket was opened")

    import datasets

    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", no_sockets)
    monkeypatch.setattr(socket.socket, "connect", no_sockets)
    assert same_as_written(read(write_parquet(tmp_path)))
    config = "{config_name: it, data_files: 'hf://datasets/some/one/train.parquet'}"
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n- {config}\n---\n")
    message = refused(tmp_path)
    assert "cannot be read (" in message
    assert "a socket was opened" not in message
    assert datasets.config.HF_HUB_OFFLINE is False


def test_innermost_is_one_short_line() -> None:
    try:
        try:
            raise ValueError("  the cause.\nand more\n")
        except ValueError as error:
            raise RuntimeError("around it") from error
    except RuntimeError as error:
        assert reason(error) == "the cause"
    assert reason(KeyError()) == "KeyError"
    assert len(reason(OSError("x" * 999))) == 160


# --- The Hub

DEADLINE_S = 15
SHOW = """
import hashlib, json, sys, time
from ddp_mnist.errors import DdpMnistError
def show(function):
    try:
        result = function()
    except DdpMnistError as error:
        result = [type(error).__name__, error.code, str(error)]
    print(json.dumps(result), flush=True)
def waited_for_a_cpu():
    try:
        with open("/proc/self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0
import atexit
atexit.register(lambda: print(waited_for_a_cpu(), flush=True))
"""
LOAD = """
from ddp_mnist import data
def values(dataset):
    images = data.load(dataset)
    pixels = hashlib.sha256(images.train_images.numpy().tobytes()).hexdigest()
    return [images.source, pixels, images.test_labels.tolist(), images.warnings]
"""
WRITTEN = [
    "hub:ylecun/mnist",
    hashlib.sha256(PIXELS[:TRAIN].tobytes()).hexdigest(),
    LABELS[TRAIN:],
    [],
]


def run_script(
    script: str, endpoint: str, home: Path, *, code: int = 0, stderr: str = ""
) -> list[Any]:
    """What it showed on stdout, then the seconds that it waited for a CPU.

    A new process, because HF_ENDPOINT is read at import.
    """
    done = subprocess.run(
        [sys.executable, "-c", LOOPBACK_ONLY + SHOW + script],
        env=hub_environment(endpoint, home),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (code, stderr)
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if not line.startswith("reading ")]


def timed(*args: Any, **options: Any) -> tuple[float, Any]:
    """Seconds that `run_script` takes where nobody else wants the CPUs, and its result."""
    start = time.monotonic()
    *shown, waited_for_a_cpu = run_script(*args, **options)
    return time.monotonic() - start - waited_for_a_cpu, shown


READ_MNIST = """
from ddp_mnist.sources import find_source
show(lambda: find_source("mnist").read())
"""
DEAF_NAME_SERVER = """
def deaf(*args, **kwargs):
    time.sleep(100)
socket.getaddrinfo = deaf
"""
AUTO_THEN_PREPARE = """
from ddp_mnist import data
from ddp_mnist.cli import main
show(lambda: data.choose("auto"))
main(["prepare", "--dataset", "mnist"])
"""
WAY_OUT = (
    "; run ddp-mnist prepare where there is a network and copy the cache folder, give a folder"
    " (--dataset PATH), or train on the built-in digits (--dataset digits)"
)
NOT_HERE = "--dataset ylecun/mnist: not in the cache, and the Hub cannot be reached ("
REFUSED = f"{NOT_HERE}[Errno 111] Connection refused)"
Runs = dict[str, "concurrent.futures.Future[tuple[float, Any]]"]


@pytest.fixture(scope="module")
def without_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Runs with nothing cached and the Hub out of reach in several ways, all at the same time."""
    closed = f"http://127.0.0.1:{free_port()}"

    def home() -> Path:
        return tmp_path_factory.mktemp("home")

    with concurrent.futures.ThreadPoolExecutor() as pool, silent_server() as silent:
        line = f"ddp-mnist: error: {REFUSED}{WAY_OUT} (code 3)\n"
        yield {
            "closed": pool.submit(timed, AUTO_THEN_PREPARE, closed, home(), code=3, stderr=line),
            "silent": pool.submit(timed, READ_MNIST, silent, home()),
            "no names": pool.submit(
                timed, DEAF_NAME_SERVER + READ_MNIST, "http://hub.invalid", home()
            ),
        }


@pytest.fixture(scope="module")
def with_hub(
    tmp_path_factory: pytest.TempPathFactory,
    without_hub: Runs,  # noqa: ARG001 (they run meanwhile)
) -> tuple[Path, Hub, list[Any]]:
    """A home after it read from the Hub, the Hub (down again), and what was shown."""
    folder, home = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("home")
    script = """
show(lambda: values("mnist"))
show(lambda: data.choose("auto"))
show(lambda: values("nobody/nothing"))
"""
    with Hub("ylecun/mnist", write_parquet(folder, hf=4)).running() as hub:
        return home, hub, run_script(LOAD + script, hub.endpoint, home)


def test_reads_from_the_hub(with_hub: tuple[Path, Hub, list[Any]]) -> None:
    _, hub, shown = with_hub
    assert shown[0] == WRITTEN
    for name in hub.files:
        assert sum(r.startswith("GET") and r.endswith(f"/{name}") for r in hub.requests) == 1


def test_auto_is_mnist_where_the_hub_has_it(with_hub: tuple[Path, Hub, list[Any]]) -> None:
    assert with_hub[2][1] == ["mnist", []]


def test_a_data_set_that_the_hub_does_not_have(with_hub: tuple[Path, Hub, list[Any]]) -> None:
    message = (
        "--dataset nobody/nothing: the Hub has no such data set for you; check the id, or log in"
        " (hf auth login) if it is private"
    )
    assert with_hub[2][2] == ["DataError", 3, message]


def test_fault_28_caches_do_without_the_hub(with_hub: tuple[Path, Hub, list[Any]]) -> None:
    home, hub, _ = with_hub
    asked = len(hub.requests)
    script = f"""
show(lambda: values("mnist"))
show(lambda: "datasets" in sys.modules or "huggingface_hub" in sys.modules)
import shutil
shutil.rmtree({str(home / "cache")!r})
show(lambda: values("mnist"))
"""
    ours, imported, hugging_faces, _ = run_script(LOAD + script, hub.endpoint, home)
    assert ours == WRITTEN
    assert imported is False
    assert hugging_faces == WRITTEN
    assert len(hub.requests) == asked


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """`why_out_of_reach`, in this process, of a Hub that answers everything with one thing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)

    def ask(status: int, headers: dict[str, str], content: bytes) -> str:
        hub = Hub("ylecun/mnist", tmp_path)
        monkeypatch.setattr(hub, "answer", lambda _: (status, headers, content))
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
        with hub.running():
            return sources.why_out_of_reach("ylecun/mnist")

    return ask


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_hub_that_refuses(status: int, ask: Callable[..., str]) -> None:
    with pytest.raises(DataError, match=r"^--dataset ylecun/mnist: the Hub has no such data set"):
        ask(status, {}, b"")


def test_a_hub_that_is_ill_is_out_of_reach(ask: Callable[..., str]) -> None:
    assert "503 Service Unavailable" in ask(503, {}, b"")
    portal = ask(200, {"Content-Type": "text/html"}, b"<html>please log in</html>")
    assert portal == "Expecting value: line 1 column 1 (char 0)"
    assert ask(*as_json({"id": "ylecun/mnist", "sha": "0" * 40})) == ""


def test_offline_is_believed() -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"  # tests/conftest.py
    assert sources.why_out_of_reach("ylecun/mnist") == "HF_HUB_OFFLINE is set"


def test_fault_28_nothing_cached_and_no_hub(without_hub: Runs) -> None:
    """`auto` is the digits, loudly; `mnist` is an error. One process tells both."""
    seconds, [[name, notes]] = without_hub["closed"].result()
    assert seconds < DEADLINE_S
    assert name == "digits"
    assert notes == [
        f"MNIST could not be had: {REFUSED}",
        "INSTEAD OF MNIST, this is a run on the 1,797 digits built into scikit-learn",
    ]


@pytest.mark.parametrize("how", ["silent", "no names"])
def test_fault_28_nothing_cached_and_a_hub_that_does_not_answer(
    how: str, without_hub: Runs
) -> None:
    seconds, [[kind, code, message]] = without_hub[how].result()
    assert 4 < seconds < DEADLINE_S
    assert (kind, code) == ("DataError", 3)
    assert message.startswith(NOT_HERE)
    assert message.endswith(WAY_OUT)
