"""Reads a data set from where it lives: the Hub, a folder, or the digits inside scikit-learn.

Everything becomes uint8 images [N, 28, 28] and int64 labels [N], once; decode.py says how, and the
cache in data.py keeps the result. Heavy libraries are imported where they are used, because a
cached run needs none.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddp_mnist.data.decode import (
    IMAGE_SHAPE,
    Decoded,
    decode_image,
    is_as_seen,
    refuse_unseen,
)
from ddp_mnist.data.idx import find_idx_files, read_idx
from ddp_mnist.errors import (
    DataError,
    StorageError,
    UsageError,
    causes,
    printable,
    reason,
    root_cause,
)

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


HUB_IDS = {"mnist": "ylecun/mnist", "fashion_mnist": "zalando-datasets/fashion_mnist"}

OFFLINE_REMEDY = (
    "run ddp-mnist prepare where there is a network and copy the cache folder, give a folder"
    " (--dataset PATH), or train on the built-in digits (--dataset digits)"
)

HUB_TIMEOUT_S = 5.0

MAX_CLASSES = 1000

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

UNWRITABLE = (*NO_SPACE, errno.EACCES, errno.EROFS, errno.ENOTDIR)

# --- Which source


@dataclass(frozen=True)
class Source:
    """Where a data set comes from: kind is digits, hub or folder; place a Hub id or a path."""

    name: str
    kind: str
    place: str

    def read(self) -> Decoded:
        """The whole data set, decoded.

        Raises:
            DataError: it is missing, damaged or not a set of labelled images.
            StorageError: no space to unpack it in.
        """
        with readable(self.place):
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
        with readable(self.place):
            files = sorted(p for p in Path(self.place).rglob("*") if p.is_file())
            stats = [(p, p.stat()) for p in files]
        return [[str(p.relative_to(self.place)), s.st_size, s.st_mtime_ns] for p, s in stats]


@contextlib.contextmanager
def readable(place: str) -> Iterator[None]:
    """Turns what the file system and pyarrow raise (OSError, ValueError) into a DataError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise DataError(
            f"--dataset {place}: cannot be read ({reason(root_cause(error))}); check its files"
        ) from error


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
    # Unlike pathlib's, these two raise nothing for ~nobody or links in a circle.
    path = Path(os.path.realpath(os.path.expanduser(dataset)))  # noqa: PTH111
    with readable(dataset):
        if dataset and path.is_dir():
            return Source(printable(path.name), "folder", str(path))
        if dataset and path.exists():
            raise DataError(f"--dataset {dataset}: is a file; give the folder it lies in")
    if dataset.startswith((".", "/", "~")) or dataset.count("/") > 1:
        raise DataError(f"--dataset {dataset}: there is no such folder; check the path")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", dataset, re.ASCII):
        return Source(dataset.replace("/", "--"), "hub", dataset)
    raise UsageError(
        f"--dataset {dataset}: no such folder; choose from mnist, auto, fashion_mnist, digits,"
        " a Hub id (owner/name) or a folder"
    )


def from_anywhere(dataset: str) -> str:
    """What finds the same data from another working directory: of a folder its whole path."""
    source = find_source(dataset)
    return source.place if source.kind == "folder" else dataset


# --- The Hub


def read_hub(hub_id: str) -> DatasetDict:
    """From the Hub, or from Hugging Face's own cache where the Hub is out of reach.

    One request with a deadline decides which: `load_dataset` on its own would retry for 24 s.
    """
    import datasets
    import huggingface_hub

    why = why_out_of_reach(hub_id)
    quiet_datasets()
    try:
        with no_network() if why else contextlib.nullcontext():
            return datasets.load_dataset(hub_id)
    except Exception as error:  # its own and those of pyarrow, fsspec and the transport
        check_space(error, huggingface_hub.constants.HF_HOME, "HF_HOME", UNWRITABLE)
        what = f"cannot be read ({reason(root_cause(error))})"
        if isinstance(error, ConnectionError):
            why = why or reason(root_cause(error))
            what = f"not in the cache, and the Hub cannot be reached ({why})"
        raise DataError(f"--dataset {hub_id}: {what}; {OFFLINE_REMEDY}") from error


