"""The data sets that need no network: they come with scikit-learn."""

from pathlib import Path

import numpy as np

from ddp_mnist.data.image_format import DIGITS, Decoded

PATCH, STRIDE = 32, 8  # pixels: the side of a patch, and from one patch to the next
TRAIN_WIDTH = 448  # of the photographs' 640 columns; the test begins a patch further right


def load_digits() -> Decoded:
    """Return 1,797 handwritten digits of 8x8 in 0..16 as 28x28 in 0..255; 360 are for the test.

    Each pixel is repeated 3x3, smoothed by a 3x3 mean and framed by 2 pixels, in whole numbers,
    so that every machine gets the same bytes. The split is a fixed permutation.
    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    small = pixels.reshape(-1, 8, 8).astype(np.int64)
    large = np.pad(small.repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (3, 3), (3, 3)))
    shifted = [large[:, dy : dy + 28, dx : dx + 28] for dy in range(3) for dx in range(3)]
    images = (np.sum(shifted, axis=0) * 255 // (16 * 9)).astype(np.uint8)
    order = np.random.RandomState(0).permutation(len(images))  # frozen by NumPy for all time
    splits = {"train": order[360:], "test": order[:360]}
    return Decoded(
        images={split: images[rows, None] for split, rows in splits.items()},
        labels={split: labels[rows].astype(np.int64) for split, rows in splits.items()},
        classes=DIGITS,
        notes=["the 8x8 digits were enlarged to 28x28"],
    )


def load_sample_images() -> Decoded:
    """Return 32x32 patches in colour of two photographs, a temple in China and a flower.

    Test patches come from the right of each photograph, train patches from its left, with a
    patch's width between them. Source: scikit-learn's sample images china.jpg, by danielbuechele,
    and flower.jpg, by vultilion, both CC BY 2.0.
    """
    from sklearn import datasets

    photos = datasets.load_sample_images()
    classes = [Path(name).stem for name in photos.filenames]
    images: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    labels: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    for label, photo in enumerate(photos.images):
        parts = {"train": photo[:, :TRAIN_WIDTH], "test": photo[:, TRAIN_WIDTH + PATCH :]}
        for split, part in parts.items():
            windows = np.lib.stride_tricks.sliding_window_view(part, (PATCH, PATCH), axis=(0, 1))
            patches = windows[::STRIDE, ::STRIDE].reshape(-1, 3, PATCH, PATCH)
            images[split].append(patches)
            labels[split].append(np.full(len(patches), label))
    return Decoded(
        images={split: np.concatenate(parts) for split, parts in images.items()},
        labels={split: np.concatenate(parts).astype(np.int64) for split, parts in labels.items()},
        classes=classes,
    )


# By their names in --dataset.
BUILT_IN = {"digits": load_digits, "patches": load_sample_images}
