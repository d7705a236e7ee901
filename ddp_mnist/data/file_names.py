"""Find the file of a test image: the cache of decoded images has no names."""

import bisect
import contextlib
import functools
from collections.abc import Iterable
from pathlib import Path

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data.batches import ImageData
from ddp_mnist.data.decode import open_image, stored_pixels
from ddp_mnist.data.folders import find_images, split_files
from ddp_mnist.data.held_out import key_of
from ddp_mnist.errors import DataError


def files_of_test(
    folder: str, images: ImageData, image_options: ImageOptions, rows: Iterable[int]
) -> dict[int, Path]:
    """Return the file of each of these rows of the test split, relative to the folder of images.

    Rows are in the order of the files, also where they were drawn from train: there, a row is found
    by bisection. A file counts only if it has the row's key, so none is named wrongly; rows that
    are not found are left out, as in a folder of tables. About ten files are decoded per row.
    """
    split = "train" if images.test_drawn else "test"
    files: list[Path] = []
    with contextlib.suppress(DataError):
        files = split_files(find_images(folder, folder)[0], [], image_options).get(split, [])
    train, test = (
        {key: row for row, key in enumerate(keys.tolist())}
        for keys in (images.train_keys, images.test_keys)
    )

    @functools.cache
    def key_at(place: int) -> int | None:
        with contextlib.suppress(Exception), open_image(Path(folder, files[place])) as image:
            return key_of(stored_pixels(image))
        return None

    def is_not_before(row: int, place: int) -> bool:
        """Return whether the file at this place is the test row's, or comes after it."""
        key = key_at(place)
        if key in test:
            return test[key] >= row
        return place - train.get(key or 0, place) > row  # test images before the file

    found = {}
    for row in rows:
        behind = functools.partial(is_not_before, row)
        drawn = images.test_drawn
        place = bisect.bisect_left(range(len(files)), True, key=behind) if drawn else row
        if place < len(files) and key_at(place) == images.test_keys[row]:
            found[row] = files[place]
    return found
