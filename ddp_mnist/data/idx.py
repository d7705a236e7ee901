"""MNIST's original files, in the format IDX: a magic number, sizes as big-endian int32, bytes.

The format: Yann LeCun, "The MNIST database of handwritten digits", section on file formats.
"""

import gzip
import math
import struct
import zlib
from itertools import product
from pathlib import Path

import numpy as np

from ddp_mnist.data.image_files import ImageFiles
from ddp_mnist.errors import DataError, reason

MNIST = (28, 28)  # height and width
UNSIGNED_BYTE = 8
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
    images = {split: _read_array(files[split, "images"], MNIST) for split in STEMS}
    labels = {split: _read_array(files[split, "labels"], ()).astype(np.int64) for split in STEMS}
    for split in STEMS:
        rows, named = len(images[split]), len(labels[split])
        if rows != named or named == 0:
            fault = f"{files[split, 'images']}: {rows} images but {named} labels"
            raise DataError(f"{fault}; fetch both files again")
    highest = max(int(each.max()) for each in labels.values())
    classes = [str(label) for label in range(max(10, highest + 1))]
    return ImageFiles(where, images, labels, classes, notes=[])


def _read_array(file: Path, row_shape: tuple[int, ...]) -> np.ndarray:
    """Return uint8 [N, *row_shape] from an IDX file, plain or .gz."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({reason(error)}); fetch it again") from error
    start = 4 * (2 + len(row_shape))
    count, rest = divmod(len(raw) - start, math.prod(row_shape))
    shape = (max(0, count), *row_shape)
    header = struct.pack(f">4B{len(shape)}I", 0, 0, UNSIGNED_BYTE, len(shape), *shape)
    if rest or not raw.startswith(header):
        rows = f"rows of {'x'.join(map(str, row_shape)) or 1} bytes"
        raise DataError(f"{file}: is not an IDX file of {rows}, or is cut short; fetch MNIST's own")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape)
