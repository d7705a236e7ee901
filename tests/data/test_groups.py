"""The images of a group, as of an animal, are on one side: of the test, and of the validation."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.data import groups
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import DataError, UsageError
from ddp_mnist.system.files import read_json
from tests.commands import Typed
from tests.data_sets import encoded, load, noise, write_metadata, write_noise, write_split

ANIMALS, PHOTOS = 20, 3  # of each class, of each animal
BY_NAME = ImageOptions(group=r"A\d+")


def name_of(number: int) -> str:
    """Return the name of a photo: of one of two classes, and of an animal."""
    animal = number // PHOTOS
    return f"{'ab'[animal % 2]}/A{animal:03}_{number % PHOTOS}.png"


NAMES = [name_of(number) for number in range(2 * ANIMALS * PHOTOS)]


def sides(images: ImageData, animal_of: Callable[[str], str]) -> dict[str, set[str]]:
    """Return the splits in which each animal has photos, with a fifth of train for validation."""
    images = images.hold_out(len(images.rows["train"]) // 5)
    found: dict[str, set[str]] = {}
    for split, rows in images.rows.items():
        for file in images.files_of(rows.tolist()).values():
            found.setdefault(animal_of(file), set()).add(split)
    return found


def by_name(file: str) -> str:
    return Path(file).name.partition("_")[0]


def in_csv(own: Path) -> ImageOptions:
    rows = [(name, name[0], by_name(name)) for name in NAMES]
    write_metadata(own, rows, "file_name label Group")
    return AS_THEY_ARE


def in_numbers(own: Path) -> ImageOptions:
    write_metadata(own, [(n, i, by_name(n)) for i, n in enumerate(NAMES)], "file_name x group")
    return ImageOptions(numbers=("x",))


WAYS: dict[str, Callable[[Path], ImageOptions]] = {
    "names": lambda _: BY_NAME,
    "a parenthesis": lambda _: ImageOptions(group="^[ab]/(A[0-9]{3})_"),
    "a column": in_csv,
    "numbers": in_numbers,
}


@pytest.mark.parametrize("way", WAYS)
def test_no_group_is_parted(way: str, tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *NAMES)
    options = WAYS[way](own)
    images = load(own, options)
    found = sides(images, by_name)
    assert len(found) == 2 * ANIMALS and {len(splits) for splits in found.values()} == {1}
    counts = {split: sum(splits == {split} for splits in found.values()) for split in images.rows}
    assert 4 <= counts["test"] <= 16
    test = len(images.rows["test"])
    assert images.image_format.notes[0] == (
        f"{test} of 120 images, {counts['test']} of 40 groups, are held out for the test, by a hash"
        " of their groups' names: with --test-size 0.2 each stays there as the folder grows"
    )
    held = images.hold_out(20).image_format.notes[-1]
    kept, validated = 40 - counts["test"], sum(x == {"validation"} for x in found.values())
    assert held == f"{validated} of {kept} groups of train are held out for validation"
    if way != "numbers":
        (own / "metadata.csv").unlink(missing_ok=True)
        plain = load(own)
        assert plain.groups is None and plain.digest != images.digest
        assert max(map(len, sides(plain, by_name).values())) > 1


def test_a_groups_side_is_that_of_its_name_however_the_set_grows(tmp_path: Path) -> None:
    """In tables too; and the same as by a flag, where the names are."""
    own, names = write_noise(tmp_path / "own", *NAMES), [by_name(name) for name in NAMES]
    before = sides(load(own, BY_NAME), by_name)
    write_noise(own, *(f"{name[:-4]}_more.png" for name in NAMES[::4]), "a/A999_0.png", seed=1)
    after = sides(load(own, BY_NAME), by_name)
    assert {name: after[name] for name in before} == before
    names_of = [
        "A1",
        "",
        "\u00e9 2",
        "\u00e9 2",
        "1",
        "",
        "1",
        "10",
        "1.5",
        "A1.0",
        "1",
        "1.00",
        "1,000",
    ]
    cells = [
        "A1 ",
        None,
        "e\u0301 2",
        "\u00e9 2",
        1,
        float("nan"),
        1.0,
        "10.0 ",
        1.5,
        "A1.0",
        "1,0",
        "1.00",
        "1,000",
    ]
    assert [*map(groups.name_in, cells)] == names_of
    assert groups.named_by("\u00e9 .", ["a/e\u0301 2.png", "b/2.png"]) == ["\u00e9 2", ""]
    assert groups.named_by("(A.)?_(B)?", ["A1_B", "_B", "A2"]) == ["A1", "", ""]
    assert groups.keys_of(["A001", ""]).tolist() == [15238346660213068894, groups.NONE]
    pngs = [(own / name).read_bytes() for name in NAMES]
    write_split(tmp_path / "tables", "train", image=pngs, label=[n[0] for n in NAMES], group=names)
    in_table = load(tmp_path / "tables")
    test = {names[row] for row in in_table.rows["test"].tolist()}
    assert test == {name for name, splits in before.items() if splits == {"test"}}


def test_a_group_validates_however_a_set_with_a_test_grows(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *(f"train/{name}" for name in NAMES))
    write_noise(own, "test/a/1.png", "test/b/2.png", seed=2)
    before = sides(load(own, BY_NAME), by_name)
    more = (f"train/a/A{n}_{photo}.png" for n in range(500, 520) for photo in range(3))
    write_noise(own, *more, seed=1)
    after = sides(load(own, BY_NAME), by_name)
    assert {name: after[name] for name in before} == before


def test_groups_whose_names_are_read_alike_are_told(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *NAMES, "a/a7_1.png", "b/A7_2.png")
    found = load(own, ImageOptions(group="[Aa][0-9]+"))
    said = "groups 'A7' and 'a7' look alike and are kept apart: write each in one way"
    assert said in found.caveats


def test_images_that_cannot_be_read_join_no_groups(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *NAMES, *(f"{name[:-4]}_2.png" for name in NAMES))
    for name in (NAMES[0], NAMES[-1]):
        (own / name).write_bytes(b"?")
    assert load(own, BY_NAME).caveats == []


def test_copies_of_an_image_join_their_groups(tmp_path: Path) -> None:
    """Through a third group, and one that has no name; two that share no image stay apart."""
    own = write_noise(tmp_path / "own", *NAMES)
    for number in range(0, 2 * ANIMALS - 4, 4):
        for one, other in ((number, number + 2), (number + 2, number + 3)):
            shutil.copy(own / name_of(3 * one), own / f"{name_of(3 * other)[:-4]}_copy{one}.png")
    shutil.copy(own / NAMES[0], own / "b/loose.png")
    images = load(own, BY_NAME)
    said = "27 of 40 groups count as 9, as they share images: 2 have the same image, as "
    assert sum(each.startswith(said) for each in images.caveats) == 1
    found = sides(images, by_name)
    for number in range(0, 2 * ANIMALS - 4, 4):
        animals = [by_name(name_of(3 * each)) for each in (number, number + 2, number + 3)]
        assert len(set.union(*(found[each] for each in animals))) == 1
    assert found["loose.png"] == found["A000"]
    keys = np.array([1, 2, 2, 3, 4, 4, 5], np.uint64)
    names = np.array([9, 9, 8, 7, groups.NONE, groups.NONE, 7], np.uint64)
    assert groups.together(keys, names).tolist() == [8, 8, 8, 7, 4, 4, 7]
    assert groups.together(keys, None) is keys


def test_a_pattern_that_finds_cameras_in_place_of_animals_is_seen(tmp_path: Path) -> None:
    cameras = [f"{n[:2]}CAM{1 + (n < 'a/A03')}/{n[2:]}" for n in NAMES]
    own = write_noise(tmp_path / "own", *cameras)
    first = ImageOptions(class_folder="first", group="[A-Z][0-9]+")
    [careful] = [each for each in load(own, first).caveats if "see that" in each]
    assert re.match(r"group M\d has \d+ of 120 images, as \w/CAM\d/A\d+_0.png: see that", careful)
    by_animal = load(own, dataclasses.replace(first, group="A[0-9]+"))
    assert not any("see that" in each for each in by_animal.caveats)


def test_images_without_a_group_are_counted_and_a_flag_beats_the_column(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *NAMES, "a/x.png", "b/y.png")
    images = load(own, BY_NAME)
    said = "{} of 122 images have no group, so each is drawn alone, as a/x.png: if others show"
    assert any(each.startswith(said.format(2)) for each in images.caveats)
    rows = [(name, name[0], "same") for name in NAMES[:-1]] + [(NAMES[-1], "b", " ")]
    write_metadata(
        own, [*rows, ("a/x.png", "a", ""), ("b/y.png", "b", "")], "file_name label group"
    )
    assert any(each.startswith(said.format(3)) for each in load(own).caveats)
    notes = load(own, BY_NAME).image_format.notes
    assert "the column of groups is not used, as --group says what belongs together" in notes
    assert "of 42 groups" in notes[0]


def test_groups_on_both_sides_of_given_splits_are_told(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *(f"train/{name}" for name in NAMES[:60]))
    write_noise(own / "test", *(NAMES[48:60]), *NAMES[90:], seed=1)
    write_noise(own / "validation", *NAMES[57:63], seed=2)
    images = load(own, BY_NAME)
    assert images.image_format.notes == ["groups: 20 in train, 14 in test, 2 in validation"]
    assert images.caveats == [
        "4 of 14 groups in test are in train too, as test/a/A016_0.png: put each wholly into one",
        "1 of 2 groups in validation are in train too, as validation/b/A019_0.png: put each wholly"
        " into one",
        "1 of 2 groups in validation are in test too, as validation/b/A019_0.png: put each wholly"
        " into one",
    ]


def test_a_pattern_that_is_wrong_or_finds_nothing(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *NAMES)
    with pytest.raises(UsageError, match=r"^--group A\[: .*: unterminated .*; try"):
        RunFlags(group="A[")
    line = f"^--group B1: finds nothing in the paths of --dataset {own}, as {NAMES[0]};"
    with pytest.raises(UsageError, match=line):
        load(own, ImageOptions(group="B1"))
    pngs = [(own / name).read_bytes() for name in NAMES]
    write_split(tmp_path / "tables", "train", image=pngs, label=[n[0] for n in NAMES])
    with pytest.raises(UsageError, match=r"^--group B1: the images of .* have no paths; add a col"):
        load(tmp_path / "tables", ImageOptions(group="B1"))


def test_a_class_of_one_group_cannot_be_drawn_from(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *(f"{c}/{n}.png" for c in "ab" for n in range(9)))
    line = r"as each class has only one \(copies, and the images of a group, count as one\); add"
    with pytest.raises(DataError, match=line):
        load(own, ImageOptions(group="^[ab]"))


def test_a_column_of_classes_called_group_is_that_of_labels_only_if_it_is_alone(
    tmp_path: Path,
) -> None:
    import datasets

    files = [{"bytes": encoded(noise(n)), "path": None} for n in range(24)]
    for name, more in (("alone", {}), ("beside", {"label": [n % 2 for n in range(24)]})):
        table = pa.table({"image": files, "group": [n // 3 % 8 for n in range(24)], **more})
        features = {"image": datasets.Image(), "group": datasets.ClassLabel(names=list("abcdefgh"))}
        features |= {"label": datasets.Value("int64")} if more else {}
        table = table.cast(datasets.Features(features).arrow_schema)
        (tmp_path / name).mkdir()
        pq.write_table(table, tmp_path / name / "train.parquet")
    assert load(tmp_path / "alone").classes == list("abcdefgh")
    assert load(tmp_path / "alone").groups is None
    found = load(tmp_path / "beside").groups
    assert found is not None and len(np.unique(found)) == 8


def test_a_column_that_is_to_be_learned_is_neither_group_nor_split(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *NAMES)
    rows = [(name, number // 3, number) for number, name in enumerate(NAMES)]
    write_metadata(own, rows, "file_name group split")
    images = load(own, ImageOptions(numbers=("group", "split")))
    assert images.groups is None and images.targets[:2].tolist() == [[0, 0], [0, 1]]


# --- A run


@pytest.mark.usefixtures("here")
def test_a_run_keeps_its_groups_together_to_the_end(typed: Typed) -> None:
    write_noise(Path("own"), *NAMES)
    flags = ("--model", "mlp", "--batch-size", 8, "--epochs", 1, "--cpu", "--run-dir", "run")
    said = typed("train", "--dataset", "own", "--group", r"A\d+", *flags).succeeds()
    images = load(Path("own"), BY_NAME).hold_out(19)
    counts = {split: len(rows) for split, rows in images.rows.items()}
    shown = "own: {train} train, {validation} validation, {test} test images, 2 classes"
    assert shown.format(**counts) in said and "of 40 groups, are held out for the test" in said
    summary = read_json(Path("run/summary.json"))
    for split, score in (("test", "test_accuracy"), ("validation", "val_accuracy")):
        found = json.loads(typed("evaluate", "run", "--split", split, "--json").succeeds())
        assert (found["count"], found["accuracy"]) == (counts[split], summary[score])
    assert typed("report", "run").code == 0
    assert typed("train", "--resume", "run", "--epochs", 2, "--cpu").code == 0
    ended = typed("train", "--resume", "run", "--epochs", 3, "--group", "A..", "--cpu")
    assert ended.err.startswith("ddp-mnist: error: --group A..: run was made with A\\d+;")
    write_noise(Path("own"), "a/A000_9.png", "b/A001_9.png", seed=4)  # the folder has grown
    found = json.loads(typed("evaluate", "run", "--dataset", "own", "--json").succeeds())
    assert counts["test"] <= found["count"] <= counts["test"] + 2
    write_noise(Path("new"), *(f"{c}/{n}.png" for c in "ab" for n in range(3)), seed=5)
    found = json.loads(typed("evaluate", "run", "--dataset", "new", "--json").succeeds())
    assert found["count"] == 6
    assert found["notes"] == ["there is no test split, so all images count"]
    write_noise(Path("more"), *(name.replace("_", "_7") for name in NAMES), seed=6)
    found = json.loads(typed("evaluate", "run", "--dataset", "more", "--json").succeeds())
    trained_on = {by_name(file) for file in images.files_of(images.rows["train"].tolist()).values()}
    alike = f"{PHOTOS * len(trained_on)} test images are of groups named as those trained on: if"
    assert found["count"] == len(NAMES) and alike in "\n".join(found["notes"])
    write_noise(Path("more/train"), *NAMES[30:], seed=7)
    write_noise(Path("more/test"), *NAMES[:30], seed=8)
    shutil.rmtree("more/a")
    shutil.rmtree("more/b")
    tuned = (*flags[:-1], "tuned", "--weights", "run/model.safetensors", "--group", r"A\d+")
    said = typed("train", "--dataset", "more", *tuned).succeeds()
    assert "was trained on some: " in said and "test images are of groups named as those" in said
