"""Reads a data set from where it lives: the Hub, a folder, or the digits inside scikit-learn.

Everything becomes uint8 images [N, 28, 28] and int64 labels [N], once; the cache in data.py keeps
the result. Heavy libraries are imported where they are used, because a cached run needs none.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_mnist.errors import DataError, UsageError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

HUB_IDS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}
OFFLINE_REMEDY = (
    "run ddp-mnist prepare where there is a network and copy the cache folder, give a folder"
    " (--dataset PATH), or train on the built-in digits (--dataset digits)"
)
HUB_TIMEOUT_S = 5.0
MAX_CLASSES = 1000


@dataclass
class Decoded:
    """A data set in memory.

    Attributes:
        images: uint8 [N, 28, 28] per split (train, test).
        labels: int64 [N] per split, 0 <= label < len(classes).
        classes: their names.
        notes: what was converted, one sentence each.
    """

    images: dict[str, np.ndarray]
    labels: dict[str, np.ndarray]
    classes: list[str]
    notes: list[str] = field(default_factory=list)


# --- Which source


@dataclass(frozen=True)
class Source:
    """Where a data set comes from: kind is digits, hub or folder; place a Hub id or a path."""

    name: str
    kind: str
    place: str

    def read(self) -> Decoded:
        """Raises DataError when it is missing, damaged or not a set of labelled images."""
        if self.kind == "digits":
            return read_digits()
        if self.kind == "hub":
            return decode(read_hub(self.place), self.place)
        folder = Path(self.place)
        idx = find_idx_files(folder)
        return read_idx(idx) if idx else decode(read_folder(folder), self.place)

    def fingerprint(self) -> list[list[Any]]:
        """Name, size and time of each file of a folder: what changes when the data do."""
        if self.kind != "folder":
            return []
        files = sorted(p for p in Path(self.place).rglob("*") if p.is_file())
        stats = [(p, p.stat()) for p in files]
        return [[str(p.relative_to(self.place)), s.st_size, s.st_mtime_ns] for p, s in stats]


def find_source(dataset: str) -> Source:
    """What `--dataset` names.

    Raises:
        UsageError: no known name, folder, or Hub id.
        DataError: a path that does not exist.
    """
    if dataset == "digits":
        return Source("digits", "digits", "sklearn.datasets.load_digits")
    if dataset in HUB_IDS:
        return Source(dataset, "hub", HUB_IDS[dataset])
    path = Path(dataset).expanduser()
    if path.is_dir():
        return Source(path.resolve().name, "folder", str(path.resolve()))
    if path.exists():
        raise DataError(f"--dataset {dataset}: is a file; give the folder it lies in")
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1:
        raise DataError(f"--dataset {dataset}: there is no such folder; check the path")
    if dataset.count("/") == 1 and all(dataset.split("/")):
        return Source(dataset.replace("/", "--"), "hub", dataset)
    raise UsageError(
        f"--dataset {dataset}: no such folder; choose from mnist, auto, fashion_mnist, digits,"
        " a Hub id (owner/name) or a folder"
    )


# --- The Hub


def read_hub(hub_id: str) -> DatasetDict:
    """From the Hub, or from Hugging Face's own cache where the Hub is out of reach.

    One request with a deadline decides which: `load_dataset` on its own would retry for 24 s.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    online = False
    reason = "HF_HUB_OFFLINE is set"
    if not huggingface_hub.constants.HF_HUB_OFFLINE:
        try:
            huggingface_hub.HfApi().dataset_info(hub_id, timeout=HUB_TIMEOUT_S)
            online = True
        except (GatedRepoError, RepositoryNotFoundError) as error:
            raise DataError(
                f"--dataset {hub_id}: the Hub has no such data set for you; check the id, or log in"
                " (hf auth login) if it is private"
            ) from error
        except Exception as error:  # any transport's own error: httpx, requests, sockets, proxies
            reason = innermost(error)
    with quiet_datasets(offline=not online):
        try:
            return datasets.load_dataset(hub_id)
        except ConnectionError:
            raise DataError(
                f"--dataset {hub_id}: not in the cache, and the Hub cannot be reached ({reason});"
                f" {OFFLINE_REMEDY}"
            ) from None
        except Exception as error:
            raise DataError(
                f"--dataset {hub_id}: cannot be read ({innermost(error)}); {OFFLINE_REMEDY}"
            ) from error


@contextlib.contextmanager
def quiet_datasets(*, offline: bool = False) -> Iterator[None]:
    """No bars, no log lines; `offline` as HF_HUB_OFFLINE would, which is read only at import."""
    import datasets
    import huggingface_hub

    before = (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)
    verbosity = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    if offline:
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before
        datasets.logging.set_verbosity(verbosity)
        datasets.enable_progress_bars()


# --- A folder


