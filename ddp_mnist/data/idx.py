"""MNIST's original files, in the format IDX, plain or .gz."""

import gzip
import math
import struct
from pathlib import Path

import numpy as np

from ddp_mnist.data.listing import Listing
from ddp_mnist.errors import DataError, blame
from ddp_mnist.system.files import regular

STEMS = {"train": "train", "test": "t10k"}
FOLDERS = ("", "raw", "MNIST/raw")  # in which torchvision puts them


def list_idx(folder: str, typed: str) -> Listing | None:
    """Return the data set of the four files, if any is there; classes are the digits, or more."""
    found: dict[str, dict[str, np.ndarray]] = {"images": {}, "labels": {}}
    for split, stem in STEMS.items():
        for kind, sides in (("images", 3), ("labels", 1)):
            name = f"{stem}-{kind}[-.]idx{sides}-ubyte*"
            files = [file for place in FOLDERS for file in sorted(Path(folder, place).glob(name))]
            for file in files[:1]:
                with blame(f"{typed}: {file.name}", DataError, "fetch it again"):
                    found[kind][split] = read_idx(file, sides)
    images, labels = found.values()
    if not (count := len(images) + len(labels)):
        return None
    if count < 4:
        raise DataError(f"{typed}: has only {count} of MNIST's four IDX files; fetch the others")
    for split in STEMS:
        if len(images[split]) != len(labels[split]):
            fault = f"{len(images[split])} images but {len(labels[split])} labels"
            raise DataError(f"{typed}: split {split}: {fault}; fetch both files again")
    highest = max(int(each.max()) for each in labels.values())
    numbers = {split: each.astype(np.int64) for split, each in labels.items()}
    return Listing(typed, images, numbers, [str(n) for n in range(max(10, highest + 1))], notes=[])


def read_idx(file: Path, sides: int) -> np.ndarray:
    """Return the uint8 array of so many sides, plain or .gz. Raise ValueError if it is another.

    A header has 0, 0, the type (8: bytes), the number of dimensions, and their sizes as int32. No
    more is unpacked than it says, nor than the file can hold: gzip packs up to 1,032 bytes in one.
    """
    is_packed = regular(file).suffix == ".gz"
    with gzip.open(file) if is_packed else file.open("rb") as stream:
        head = stream.read(4 + 4 * sides)
        kind, *shape = struct.unpack(f">{1 + sides}i", head.ljust(4 + 4 * sides, b"\0"))
        if kind != 0x800 + sides or min(shape) < 1:
            wanted = f"00000{0x800 + sides:x} and sizes from 1"
            raise ValueError(f"its header is {head.hex(' ', 4)}, not {wanted}")
        size, most = math.prod(shape), file.stat().st_size * (1032 if is_packed else 1)
        content = stream.read(min(size, most) + 1)
    return np.frombuffer(content, np.uint8).reshape(shape)
