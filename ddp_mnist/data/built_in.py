"""The data sets that need no network: they are part of scikit-learn."""

from pathlib import Path

import numpy as np

from ddp_mnist.data.image_format import DIGITS
from ddp_mnist.data.listing import Listing

PATCH, STRIDE = 32, 8  # pixels: the side of a patch, and from one patch to the next
TRAIN_WIDTH = 448  # of the photographs' 640 columns; the test begins a patch further right


def load_digits(typed: str) -> Listing:
    """Return 1,797 handwritten digits of 8x8 in 0..16 as 28x28 in 0..255; 360 are for testing.

    Each pixel is repeated 3x3, smoothed by a 3x3 mean and framed by 2 pixels, in whole numbers, so
    that every machine gets the same bytes. The split is a fixed permutation. Source: E. Alpaydin
    and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn import datasets

    values, labels = datasets.load_digits(return_X_y=True)
    small = values.reshape(-1, 8, 8).astype(np.int64)
    large = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (3, 3), (3, 3)))
    shifted = [large[:, dy : dy + 28, dx : dx + 28] for dy in range(3) for dx in range(3)]
    images = (np.sum(shifted, axis=0) * 255 // (16 * 9)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(images))  # NumPy guarantees it never to change
    splits = {"train": order[360:], "test": order[:360]}
    pixels = {split: images[rows] for split, rows in splits.items()}
    targets = {split: labels[rows].astype(np.int64) for split, rows in splits.items()}
    return Listing(typed, pixels, targets, DIGITS, ["the 8x8 digits were enlarged to 28x28"])


def load_sample_images(typed: str) -> Listing:
    """Return 32x32 patches in colour of two photographs, a temple in China and a flower.

    Test patches are cut from the right of each photograph, train patches from its left, with a
    patch's width between them. Source: scikit-learn's sample images china.jpg, by danielbuechele,
    and flower.jpg, by vultilion, both CC BY 2.0.
    """
    from sklearn import datasets

    photos = datasets.load_sample_images()
    classes = [Path(name).stem for name in photos.filenames]
    parts = {"train": np.s_[:TRAIN_WIDTH], "test": np.s_[TRAIN_WIDTH + PATCH :]}
    images, labels = dict[str, np.ndarray](), dict[str, np.ndarray]()
    for split, columns in parts.items():
        of_photos = [_patches(photo[:, columns]) for photo in photos.images]
        images[split] = np.concatenate(of_photos)
        labels[split] = np.repeat(np.arange(len(classes)), [len(each) for each in of_photos])
    return Listing(typed, images, labels, classes, notes=[])


def _patches(photo: np.ndarray) -> np.ndarray:
    """Return the patches of a photograph, row by row: uint8 [N, PATCH, PATCH, 3]."""
    windows = np.lib.stride_tricks.sliding_window_view(photo, (PATCH, PATCH), axis=(0, 1))
    return np.moveaxis(windows[::STRIDE, ::STRIDE].reshape(-1, 3, PATCH, PATCH), 1, 3)


# By their names in --dataset.
BUILT_IN = {"digits": load_digits, "patches": load_sample_images}
