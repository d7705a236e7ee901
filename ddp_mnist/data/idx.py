"""MNIST's original files, in the format IDX: a magic number, sizes as big-endian int32, bytes.

The format: Yann LeCun, "The MNIST database of handwritten digits", section on file formats.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from ddp_mnist.data.decode import IMAGE_SHAPE, Decoded
from ddp_mnist.errors import DataError, reason

UNSIGNED_BYTE = 8

STEMS = {"train": "train", "test": "t10k"}


def find_idx_files(folder: Path) -> dict[str, tuple[Path, Path]]:
    """Return {split: (images, labels)}, if the folder, or raw/ or MNIST/raw/ in it, holds them."""
    for base in (folder, folder / "raw", folder / "MNIST" / "raw"):
        files = {
            (split, kind): _find_file(base, f"{stem}-{kind}", dimensions)
            for split, stem in STEMS.items()
            for kind, dimensions in (("images", 3), ("labels", 1))
        }
        there = {key: file for key, file in files.items() if file}
        if there and len(there) < len(files):
            raise DataError(
                f"--dataset {folder}: of MNIST's four IDX files only {len(there)} are there;"
                " fetch the others"
            )
        if there:
            return {split: (there[split, "images"], there[split, "labels"]) for split in STEMS}
    return {}


def _find_file(base: Path, stem: str, dimensions: int) -> Path | None:
    names = [f"{stem}{dot}idx{dimensions}-ubyte{gz}" for dot in "-." for gz in ("", ".gz")]
    return next((base / name for name in names if (base / name).is_file()), None)


def read_idx(files: dict[str, tuple[Path, Path]]) -> Decoded:
    """Return the data set in these files; its classes are the digits, or more if labels say so."""
    images, labels = {}, {}
    for split, (image_file, label_file) in files.items():
        images[split] = _read_array(image_file, dimensions=3)
        labels[split] = _read_array(label_file, dimensions=1).astype(np.int64)
        if images[split].shape[1:] != IMAGE_SHAPE:
            size = "x".join(map(str, IMAGE_SHAPE))
            raise DataError(f"{image_file}: images must be {size}; fetch MNIST's own file")
        if len(images[split]) != len(labels[split]) or len(labels[split]) == 0:
            raise DataError(
                f"{image_file}: {len(images[split])} images but {len(labels[split])} labels;"
                " fetch both files again"
            )
    highest = max(int(split.max()) for split in labels.values())
    return Decoded(images, labels, classes=[str(label) for label in range(max(10, highest + 1))])


def _read_array(file: Path, dimensions: int) -> np.ndarray:
    """Return the uint8 array of an IDX file, plain or .gz."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({reason(error)}); fetch it again") from error
    header = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", raw[4:header].ljust(4 * dimensions, b"\0"))
    magic = bytes([0, 0, UNSIGNED_BYTE, dimensions])
    if raw[:4] != magic or len(raw) != header + math.prod(shape):
        raise DataError(f"{file}: is not an IDX file, or is cut short; fetch it again")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)
