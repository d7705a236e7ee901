"""Data sets that tests write: of every format, of noise, of odd images, of few digits."""

import csv
import gzip
import io
import os
import struct
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.image_format import DIGITS, ImageFormat

# datasets reads its environment at import: not before conftest.py set it.

GREY = ImageFormat((1, 28, 28), (0.1307,), (0.3081,), [], bright_on_black=True, digit_photos=True)
COLOUR = ImageFormat((3, 32, 40), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), [], False, False)
DRAWN = ImageOptions(test_size=4)
RED = (200, 10, 10)

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"

TRAIN, TEST = 12, 5
PIXELS = np.random.default_rng(0).integers(0, 256, (TRAIN + TEST, 28, 28), dtype=np.uint8)
LABELS = [row % 4 for row in range(TRAIN + TEST)]
SPLITS = {"train": slice(0, TRAIN), "test": slice(TRAIN, TRAIN + TEST)}


class Part(NamedTuple):
    """The images of one split."""

    images: torch.Tensor
    labels: torch.Tensor
    keys: np.ndarray


def fake_ghostscript(folder: Path) -> str:
    """Return a PATH on which gs writes the file `started`."""
    (folder / "bin").mkdir()
    (program := folder / "bin" / "gs").write_text(f"#!/bin/sh\ntouch '{folder}/started'\n")
    program.chmod(0o755)
    return f"{folder}/bin:{os.environ['PATH']}"


def named(columns: str) -> ImageOptions:
    """Return how `--columns` says to read a table."""
    return ImageOptions.from_flags({"image_size": None, "columns": columns})


def of(data: ImageData, split: str) -> Part:
    rows = data.rows[split]
    images, targets = (torch.from_numpy(each[rows]) for each in (data.images, data.targets))
    return Part(images, targets, data.keys[rows])


def read(folder: Path | str, reading: ImageOptions = AS_THEY_ARE) -> ImageData:
    """Return a data set that was decoded for this call."""
    with tempfile.TemporaryDirectory() as place:
        data = cache.load(str(folder), place, reading)
        return replace(data, images=np.array(data.images), keys=np.array(data.keys))


# --- Folders of every format


def encoded(pixels: Any, format: str = "PNG", **options: Any) -> bytes:
    """Return an image file of a Pillow image or of an array."""
    image = pixels if isinstance(pixels, PIL.Image.Image) else PIL.Image.fromarray(pixels)
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


PNGS = [encoded(pixels) for pixels in PIXELS]


def cells_of(files: Sequence[bytes | None]) -> pa.Array:
    cells = [None if file is None else {"bytes": file, "path": None} for file in files]
    return pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))


def table_of(split: str, names: Sequence[str] = (), **columns: Any) -> pa.Table:
    """Return a split's columns `image` and `label`; `columns` replace them, or leave out if None.

    With `names` it has Hugging Face's metadata, as MNIST has.
    """
    rows = SPLITS[split]
    every = {"image": cells_of(PNGS[rows]), "label": LABELS[rows], **columns}
    table = pa.table({name: values for name, values in every.items() if values is not None})
    if not names:
        return table
    import datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(names))}
    return table.cast(datasets.Features(features).arrow_schema)


def write_split(folder: Path, split: str, names: Sequence[str] = (), **columns: Any) -> None:
    folder.mkdir(exist_ok=True)
    pq.write_table(table_of(split, names, **columns), folder / f"{split}-00000-of-00001.parquet")


def write_parquet(folder: Path, names: Sequence[str] = ()) -> Path:
    for split in SPLITS:
        write_split(folder, split, names)
    return folder


def write_images(folder: Path) -> Path:
    """Write train/CLASS/*.png and test/CLASS/*.png, of the classes ant, bee, cat, dog."""
    for split, rows in SPLITS.items():
        for row in range(rows.start, rows.stop):
            file = folder / split / ("ant", "bee", "cat", "dog")[LABELS[row]] / f"{row:02}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(PNGS[row])
    return folder


def save_to_disk(folder: Path, train_names: str = "wxyz", test_names: str = "wxyz") -> Path:
    import datasets

    datasets.disable_progress_bars()
    train, test = table_of("train", train_names), table_of("test", test_names)
    splits = {"train": datasets.Dataset(train), "test": datasets.Dataset(test)}
    datasets.DatasetDict(splits).with_format("arrow").save_to_disk(str(folder))
    return folder


