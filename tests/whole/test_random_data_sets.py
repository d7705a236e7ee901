"""Folders of images made at random are read as Pillow and NumPy read them without us.

Each is a function of its seed: formats, modes, sizes, orientations, transparency, names. What a
single oddity of a layout, a name, a table of labels or a side file does is in data/ and in
test_reported.py. SETS=300 in the environment makes so many.
"""

import io
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from PIL.ExifTags import Base

from ddp_mnist import cli
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.verbs.predict import read_image
from tests.data_sets import encoded, load, of

SETS = int(os.environ.get("SETS", "30"))
MODES = {  # by suffix: Pillow's name of the format, and modes that it writes
    "png": ("PNG", ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    "JPEG": ("JPEG", ("L", "RGB", "CMYK")),
    "bmp": ("BMP", ("1", "L", "P", "RGB")),
    "tiff": ("TIFF", ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16")),
    "webp": ("WEBP", ("RGB", "RGBA")),
    "gif": ("GIF", ("L", "P")),
    "ppm": ("PPM", ("RGB",)),
    "tga": ("TGA", ("L", "RGB", "RGBA")),
    "jp2": ("JPEG2000", ("L", "RGB")),
}
KINDS = [(suffix, mode) for suffix, (_, modes) in MODES.items() for mode in modes]
WITH_EXIF = ("PNG", "JPEG", "TIFF", "WEBP")
NAMES = [  # of a file, of a class and of the data set
    ("image{}", "kind{}", "photos"),
    ("图片 {} é", "种类{} ß", "照片"),
    ("what? [{}]*", "a[{}]*", "photos[1] *?"),
    ("{}", "00{}", "2024"),
    ("null{}", "NA1e{}", "true"),
]
COLOURS = ((220, 40, 40), (40, 200, 60), (50, 60, 220), (210, 200, 40), (200, 60, 200))


@dataclass
class RandomSet:
    """A data set and the image files that are in it."""

    path: Path
    is_split: bool  # into train and test; else its test is drawn
    flags: list[str]  # of train
    kinds: list[tuple[str, str]]
    files: list[tuple[Path, str, str]] = field(default_factory=list)  # with class and split


def make(seed: int, place: Path) -> RandomSet:
    """Write the data set of a seed."""
    draw = np.random.default_rng([0xDA7A, seed])
    file_name, class_name, set_name = NAMES[draw.integers(len(NAMES))]
    flags = str(draw.choice(["", "", "--grey", "--image-size 20x28"])).split()
    kinds = [KINDS[number] for number in draw.integers(0, len(KINDS), draw.integers(1, 5))]
    own = RandomSet(place / set_name, bool(draw.integers(2)), flags, kinds)
    sizes = draw.integers(16, 40, (draw.integers(1, 4), 2)).tolist()
    turns, classes = bool(draw.integers(2)), draw.integers(2, 6)
    for split, least in (("train", 8), ("test", 3)):
        for label in range(classes):
            for number in range(draw.integers(least, 2 * least)):
                suffix, mode = kinds[draw.integers(len(kinds))]
                name, part = class_name.format(label), split if own.is_split else ""
                file = f"{file_name.format(f'{split}{number}')}.{suffix}"
                path = own.path / part / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                image = picture(label, sizes[draw.integers(len(sizes))], draw)
                write(image, path, mode, int(draw.integers(1, 9)) if turns else 1, draw)
                own.files.append((path, name, split))
    return own


def picture(label: int, size: list[int], draw: np.random.Generator) -> PIL.Image.Image:
    """Return noise with a block of the class's colour; no two are alike."""
    width, height = size
    pixels = draw.integers(60, 190, (height, width, 3), dtype=np.uint8)
    top, left = draw.integers(0, height // 2), draw.integers(0, width // 2)
    pixels[top : top + height // 2, left : left + width // 2] = COLOURS[label]
    return PIL.Image.fromarray(pixels)


def write(
    image: PIL.Image.Image, path: Path, mode: str, orientation: int, draw: np.random.Generator
) -> None:
    kind, _ = MODES[path.suffix[1:]]
    if mode == "I;16":
        image = PIL.Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 257)
    else:
        image = image.convert(mode)
    if mode in ("LA", "RGBA"):
        image.putalpha(PIL.Image.new("L", image.size, int(draw.integers(256))))
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    if kind in WITH_EXIF:
        image.getexif()[Base.Orientation] = orientation
        options["exif"] = image.getexif()
    path.write_bytes(encoded(image, kind, **options))


def by_pillow(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return an image file as uint8 [C, H, W], upright and on white, by Pillow's own functions."""
    channels, height, width = shape
    image = PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(path.read_bytes())))
    if image.mode.startswith("I"):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    layers = np.asarray(image.convert("RGBA")).astype(float)
    opaque = layers[..., 3:] / 255
    on_white = (layers[..., :3] * opaque + 255 * (1 - opaque)).round().astype(np.uint8)
    image = PIL.Image.fromarray(on_white).convert("L" if channels == 1 else "RGB")
    fitted = PIL.ImageOps.fit(image, (width, height), PIL.Image.Resampling.BILINEAR)
    return np.asarray(fitted).reshape(height, width, channels).transpose(2, 0, 1)


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=pytest.mark.soak if n >= 4 else ()) for n in range(SETS)]
)
def test_each_image_is_read_as_pillow_reads_it_and_by_predict_too(
    seed: int, tmp_path: Path, record_property: Any
) -> None:
    """What predict then answers, test_new_images.py counts."""
    own, seen = make(seed, tmp_path), dict[Path, bytes]()
    details = f"{own.path.name}, {own.is_split=}, {own.flags}, {own.kinds}"
    record_property("details", details)
    images = load(own.path, ImageOptions.from_flags(vars(cli.train_config(own.flags).run)))
    for path, *_ in own.files:
        pixels = read_image(path, images.image_format, False)
        by_others = by_pillow(path, images.image_format.shape)
        assert abs(pixels.astype(int) - by_others).max() <= 2, path
        seen[path] = pixels.tobytes()
    rows, files = (dict[str, Counter[tuple[bytes, str]]]() for _ in range(2))
    for split in ("train", "test"):
        part = of(images, split)
        names = [images.classes[label] for label in part.labels.tolist()]
        pixels_of = [image.numpy().tobytes() for image in part.images]
        rows[split] = Counter(zip(pixels_of, names, strict=True))
        files[split] = Counter((seen[path], name) for path, name, of in own.files if of == split)
    if own.is_split:
        assert rows == files
    else:
        assert rows["train"] + rows["test"] == files["train"] + files["test"]
