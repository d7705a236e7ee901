"""What people reported of other trainers' image data, each as a small data set: taken, or told."""

import itertools
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import PIL.Image
import PIL.ImageDraw
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddp_mnist.config.image_options import AS_THEY_ARE
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import DataError
from tests.data_sets import DRAWN, cells_of, encoded, flat, noise, read, write_metadata, write_noise

READINGS = AS_THEY_ARE, DRAWN
SIZES = {"train": 6, "test": 3}
NFC, NFD = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))


def tree(root: Path, train: Sequence[str], test: Sequence[str] = ()) -> None:
    """Write four train and two test images of each class, in its folder."""
    for seed, (split, names, count) in enumerate((("train", train, 4), ("test", test or train, 2))):
        files = (f"{name}/{number}.png" for name in names for number in range(count))
        write_noise(root / split, *files, seed=seed)


def described(*words: Any) -> Callable[[Path], None]:
    """Return what writes six train and three test images, with these labels in metadata.csv."""

    def make(root: Path) -> None:
        for seed, (split, count) in enumerate(SIZES.items()):
            rows = [(f"{n}.png", words[n % len(words)]) for n in range(count)]
            write_noise(root / split, *(name for name, _ in rows), seed=seed)
            write_metadata(root / split, rows)

    return make


def table(readme: str = "", as_bytes: bool = False) -> Callable[[Path], None]:
    """Return what writes parquet of six train and three test images, labels 0 and 1 in turn."""

    def make(root: Path) -> None:
        root.mkdir()
        for seed, (split, count) in enumerate(SIZES.items()):
            files = [encoded(noise(10 * seed + number)) for number in range(count)]
            images = pa.array(files, pa.binary()) if as_bytes else cells_of(files)
            labels = [n % 2 for n in range(count)]
            pq.write_table(pa.table({"image": images, "label": labels}), root / f"{split}.parquet")
        (root / "README.md").write_text(readme)

    return make


def shapes_on_glass(root: Path) -> None:
    for split, kind in itertools.product(("train", "test"), ("ellipse", "rectangle")):
        for number in range(6):
            alpha = PIL.Image.new("L", (32, 32))
            getattr(PIL.ImageDraw.Draw(alpha), kind)([4 + number, 5, 20, 22], fill=255)
            image = PIL.Image.new("RGBA", (32, 32), (255, 255, 255, 0))
            image.putalpha(alpha)
            path = root / split / kind / f"{number}{split}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)


def one_table_for_all(root: Path) -> None:
    rows = [
        (f"{split}/{('monday', 'friday')[n // 2 % 2]}/{n}.png", ("cat", "dog")[n % 2])
        for split, count in SIZES.items()
        for n in range(count)
    ]
    write_noise(root, *(name for name, _ in rows))
    write_metadata(root, rows)


def with_card(root: Path) -> None:
    """Captions beside the images, and a card whose globs take them in."""
    tree(root, ("cat", "dog"))
    for image in root.rglob("*.png"):
        image.with_suffix(".txt").write_text("a photo")
    splits = "".join(f"  - split: {split}\n    path: {split}/**\n" for split in ("train", "test"))
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n"
    (root / "README.md").write_text(card)


CARD = "---\ndataset_info:\n  splits:\n  - name: train\n    num_examples: 30\n---\n"
SMALL_AND_LARGE = "---\nconfigs:\n" + "".join(
    f"- config_name: {name}\n  data_files: train.parquet\n" for name in ("small", "large")
)


def beside(classes: str, **files: str) -> Callable[[Path], None]:
    """Return what writes six images of each class, in its folder, and files beside the folders."""

    def make(root: Path) -> None:
        names = classes.split(",")
        write_noise(root, *(f"{name}/{n}.png" for name in names for n in range(6)))
        for name, content in files.items():
            (root / name.replace("_json", ".json")).write_text(content)

    return make


class Taken(NamedTuple):
    """How many train and test images of each class there are."""

    make: Callable[[Path], None]
    train: dict[str, int]
    test: dict[str, int]