def read_folder(folder: Path) -> DatasetDict:
    """Parquet, CSV or image files in any layout that `load_dataset` knows, or `save_to_disk`."""
    import datasets

    if not any(p.is_file() for p in folder.rglob("*")):
        raise DataError(
            f"--dataset {folder}: the folder is empty; put parquet or image files there"
        )
    with quiet_datasets():
        try:
            if (folder / "dataset_dict.json").exists():
                return datasets.load_from_disk(str(folder))
            # Its Arrow copy is only needed until the images are decoded.
            with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
                return datasets.load_dataset(str(folder), cache_dir=scratch, keep_in_memory=True)
        except OSError as error:
            if error.errno is not None and error.errno in (28, 122):  # no space, quota
                raise
            raise DataError(unreadable(folder, error)) from error
        except Exception as error:  # datasets raises its own and pyarrow's, with no common base
            raise DataError(unreadable(folder, error)) from error


def unreadable(folder: Path, error: BaseException) -> str:
    """One sentence that names the damaged file where one can be found."""
    import pyarrow.parquet

    for file in sorted(folder.rglob("*.parquet")):
        try:
            pyarrow.parquet.ParquetFile(file).read()
        except Exception as damage:
            return (
                f"--dataset {folder}: {file.relative_to(folder)} is damaged"
                f" ({innermost(damage)}); fetch it again"
            )
    return (
        f"--dataset {folder}: cannot be read ({innermost(error)}); it needs parquet files or images"
        " in train/CLASS/ and test/CLASS/"
    )


# --- Decoding


def decode(dataset: DatasetDict, place: str) -> Decoded:
    """Finds the image and label columns and turns every image into 28x28 greyscale.

    Raises:
        DataError: names the split, column and row.
    """
    if not hasattr(dataset, "keys") or "train" not in dataset or "test" not in dataset:
        found = ", ".join(getattr(dataset, "keys", lambda: ["one without a name"])())
        raise DataError(
            f"--dataset {place}: needs the splits train and test, found: {found}; name the files or"
            " folders so"
        )
    for split in ("train", "test"):
        if len(dataset[split]) == 0:
            raise DataError(f"--dataset {place}: split {split} has no rows; check its files")
    image_column = find_image_column(dataset["train"], place)
    label_column = find_label_column(dataset["train"], place)
    images: dict[str, np.ndarray] = {}
    labels: dict[str, np.ndarray] = {}
    classes: list[str] = []
    converted: set[str] = set()
    for split in ("train", "test"):
        where = f"--dataset {place}: split {split}"
        missing = {image_column, label_column} - set(dataset[split].column_names)
        if missing:
            raise DataError(
                f"{where} has no column {missing.pop()}; give both splits the same columns"
            )
        labels[split], classes = decode_labels(dataset[split], label_column, classes, where)
        images[split], seen = decode_images(dataset[split], image_column, where)
        converted |= seen
    notes = [f"images of {', '.join(sorted(converted))} became 28x28 grey"] if converted else []
    return Decoded(images, labels, classes, notes)


def find_image_column(rows: Dataset, place: str) -> str:
    from datasets import Image

    columns = [name for name, feature in rows.features.items() if isinstance(feature, Image)]
    # Plain parquet without Hugging Face's metadata stores an image as {bytes, path}.
    columns += [
        name
        for name, feature in rows.features.items()
        if isinstance(feature, dict) and "bytes" in feature
    ]
    if not columns:
        raise DataError(
            f"--dataset {place}: no image column among {', '.join(rows.column_names)};"
            " it needs images and labels"
        )
    return columns[0]


def find_label_column(rows: Dataset, place: str) -> str:
    from datasets import ClassLabel

    columns = [name for name, feature in rows.features.items() if isinstance(feature, ClassLabel)]
    columns += [name for name in ("label", "labels") if name in rows.column_names]
    if not columns:
        raise DataError(
            f"--dataset {place}: no label column among {', '.join(rows.column_names)};"
            " name it label"
        )
    return columns[0]


def decode_labels(
    rows: Dataset, column: str, classes: list[str], where: str
) -> tuple[np.ndarray, list[str]]:
    """int64 labels and the class names; `classes` is what the train split gave, or empty."""
    from datasets import ClassLabel

    values = rows.with_format("arrow")[:].column(column).to_pylist()
    if any(value is None for value in values):
        raise DataError(f"{where}, column {column}: row {values.index(None)} has no label")
    if isinstance(values[0], str):
        classes = classes or sorted(set(values))
        number = {name: i for i, name in enumerate(classes)}
        values = [number.get(value, -1) for value in values]
    elif not all(isinstance(value, int) for value in values):
        raise DataError(f"{where}, column {column}: labels must be whole numbers or words")
    feature = rows.features[column]
    if not classes:
        named = isinstance(feature, ClassLabel)
        highest = min(max(values), MAX_CLASSES)
        classes = feature.names if named else [str(i) for i in range(highest + 1)]
    labels = np.asarray(values, dtype=np.int64)
    bad = np.flatnonzero((labels < 0) | (labels >= min(len(classes), MAX_CLASSES)))
    if bad.size:
        raise DataError(
            f"{where}, column {column}: row {bad[0]} has label {values[bad[0]]}, outside 0 to"
            f" {min(len(classes), MAX_CLASSES) - 1}; correct the labels"
        )
    return labels, list(classes)


