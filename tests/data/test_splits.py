"""A split that a data set gives is used as it is: in folders, in tables, in a column `split`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddp_mnist.data import cache
from ddp_mnist.errors import DataError
from ddp_mnist.system.files import read_json
from tests.commands import Typed
from tests.data_sets import (
    flat,
    load,
    noise,
    read,
    split_up,
    write_metadata,
    write_noise,
    write_split,
)

COUNTS = {"train": 8, "test": 6, "validation": 4}
WORDS = {"train": ("train", "Training "), "validation": ("val", "DEV"), "test": ("test", "eval")}


def in_folders(own: Path) -> None:
    for seed, (split, count) in enumerate(COUNTS.items()):
        write_noise(own / split, *flat(count), seed=seed)


def in_tables(own: Path) -> None:
    for split in COUNTS:
        write_split(own, "train" if split == "train" else "test")
    (own / "test-00000-of-00001.parquet").rename(own / "validation-00000-of-00001.parquet")
    write_split(own, "test")


def in_a_column(own: Path) -> None:
    """Which folders named otherwise do not change."""
    names = [f"train/{n}.png" for n in range(18)]
    splits = [WORDS[split][n % 2] for split, count in COUNTS.items() for n in range(count)]
    write_noise(own, *names)
    rows = [(name, ["cat", "dog"][n % 2], splits[n]) for n, name in enumerate(names)]
    write_metadata(own, rows, "file_name label Split")


WAYS: dict[str, tuple[Callable[[Path], None], dict[str, int]]] = {
    "folders": (in_folders, COUNTS),
    "tables": (in_tables, {"train": 12, "test": 5, "validation": 5}),
    "a column": (in_a_column, COUNTS),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_validation_split_besides_a_test_validates(way: str, tmp_path: Path) -> None:
    write, counts = WAYS[way]
    write(own := tmp_path / "own")
    images = load(own)
    assert {split: len(rows) for split, rows in images.rows.items()} == counts
    assert images.hold_out(3) is images
    assert (images.image_format.notes, images.test_share) == ([], None)
    rows = {f"{split}_rows": count for split, count in counts.items()}
    rows["val_rows"] = rows.pop("validation_rows")
    assert images.describe().items() >= rows.items()
    assert (
        images.per_class()["validation"]
        == np.bincount(
            images.targets[images.rows["validation"]], minlength=len(images.classes)
        ).tolist()
    )
    for name in own.rglob("validation*"):
        shutil.rmtree(name) if name.is_dir() else name.unlink()
    if way != "a column":
        assert load(own).digest != images.digest


def test_a_validation_split_without_a_test_is_the_test(tmp_path: Path) -> None:
    in_folders(own := tmp_path / "own")
    shutil.rmtree(own / "test")
    images = load(own)
    assert {split: len(rows) for split, rows in images.rows.items()} == {"train": 8, "test": 4}
    said = "split validation is the test, as there is no split of that name"
    assert images.image_format.notes == [said]
    assert len(images.hold_out(2).rows["validation"]) == 2


def test_images_of_train_that_validate_too_are_counted(tmp_path: Path) -> None:
    in_folders(own := tmp_path / "own")
    shutil.copy(own / "train/cat/0.png", own / "validation/cat/copy.png")
    shutil.copy(own / "test/dog/1.png", own / "validation/dog/copy.png")
    assert load(own).caveats == [
        f"1 of 6 validation images are in {split} too, as validation/{name}/copy.png: take them out"
        " of one"
        for split, name in (("train", "cat"), ("test", "dog"))
    ]
    write_noise(own / "validation", "owl/1.png", seed=9)
    with pytest.raises(
        DataError, match=r"class owl has images in validation \(row 6\) and none in"
    ):
        load(own)


def test_other_words_in_the_column_are_told_with_their_places(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *(f"{n}.png" for n in range(4)))
    splits = ["train", "holdout", "", "test"]
    write_metadata(
        own, [(f"{n}.png", n % 2, s) for n, s in enumerate(splits)], "file_name label split"
    )
    line = (
        f"--dataset {own}: metadata.csv: 2 of 4 rows have no split in column split: line 3 is"
        " 'holdout', line 4 is ''; write train, validation, test in each, or leave the column out"
    )
    with pytest.raises(DataError) as refused:
        load(own)
    assert str(refused.value) == line
    twice = [("0.png", 0, "train"), ("1.png", 1, "test"), ("0.png", 0, "test")]
    write_metadata(own, twice, "file_name label split")
    with pytest.raises(
        DataError, match=r"line 4: 0.png has the splits train and test; decide on one"
    ):
        load(own)


def test_a_table_without_the_column_leaves_its_images_to_their_folder(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *(f"{s}/{n}.png" for s in ("a", "test") for n in range(6)))
    rows = [(f"{n}.png", ["cat", "dog"][n % 2]) for n in range(6)]
    write_metadata(own / "test", rows)
    splits = [*["train"] * 4, *["validation"] * 2]
    with_splits = [(*row, split) for row, split in zip(rows, splits, strict=True)]
    write_metadata(own / "a", with_splits, "file_name label split")
    found = {split: len(rows) for split, rows in load(own).rows.items()}
    assert found == {"train": 4, "test": 6, "validation": 2}


# --- What earlier versions had stays


@pytest.mark.parametrize(
    ("names", "digest", "held_out"),
    [
        (flat(20), "75eea4b21474da1ec9b25dcdef8ed066dc33469542013e8b94064d3f59ec004f", [5, 14]),
        (split_up(), "f679498a6206ef52ad23b20fef922cfb5edde266223da2f8eb010b4e426ce92f", [0, 4, 5]),
    ],
)
def test_a_set_without_such_a_split_is_the_same_as_ever(
    names: list[str], digest: str, held_out: list[int], tmp_path: Path
) -> None:
    images = load(write_noise(tmp_path / "own", *names))
    assert images.digest == digest
    assert images.hold_out(3).rows["validation"].tolist() == held_out


# --- A run


@pytest.mark.usefixtures("here")
def test_a_run_validates_on_the_split_that_there_is(typed: Typed) -> None:
    """With a preset that holds out none, and a rule that needs a validation; so does a resume."""
    in_folders(Path("own"))
    noise(1).save("own/train/cat/more.png")  # so that as many validate as before a draw
    command = ["train", "--dataset", "own", "--model", "mlp", "--batch-size", 4, "--cpu"]
    ended = typed(*command, "--val-size", 2)
    assert ended.code == 2
    line = "--val-size 2: --dataset own already has a validation split; remove --val-size"
    assert line in ended.err
    more = ("--preset", "accurate", "--patience", 3, "--epochs", 1, "--run-dir", "run")
    said = typed(*command, *more).succeeds()
    assert "own: 9 train, 4 validation, 6 test images, 2 classes" in said
    summary, config = read_json(Path("run/summary.json")), read_json(Path("run/config.json"))
    counted = {"train_rows": 9, "test_rows": 6, "val_rows": 4}
    assert summary["dataset"].items() >= counted.items()
    assert summary["images_per_class"] == {"train": [5, 4], "test": [3, 3], "validation": [2, 2]}
    assert config["recipe"]["val_size"] == 4
    seen = {*np.load("run/trained_on.npy").tolist()}
    images = cache.load("own")
    assert seen == {*images.keys[images.rows["train"]].tolist()}
    for split, score in (("validation", "val_accuracy"), ("test", "test_accuracy")):
        found = json.loads(typed("evaluate", "run", "--split", split, "--json").succeeds())
        assert (found["count"], found["accuracy"]) == (len(images.rows[split]), summary[score])
    assert (
        json.loads(typed("evaluate", "run", "--split", "train", "--json").succeeds())["count"] == 9
    )
    shutil.copytree("own", "moved")
    for split, count in (("validation", 4), ("train", 9)):
        command = ["evaluate", "run", "--split", split, "--dataset", "moved", "--json"]
        assert json.loads(typed(*command).succeeds())["count"] == count
    assert typed("report", "run").code == 0
    resumed = typed("train", "--resume", "run", "--epochs", 2, "--cpu").succeeds()
    assert "9 train, 4 validation, 6 test" in resumed
    ended = typed("train", "--resume", "run", "--epochs", 3, "--val-size", 2, "--cpu")
    assert ended.err.startswith("ddp-mnist: error: --val-size 2: run was made with 4;")
    ended = typed("prepare", "--dataset", "own")
    assert "own: 9 train, 6 test and 4 validation images of 2 classes in " in ended.out
    assert read(Path("own")).digest == images.digest
