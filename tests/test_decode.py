"""One decoder for all who prepare an image, and what it remembers of a data set."""

import resource
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from ddp_mnist.cluster.local import run_world
from ddp_mnist.data import cache, decode
from ddp_mnist.data.decode import (
    DIGITS,
    Decoded,
    Preparation,
    _strip_as_grey,
    as_grey,
    bright_on_black,
    decode_image,
    decoder_digest,
)
from ddp_mnist.verbs.predict import read_image

MEGAPIXELS = 12
MODES = ("L", "LA", "RGB", "RGBA", "P", "1", "CMYK", "YCbCr", "HSV", "I", "I;16", "PA")


def rgba(width: int, height: int) -> PIL.Image.Image:
    """Return colours and opacities of every kind."""
    values = np.random.default_rng(width).integers(0, 256, (height, width, 4), dtype=np.uint8)
    values[: height // 2, :, 3] = 255
    return PIL.Image.fromarray(values)


def sample(mode: str, width: int = 67, height: int = 45) -> PIL.Image.Image:
    if mode == "I;16":
        values = np.arange(width * height).reshape(height, width) * 21 % 65536
        return PIL.Image.fromarray(values.astype(np.uint16))
    if mode == "I":
        return PIL.Image.fromarray(np.arange(width * height, dtype=np.int32).reshape(height, -1))
    image = rgba(width, height)
    if mode == "PA":
        return image.convert("RGB").convert("P").convert("PA")
    if mode in ("HSV", "YCbCr", "P", "CMYK"):
        image = image.convert("RGB")
    image = image.convert(mode)
    if mode == "P":
        image.info["transparency"] = bytes(range(256))
    return image


@pytest.mark.parametrize("mode", MODES)
def test_strips_give_what_the_whole_image_gives(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = sample(mode)
    assert image.mode == mode
    whole = np.asarray(_strip_as_grey(image, "white"))
    for strip in (1, 67 * 7, 67 * 45, 2**20):
        monkeypatch.setattr("ddp_mnist.data.decode.STRIP", strip)
        grey = as_grey(image)
        assert grey.mode == "L"
        assert np.array_equal(np.asarray(grey), whole)
    if mode == "RGB":  # one colour counts as transparent
        image.info["transparency"] = image.getpixel((3, 3))
        monkeypatch.setattr("ddp_mnist.data.decode.STRIP", 67 * 7)
        assert as_grey(image).getpixel((3, 3)) == 255
        assert as_grey(image, "black").getpixel((3, 3)) == 0


def test_what_the_decoder_does_has_not_changed() -> None:
    """By hand, so that a change of the decoder is a decision: every cache and model is of one."""
    image = rgba(90, 50)
    paper = PIL.Image.new("RGBA", image.size, "white")
    grey = PIL.Image.alpha_composite(paper, image).convert("L")
    stretched = grey.resize((28, 28), PIL.Image.Resampling.BILINEAR)
    assert np.array_equal(decode_image(image), np.asarray(stretched))
    assert decode_image(sample("L", 28, 28)).tolist() == np.asarray(sample("L", 28, 28)).tolist()


def test_an_edited_decoder_has_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, edited = decoder_digest(), tmp_path / "decode.py"
    edited.write_text(Path(decode.__file__).read_text().replace("BILINEAR", "NEAREST"))
    monkeypatch.setattr("ddp_mnist.data.decode.__file__", str(edited))
    assert decoder_digest() != before


# --- What kind of images a data set holds


def digits() -> np.ndarray:
    return cache.load("digits").train_images.numpy()[:200]


def preparation_of(
    train: np.ndarray, test: np.ndarray | None = None, classes: list[str] = DIGITS
) -> Preparation:
    return Decoded(
        {"train": train, "test": train if test is None else test}, {}, classes
    ).preparation()


def drawn_to_the_border() -> np.ndarray:
    """Return bright on black in a frame that they fill, as Fashion-MNIST's clothes do."""
    clothes = digits().repeat(2, 1)[:, 14:42].copy()
    clothes[:, :20, 0] = 200
    return clothes


def test_digits_as_mnist_stores_them_are_known_by_facts() -> None:
    images, blank = digits(), np.zeros((1, 28, 28), dtype=np.uint8)
    known = Preparation([], bright_on_black=True, digit_photos=True)
    assert preparation_of(images) == known
    few = images.copy()
    few[:15, 0, 14] = 255  # as in 1.3 % of MNIST
    assert bright_on_black(few)
    for other in (
        preparation_of(images, classes=list("abcdefghij")),  # letters may be drawn so too
        preparation_of(images, classes=[*DIGITS, "none"]),
        # photos of 96x96, say
        Decoded({"train": images}, {}, DIGITS, as_stored=False).preparation(),
    ):
        assert (other.bright_on_black, other.digit_photos) == (True, False)
    for train, test in [
        (255 - images, None),
        (drawn_to_the_border(), None),
        (images, 255 - images),
        # predict would invert that one file, and evaluate does not
        (images, np.concatenate([images, 255 - images[:1]])),
        (images, np.concatenate([images, blank])),  # predict would refuse it
    ]:
        other = preparation_of(train, test)
        assert (other.bright_on_black, other.digit_photos) == (False, False)


def test_mnist_and_the_digits_are_of_that_kind(mnist: Path) -> None:
    for dataset in ("digits", str(mnist)):
        assert cache.load(dataset).preparation.digit_photos


# --- Memory


def bytes_a_pixel(file: str, photo: bool) -> float:
    """Return the highest use of memory while a file is prepared, above what there was before."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    read_image(Path(file), photo)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return kilobytes * 1024 / (MEGAPIXELS * 10**6)


@pytest.mark.parametrize(
    ("photo", "mode", "limit"), [(False, "RGBA", 8), (True, "RGB", 12), (True, "L", 10)]
)
def test_a_large_photo_takes_little_memory(
    photo: bool, mode: str, limit: float, tmp_path: Path
) -> None:
    """4 bytes a pixel are Pillow's own, except in grey."""
    width, height = 4000, MEGAPIXELS * 250
    page = PIL.Image.new(mode, (width, height), "white")
    page.paste(PIL.Image.new(mode, (width // 9, height // 2), "black"), (width // 2, height // 4))
    page.save(tmp_path / "x.png", compress_level=1)
    [taken] = run_world(1, bytes_a_pixel, str(tmp_path / "x.png"), photo, folder=tmp_path)
    assert taken < limit
