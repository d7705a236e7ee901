"""The rows of each split of a data set, as training reads them."""

import numpy as np
import torch

from ddp_mnist.core.batches import Rows
from ddp_mnist.data.image_data import ImageData

SPLITS, CPU = ("train", "validation", "test"), torch.device("cpu")


def rows_of_splits(data: ImageData, device: torch.device = CPU) -> tuple[Rows, Rows, Rows]:
    """Return the rows to train on, to validate on and to test on.

    On a GPU the images (55 MB for MNIST) are copied there if they fit into half of what is free.
    Otherwise they stay mapped from the disk, and batches are sent one by one.
    """
    images, targets = torch.from_numpy(data.images), torch.from_numpy(data.targets)
    # Accelerate calls a process's CPU cpu:N; .to() would unmap the file.
    if device.type == "cuda" and images.nbytes <= torch.cuda.mem_get_info(device)[0] / 2:
        images, targets = images.to(device), targets.to(device)
    numbers = (torch.from_numpy(data.rows.get(name, np.arange(0))) for name in SPLITS)
    train, validation, test = (Rows(images, targets, rows) for rows in numbers)
    return train, validation, test


def subset(data: ImageData, name: str) -> Rows:
    """Return the rows of train, validation or test; none of a split that there is not."""
    return rows_of_splits(data)[SPLITS.index(name)]
