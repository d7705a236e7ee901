"""The columns of a table of the library `datasets`: image files and labels."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.decode_all import MAX_CLASSES
from ddp_mnist.data.image_files import Cell, ImageFiles, choose_splits
from ddp_mnist.errors import DataError, joined

NAMES = {
    "image": ("image", "images", "img", "pixels", "pixel_values"),
    "label": ("label", "labels"),
}


def from_table(dataset: Any, where: str, image_options: ImageOptions) -> ImageFiles:
    """Return a table's files and labels. Raise DataError, which names column and row."""
    named = dict(dataset) if isinstance(dataset, dict) else {"train": dataset}
    splits, notes = choose_splits(named, where, image_options)
    if image_options.for_evaluation and not len(splits.get("train", "none")):
        del splits["train"]
    each = list(splits.values())
    first, last = each[0], each[-1]
    image_column, label_column, unused = _find_columns(first, where)
    for column in (image_column, label_column):
        # Splits that were saved one by one may differ: label 3 may be another class in test.
        if (kind := first.features[column]) != (other := last.features.get(column, "missing")):
            fault = f"{where}: column {column} is {kind} in train and {other} in test"
            raise DataError(f"{fault}; give both the same type and the same names")
    labels, classes = dict[str, np.ndarray](), list[str]()
    for split, rows in splits.items():
        at = f"{where}: split {split}"
        if len(rows) == 0:
            raise DataError(f"{at} has no rows; check its files")
        labels[split], classes = _decode_labels(rows, label_column, classes, at)
    cells = {split: Cells(rows, image_column) for split, rows in splits.items()}
    return ImageFiles(where, cells, labels, classes, notes + unused, image_column)


def _find_columns(rows: Any, where: str) -> tuple[str, str, list[str]]:
    """Return the names of the image column and of the label column, and notes on unused ones.

    If several qualify, the first in the order of NAMES is used, else the first in the table.
    """
    from datasets import ClassLabel, Image

    found: dict[str, list[str]] = {"image": [], "label": []}
    for name, kind in rows.features.items():
        # Plain parquet without Hugging Face's metadata stores an image as {bytes, path}.
        if isinstance(kind, Image) or (isinstance(kind, dict) and "bytes" in kind):
            found["image"].append(name)
        if isinstance(kind, ClassLabel) or name in NAMES["label"]:
            found["label"].append(name)
    notes = []
    for what, columns in found.items():
        if not columns:
            among = joined(rows.column_names, 80)
            raise DataError(f"{where}: no {what} column among {among}; add one, named {what}")
        columns.sort(key=lambda name: [*NAMES[what], name].index(name))
        if others := ", ".join(columns[1:]):
            notes.append(f"{what}s are those of column {columns[0]}; not used: {others}")
    return found["image"][0], found["label"][0], notes


def _decode_labels(
    rows: Any, column: str, classes: list[str], where: str
) -> tuple[np.ndarray, list[str]]:
    """Return int64 labels and the names of the classes; `classes` are train's, once decoded.

    Unless declared, the names are the label words, sorted, or the numbers from 0 to the highest
    label.
    """
    values = rows.with_format("arrow")[:].column(column).to_pylist()
    given = [value for value in values if value is not None]
    words = all(isinstance(value, str) for value in given)
    if not words and not isinstance(given[0], int):
        fault = f"labels are {type(given[0]).__name__}; give whole numbers or words"
        raise DataError(f"{where}, column {column}: {fault}")
    classes = classes or getattr(rows.features[column], "names", [])  # of a ClassLabel
    most = len(classes) or MAX_CLASSES
    if not classes and words:
        classes = sorted(set(given))
    elif not classes:
        highest = min(max(0, *given), most - 1)
        classes = [str(label) for label in range(highest + 1)]
    index_of = {name if words else index: index for index, name in enumerate(classes)}
    for row, value in enumerate(values):
        if value not in index_of:
            legal = "a word that train has" if words else f"a whole number from 0 to {most - 1}"
            raise DataError(f"{where}, column {column}: row {row} has label {value}; give {legal}")
    return np.asarray([index_of[value] for value in values], dtype=np.int64), list(classes)


@dataclass
class Cells:
    """A column of images: for each row the bytes of its file, or else its path."""

    rows: Any
    column: str

    def __iter__(self) -> Iterator[Cell]:
        from datasets import Image

        rows = self.rows
        if isinstance(rows.features[self.column], Image):
            rows = rows.cast_column(self.column, Image(decode=False))
        # more photos of several megabytes would fill the memory
        for batch in rows.select_columns([self.column]).with_format(None).iter(batch_size=100):
            for cell in batch[self.column]:
                yield (cell["bytes"] or cell.get("path") or None) if cell else None
