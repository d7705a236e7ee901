"""Data sets made at random, as people have them: predict and evaluate agree on every image.

Each is a function of its seed: formats, modes, sizes, orientations, names, side files, splits. They
also agree with what Pillow and NumPy make of the file without us. What a single oddity does is in
the tests of data/. SETS=300 in the environment makes so many.
"""

import csv
import gc
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL.ExifTags import Base

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.system.files import read_json
from ddp_mnist.training import weights
from ddp_mnist.verbs.predict import read_image
from tests.commands import Typed
from tests.data_sets import cells_of, encoded, of

SETS = int(os.environ.get("SETS", "30"))
FORMATS = {  # by suffix: Pillow's name, and modes that it writes
    "png": ("PNG", ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    "jpg": ("JPEG", ("L", "RGB", "CMYK")),
    "JPEG": ("JPEG", ("RGB",)),
    "jfif": ("JPEG", ("RGB",)),
    "bmp": ("BMP", ("1", "L", "P", "RGB")),
    "tiff": ("TIFF", ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16")),
    "webp": ("WEBP", ("RGB", "RGBA")),
    "gif": ("GIF", ("L", "P")),
    "ppm": ("PPM", ("RGB",)),
    "tga": ("TGA", ("L", "RGB", "RGBA")),
    "jp2": ("JPEG2000", ("L", "RGB")),
}
WITH_EXIF = ("PNG", "JPEG", "TIFF", "WEBP")
LAYOUTS = ("folders", "flat", "metadata", "parquet")
NAMES = {  # of a file, of a class and of the data set
    "plain": ("image{}", "kind{}", "photos"),
    "spaces": ("an image {}", "a kind {}", "my own photos"),
    "unicode": ("图片 {} é", "种类{} ß", "照片"),
    "patterns": ("what? [{}]*", "a[{}]*", "photos[1] *?"),
    "numbers": ("{}", "00{}", "2024"),
    "words": ("null{}", "NA1e{}", "true"),
}
SIDE_FILES = {"txt": "0 0.5 0.5 1 1", "json": "{}", "csv": "a,b\n1,2"}
COLOURS = ((220, 40, 40), (40, 200, 60), (50, 60, 220), (210, 200, 40), (200, 60, 200))


@dataclass
class RandomSet:
    """A data set and the image files that are in it, or for a table the same beside it."""

    what: dict[str, Any]  # what was drawn
    path: Path
    flags: list[str]  # of train and prepare
    files: list[tuple[Path, str, str]] = field(default_factory=list)  # with class and split


def make(seed: int, place: Path) -> RandomSet:
    """Write the data set of a seed."""
    draw = np.random.default_rng([0xDA7A, seed])
    layout = LAYOUTS[seed % len(LAYOUTS)]
    suffixes = list(draw.choice(list(FORMATS), draw.integers(1, 4), replace=False))
    what: dict[str, Any] = {
        "layout": layout,
        "formats": "+".join(suffixes),
        "mixed modes": bool(draw.integers(2)),
        "sizes": str(draw.choice(["equal", "mixed"])),
        "EXIF": bool(draw.integers(2)),
        "names": "plain" if layout == "parquet" else str(draw.choice(list(NAMES))),
        "beside": str(draw.choice(["nothing", "hidden images", *SIDE_FILES])),
        "classes": int(draw.integers(2, 6)),
        "flags": str(draw.choice(["", "", "--grey", "--image-size 20x28"])),
        "model": str(draw.choice(["mlp", "cnn"])),
    }
    file_name, class_name, set_name = NAMES[what["names"]]
    own = RandomSet(what, place / set_name, what["flags"].split())
    modes = {suffix: str(draw.choice(FORMATS[suffix][1])) for suffix in suffixes}
    size = tuple(draw.integers(16, 40, 2).tolist())
    for split, least in (("train", 8), ("test", 3)):
        for label in range(what["classes"]):
            for number in range(draw.integers(least, 2 * least)):
                suffix = str(draw.choice(suffixes))
                mode = str(draw.choice(FORMATS[suffix][1])) if what["mixed modes"] else None
                mixed = tuple(draw.integers(16, 40, 2).tolist())
                image = picture(label, size if what["sizes"] == "equal" else mixed, draw)
                name = class_name.format(label)
                stem = file_name.format(number + (0 if split == "train" else 100))
                bare = place_of(own.path, layout, split, name, stem)
                path = bare.with_name(f"{bare.name}.{suffix}")
                path.parent.mkdir(parents=True, exist_ok=True)
                write(image, path, mode or modes[suffix], what["EXIF"], draw)
                own.files.append((path, name, split))
                beside(path, what["beside"])
    finish(own, layout)
    return own


def picture(label: int, size: tuple[int, ...], draw: np.random.Generator) -> PIL.Image.Image:
    """Return noise with a block of the class's colour; no two are alike."""
    width, height = size
    pixels = draw.integers(60, 190, (height, width, 3), dtype=np.uint8)
    top, left = draw.integers(0, height // 2), draw.integers(0, width // 2)
    pixels[top : top + height // 2, left : left + width // 2] = COLOURS[label]
    return PIL.Image.fromarray(pixels)


def write(
    image: PIL.Image.Image, path: Path, mode: str, exif: bool, draw: np.random.Generator
) -> None:
    kind = FORMATS[path.suffix[1:]][0]
    if mode == "I;16":
        grey = np.asarray(image.convert("L"), dtype=np.uint16)
        image = PIL.Image.fromarray(grey * 257)
    elif mode in ("LA", "RGBA"):
        image = image.convert(mode)
        if draw.integers(2):
            image.putalpha(PIL.Image.new("L", image.size, int(draw.integers(256))))
    else:
        image = image.convert(mode)
    options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
    if exif and kind in WITH_EXIF:
        image.getexif()[Base.Orientation] = int(draw.integers(1, 9))
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


def place_of(folder: Path, layout: str, split: str, name: str, stem: str) -> Path:
    """Return where a file lies, its suffix apart."""
    if layout == "metadata":
        return folder / split / f"{name} {stem}"
    if layout == "parquet":
        return folder.with_name("files") / split / name / stem
    return folder / (name if layout == "flat" else f"{split}/{name}") / stem


def beside(path: Path, kind: str) -> None:
    """Write what people and programs leave beside an image."""
    if kind in SIDE_FILES:
        path.with_suffix(f".{kind}").write_text(SIDE_FILES[kind])
    elif kind == "hidden images":
        shutil.copy(path, path.with_name(f".{path.name}"))


def finish(own: RandomSet, layout: str) -> None:
    """Write what a layout needs besides files."""
    for split in ("train", "test"):
        of_split = [(path, name) for path, name, of in own.files if of == split]
        if layout == "metadata":
            with (own.path / split / "metadata.csv").open("w", newline="") as file:
                rows = [(path.name, name) for path, name in of_split]
                csv.writer(file).writerows([("file_name", "label"), *rows])
        elif layout == "parquet":
            files, names = zip(*of_split, strict=True)
            images = cells_of([path.read_bytes() for path in files])
            own.path.mkdir(exist_ok=True)
            table = pa.table({"image": images, "label": names})
            pq.write_table(table, own.path / f"{split}-00000-of-00001.parquet")


# --- All of them


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("seed", range(SETS))
def test_predict_agrees_with_evaluate_on_each_image_of_any_data_set(
    seed: int, tmp_path: Path, typed: Typed, record_property: Callable[[str, object], None]
) -> None:
    own, run = make(seed, tmp_path), tmp_path / "run"
    details = ", ".join(f"{name} {value}" for name, value in own.what.items() if value)
    record_property("details", details)
    options = ["--model", own.what["model"], "--epochs", 2, "--batch-size", 6, "--cpu"]
    typed("train", "--dataset", own.path, *own.flags, *options, "--run-dir", run).succeeds()
    counted = json.loads(typed("evaluate", run, "--json").out)
    assert counted["confusion"] == read_json(run / "summary.json")["confusion"]

    # The images of each split are the files that were written for it, as predict prepares them.
    trained = weights.from_bytes(weights.read_bytes(str(run)), str(run))
    reading = ImageOptions.of(read_json(run / "config.json")["run"])
    images = cache.load(str(own.path), options=reading)
    as_rows = {
        "train": rows_of(of(images, "train").images, of(images, "train").labels, images.classes),
        "test": rows_of(of(images, "test").images, of(images, "test").labels, images.classes),
    }
    read = {path: read_image(path, trained.image_format, False) for path, *_ in own.files}
    for path, pixels in read.items():
        apart = pixels.astype(int) - by_pillow(path, trained.image_format.shape)
        assert abs(apart).max() <= 2, path
    seen = {path: pixels.tobytes() for path, pixels in read.items()}
    as_files = {
        split: Counter((seen[path], name) for path, name, of in own.files if of == split)
        for split in as_rows
    }
    if flat := own.what["layout"] == "flat":  # its test was drawn
        assert as_rows["train"] + as_rows["test"] == as_files["train"] + as_files["test"]
    else:
        assert as_rows == as_files

    # predict answers each as the net that evaluate counts does, and its answers count the same.
    with torch.inference_mode():
        guesses = trained.model(of(images, "test").images).argmax(1).tolist()
    answers = dict(
        zip((row.numpy().tobytes() for row in of(images, "test").images), guesses, strict=True)
    )
    rows = [(path, name) for path, name, split in own.files if flat or split == "test"]
    tested = [path for path, name in rows if (seen[path], name) in as_rows["test"]]
    assert len(tested) == counted["count"]
    whole = own.what["layout"] in ("folders", "metadata") and own.what["beside"] != "hidden images"
    folder = own.path / "test" if whole else None
    ended = typed("predict", run, *([folder] if folder else tested), "--show", tmp_path / "x.png")
    assert (ended.code, ended.err, ended.out.count("\n")) == (0, "", len(tested))
    names = {str(path): name for path, name, _ in own.files}
    confusion = np.zeros_like(counted["confusion"])
    for answer in map(json.loads, ended.out.splitlines()):
        label = trained.task.names.index(answer["label"])
        assert label == answers[seen[Path(answer["file"])]], answer["file"]
        confusion[trained.task.names.index(names[answer["file"]]), label] += 1
    assert confusion.tolist() == counted["confusion"]
    gc.collect()  # of `datasets`, which leaves metadata.csv open


def rows_of(
    images: torch.Tensor, labels: torch.Tensor, classes: list[str]
) -> Counter[tuple[bytes, str]]:
    """Return how often each image of a class is there."""
    pairs = zip(images, labels.tolist(), strict=True)
    return Counter((image.numpy().tobytes(), classes[label]) for image, label in pairs)