def write_idx(folder: Path, *, gz: bool = False, dot: str = "-", **changed: Any) -> Path:
    """Write MNIST's four files; `changed` has other train_images, train_labels, test_images, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, stem in (("train", "train"), ("test", "t10k")):
        images = np.asarray(changed.get(f"{split}_images", PIXELS[SPLITS[split]]))
        labels = np.asarray(changed.get(f"{split}_labels", LABELS[SPLITS[split]]))
        images = images.reshape(-1, *images.shape[-2:])  # of one channel, whether it says so or not
        for kind, array in (("images", images), ("labels", labels)):
            content = struct.pack(f">{array.ndim + 1}I", 0x800 + array.ndim, *array.shape)
            content += array.astype(np.uint8).tobytes()
            name = f"{stem}-{kind}{dot}idx{array.ndim}-ubyte"
            path = folder / (f"{name}.gz" if gz else name)
            path.write_bytes(gzip.compress(content) if gz else content)
    return folder


def few_digits(folder: Path, train: int, test: int) -> Path:
    """Write a folder of the first digits of each split, as IDX files."""
    digits, rows = cache.load("digits"), {"train": train, "test": test}
    few = {
        f"{split}_{kind}": getattr(of(digits, split), kind)[:count]
        for split, count in rows.items()
        for kind in ("images", "labels")
    }
    return write_idx(folder, **few)


def write_digits(folder: Path) -> Path:
    """Write half of the digits as tables with Hugging Face's metadata, as MNIST is stored."""
    digits = cache.load("digits")
    for split, count in (("train", 720), ("test", 90)):
        images, labels, _ = of(digits, split)
        files = cells_of([encoded(image[0].numpy()) for image in images[:count]])
        write_split(folder, split, DIGITS, image=files, label=labels[:count].tolist())
    return folder


def write_metadata(
    folder: Path, rows: Iterable[Sequence[object]], columns: str = "file_name label"
) -> None:
    with (folder / "metadata.csv").open("w", newline="") as file:
        csv.writer(file).writerows([columns.split(), *rows])


# --- Folders of images of noise


def noise(seed: int, size: tuple[int, int] = (9, 7)) -> PIL.Image.Image:
    """Return an image in colour of this height and width."""
    return PIL.Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def write_noise(place: Path, *names: str, size: tuple[int, int] = (9, 7), seed: int = 0) -> Path:
    """Write an image of noise under each name."""
    for number, name in enumerate(names):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        noise(1000 * seed + number, size).save(place / name)
    return place


def flat(count: int = 12, name: str = "{n}.png", classes: str = "cat dog") -> list[str]:
    """Return names of images, each in the folder of its class."""
    each = classes.split()
    return [f"{each[n % len(each)]}/{name.format(n=n)}" for n in range(count)]


def split_up(count: int = 8) -> list[str]:
    return [f"{split}/{path}" for split in ("train", "test") for path in flat(count)]


def load(place: Path, reading: ImageOptions = AS_THEY_ARE) -> ImageData:
    return cache.load(str(place), str(place.parent / "cache"), reading)


def sizes(images: ImageData) -> tuple[int, int]:
    return len(of(images, "train").labels), len(of(images, "test").labels)


# --- Odd images


def picture(size: tuple[int, int] = (20, 12), right: tuple[int, int, int] = RED) -> PIL.Image.Image:
    """Return an image of width and height `size`, black on its left half."""
    image = PIL.Image.new("RGB", size)
    image.paste(right, (size[0] // 2, 0, *size))
    return image


def folder_of(place: Path, *images: Any) -> Path:
    """Write each image, or its bytes, to train/ and test/, in classes a and b by turns."""
    for split in ("train", "test"):
        for number, image in enumerate(images):
            path = place / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image if isinstance(image, bytes) else encoded(image, **image.info))
    return place


def stored(image: PIL.Image.Image, **how: Any) -> PIL.Image.Image:
    """Return an image that `folder_of` saves with these options of Pillow's."""
    image.info = dict[Any, Any](how)
    return image


# --- Images in memory


def images(count: int) -> torch.Tensor:
    """Return random pixels, the same each time, uint8 [count, 1, 28, 28]."""
    stream = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 1, 28, 28), dtype=torch.uint8, generator=stream)