TWO = {"cat": 4, "dog": 4}, {"cat": 2, "dog": 2}
HALVES = {"0": 3, "1": 3}, {"0": 2, "1": 1}
TAKEN = {
    "white shapes on transparent ground": Taken(
        shapes_on_glass, {"ellipse": 6, "rectangle": 6}, {"ellipse": 6, "rectangle": 6}
    ),
    "NA": Taken(described("EU", "NA"), {"EU": 3, "NA": 3}, {"EU": 2, "NA": 1}),
    "None": Taken(described("crack", "None"), {"crack": 3, "None": 3}, {"crack": 2, "None": 1}),
    "zeros in front": Taken(described("007", "012"), {"007": 3, "012": 3}, {"007": 2, "012": 1}),
    "truth": Taken(described(False, True), {"False": 3, "True": 3}, {"False": 2, "True": 1}),
    "years": Taken(described(1914, 1939), {"1914": 3, "1939": 3}, {"1914": 2, "1939": 1}),
    "one table for all splits": Taken(
        one_table_for_all, {"cat": 3, "dog": 3}, {"cat": 2, "dog": 1}
    ),
    "accents composed in two ways": Taken(
        lambda root: tree(root, ("thé", NFC), ("thé", NFD)), {NFC: 4, "thé": 4}, {NFC: 2, "thé": 2}
    ),
    "a card and captions": Taken(with_card, *TWO),
    "a card that counts rows that are gone": Taken(table(CARD), *HALVES),
    "a card that is prose": Taken(table("# Two kinds of leaf\n"), *HALVES),
    "images as bytes": Taken(table(as_bytes=True), *HALVES),
}


def named(classes: str = "cat dog", name: str = "{n}.png") -> Callable[[Path], object]:
    """Return what writes twelve images of these classes, with such names."""
    return lambda root: write_noise(root, *flat(classes=classes, name=name))


# Of six images in each class one is held out for the test
OF_CLASSES: dict[str, Callable[[Path], object]] = {
    "another tool's state.json": beside("cat,dog", state_json="{}"),
    "another tool's dataset_dict.json": beside("cat,dog", dataset_dict_json="{}"),
    "trains": beside("images/bullet train,images/freight car"),
    "trains alone": beside("images/bullet train,images/freight train"),
    "test tubes": beside("images/test tube,images/beaker,images/flask"),
    "a valley": beside("images/val,images/hill"),
    "boards": beside("a/images/dev board,a/images/breadboard"),
    "names of ILSVRC": named(name="ILSVRC2012_val_{n:08}.png"),
    "one name of a test": lambda root: write_noise(root, *flat(), "cat/a-test-1.png"),
    "train cars": named("train-car test_tube dog"),
    "tested animals": lambda root: named(name="test_{n}.png")(root / "animals"),
}
NO_SPLIT = "8 of 12 images are in no split, as .*bus/0.png, but .*rain.* is; rename that, or put "
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "train is a class": (named("bus car train"), NO_SPLIT),
    "Train is a class": (named("bus car Train"), NO_SPLIT),
    "valid is a class": (beside("valid,invalid"), "6 of 12 .* no split, as invalid/.*; rename"),
    "splits without classes": (beside("a/train,a/test"), "which folder is the class of a/train/0"),
    "several configurations": (table(SMALL_AND_LARGE + "---\n"), "several configurations: "),
    "a space behind a name": (
        lambda root: tree(root, ("cat", "dog"), ("cat ", "dog")),
        "class 'cat ' has images in test",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_others_lost_is_taken(name: str, tmp_path: Path) -> None:
    case = TAKEN[name]
    case.make(tmp_path / "own")
    images = read(tmp_path / "own")
    counts = images.per_class()
    found = {s: dict(zip(images.classes, n, strict=True)) for s, n in counts.items()}
    assert found == {"train": case.train, "test": case.test}
    ends = [images.images.min((1, 2, 3)), images.images.max((1, 2, 3))]
    assert (ends[0] != ends[1]).all()  # no image is blank


@pytest.mark.parametrize("name", OF_CLASSES)
def test_folders_of_classes_are_known_by_those_beside_them(name: str, tmp_path: Path) -> None:
    OF_CLASSES[name](own := tmp_path / "own")
    like_a_split = ["taken for classes, not for splits: images/val"]
    for reading in READINGS:
        found, files = find_source(str(own)).listing(reading), [*own.rglob("*.png")]
        assert found.classes == sorted({path.parent.name for path in files})
        assert ([*found.images], len(found)) == (["train"], len(files))
        assert found.notes == (like_a_split if name == "a valley" else [])


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_is_told(name: str, tmp_path: Path) -> None:
    make, line = REFUSED[name]
    make(tmp_path / "own")
    for reading in READINGS:
        with pytest.raises(DataError, match=f"^--dataset {tmp_path}/own: .*{line}") as refused:
            read(tmp_path / "own", reading)
        assert "\n" not in str(refused.value)
