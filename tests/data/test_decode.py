"""One decoder for all who prepare an image, and what it remembers of a data set."""

import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageFile
import PIL.ImageOps
import pytest
from PIL.ExifTags import Base

from ddp_mnist.config.image_options import AS_THEY_ARE, FITS
from ddp_mnist.data import cache, decode_all
from ddp_mnist.data.decode import FIT_BY, decode_image, open_image, upright
from ddp_mnist.data.image_format import DIGITS, ImageFormat, mean_and_std
from ddp_mnist.data.listing import STORED_SPLITS, Listing
from tests.data_sets import encoded, of


def test_a_png_with_its_exif_behind_the_pixels_becomes_upright_too() -> None:
    upright = PIL.Image.new("RGB", (40, 20), "red")
    upright.paste((0, 0, 255), (0, 0, 40, 10))
    turned = upright.transpose(PIL.Image.Transpose.ROTATE_90)
    turned.getexif()[274] = 6
    file = encoded(turned, exif=turned.getexif())
    at = file.index(b"eXIf") - 4
    end = at + 12 + int.from_bytes(file[at : at + 4], "big")
    last = file.index(b"IEND") - 4
    late = file[:at] + file[end:last] + file[at:end] + file[last:]
    with open_image(late) as image:
        decoded = decode_image(image, (3, 20, 40))
    assert np.array_equal(decoded.transpose(1, 2, 0), np.asarray(upright))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_by_pillow_and_by_damaged_exif_too(orientation: int) -> None:
    image = PIL.Image.fromarray(np.arange(24, dtype=np.uint8).reshape(4, 6))
    exif = image.getexif()
    exif[Base.Orientation] = orientation
    by_pillow = PIL.ImageOps.exif_transpose(image)
    assert np.array_equal(np.asarray(upright(image)), np.asarray(by_pillow))
    exif[Base.XResolution] = 72.0
    content = bytearray(exif.tobytes())
    content[29] = 0  # makes it the tag ImageWidth, whose value then can be read, but not written
    with open_image(encoded(image, exif=bytes(content))) as damaged:
        damaged.load()
        assert np.array_equal(np.asarray(upright(damaged)), np.asarray(by_pillow))
        if orientation > 1:
            with pytest.raises(Exception, match="not an integer"):
                PIL.ImageOps.exif_transpose(damaged)


def test_what_the_decoder_does_has_not_changed() -> None:
    """By hand, so that a change of the decoder is a decision: every cache and model is of one."""
    values = np.random.default_rng(0).integers(0, 256, (50, 90, 4), dtype=np.uint8)
    values[:25, :, 3] = 255
    image = PIL.Image.fromarray(values)
    paper = PIL.Image.new("RGBA", image.size, "white")
    grey = PIL.Image.alpha_composite(paper, image).convert("L")
    middle = (20, 0, 70, 50)
    small = grey.resize((28, 28), PIL.Image.Resampling.BILINEAR, middle)
    assert np.array_equal(decode_image(image, (1, 28, 28)), np.asarray(small)[None])
    coloured = PIL.Image.alpha_composite(paper, image).convert("RGB")
    small = coloured.resize((28, 28), PIL.Image.Resampling.BILINEAR, middle)
    planes = [np.asarray(plane) for plane in small.split()]
    assert np.array_equal(decode_image(image, (3, 28, 28)), planes)
    for as_it_is, shape in ((values[..., 0], (1, 50, 90)), (values[..., :3], (3, 50, 90))):
        pixels = decode_image(PIL.Image.fromarray(as_it_is), shape)
        assert np.array_equal(pixels, as_it_is.reshape(50, 90, -1).transpose(2, 0, 1))


def test_a_padded_image_is_whole_in_the_middle_of_grey() -> None:
    assert {*FIT_BY} == {*FITS}  # as flags have it
    values = np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(values)
    small = np.asarray(image.resize((32, 16), PIL.Image.Resampling.BILINEAR)).transpose(2, 0, 1)
    padded = decode_image(image, (3, 24, 32), "pad")
    assert np.array_equal(padded[:, 4:20], small)
    assert np.array_equal(np.unique(padded[:, [*range(4), *range(20, 24)]]), [127])
    tall = decode_image(
        image.convert("L").transpose(PIL.Image.Transpose.ROTATE_90), (1, 9, 9), "pad"
    )
    assert (tall[0, :, [0, 1, 7, 8]] == 127).all() and (tall[0, :, 2:7] != 127).any()
    assert np.array_equal(decode_image(image, (3, 20, 40), "pad"), decode_image(image, (3, 20, 40)))


