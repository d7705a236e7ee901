"""A person's own images: any size, colour and oddity is taken as it is, said, or refused."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.features
import PIL.Image
import pytest
from PIL.ExifTags import Base

from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data.decode_all import usual_size
from ddp_mnist.verbs.predict import read_image
from tests.data_sets import RED, folder_of, load, of, picture, stored

BLUE = (10, 10, 200)


def turned(kind: str = "PNG") -> PIL.Image.Image:
    image = picture()
    image.getexif()[Base.Orientation] = 6
    return stored(image, format=kind, exif=image.getexif())


def animated(kind: str = "GIF") -> PIL.Image.Image:
    more = [picture(right=BLUE)]
    return stored(picture(), format=kind, save_all=True, append_images=more)


def half_clear() -> PIL.Image.Image:
    image = PIL.Image.new("P", (20, 12), 1)
    image.putpalette([0, 0, 0, *RED])
    return image


def sixteen_bits() -> PIL.Image.Image:
    pixels = np.zeros((12, 20), dtype=np.uint16)
    pixels[:, 10:] = 180 * 256 + 77
    return PIL.Image.fromarray(pixels)


class Taken(NamedTuple):
    """What an image becomes: its right half's pixel, what is said of it, its height and width."""

    make: Callable[[], PIL.Image.Image]
    pixel: tuple[int, ...] = RED
    note: str = ""
    size: tuple[int, int] = (12, 20)


def saved(kind: str, mode: str = "RGB", **how: Any) -> Callable[[], PIL.Image.Image]:
    return lambda: stored(picture().convert(mode), format=kind, **how)


