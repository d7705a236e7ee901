"""The file of each test image is found again, and none is named wrongly."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.decode import decode_image, open_image
from tests.data_sets import flat, load, split_up, write_noise


@pytest.mark.parametrize("drawn", [False, True])
def test_each_test_image_has_its_file_and_no_other(drawn: bool, tmp_path: Path) -> None:
    folder = write_noise(tmp_path / "photos", *(flat(90) if drawn else split_up(30)))
    if drawn:
        shutil.copy(folder / "cat" / "0.png", folder / "cat" / "0 copy.png")
    (folder / "notes.txt").write_text("no image")
    images = load(folder, ImageOptions(test_size=30 if drawn else None))
    found = images.files_of(images.rows["test"].tolist())
    assert len({*found.values()}) == len(images.rows["test"]) > 20
    for number, file in found.items():
        assert Path(file).parent.name == images.classes[images.targets[number]]
        with open_image(folder / file) as image:
            pixels = decode_image(image, images.image_format.shape)
        assert np.array_equal(pixels, images.images[number])
    assert cache.load("digits").files_of(range(9)) == {}  # which have no files