def test_lab_becomes_grey_too() -> None:
    image = PIL.Image.new("LAB", (5, 4), (128, 128, 128))
    grey = decode_image(image, (1, 4, 5))
    assert np.array_equal(grey[0], np.asarray(image.convert("RGB").convert("L")))


def test_a_format_of_an_earlier_version_is_cropped() -> None:
    now = ImageFormat((1, 2, 3), (0.5,), (0.5,), [], False, False)
    earlier = {name: value for name, value in asdict(now).items() if name != "fit"}
    assert ImageFormat.from_dict(earlier) == now and now.fit == "crop"


def test_statistics_are_those_of_each_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the train split alone, and the same however many images are taken at a time."""
    images = np.random.default_rng(0).integers(0, 256, (7, 3, 4, 5), dtype=np.uint8)
    images[:, 1] //= 4
    images[:, 2] = 51  # all pixels alike: its deviation is taken to be one step of 255
    expected = [images[:, channel] / 255 for channel in range(3)]
    for block in (decode_all.BLOCK, 120):
        monkeypatch.setattr(decode_all, "BLOCK", block)
        made = preparation_of(images, 255 - images)
        assert (made.shape, made.bright_on_black) == ((3, 4, 5), False)
        assert made.mean == pytest.approx([each.mean() for each in expected], abs=5e-5)
        deviations = [each.std() for each in expected[:2]]
        assert made.std == pytest.approx([*deviations, 1 / 255], abs=5e-5)


# --- What kind of images a data set holds


def preparation_of(*splits: np.ndarray, classes: list[str] = DIGITS) -> ImageFormat:
    """Return the format of images, uint8 [N, C, H, W] of each split."""
    pixels = [each[:, 0] if each.shape[1] == 1 else each.transpose(0, 2, 3, 1) for each in splits]
    images = dict(zip(STORED_SPLITS, pixels, strict=False))
    labels = {split: np.zeros(len(each), np.int64) for split, each in images.items()}
    listing = Listing("it", images, labels, classes, [])
    with tempfile.TemporaryDirectory() as place:
        about, arrays = decode_all.decode_all(listing, AS_THEY_ARE, Path(place), lambda _: None)
    shape = splits[0].shape[1:]
    mean, std = mean_and_std(arrays["sums"][: len(splits[0])], shape)
    return ImageFormat(**about["image_format"], mean=mean, std=std, notes=about["notes"])


def test_digits_as_mnist_stores_them_are_known_by_facts() -> None:
    images = of(cache.load("digits"), "train").images.numpy()[:200]
    blank = np.zeros((1, 1, 28, 28), dtype=np.uint8)
    known = preparation_of(images)
    assert (known.bright_on_black, known.digit_photos) == (True, True)
    assert (known.shape, known.notes) == ((1, 28, 28), [])
    few = images.copy()
    few[:15, 0, [0, -1], :15] = few[:15, 0, :15, 0] = 255  # as in 1.3 % of MNIST, and broader
    assert preparation_of(few).bright_on_black
    clothes = images.repeat(2, 2)[:, :, 14:42].copy()  # as Fashion-MNIST's, which fill their frame
    clothes[:, :, :20, 0] = 200
    for other in (
        preparation_of(images, classes=list("abcdefghij")),  # letters may be drawn so too
        preparation_of(images, classes=[*DIGITS, "none"]),
        preparation_of(np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)))),  # of 32x32
    ):
        assert (other.bright_on_black, other.digit_photos) == (True, False)
    for splits in [
        (255 - images,),
        (clothes,),
        (images, 255 - images),
        # predict would invert that one file, and evaluate does not
        (images, np.concatenate([images, 255 - images[:1]])),
        (images, np.concatenate([images, blank])),  # predict would refuse it
        (images.repeat(3, 1),),  # in colour
    ]:
        other = preparation_of(*splits)
        assert (other.bright_on_black, other.digit_photos) == (False, False)


def test_classes_of_single_characters_are_known() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8), dtype=np.uint8)
    for classes, characters in ((DIGITS, True), (["由", "甲"], True), (["cat", "dog"], False)):
        made = preparation_of(noise, classes=classes)
        assert (made.characters, made.bright_on_black) == (characters, False)
