"""The file of each test image is found again, and none is named wrongly."""

from pathlib import Path

import numpy as np
import pytest

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.decode import decode_image, open_image
from tests.data_sets import flat, load, of, split_up, write_noise


@pytest.mark.parametrize("drawn", [False, True])
def test_each_test_image_has_its_file_and_no_other(drawn: bool, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    if drawn:
        write_noise(folder, *flat(90))
        (folder / "cat" / "0 copy.png").write_bytes((folder / "cat" / "0.png").read_bytes())
    else:
        write_noise(folder, *split_up(30))
    (folder / "notes.txt").write_text("no image")
    reading = ImageOptions(test_size=30 if drawn else None)
    images = load(folder, reading)
    rows = range(len(of(images, "test").labels))
    numbers = images.rows["test"]
    found = dict(zip(rows, images.files_of(numbers.tolist()).values(), strict=True))
    assert len(rows) > 20 and [*found] == [*rows]
    for row, file in found.items():
        assert Path(file).parent.name == images.classes[of(images, "test").labels[row]]
        with open_image(folder / file) as image:
            pixels = decode_image(image, images.image_format.shape)
        assert np.array_equal(pixels, of(images, "test").images[row])
    assert cache.load("digits").files_of(rows) == {}  # which have no files
