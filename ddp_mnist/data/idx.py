"""MNIST's original files, in the format IDX, plain or .gz; torchvision reads them."""

import gzip
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

from ddp_mnist.data.image_files import ImageFiles
from ddp_mnist.errors import DataError, blame

AGAIN = "fetch it again"
STEMS = {"train": "train", "test": "t10k"}
DIMENSIONS = {"images": 3, "labels": 1}


def find_idx_files(folder: Path, where: str) -> dict[tuple[str, str], Path]:
    """Return {(split, kind): file}, if the folder, or raw/ or MNIST/raw/ in it, holds them."""
    for base in (folder, folder / "raw", folder / "MNIST" / "raw"):
        files = {}
        for split, kind, dot, gz in product(STEMS, DIMENSIONS, "-.", (".gz", "")):
            file = base / f"{STEMS[split]}-{kind}{dot}idx{DIMENSIONS[kind]}-ubyte{gz}"
            if file.is_file():
                files[split, kind] = file
        if files and len(files) < 4:
            few = f"has only {len(files)} of MNIST's four IDX files"
            raise DataError(f"{where}: {few}; fetch the others")
        if files:
            return files
    return {}


def read_idx(files: dict[tuple[str, str], Path], where: str) -> ImageFiles:
    """Return the data set in these files; its classes are the digits, or more if labels need it."""
    from torchvision.datasets.mnist import read_image_file, read_label_file  # takes a second

    images, labels = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for (split, kind), file in files.items():
        read, found = (read_image_file, images) if kind == "images" else (read_label_file, labels)
        with (
            blame(f"{where}: {file.name}", DataError, AGAIN),
            tempfile.NamedTemporaryFile() as plain,
        ):
            raw = file.read_bytes()
            plain.write(gzip.decompress(raw) if file.suffix == ".gz" else raw)
            plain.flush()
            found[split] = read(plain.name).numpy()
    for split in STEMS:
        if len(images[split]) != len(labels[split]):
            fault = f"{len(images[split])} images but {len(labels[split])} labels"
            raise DataError(f"{where}: split {split}: {fault}; fetch both files again")
    highest = max(int(each.max()) for each in labels.values())
    classes = [str(label) for label in range(max(10, highest + 1))]
    return ImageFiles(where, images, labels, classes, notes=[])
