"""A folder of images is read for what it holds, whatever its name and what else lies there."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ddp_mnist import api
from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import DataError
from tests.commands import Typed
from tests.data_sets import (
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
    write_metadata,
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


def test_images_that_metadata_does_not_name_are_said_to_be_left_out(tmp_path: Path) -> None:
    images = [f"{s}/{c}{n}.png" for s in ("train", "test") for c in "ab" for n in range(4)]
    own = write_noise(tmp_path / "own", *images)
    write_metadata(own / "test", [(f"{c}{n}.png", c) for c in "ab" for n in range(4)])
    write_metadata(own / "train", [("a0.png", "a"), ("b0.png", "b"), ("a1.png", "a")])
    found = load(own)
    assert sizes(found) == (3, 8)
    said = "5 of 16 images were left out, as train/a2.png, which no metadata file has: add rows"
    assert found.caveats[0].startswith(said)


def test_the_path_is_asked_for_where_a_table_has_names_alone(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *(f"{c}/CAM1/{c}{n}.png" for c in "ab" for n in range(4)))
    write_metadata(own, [(f"{c}{n}.png", c) for c in "ab" for n in range(4)])
    line = "a/CAM1/a0.png is in no metadata file, but a0.png is; give paths in its column of files"
    with pytest.raises(DataError, match=line):
        load(own)


def test_metadata_of_one_split_alone_is_refused(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *split_up())
    write_metadata(own / "train", [(path, path[:3]) for path in flat(8)])
    line = f"^--dataset {own}: no metadata file describes the images of test; add one, or move"
    with pytest.raises(DataError, match=line):
        load(own)


def test_a_name_that_only_resembles_a_splits_does_not_leave_out_the_others(tmp_path: Path) -> None:
    places = [f"{place}/{time}" for place in ("train station", "pier") for time in ("day", "night")]
    own = write_noise(tmp_path / "own", *[f"{place}/{n}.png" for place in places for n in range(9)])
    line = "18 of 36 images are in no split, as pier/day/0.png, but train station/day/0.png is; ren"
    for options in (AS_THEY_ARE, ImageOptions(class_folder="first")):
        with pytest.raises(DataError, match=line):
            load(own, options)
    rows = [(f"{place}/{n}.png", place[-3:]) for place in places for n in range(9)]
    write_metadata(own, rows[:30])  # which says what belongs to the data set
    assert "taken for splits by their names: train station" in load(own).image_format.notes


# --- Names of files and classes


@pytest.mark.parametrize("misspelt", [("Testing", "Train"), ("TestSet", "Train_set")])
def test_splits_are_known_in_other_spellings(misspelt: tuple[str, str], tmp_path: Path) -> None:
    images = [f"{split}/{path}" for split in misspelt for path in flat()]
    own = write_noise(tmp_path / "own", *images)
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


# --- Ours in the folder, and what is elsewhere


def test_a_cache_within_the_folder_is_no_data(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *split_up())
    before = find_source(str(own)).fingerprint
    told: list[str] = []
    for _ in range(3):
        images = cache.load(str(own), str(own / "my_cache"), log=told.append)
        assert images.image_format.notes == []
    assert len(told) == 1 and find_source(str(own)).fingerprint == before
    write_noise(own / "train", "cat/folder-x-12345678.lock.png", "cat/about.json.png")
    (own / "train" / "cat" / "about.json").write_text("{}")  # another's
    assert sizes(cache.load(str(own), str(own / "my_cache"), log=told.append)) == (10, 8)
    assert len(told) == 2


def test_what_predict_draws_into_the_folder_is_named(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *flat(), "seen.png")
    with pytest.raises(DataError, match=r"which folder is the class of .* and seen.png\?"):
        load(own)


def test_images_that_a_cloud_has_not_fetched_are_counted(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *flat(40))
    for name in ("cat/0", "cat/2", "dog/1"):
        (own / f"{name}.png").rename((own / name).parent / f".{Path(name).name}.png.icloud")
    (own / ".notes.txt.icloud").touch()
    away = "3 of 40 images are not on this disk, as cat/.0.png.icloud: let iCloud fetch them"
    assert away in load(own).image_format.notes
    for image in own.rglob("*.png"):
        image.rename(image.with_name(f".{image.name}.icloud"))
    with pytest.raises(DataError, match="holds no image that can be read; 40 of 40 images are not"):
        load(own)


@pytest.mark.timeout(20)
def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    """Of whatever name, and one that a metadata file names."""
    own = write_noise(tmp_path / "own", *flat(8))
    for name in ("cat/9.png", "train.parquet", "metadata.csv", "dataset_dict.json"):
        os.mkfifo(own / name)
        with pytest.raises(DataError, match=f"^--dataset {own}: {name}: not a regular file; t"):
            load(own)
        (own / name).unlink()
    os.mkfifo(tmp_path / "pipe.png")
    write_metadata(own, [*((path, path[:3]) for path in flat(8)), ("../pipe.png", "cat")])
    with pytest.raises(DataError, match=r"1 of 9 images .*/pipe.png \(not a regular file\)"):
        load(own)
    (own / "metadata.csv").unlink()
    os.mkfifo(own / "train-images-idx3-ubyte")
    with pytest.raises(DataError, match="train-images-idx3-ubyte: not a regular file; fetch it a"):
        load(own)


def test_the_way_to_images_outside_means_no_split(tmp_path: Path) -> None:
    away = write_noise(tmp_path / "dev" / "test", *flat(6))
    own = write_noise(tmp_path / "own", *flat(6, name="{n}a.png"))
    rows = [(f"{away}/{path}", path[:3]) for path in flat(5)] + [("../dev/test/dog/5.png", "dog")]
    write_metadata(own, [*rows, *((path, path[:3]) for path in flat(6, name="{n}a.png"))])
    images = load(own)
    assert sum(sizes(images)) == 12
    [drawn] = images.image_format.notes
    assert "of 12 images are held out for the test" in drawn


def test_labels_that_were_changed_within_a_second_are_read(tmp_path: Path) -> None:
    """And the tables elsewhere that a card names; size and time say nothing."""
    own = write_noise(tmp_path / "own", *(f"{n}.png" for n in range(8)))
    for words in (("cat", "dog"), ("dog", "cat")):
        write_metadata(own, [(f"{n}.png", words[n % 2]) for n in range(8)])
        os.utime(own / "metadata.csv", (0, 0))
        images = load(own)
        by_name = dict(zip([*range(8)], images.targets.tolist(), strict=True))
        assert images.classes[by_name[0]] == words[0]
    tables = tmp_path / "tables"
    (tmp_path / "away").mkdir()
    tables.mkdir()
    write_parquet(tmp_path / "away")
    files = [f"  - split: {s}\n    path: ../away/{s}*\n" for s in ("train", "test")]
    card = f"---\nconfigs:\n- config_name: default\n  data_files:\n{''.join(files)}---\n"
    (tables / "README.md").write_text(card)
    first = load(tables)
    write_split(tmp_path / "away", "train", label=[3, 2, 1, 0] * 3)
    assert load(tables).digest != first.digest


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


def test_what_is_prepared_is_what_train_reads_then(here: Path, typed: Typed) -> None:
    write_noise(here / "own", *(f"{c}/{n % 3}/{n}.png" for c in "ab" for n in range(12)))
    how = ("--dataset", "own", "--class-folder", "first", "--fit", "pad", "--image-size", 8)
    assert "images of 2 classes" in typed("prepare", *how).succeeds()
    said = typed("train", *how, "--model", "mlp", "--batch-size", 4, "--dry-run").succeeds()
    assert "became 8x8, kept whole on grey" in said and "decoded once" not in said


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


# --- The first folder is the class


def by_camera(split: str = "") -> list[str]:
    """Return names of images in folders of cameras, one of them loose, below those of classes."""
    places = ("", "C1/", "C2/may/")
    return [
        f"{split}{name}/{place}{n}.png"
        for name in ("ant", "bee")
        for place in places
        for n in (1, 2)
    ]


@pytest.mark.parametrize("above", ["", "photos/raw/"])
@pytest.mark.parametrize("splits", [("",), ("train/", "test/")])
def test_the_first_folder_that_not_all_images_share_is_the_class(
    above: str, splits: tuple[str, ...], tmp_path: Path
) -> None:
    names = [f"{above}{name}" for split in splits for name in by_camera(split)]
    own = write_noise(tmp_path / "own", *names)
    (own / above / splits[0] / "empty").mkdir()
    way_out = (
        r"; or, if its first folder is the class \(ant, bee\), give train --class-folder first$"
    )
    with pytest.raises(DataError, match=way_out):
        load(own)
    found = load(own, ImageOptions(class_folder="first"))
    assert found.classes == ["ant", "bee"]
    assert sum(sizes(found)) == len(names)
    for row, file in found.files_of(range(len(names))).items():
        assert f"{found.classes[found.targets[row]]}/" in file
    assert f"without an image: {above}{splits[0]}empty" in found.image_format.notes
    with pytest.raises(DataError, match=way_out):  # whatever is cached of the other way
        load(own)


@pytest.mark.parametrize(
    "names", [["ant/1.png", "ant/C1/2.png"], ["ant/C1/1.png", "bee/C1/2.png", "3.png"]]
)
def test_the_flag_is_named_only_where_it_helps(names: list[str], tmp_path: Path) -> None:
    """Not for one class; nor if an image lies on top, which is then named."""
    own = write_noise(tmp_path / "own", *names)
    with pytest.raises(DataError, match="which folder is the class of") as refused:
        load(own)
    assert "--class-folder" not in str(refused.value)
    if "3.png" in names:
        line = r"which folder is the class of 3.png\? put each image below the folder of its class,"
        with pytest.raises(DataError, match=line):
            load(own, ImageOptions(class_folder="first"))


def test_a_run_on_first_folders_reads_new_ones_so_too(here: Path, typed: Typed) -> None:
    write_noise(here / "own", *by_camera("train/"), *by_camera("test/"))
    write_noise(here / "new", *by_camera(), seed=3)
    flags = ("--epochs", 1, "--model", "mlp", "--batch-size", 2, "--quiet", "--cpu")
    typed(
        "train", "--dataset", "own", "--class-folder", "first", "--run-dir", "run", *flags
    ).succeeds()
    for more, count in (((), 12), (("--dataset", "new"), 12)):
        assert json.loads(typed("evaluate", "run", "--json", *more).succeeds())["count"] == count
    assert typed("report", "run").code == 0
    assert len(typed("predict", "run", "new").succeeds().splitlines()) == 12
    ended = typed("train", "--resume", "run", "--class-folder", "last", "--cpu")
    assert ended.err.startswith("ddp-mnist: error: --class-folder last: run was made with first;")
