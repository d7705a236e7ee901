"""A folder of images is read for what it holds, whatever its name and what else lies there."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddp_mnist import api
from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import DataError
from tests.commands import Typed
from tests.data_sets import (
    DRAWN,
    LABELS,
    TEST,
    TRAIN,
    flat,
    load,
    noise,
    of,
    save_to_disk,
    sizes,
    split_up,
    write_noise,
    write_parquet,
    write_split,
)

# --- Its name


@pytest.mark.parametrize("name", ["a*", "photos[1]"])
def test_a_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    """Of images and saved tables; the siblings are what it would match. Tables are refused."""
    for seed, sibling in enumerate(("abc", "photos1", name)):
        write_noise(tmp_path / "images" / sibling, *split_up(), seed=seed)
    images = load(tmp_path / "images" / name)
    assert (sizes(images), images.image_format.notes) == ((8, 8), [])
    assert np.array_equal(of(images, "train").images[0].permute(1, 2, 0), np.asarray(noise(2000)))
    for each in ("abc", "photos1", name):
        for writer, place in ((write_parquet, "tables"), (save_to_disk, "saved")):
            (tmp_path / place / each).mkdir(parents=True)
            writer(tmp_path / place / each)
    images = load(tmp_path / "saved" / name)
    assert sizes(images) == (TRAIN, TEST)
    assert of(images, "train").labels.tolist() == LABELS[:TRAIN]
    with pytest.raises(DataError, match=r": has . in its path, .*; rename it$"):
        load(tmp_path / "tables" / name)


# --- What lies beside the images


@pytest.mark.parametrize("kind", ["txt", "csv", "jsonl"])
def test_a_file_beside_each_image_does_not_make_it_a_table(kind: str, tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *split_up())
    plain = load(own)
    for image in [*own.rglob("*.png")]:
        image.with_suffix(f".{kind}").write_text("0 0.5 0.5 1 1\n")
    (own / "README.md").write_text("# My photos\n")
    assert load(own).digest == plain.digest


def describe(place: Path, names: list[str]) -> None:
    lines = [json.dumps({"file_name": name, "label": name[0]}) + "\n" for name in names]
    place.write_text("".join(lines))


def test_images_that_metadata_does_not_name_are_said_to_be_left_out(tmp_path: Path) -> None:
    own = write_noise(
        tmp_path / "own",
        *(f"{s}/{c}{n}.png" for s in ("train", "test") for c in "ab" for n in range(4)),
    )
    describe(own / "test" / "metadata.jsonl", [f"{c}{n}.png" for c in "ab" for n in range(4)])
    describe(own / "train" / "metadata.jsonl", ["a0.png", "b0.png", "a1.png"])
    images = load(own)
    assert sizes(images) == (3, 8)
    assert images.image_format.notes == ["5 of 16 images were left out, as train/a2.png"]


def test_metadata_of_one_split_alone_is_refused(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *split_up())
    names = [f"{['cat', 'dog'][n % 2]}/{n}.png" for n in range(8)]
    describe(own / "train" / "metadata.jsonl", names)
    line = f"^--dataset {own}: no metadata file describes the images of test; add one, or move"
    with pytest.raises(DataError, match=line):
        load(own)


# --- Names of files and classes


@pytest.mark.parametrize(
    "names",
    [
        flat(name="ILSVRC2012_val_{n:08}.png"),
        [*flat(), "cat/a-test-1.png"],
        flat(classes="train-car test_tube dog"),
        [f"animals/{path}" for path in flat(name="test_{n}.png")],
    ],
)
def test_names_do_not_hold_images_out_where_a_test_is_drawn(
    names: list[str], tmp_path: Path
) -> None:
    own = write_noise(tmp_path / "own", *names)
    for reading in (AS_THEY_ARE, DRAWN):
        images = load(own, reading)
        assert sum(sizes(images)) == len(names)
        assert images.classes == sorted({Path(name).parent.name for name in names})
        [note] = images.image_format.notes
        assert f"of {len(names)} images are held out for the test" in note


@pytest.mark.parametrize("drawn", [None, 4])
@pytest.mark.parametrize("classes", ["bus car train", "x/bus x/car x/my-train_2"])
def test_a_class_that_is_named_like_a_split_is_not_the_only_one(
    classes: str, drawn: int | None, tmp_path: Path
) -> None:
    own = write_noise(tmp_path / "own", *flat(classes=classes))
    line = "8 of 12 images are in no split, as .*bus/0.png, but .*train.* is; rename that, or put "
    with pytest.raises(DataError, match=f"^--dataset {own}: {line}"):
        load(own, ImageOptions(test_size=drawn))


@pytest.mark.parametrize("misspelt", [("Testing", "Train"), ("TestSet", "Train_set")])
def test_splits_are_known_in_other_spellings(misspelt: tuple[str, str], tmp_path: Path) -> None:
    own = write_noise(
        tmp_path / "own", *(f"{split}/{path}" for split in misspelt for path in flat())
    )
    assert sizes(load(own)) == (12, 12)


# --- Runs in the folder that they are trained on


def test_a_folder_holds_the_runs_that_were_trained_on_it(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = write_noise(tmp_path / "own", *split_up())
    monkeypatch.chdir(own)
    before = find_source(".").fingerprint
    flags = ("--epochs", "1", "--model", "mlp", "--batch-size", "4", "--quiet", "--cpu")
    for more in ((), ("--run-dir", "mine")):
        typed("train", "--dataset", ".", *flags, *more).succeeds()
    assert (own / "runs" / "latest").resolve().name == "own-001"
    assert typed("report", "runs/latest").code == typed("evaluate", "runs/latest").code == 0
    assert find_source(".").fingerprint == before
    shutil.rmtree(own / "runs" / "own-001")  # which leaves a link to nothing
    assert api.evaluate("mine", dataset=".")["count"] == 8  # type: ignore[index]
    (own / "train" / "cat" / "more.png").symlink_to("0.png")
    assert find_source(".").fingerprint != before


# --- A folder beside a name, and files beside a folder


def test_a_folder_of_a_built_in_name_is_not_meant_and_a_line_says_so(
    here: Path, typed: Typed
) -> None:
    write_noise(here / "digits", *split_up())
    printed = typed("prepare", "--dataset", "digits").out
    assert "digits is the data set of that name; for the folder, give ./digits\n" in printed
    assert "1,437 train" in printed
    printed = typed("prepare", "--dataset", "./digits").out
    assert "8 train" in printed and "give ./digits" not in printed


def test_images_outside_of_the_folder_that_names_them_are_read_again(tmp_path: Path) -> None:
    """As a parquet file may, in a column of paths and no bytes."""
    away, own = write_noise(tmp_path / "away", *flat(TRAIN)), tmp_path / "own"
    files = [str(path) for path in sorted(away.rglob("*.png"))]
    for split, count in (("train", TRAIN), ("test", TEST)):
        cells = [{"bytes": None, "path": file} for file in files[:count]]
        column = pa.array(cells, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
        write_split(own, split, image=column)
    first = load(own)
    assert load(own).digest == first.digest and not load(own).warnings
    noise(77).save(files[0])
    second = load(own)
    assert second.digest != first.digest
    assert np.array_equal(of(second, "train").images[0].permute(1, 2, 0), np.asarray(noise(77)))
