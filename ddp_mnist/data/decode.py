"""The one decoder of image files, for training, evaluation and prediction alike."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageOps
import PIL.PngImagePlugin
from PIL.ExifTags import Base

from ddp_mnist.data.image_format import Shape
from ddp_mnist.errors import DataError
from ddp_mnist.system.files import regular

PAPER = "#7f7f7f"  # grey, 127 of 255, around an image that is padded
FIT_BY: dict[str, Callable[..., PIL.Image.Image]]
FIT_BY = {"crop": PIL.ImageOps.fit, "pad": functools.partial(PIL.ImageOps.pad, color=PAPER)}
GREY_MODES = ("1", "L", "LA", "La")
SIXTEEN_BITS = "16 bits, of which the upper 8 count"
TRANSPARENT = "an alpha channel and were laid on white, or on black if only white is visible"
# The transposition that makes an image upright, by its EXIF orientation: that of Pillow's own
# exif_transpose, which also writes the EXIF data anew, and so raises for some that are damaged.
TURN = PIL.Image.Transpose
TURNS = {
    2: TURN.FLIP_LEFT_RIGHT,
    3: TURN.ROTATE_180,
    4: TURN.FLIP_TOP_BOTTOM,
    5: TURN.TRANSPOSE,
    6: TURN.ROTATE_270,
    7: TURN.TRANSVERSE,
    8: TURN.ROTATE_90,
}

HEIF = (".heic", ".heif")  # a phone's photos
HEIF_STARTS = (b"ftypheic", b"ftypheix", b"ftyphevc", b"ftypmif1")  # from its fifth byte on
LFS = b"version https://git-lfs"  # how a pointer begins that stands for a file of Git LFS
NO_IMAGE = {  # what often has the name of an image, by how it begins
    LFS: "a pointer of Git LFS: git lfs pull",
    b"<": "a web page or other text: fetch the image again",
}
# What Pillow itself decodes. Not so: it starts Ghostscript for EPS, opens what is in IPTC as any
# format, and reads but the header of BUFR, GRIB, HDF5, MPEG and WMF. New ones are not read either.
DECODED = """
    AVIF BLP BMP CUR DCX DDS DIB FITS FLI FPX FTEX GBR GIF ICNS ICO IM IMT JPEG JPEG2000 MCIDAS MIC
    MPO MSP PCD PCX PIXAR PNG PPM PSD QOI SGI SPIDER SUN TGA TIFF WEBP XBM XPM XVTHUMB
"""
# Texts and colour profiles of PNG, in bytes: editors write more than Pillow's 1 MB.
PIL.PngImagePlugin.MAX_TEXT_CHUNK = 2**26
PIL.PngImagePlugin.MAX_TEXT_MEMORY = 2**27


@functools.cache
def register_heif() -> None:
    """Let Pillow read a phone's HEIC, if pillow_heif is installed."""
    with contextlib.suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()


def formats() -> list[str]:
    """Return the formats to read: what is DECODED, and what others than Pillow have registered."""
    register_heif()
    PIL.Image.preinit()  # the usual formats are tried first
    PIL.Image.init()
    known, every = DECODED.split(), PIL.Image.OPEN.items()
    return [n for n, x in every if n in known or not x[0].__module__.startswith("PIL.")]


def image_endings() -> frozenset[str]:
    """Return the suffixes, in lower case, of image files; of HEIC even if it cannot be read."""
    readable = {*formats(), "MPO"}  # JPEG's opener reads it
    endings = PIL.Image.registered_extensions().items()
    return frozenset(ending for ending, kind in endings if kind in readable).union(HEIF)


def reads_heif() -> bool:
    register_heif()
    return HEIF[0] in PIL.Image.EXTENSION


def why_unread(name: str, start: bytes) -> str:
    """Return, in a few words, why a file is not read, given its name and first bytes."""
    if not start:
        return "empty"
    for sign, what in NO_IMAGE.items():
        if start.lstrip().startswith(sign):
            return what
    is_heif = name.lower().endswith(HEIF) or start[4:12] in HEIF_STARTS
    if is_heif and not reads_heif():
        return "of a format that needs: pip install pillow-heif"
    return "damaged, or of no format that is read here: save it as PNG"


@contextlib.contextmanager
def open_image(file: str | Path | bytes | np.ndarray) -> Iterator[PIL.Image.Image]:
    """Open an image file, given its path or its content, or an array of pixels.

    The caller filters Pillow's warnings: threads would undo each other's filters.
    Raise DataError for a file of another kind, OSError, or any of Pillow's errors.
    """
    if isinstance(file, np.ndarray):
        yield PIL.Image.fromarray(file)
        return
    name = "" if isinstance(file, bytes) else str(file)
    # A stream: given a path, Pillow maps an uncompressed file into memory, and misreads the rows of
    # a TIFF that EXIF turns on its side.
    with io.BytesIO(file) if isinstance(file, bytes) else regular(Path(file)).open("rb") as stream:
        try:
            opened = PIL.Image.open(stream, formats=formats())
        except PIL.UnidentifiedImageError as error:
            stream.seek(0)
            raise DataError(why_unread(name, stream.read(100))) from error
        with opened as image:
            yield image


