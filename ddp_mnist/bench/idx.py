"""MNIST's original files, which torchvision reads: IDX, see http://yann.lecun.com/exdb/mnist/."""

from __future__ import annotations

import struct
from pathlib import Path

from torch import Tensor

from ddp_mnist.data import ImageData

UNSIGNED_BYTE = 8


def write(images: ImageData, folder: Path) -> None:
    """The four files of a data set into `folder`, which is made."""
    folder.mkdir(parents=True)
    for split, name in (("train", "train"), ("test", "t10k")):
        pixels, labels = getattr(images, f"{split}_images"), getattr(images, f"{split}_labels")
        (folder / f"{name}-images-idx3-ubyte").write_bytes(to_idx(pixels))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(to_idx(labels.byte()))


def to_idx(values: Tensor) -> bytes:
    """uint8 of any shape: a magic number, the sizes as big-endian 32-bit numbers, the bytes."""
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, UNSIGNED_BYTE, values.ndim, *values.shape)
    return header + values.numpy().tobytes()
