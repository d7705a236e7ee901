"""The one decoder: what it makes of an image file is what a net sees, in training and after it."""

import contextlib
import functools
import io
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
from PIL.ExifTags import Base

from ddp_mnist.data.image_format import Shape

GREY_MODES = ("1", "L", "LA", "La")
SIXTEEN_BITS = "16 bits, of which the upper 8 count"
TURN = PIL.Image.Transpose
TURNS = {  # what makes an image upright, by its orientation in EXIF
    2: TURN.FLIP_LEFT_RIGHT,
    3: TURN.ROTATE_180,
    4: TURN.FLIP_TOP_BOTTOM,
    5: TURN.TRANSPOSE,
    6: TURN.ROTATE_270,
    7: TURN.TRANSVERSE,
    8: TURN.ROTATE_90,
}

HEADER_ONLY = ("BUFR", "GRIB", "HDF5", "MPEG", "WMF")  # all that Pillow reads of such files


@functools.cache
def reads_heif() -> bool:
    """Return whether Pillow reads HEIC, as phones store photos: it does if pillow_heif is there."""
    try:
        from pillow_heif import register_heif_opener
    except ImportError:
        return False
    register_heif_opener()
    return True


def image_endings() -> frozenset[str]:
    """Return the suffixes, in lower case, of the files that can be decoded here."""
    reads_heif()
    endings = PIL.Image.registered_extensions().items()
    readable = PIL.Image.OPEN.keys() - HEADER_ONLY
    return frozenset(ending for ending, kind in endings if kind in readable)


@contextlib.contextmanager
def open_image(file: str | Path | bytes) -> Iterator[PIL.Image.Image]:
    """Open an image file, by its path or of its bytes. Raise what Pillow does."""
    # It warns of what it can do without, as a part of the EXIF.
    with warnings.catch_warnings(action="ignore"), open_beside_others(file) as image:
        yield image


@contextlib.contextmanager
def open_beside_others(file: str | Path | bytes) -> Iterator[PIL.Image.Image]:
    """Do so in one of several threads: they would undo each other's filters of warnings."""
    # Given a path, Pillow maps an uncompressed file into memory, and misreads the rows of a TIFF
    # that EXIF turns on its side.
    reads_heif()
    with (
        io.BytesIO(file) if isinstance(file, bytes) else Path(file).open("rb") as stream,
        PIL.Image.open(stream) as image,
    ):
        yield image


def decode_image(image: PIL.Image.Image, shape: Shape) -> np.ndarray:
    """Return an opened image file, upright, as uint8 [C, H, W].

    The middle of an image of another size is kept, as much as has the wanted sides' ratio.
    """
    channels, height, width = shape
    image.load()  # damage is an error here: getexif of a PNG would load it, and be forgiven
    image = in_mode(upright(image), "L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = PIL.ImageOps.fit(image, (width, height), PIL.Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def stored_pixels(image: PIL.Image.Image) -> np.ndarray:
    """Return the pixels of a loaded image file, [H, W] or [H, W, channels], as its mode has them.

    They are neither turned nor resized. A number of a palette says nothing without its colour.
    """
    return np.asarray(image.convert("RGBA") if image.mode in ("P", "PA") else image)


def upright(image: PIL.Image.Image, orientation: int | None = None) -> PIL.Image.Image:
    """Return the image turned as its EXIF data, or else `orientation`, say."""
    turn = TURNS.get(orientation or orientation_of(image))
    return image if turn is None else image.transpose(turn)


def orientation_of(image: PIL.Image.Image) -> int:
    """Return EXIF's 1 (upright) to 8; 1 if the EXIF data are missing or damaged.

    Of a PNG that is not loaded, EXIF behind its pixels, where few programs write it, is not found:
    PngImageFile's own getexif would decode the pixels to look for it.
    """
    with contextlib.suppress(Exception):
        orientation = PIL.Image.Image.getexif(image).get(Base.Orientation)
        return orientation if orientation in TURNS else 1
    return 1


def in_mode(image: PIL.Image.Image, mode: str, paper: str = "white") -> PIL.Image.Image:
    """Return it in mode L or RGB, on `paper` if parts are clear; of 16 bits, the upper 8 count.

    Raise ValueError for mode F.
    """
    if image.mode.startswith("I"):  # convert("L") would make all above 255 white
        upper = (np.asarray(image) // 256).clip(0, 255).astype(np.uint8)
        image = PIL.Image.fromarray(upper)
    if image.mode == "F":
        raise ValueError("mode F has no fixed range: save 8-bit images")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", layer.size, paper), layer)
    return image if image.mode == mode else image.convert(mode)


def is_clear(image: PIL.Image.Image) -> bool:
    """Return whether parts of a decoded image are transparent; its header says whether they may."""
    if not image.has_transparency_data:
        return False
    return bool((np.asarray(image.convert("RGBA").getchannel("A")) < 255).any())


def facts_of(image: PIL.Image.Image) -> tuple[tuple[int, int], bool, list[str]]:
    """Return an opened file's height and width (upright), whether it is grey, and its oddities.

    Only its header is read.
    """
    turned, odd = orientation_of(image), []
    across = turned >= 5 and image.format != "TIFF"  # of which Pillow says the size when upright
    size = (image.width, image.height) if across else (image.height, image.width)
    sixteen = image.mode.startswith("I")
    for wrong, what in (
        (turned != 1, "an orientation in EXIF and became upright"),
        (getattr(image, "is_animated", False), "several frames, of which the first counts"),
        (sixteen, SIXTEEN_BITS),
        (image.mode == "CMYK", "CMYK colours, which became RGB"),
    ):
        if wrong:
            odd.append(what)
    return size, sixteen or image.mode in GREY_MODES, odd