def decode_image(image: PIL.Image.Image, shape: Shape, fit: str = "crop") -> np.ndarray:
    """Return an opened image file, upright, as uint8 [C, H, W].

    An image of a different size is cropped around its centre to the wanted ratio, then resized; or,
    to `pad`, resized as a whole and laid on grey.
    """
    return in_shape(as_seen(image), shape, fit)


def in_shape(image: PIL.Image.Image, shape: Shape, fit: str = "crop") -> np.ndarray:
    """Return an image that is `as_seen` as uint8 [C, H, W], in another size if necessary."""
    channels, height, width = shape
    image = in_mode(image, "L" if channels == 1 else "RGB")
    if image.size != (width, height):
        image = FIT_BY[fit](image, (width, height), PIL.Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def pixels_of(image: PIL.Image.Image) -> np.ndarray:
    """Return an image that is `as_seen` as uint8 [H, W], or [H, W, 3] if any pixel has colour."""
    mode = "L" if image.mode in GREY_MODES else "RGB"
    return without_equal_channels(np.asarray(in_mode(image, mode)))


def without_equal_channels(pixels: np.ndarray) -> np.ndarray:
    """Return uint8 [H, W] for [H, W, 1], or for [H, W, 3] without colour; others as they are."""
    if pixels.ndim == 3 and (pixels.shape[2] == 1 or (pixels == pixels[..., :1]).all()):
        return pixels[..., 0]
    return pixels


def upright(image: PIL.Image.Image, orientation: int | None = None) -> PIL.Image.Image:
    """Return the image turned upright by `orientation`, or else by its EXIF data."""
    turn = TURNS.get(orientation or orientation_of(image))
    return image if turn is None else image.transpose(turn)


def orientation_of(image: PIL.Image.Image) -> int:
    """Return EXIF's 1 (upright) to 8; 1 if the EXIF data are missing or damaged.

    In a PNG that is not loaded, EXIF after the pixels (few programs write it there) is not found:
    PngImageFile's own getexif would decode the pixels to look for it.
    """
    with contextlib.suppress(Exception):
        orientation = PIL.Image.Image.getexif(image).get(Base.Orientation)
        return orientation if orientation in TURNS else 1
    return 1


def as_seen(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an opened image file as a viewer shows it: upright, of 8 bits, and opaque."""
    image.load()  # raises an error if damaged; for a PNG, getexif would load it and hide the error
    return opaque(upright(image))


def opaque(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return a loaded image in 8 bits, the upper ones of 16; transparent parts become white.

    They become black if all that is visible is white. Raise DataError for mode F, and for values
    that 16 bits cannot hold.
    """
    if image.mode == "F":
        raise DataError("mode F has no fixed range: save 8-bit images")
    if image.mode.startswith("I"):  # convert("L") would make all above 255 white
        deep, clear = np.asarray(image), image.info.get("transparency")
        if (low := deep.min()) < 0 or deep.max() >= 2**16:
            fault = f"values from {low:,} to {deep.max():,} do not fit 16 bits"
            raise DataError(f"{fault}: scale them to 0 to 65535")
        image = PIL.Image.fromarray((deep // 256).clip(0, 255).astype(np.uint8))
        if clear is not None:  # a value of 16 bits
            image.putalpha(PIL.Image.fromarray(np.where(deep == clear, 0, 255).astype(np.uint8)))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = laid_on("white", layer)
        if is_plain(image) and not is_plain(on_black := laid_on("black", layer)):
            image = on_black
    return image


def in_mode(image: PIL.Image.Image, mode: str) -> PIL.Image.Image:
    if image.mode == "LAB":  # which Pillow converts to nothing else
        image = image.convert("RGB")
    return image if image.mode == mode else image.convert(mode)


def laid_on(paper: str, layer: PIL.Image.Image) -> PIL.Image.Image:
    return PIL.Image.alpha_composite(PIL.Image.new("RGBA", layer.size, paper), layer)


def is_plain(image: PIL.Image.Image) -> bool:
    """Return whether the image is of one colour."""
    return all(low == high for low, high in np.reshape(image.getextrema(), (-1, 2)).tolist())


def facts_of(image: PIL.Image.Image) -> tuple[tuple[int, int], bool, list[str]]:
    """Return an opened file's upright height and width, whether it is grey, and what is unusual.

    Only the header is read.
    """
    turned, sixteen = orientation_of(image), image.mode.startswith("I")
    across = turned >= 5 and image.format != "TIFF"  # whose size Pillow gives as upright
    size = (image.width, image.height) if across else (image.height, image.width)
    unusual = {
        "an orientation in EXIF and became upright": turned != 1,
        "several frames, of which the first counts": getattr(image, "is_animated", False),
        SIXTEEN_BITS: sixteen,
        TRANSPARENT: image.has_transparency_data,
        "CMYK colours, which became RGB": image.mode == "CMYK",
    }
    odd = [what for what, is_so in unusual.items() if is_so]
    return size, sixteen or image.mode in GREY_MODES, odd
