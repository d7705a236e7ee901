"""MNIST's original files, in the format IDX, plain or .gz."""

import gzip
from pathlib import Path

import numpy as np

from ddp_mnist.data.listing import Listing
from ddp_mnist.errors import DataError, blame

STEMS = {"train": "train", "test": "t10k"}
FOLDERS = ("", "raw", "MNIST/raw")  # in which torchvision puts them


def list_idx(folder: str, typed: str) -> Listing | None:
    """Return the data set of the four files, if any is there; its classes are at least the digits.

    A header has 0, 0, the type (8: bytes), the number of dimensions, and their sizes as int32.
    """
    found: dict[str, dict[str, np.ndarray]] = {"images": {}, "labels": {}}
    for split, stem in STEMS.items():
        for kind, sides in (("images", 3), ("labels", 1)):
            name = f"{stem}-{kind}[-.]idx{sides}-ubyte*"
            files = [file for place in FOLDERS for file in sorted(Path(folder, place).glob(name))]
            for file in files[:1]:
                with blame(f"{typed}: {file.name}", DataError, "fetch it again"):
                    raw = file.read_bytes()
                    raw = gzip.decompress(raw) if file.suffix == ".gz" else raw
                    shape = np.frombuffer(raw, ">i4", sides, 4)
                    values = np.frombuffer(raw, np.uint8, -1, 4 + 4 * sides)
                    found[kind][split] = values.reshape(shape)
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