def decode_images(rows: Dataset, column: str, where: str) -> tuple[np.ndarray, set[str]]:
    """uint8 [N, 28, 28], and what other sizes and modes were met, e.g. {"32x32 RGB"}."""
    from datasets import Image

    if isinstance(rows.features[column], Image):
        rows = rows.cast_column(column, Image(decode=False))
    images = np.empty((len(rows), 28, 28), dtype=np.uint8)
    converted: set[str] = set()
    row = 0
    for batch in rows.select_columns([column]).iter(batch_size=1000):
        for cell in batch[column]:
            images[row] = decode_image(cell, converted, f"{where}, column {column}: row {row}")
            row += 1
    return images, converted


def decode_image(cell: dict[str, Any], converted: set[str], where: str) -> np.ndarray:
    """One image, {bytes, path}, as uint8 [28, 28]; what it was is added to `converted`."""
    import PIL.Image

    try:
        file = io.BytesIO(cell["bytes"]) if cell.get("bytes") else cell["path"]
        with PIL.Image.open(file) as image:
            if image.mode == "L" and image.size == (28, 28):
                return np.asarray(image)
            converted.add(
                f"{image.width}x{image.height} {image.mode}"
                if len(converted) < 3
                else "other sizes"
            )
            grey = image.convert("RGBA").convert("L") if image.mode == "P" else image.convert("L")
            return np.asarray(grey.resize((28, 28), PIL.Image.Resampling.BILINEAR))
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
        raise DataError(f"{where} is no readable image ({innermost(error)})") from error


# --- MNIST's own files


def find_idx_files(folder: Path) -> dict[str, tuple[Path, Path]]:
    """{split: (images, labels)} if the folder, or raw/ or MNIST/raw/ in it, holds IDX files."""
    for base in (folder, folder / "raw", folder / "MNIST" / "raw"):
        found = {
            split: (_idx_file(base, f"{stem}-images", 3), _idx_file(base, f"{stem}-labels", 1))
            for split, stem in (("train", "train"), ("test", "t10k"))
        }
        files = [file for pair in found.values() for file in pair]
        if any(files):
            if not all(files):
                raise DataError(
                    f"--dataset {folder}: of MNIST's four IDX files only"
                    f" {sum(file is not None for file in files)} are there; fetch the others"
                )
            return found  # type: ignore[return-value]
    return {}


def _idx_file(base: Path, stem: str, dimensions: int) -> Path | None:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]
    return next((base / name for name in names if (base / name).is_file()), None)


def read_idx(files: dict[str, tuple[Path, Path]]) -> Decoded:
    """MNIST's format: big-endian magic number, sizes, then bytes.

    Format: Yann LeCun, "The MNIST database of handwritten digits", section on file formats.
    """
    images, labels = {}, {}
    for split, (image_file, label_file) in files.items():
        images[split] = read_idx_array(image_file, dimensions=3)
        labels[split] = read_idx_array(label_file, dimensions=1).astype(np.int64)
        if images[split].shape[1:] != (28, 28):
            raise DataError(f"{image_file}: images must be 28x28; this is not MNIST")
        if len(images[split]) != len(labels[split]) or len(labels[split]) == 0:
            raise DataError(
                f"{image_file}: {len(images[split])} images but {len(labels[split])} labels"
            )
    highest = max(int(split.max()) for split in labels.values())
    return Decoded(images, labels, [str(i) for i in range(max(10, highest + 1))])


def read_idx_array(file: Path, dimensions: int) -> np.ndarray:
    """uint8 array of an IDX file, plain or .gz."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError) as error:
        raise DataError(
            f"{file}: cannot be unpacked ({innermost(error)}); fetch it again"
        ) from error
    header = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(raw[4:header], dtype=">u4"))
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) - header != int(np.prod(shape)):
        raise DataError(f"{file}: is not an IDX file, or is cut short; fetch it again")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)


# --- The digits inside scikit-learn


def read_digits() -> Decoded:
    """1,797 handwritten digits, 8x8 in 0..16, brought to 28x28 in 0..255; 360 of them for the test.

    Each pixel is repeated 3x3, smoothed by a 3x3 mean and framed by 2 pixels, in whole numbers,
    so that every machine gets the same bytes. The split is a fixed permutation.
    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    small = pixels.reshape(-1, 8, 8).astype(np.int64)
    large = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (3, 3), (3, 3)))
    shifted = [large[:, dy : dy + 28, dx : dx + 28] for dy in range(3) for dx in range(3)]
    images = (np.sum(shifted, axis=0) * 255 // (16 * 9)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(images))  # frozen by NumPy for all time
    parts = {"train": order[360:], "test": order[:360]}
    return Decoded(
        images={split: images[rows] for split, rows in parts.items()},
        labels={split: labels[rows].astype(np.int64) for split, rows in parts.items()},
        classes=[str(i) for i in range(10)],
        notes=["the 8x8 digits were enlarged to 28x28"],
    )


def innermost(error: BaseException) -> str:
    """The cause at the bottom of a chain, in one short line."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:160].rstrip(os.sep + ". ")
