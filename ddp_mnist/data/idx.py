"""MNIST's original files, which torchvision reads: IDX, see http://yann.lecun.com/exdb/mnist/."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from ddp_mnist.data.decode import (
    IMAGE_SHAPE,
    Decoded,
    refuse_unseen,
)
from ddp_mnist.errors import DataError, reason

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
        if images[split].shape[1:] != IMAGE_SHAPE:
            raise DataError(f"{image_file}: images must be 28x28; fetch MNIST's own file")
        if len(images[split]) != len(labels[split]) or len(labels[split]) == 0:
            raise DataError(
                f"{image_file}: {len(images[split])} images but {len(labels[split])} labels;"
                " fetch both files again"
            )
    highest = max(int(split.max()) for split in labels.values())
    classes = [str(number) for number in range(max(10, highest + 1))]
    refuse_unseen(labels, classes, str(files["test"][1]))
    return Decoded(images, labels, classes)


def read_idx_array(file: Path, dimensions: int) -> np.ndarray:
    """uint8 array of an IDX file, plain or .gz."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read ({reason(error)}); fetch it again") from error
    header = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", raw[4:header].ljust(4 * dimensions, b"\0"))
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(raw) != header + math.prod(shape):
        raise DataError(f"{file}: is not an IDX file, or is cut short; fetch it again")
    return np.frombuffer(raw, dtype=np.uint8, offset=header).reshape(shape)