def why_out_of_reach(hub_id: str) -> str:
    """Why the Hub cannot be asked for this data set now; "" if it can.

    Raises:
        DataError: the Hub says that there is no such data set.
    """
    import huggingface_hub.constants

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    hub = huggingface_hub.HfApi()
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            hub.dataset_info(hub_id, timeout=HUB_TIMEOUT_S)
            outcome.append(None)
        except Exception as error:  # any transport's own error: httpx, requests, sockets, proxies
            outcome.append(error)

    # A thread, because no time-out of a request covers a name server that does not answer.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT_S)
    error = outcome[0] if outcome else TimeoutError(f"no answer within {HUB_TIMEOUT_S:.0f} s")
    if getattr(getattr(error, "response", None), "status_code", None) in (401, 403, 404):
        raise DataError(
            f"--dataset {hub_id}: the Hub has no such data set for you; check the id, or log in"
            " (hf auth login) if it is private"
        ) from error
    return reason(root_cause(error)) if error else ""


def quiet_datasets() -> None:
    """No bars and no log lines of `datasets`: what a person has to know, we say."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """What HF_HUB_OFFLINE=1 does, which is read only at import."""
    import datasets
    import huggingface_hub

    before = (datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE)
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


def check_space(error: BaseException, folder: str, variable: str, codes: tuple[int, ...]) -> None:
    """Raises StorageError if one of these errno codes is what `error` comes from."""
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in codes:
            raise StorageError(
                f"{folder}: cannot be written ({cause.strerror}); set {variable} to another folder"
            ) from error


# --- A folder


def read_folder(folder: Path) -> DatasetDict:
    """Parquet, CSV or image files in any layout that `load_dataset` knows, or `save_to_disk`."""
    import datasets

    if not any(p.is_file() for p in folder.rglob("*")):
        raise DataError(
            f"--dataset {folder}: the folder is empty; put parquet or image files there"
        )
    quiet_datasets()
    try:
        with no_network():
            if (folder / "dataset_dict.json").exists():
                return datasets.load_from_disk(str(folder))
            # Its Arrow copy is only needed until the images are decoded.
            with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
                return datasets.load_dataset(str(folder), cache_dir=scratch, keep_in_memory=True)
    except Exception as error:  # datasets raises its own and pyarrow's, with no common base
        check_space(error, tempfile.gettempdir(), "TMPDIR", NO_SPACE)
        raise DataError(f"--dataset {folder}: {what_is_wrong(folder, error)}") from error


def what_is_wrong(folder: Path, error: BaseException) -> str:
    """Why `error` came, in one sentence that names the file where one can be found."""
    types: dict[str, tuple[Any, str]] = {}
    for file in sorted(p for p in folder.rglob("*") if p.suffix in (".parquet", ".arrow")):
        name = str(file.relative_to(folder))
        try:
            table = read_table(file)
        except Exception as damage:
            return f"{name} is damaged ({reason(root_cause(damage))}); fetch it again"
        if len(table) == 0:
            return f"{name} has no rows; fetch it again, or leave it out"
        for column, kind in zip(table.schema.names, table.schema.types, strict=True):
            first, other = types.setdefault(column, (kind, name))
            if kind != first:
                return (
                    f"column {column} is {first} in {other} and {kind} in {name};"
                    " give both the same type"
                )
    return (
        f"cannot be read ({reason(root_cause(error))}); give it parquet files, or images in train/CLASS/"
        " and test/CLASS/"
    )


def read_table(file: Path) -> Any:
    """A parquet file, or an Arrow stream as save_to_disk writes it, as a pyarrow.Table."""
    import pyarrow.parquet

    if file.suffix == ".parquet":
        return pyarrow.parquet.ParquetFile(file).read()
    with pyarrow.ipc.open_stream(file.read_bytes()) as stream:
        return stream.read_all()


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
            " folders so, e.g. train/cat/1.png and test/cat/2.png"
        )
    for split in ("train", "test"):
        if len(dataset[split]) == 0:
            raise DataError(f"--dataset {place}: split {split} has no rows; check its files")
    image_column = find_image_column(dataset["train"], place)
    label_column = find_label_column(dataset["train"], place)
    missing = {image_column, label_column} - set(dataset["test"].column_names)
    if missing:
        raise DataError(
            f"--dataset {place}: split test has no column {missing.pop()};"
            " give it the columns of train"
        )
    same_type(dataset, label_column, place)
    images: dict[str, np.ndarray] = {}
    labels: dict[str, np.ndarray] = {}
    classes: list[str] = []
    converted: set[str] = set()
    for split in ("train", "test"):
        where = f"--dataset {place}: split {split}"
        labels[split], classes = decode_labels(dataset[split], label_column, classes, where)
        images[split], seen = decode_images(dataset[split], image_column, where)
        converted |= seen
    refuse_unseen(labels, classes, f"--dataset {place}: split test, column {label_column}")
    return Decoded(images, labels, classes, conversion_notes(converted), not converted)


def same_type(dataset: DatasetDict, column: str, place: str) -> None:
    """Splits that were saved one by one may differ: a 3 of test is then not a 3 of train."""
    train, test = (dataset[split].features[column] for split in ("train", "test"))
    if train != test:
        raise DataError(
            f"--dataset {place}: column {column} is {train} in train and {test} in test;"
            " give both the same type and the same names"
        )


def conversion_notes(converted: set[str]) -> list[str]:
    """One sentence for the kinds of images that were converted, e.g. {"32x32 RGB"}."""
    if not converted:
        return []
    kinds = ", ".join(sorted(converted)[:3])
    more = f" and {len(converted) - 3} more kinds" if len(converted) > 3 else ""
    return [f"images of {kinds}{more} became 28x28 grey"]


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
            " add one, named image"
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
    where = f"{where}, column {column}"
    try:
        values = rows.with_format("arrow")[:].column(column).to_pylist()
    except ValueError as error:  # words that are not UTF-8
        raise DataError(
            f"{where}: cannot be read ({reason(root_cause(error))}); correct it"
        ) from error
    if None in values:
        raise DataError(f"{where}: row {values.index(None)} has no label; label it or leave it out")
    declared = getattr(rows.features[column], "names", None)  # of a ClassLabel
    classes = classes or declared or found_classes(values, where)
    if len(classes) > MAX_CLASSES:
        raise DataError(f"{where}: {len(classes)} classes; give at most {MAX_CLASSES}")
    if isinstance(values[0], str):
        number_of = {name: number for number, name in enumerate(classes)}
        numbers = [number_of.get(value, -1) for value in values]
        legal = f"one of train's {len(classes)} words"
    else:
        numbers = values
        legal = f"a whole number from 0 to {len(classes) - 1}"
    for row, number in enumerate(numbers):
        if not 0 <= number < len(classes):
            raise DataError(f"{where}: row {row} has label {values[row]}; give {legal}")
    return np.asarray(numbers, dtype=np.int64), list(classes)


def found_classes(values: list[Any], where: str) -> list[str]:
    """Class names where none are declared: the words, or 0 to the highest number."""
    if isinstance(values[0], str):
        return sorted(set(values))
    if isinstance(values[0], int):
        highest = min(max(0, max(values)), MAX_CLASSES - 1)
        return [str(number) for number in range(highest + 1)]
    raise DataError(f"{where}: labels are {type(values[0]).__name__}; give whole numbers or words")


def decode_images(rows: Dataset, column: str, where: str) -> tuple[np.ndarray, set[str]]:
    """uint8 [N, 28, 28], and what other sizes and modes were met, e.g. {"32x32 RGB"}."""
    from datasets import Image

    if isinstance(rows.features[column], Image):
        rows = rows.cast_column(column, Image(decode=False))
    batches = rows.select_columns([column]).with_format(None).iter(batch_size=1000)
    images = np.empty((len(rows), *IMAGE_SHAPE), dtype=np.uint8)
    converted: set[str] = set()
    for row, cell in enumerate(cell for batch in batches for cell in batch[column]):
        images[row] = decode_cell(cell, converted, f"{where}, column {column}: row {row}")
    return images, converted


def decode_cell(cell: dict[str, Any] | None, converted: set[str], where: str) -> np.ndarray:
    """One image, {bytes, path}, as uint8 [28, 28]; what it was is added to `converted`."""
    import PIL.Image

    file = cell and (cell["bytes"] or cell.get("path"))
    if not file:
        raise DataError(f"{where} has no image; add it or leave the row out")
    try:
        with PIL.Image.open(io.BytesIO(file) if isinstance(file, bytes) else file) as image:
            if not is_as_seen(image):
                converted.add(f"{image.width}x{image.height} {image.mode}")
            return decode_image(image)
    except PIL.UnidentifiedImageError:
        why = "of no format that Pillow knows"
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError and more
        why = reason(error)
    name = f" {file}" if isinstance(file, str) else ""
    raise DataError(f"{where}{name} is no readable image ({why}); replace it or leave it out")


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