WHITE, ON_WHITE = (255, 255, 255), (228, 133, 133)
TURNED, FRAMES = "an orientation in EXIF and became upright", "several frames, of which the first"
CLEAR, CMYK = "an alpha channel and were laid on white", "CMYK colours, which became RGB"
SIXTEEN = "16 bits, of which the upper 8 count"
DAMAGED_EXIF = b"Exif\0\0II*\0\x08\0\0\0\xff\xff"
TAKEN = {
    **{kind: Taken(saved(kind)) for kind in ("PNG", "BMP", "PPM", "TGA", "TIFF", "JPEG2000")},
    "JPEG": Taken(saved("JPEG", quality=100)),
    "WebP": Taken(saved("WEBP", lossless=True)),
    "GIF": Taken(lambda: stored(picture().quantize(4), format="GIF")),
    "grey": Taken(lambda: picture().convert("L"), (67,)),
    "grey and opaque": Taken(lambda: picture().convert("LA"), (67,), CLEAR),
    "one bit": Taken(lambda: picture(right=WHITE).convert("1"), (255,)),
    "palette": Taken(lambda: picture().quantize(4)),
    "YCbCr": Taken(saved("TIFF", "YCbCr")),
    "CMYK": Taken(saved("JPEG", "CMYK", quality=100), note=CMYK),
    "16 bits": Taken(sixteen_bits, (180,), SIXTEEN),
    "16 bits of 32": Taken(
        lambda: stored(PIL.Image.fromarray(np.asarray(sixteen_bits(), np.int32)), format="TIFF"),
        (180,),
        SIXTEEN,
    ),
    "clear": Taken(lambda: PIL.Image.new("RGBA", (20, 12)), WHITE, CLEAR),
    "one clear grey": Taken(lambda: stored(picture().convert("L"), transparency=67), (255,), CLEAR),
    "one clear colour": Taken(lambda: stored(picture(), transparency=RED), WHITE, CLEAR),
    "palette, half clear": Taken(
        lambda: stored(half_clear(), transparency=bytes([127, 127])), ON_WHITE, CLEAR
    ),
    "palette, opaque": Taken(  # no pixel has colour 0
        lambda: stored(half_clear(), transparency=bytes([0, 255])), note=CLEAR
    ),
    "RGBA, opaque": Taken(lambda: picture().convert("RGBA"), note=CLEAR),
    "animated": Taken(animated, note=FRAMES),
    "pages": Taken(lambda: animated("TIFF"), note=FRAMES),
    "turned": Taken(turned, note=TURNED, size=(20, 12)),
    "a turned TIFF": Taken(lambda: turned("TIFF"), note=TURNED, size=(20, 12)),
    "damaged EXIF": Taken(saved("JPEG", quality=100, exif=DAMAGED_EXIF)),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_an_image_is_taken_as_it_is_and_what_is_odd_is_said(kind: str, tmp_path: Path) -> None:
    make, pixel, note, size = TAKEN[kind]
    images = load(folder_of(tmp_path / "own", make(), make()))
    assert images.image_format.shape == (len(pixel), *size)
    whole = read_image(tmp_path / "own" / "train" / "b" / "1.png", images.image_format, False)
    assert np.array_equal(of(images, "train").images[1], whole)  # `predict` does the same
    near_the_end = of(images, "train").images[0, :, -2, -2].int().numpy()
    np.testing.assert_allclose(near_the_end, pixel, atol=4)  # JPEG's, and a palette's
    said = [f"4 of 4 images had {note}"] * bool(note)
    assert all(map(str.startswith, images.image_format.notes, said))
    assert len(images.image_format.notes) == len(said)


CUT = ", cut to their middle (train --fit pad keeps them whole)"


@pytest.mark.parametrize(
    ("sizes", "reading", "shape", "note"),
    [
        ([(20, 12), (40, 12)], AS_THEY_ARE, [12, 12], f"12x20, 12x40 became 12x12{CUT}"),
        ([(640, 480), (640, 480)], AS_THEY_ARE, [96, 128], "480x640 became 96x128"),
        ([(20, 12), (20, 12)], ImageOptions(size=(8, 16)), [8, 16], f"12x20 became 8x16{CUT}"),
        ([(9, 9), (12, 12), (14, 14), (16, 16)], AS_THEY_ARE, [12, 12], ", ... became 12x12"),
    ],
)
def test_sizes_that_differ_become_one(
    sizes: list[tuple[int, int]], reading: ImageOptions, shape: list[int], note: str, tmp_path: Path
) -> None:
    images = load(folder_of(tmp_path / "own", *map(picture, sizes)), reading)
    assert list(of(images, "train").images.shape[2:]) == shape
    [said] = images.image_format.notes
    assert said.endswith(note)
    # The middle is kept, and not stretched: its left is black and its right is red.
    assert (of(images, "train").images[:, 0, :, 1] < 30).all()
    assert (of(images, "train").images[:, 0, :, -2] > 170).all()


def test_a_large_set_keeps_larger_images() -> None:
    sizes = ((640, 480), (96, 128), (224, 299)), ((224, 300), (300, 224), (300, 224))
    for size, few, many in sizes:
        for count, expected in ((4999, few), (5000, many)):
            assert usual_size(Counter({size[::-1]: count})) == expected
            mixed = usual_size(Counter({size[::-1]: count - 1, (500, 500): 1}))
            assert mixed == ((96, 96) if count < 5000 else (224, 224))


def test_grey_and_colour_together_are_colour_unless_grey_is_asked_for(tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own", picture(), picture(right=(90, 90, 90)).convert("L"))
    images = load(own)
    assert images.image_format.notes == ["2 of 4 images had no colour and became RGB"]
    assert of(images, "train").images[1, :, 5, 15].tolist() == [90, 90, 90]
    grey = load(own, ImageOptions(grey=True))
    assert grey.image_format.notes == ["2 of 4 images had colour and became grey"]
    assert list(of(grey, "train").images.shape) == [2, 1, 12, 20]
    assert grey.digest != images.digest
    assert np.array_equal(grey.keys, images.keys)  # by which a copy is known
    assert load(own).digest == images.digest  # both stay in the cache


def test_twelve_bits_in_sixteen_are_said_to_lose_their_greys(tmp_path: Path) -> None:
    dark = PIL.Image.fromarray(np.asarray(sixteen_bits()) // 16)
    images = load(folder_of(tmp_path / "own", dark, dark))
    assert of(images, "train").images.unique().tolist() == [0, 11]
    said = "all pixels are below 4096 of 65535, as of 12 bits: scale them to 16 bits"
    assert images.image_format.notes[1:] == [said]


def test_each_oddity_of_a_mixed_set_is_counted(tmp_path: Path) -> None:
    images = load(folder_of(tmp_path / "own", *[taken.make() for taken in TAKEN.values()]))
    for note, count in Counter(taken.note for taken in TAKEN.values() if taken.note).items():
        beginning = f"{2 * count} of {2 * len(TAKEN)} images had {note}"
        assert any(said.startswith(beginning) for said in images.image_format.notes), note
