"""An image is held out for what it is: what else lies in the folder has no part in it."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddp_mnist import api
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.data import cache
from ddp_mnist.data.held_out import (
    draw_by_share,
    draw_exactly,
    draw_fold,
    key_of,
    validation_rows,
)
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import DataError, UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.system.text import quoted
from tests import data_sets
from tests.commands import Typed
from tests.data_sets import flat, noise, of, split_up, write_noise
from tests.run_checks import rewrite_config

TEST_SIZE = 0.18  # of the photos; by default it would be a fifth
PHOTOS = flat(60, classes="a b c")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_noise(tmp_path / "photos", *PHOTOS)


def load(place: Path, test_size: float = TEST_SIZE) -> ImageData:
    return data_sets.load(place, ImageOptions(test_size=test_size))


def parts_of(images: ImageData, val_size: int | None = None) -> dict[bytes, str]:
    """Return train, validation or test for each image's pixels."""
    images = images.hold_out(len(images.rows["train"]) // 5 if val_size is None else val_size)
    each = ((image, part) for part, rows in images.rows.items() for image in images.images[rows])
    return {image.tobytes(): part for image, part in each}


CHANGES: dict[str, tuple[Callable[[Path], object], int]] = {  # and how many images it takes away
    "one more": (lambda photos: noise(100).save(photos / "a" / "000.png"), 0),
    "one less": (lambda photos: (photos / "b" / "31.png").unlink(), 1),
    "one renamed": (lambda photos: (photos / "c/8.png").rename(photos / "c/000.png"), 0),
    "one edited": (lambda photos: noise(101).save(photos / "a" / "30.png"), 1),
    "one in another class": (lambda photos: (photos / "a/3.png").rename(photos / "b/3.png"), 0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("val_size", [None, 10])
def test_a_change_of_one_image_moves_no_other(
    change: str, val_size: int | None, photos: Path
) -> None:
    before = parts_of(load(photos), val_size)
    assert len(before) == 60
    assert 6 <= sum(part == "test" for part in before.values()) <= 18
    assert 4 <= sum(part == "validation" for part in before.values()) <= 16
    make, gone = CHANGES[change]
    make(photos)
    after = parts_of(load(photos), val_size)
    others = before.keys() & after.keys()
    assert len(others) == 60 - gone
    assert {pixels for pixels in others if before[pixels] != after[pixels]} == set()


def test_the_same_bytes_in_another_shape_are_another_image() -> None:
    pixels, shapes = np.arange(48, dtype=np.uint8), ((6, 8), (8, 6), (4, 4, 3))
    assert len({key_of(pixels.reshape(shape)) for shape in shapes}) == 3


def test_no_copy_of_a_validation_image_is_trained_on() -> None:
    """Wherever the exact number cuts; a quarter are copies, in their class or in the other."""
    keys = np.random.default_rng(0).integers(0, 2**64, 100, np.uint64)
    keys[75:] = keys[:25]
    labels = np.arange(100) % 2
    for same_class, fewer in ((False, 4), (True, 1)):
        if same_class:
            labels[75:] = labels[:25]
        numbers = []
        for count in range(1, 100):
            held = draw_exactly(keys, labels, count)
            assert not np.isin(keys[held], np.delete(keys, held)).any()
            numbers.append(count - len(held))
        assert (min(numbers), max(numbers)) == (0, fewer)


def test_no_copy_of_an_image_drawn_by_share_is_trained_on() -> None:
    """Not if it is the only one of another class, which has to stay, or the only one held out."""
    keys = np.array([*range(9), 0, 1], np.uint64) << np.uint64(60)
    labels = np.array([0] * 9 + [1, 0])
    for share in (1e-9, 0.1, 0.5, 1.0):
        held = draw_by_share(keys, labels, share)
        assert held.size and not np.isin(keys[held], np.delete(keys, held)).any()


def test_a_class_without_a_test_image_is_named(photos: Path) -> None:
    (photos / "rare").mkdir()
    noise(99).save(photos / "rare" / "99.png")
    sentence = 'the test has no image of "rare": add images, or give a larger --test-size'
    assert load(photos).caveats == [sentence]


def test_a_number_is_the_share_that_it_is_now(photos: Path) -> None:
    for number, share in ((15, load(photos, 0.25)), (12, data_sets.load(photos))):
        assert load(photos, number).rows["test"].tolist() == share.rows["test"].tolist()
    more = load(photos, 20)
    assert more.digest != load(photos).digest  # a resumed run is on the images that it began with
    [note] = more.image_format.notes
    assert "with --test-size 0.333 each stays there as the folder grows" in note


def test_no_class_loses_all_its_training_images() -> None:
    """Whether the test split is drawn too, or there; also of a class with one image."""
    stream = np.random.default_rng(0)
    for each in (1, 2, 4):
        labels = np.arange(50).repeat(each)
        keys = stream.integers(0, 2**64, len(labels), np.uint64)
        for count in (10, 20, 40, 100):
            if count <= len(labels) - 50:
                held = draw_exactly(keys, labels, count)
                assert len(held) == count
                assert set(np.delete(labels, held)) == set(range(50))
        test = draw_by_share(keys, labels, 0.2)
        rest = np.delete(np.arange(len(labels)), test)
        held = validation_rows(keys[rest], labels[rest], len(rest) // 5, by_share=True)
        assert set(np.delete(labels[rest], held)) == set(range(50))
        assert len(test) == len(held) == 0 if each == 1 else len(test) and len(held)


def test_exactly_as_many_as_asked_of_each_class_its_share() -> None:
    stream = np.random.default_rng(1)
    labels = np.repeat([0, 1, 2, 3], [700, 250, 49, 1])
    keys = stream.integers(0, 2**64, 1000, np.uint64)
    held = [validation_rows(keys, labels, count, by_share=False) for count in (0, 1, 100, 999)]
    assert [len(rows) for rows in held] == [0, 1, 100, 999]
    assert np.bincount(labels[held[2]]).tolist() == [70, 25, 5]
    for label, count in enumerate((70, 25, 5)):
        lowest = np.sort(keys[labels == label])[:count]
        assert np.sort(keys[held[2]][labels[held[2]] == label]).tolist() == lowest.tolist()
    assert set(held[1]) < set(held[2]) < set(held[3])


# --- Folds


def test_folds_are_even_and_each_has_its_part_of_a_class() -> None:
    """Whatever the order of the images; a copy is in its original's fold, whatever its class."""
    stream = np.random.default_rng(0)
    keys = stream.integers(0, 2**64, 203, np.uint64)
    labels = np.repeat([0, 1, 2], [140, 60, 3])
    keys[-2:] = keys[:2]
    for folds in (2, 3, 7, 100):
        drawn = [draw_fold(keys, labels, number, folds, "it") for number in range(1, folds + 1)]
        assert sorted(np.concatenate(drawn).tolist()) == [*range(203)]
        sizes = [len({*keys[rows].tolist()}) for rows in drawn]
        assert max(sizes) - min(sizes) <= 1
        for label in (0, 1):
            counts = [(labels[rows] == label).sum() for rows in drawn]
            assert max(counts) - min(counts) <= 1
        order = stream.permutation(203)
        mixed = draw_fold(keys[order], labels[order], 1, folds, "it")
        assert {*keys[order][mixed].tolist()} == {*keys[drawn[0]].tolist()}


@pytest.mark.parametrize(
    "typed", ["3", "0/5", "6/5", "1/1", "1/101", "1/5/5", "a/b", "-1/5", "1/ 5"]
)
def test_a_fold_that_there_is_not(typed: str) -> None:
    line = rf"^--fold {typed}: must be K/N, with N from 2 to 100 and K from 1 to N, e.g. 1/5$"
    with pytest.raises(UsageError, match=line):
        RunFlags(fold=typed)
    with pytest.raises(
        UsageError, match=r"^--fold 1/5: says what the test is; leave out --test-siz"
    ):
        RunFlags(fold="1/5", test_size=0.2)


def test_each_image_is_tested_on_once_and_no_group_is_parted(tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", *flat(24, "A{n:02}.png"), "cat/A00_2.png", "rare/only.png")
    shutil.copy(own / "dog/A01.png", own / "dog/copy.png")
    tests, digests = list[str](), set[str]()
    for number in (1, 2, 3):
        images = data_sets.load(own, ImageOptions(fold=(number, 3), group=r"A\d+"))
        files = images.files_of(range(27))
        test = [files[row] for row in images.rows["test"].tolist()]
        assert ("cat/A00.png" in test) == ("cat/A00_2.png" in test)
        assert ("dog/A01.png" in test) == ("dog/copy.png" in test)
        assert images.image_format.notes[0] == (
            f"{len(test)} of 27 images, {8 + (number == 1)} of 25 groups, are the test, fold"
            f" {number} of 3"
        )
        other = "the test has" if number > 1 else "train has, in this fold,"
        alone, lacks = images.caveats
        assert alone.startswith(
            "2 of 27 images have no group, so each is drawn alone, as dog/copy.png:"
        )
        assert lacks == f'{other} no image of "rare": add images'
        assert (images.test_share, len(images.rows["train"])) == (1 / 3, 27 - len(test))
        tests, digests = tests + test, digests | {images.digest}
    assert sorted(tests) == sorted(files.values())
    for options in (ImageOptions(group=r"A\d+"), ImageOptions(fold=(1, 2), group=r"A\d+")):
        digests |= {data_sets.load(own, options).digest}
    assert len(digests) == 5
    line = r"^--fold 1/26: --dataset .* has 25 images \(copies, .*; give at most 25 folds$"
    with pytest.raises(UsageError, match=line):
        data_sets.load(own, ImageOptions(fold=(1, 26), group=r"A\d+"))


# --- A finished run, and what became of its folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `run` on `photos`."""
    place = tmp_path_factory.mktemp("trained")
    write_noise(place / "photos", *PHOTOS)
    flags = {"model": "mlp", "epochs": 1, "batch_size": 8, "quiet": True, "cpu": True}
    api.train(dataset=place / "photos", test_size=TEST_SIZE, run_dir=place / "run", **flags)
    return place


def test_a_run_of_an_earlier_version_has_the_defaults_of_younger_flags(
    trained: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config.json has neither them nor the digests of a user's code."""
    shutil.copytree(trained / "run", tmp_path / "run")
    monkeypatch.chdir(trained)
    now = json.loads(typed("evaluate", tmp_path / "run", "--json").out)
    config = read_json(tmp_path / "run/config.json")
    for name in (
        "image_size",
        "grey",
        "cache_dir",
        "fit",
        "class_folder",
        "columns",
        "group",
        "fold",
    ):
        del config["run"][name]
    for name in ("metrics", "loss", "inject"):
        del config["recipe"][name]
    del config["own_code"]
    rewrite_config(tmp_path / "run", json.dumps(config))
    assert json.loads(typed("evaluate", tmp_path / "run", "--json").out) == now


@pytest.mark.parametrize("change", ["one more", "one edited"])
def test_fault_42_a_run_is_not_measured_on_a_folder_that_changed_since(
    change: str, trained: Path, here: Path, typed: Typed
) -> None:
    """Unless it is named: then none is counted that the run was trained on."""
    shutil.copytree(trained, here, dirs_exist_ok=True)
    config = read_json(Path("run/config.json"))
    config["run"]["dataset"] = str(here / "photos")
    rewrite_config(Path("run"), json.dumps(config))
    parts = parts_of(load(Path("photos"))).items()
    trained_on = {pixels for pixels, part in parts if part == "train"}
    make, _ = CHANGES[change]
    make(Path("photos"))
    for command in (("evaluate", "run"), ("evaluate", "run", "--split", "validation")):
        ended = typed(*command)
        assert (ended.code, ended.out) == (3, "")
        [line] = ended.error_lines
        assert f"run: the images of {here}/photos have changed since the run; put them" in line
        assert f"--dataset {quoted(here / 'photos')} (code 3)" in line
    ended = typed("report", "run")
    assert ended.code == 3 and "written to run/report.html" in ended.out
    assert "so the page shows no mistakes of it; put" in ended.err
    assert "have changed since the run." in Path("run/report.html").read_text()
    again = json.loads(typed("evaluate", "run", "--json", "--dataset", "photos").out)
    now = load(Path("photos"))
    assert again["count"] == len(of(now, "test").labels)
    assert not trained_on & {image.numpy().tobytes() for image in of(now, "test").images}
    ended = typed("evaluate", "run", "--split", "validation", "--dataset", "photos")
    assert ended.code == 0


@pytest.mark.usefixtures("here")
def test_an_image_that_was_trained_on_is_never_counted(trained: Path, typed: Typed) -> None:
    shutil.copytree(trained / "run", "run")
    shutil.copytree(trained / "photos", "other/test")
    seen = len(np.load("run/trained_on.npy"))
    assert seen == sum(part == "train" for part in parts_of(load(trained / "photos")).values())
    ended = typed("evaluate", "run", "--dataset", "other")
    assert ended.code == 3
    line = f"--dataset other: run was trained on {seen} of these 60 test images (test/"
    unseen = "; give images that it has not seen, in test/CLASS/ (code 3)\n"
    assert line in ended.err and ended.err.endswith(unseen)
    names = re.findall(r"test/\w+/\d+\.png", ended.err)[:2]
    for split in ("test", "train"):  # a copy in train is none of those
        Path("few", split, "a").mkdir(parents=True)
        for name in names:
            shutil.copy(Path("other", name), Path("few", split, "a"))
    noise(999).save("few/test/a/new.png")
    ended = typed("evaluate", "run", "--dataset", "few")
    assert f"2 of these 3 test images ({', '.join(names)}){unseen}" in ended.err
    for name in names:
        Path("few", name).unlink()
    assert json.loads(typed("evaluate", "run", "--dataset", "few", "--json").out)["count"] == 1
    write_noise(Path("new"), *flat(6, classes="a b c"), seed=9)  # in no split, and none is known
    assert json.loads(typed("evaluate", "run", "--dataset", "new", "--json").out)["count"] == 6
    Path("run/trained_on.npy").unlink()
    ended = typed("evaluate", "run", "--dataset", "other")
    assert ended.code == 0
    assert ended.err.startswith("ddp-mnist: warning: run: has no trained_on.npy of this version, ")
    config = read_json(Path("run/config.json"))
    rewrite_config(Path("run"), json.dumps({**config, "digest": "0" * 64}))
    ended = typed("evaluate", "run", "--dataset", trained / "photos")
    assert ended.code == 3  # the images of its train split may be among them
    assert "is unknown; give images that it has not seen, in test/CLASS/ (code 3)" in ended.err


def test_images_that_the_first_weights_were_trained_on_are_counted_by_no_later_run(
    trained: Path, here: Path, typed: Typed
) -> None:
    """Nor by a run on the weights of that; nor after a resume. An export does not know them."""
    shutil.copytree(trained, here, dirs_exist_ok=True)
    command = ["train", "--dataset", "photos", "--model", "mlp", "--batch-size", 8, "--cpu"]
    seen = {*np.load("run/trained_on.npy").tolist()}
    for weights, share, run in (("run", 0.6, "second"), ("second", 0.7, "third")):
        flags = ("--weights", f"{weights}/model.safetensors", "--test-size", share)
        said = typed(*command, *flags, "--epochs", 1, "--run-dir", run).out
        images = cache.load("photos", options=ImageOptions(test_size=share))
        test = images.keys[images.rows["test"]].tolist()
        unseen = len({*test} - seen)
        note = f"was trained on some: {len(test) - unseen} of {len(test)} test images, which are"
        assert note in said
        assert typed("train", "--resume", run, "--epochs", 2, "--cpu").code == 0
        assert read_json(Path(run, "summary.json"))["test_count"] == unseen
        assert json.loads(typed("evaluate", run, "--json").out)["count"] == unseen
        assert typed("report", run).code == typed("export", run).code == 0
        now = {*np.load(f"{run}/trained_on.npy").tolist()}
        assert now >= seen
        seen = now
    exported = "second/export/model.safetensors"
    said = typed(*command, "--weights", exported, "--dry-run").out
    without = f"--weights {exported}: without a trained_on.npy of this version next to it"
    assert f"{without}, this may test on" in said
    with pytest.raises(DataError, match=r"^w: \d+ of \d+ test images; give images"):
        images.without(images.keys, "w")


@pytest.mark.usefixtures("here")
def test_a_run_on_a_fold_is_evaluated_reported_and_resumed_on_it(typed: Typed) -> None:
    write_noise(Path("own"), *flat(40))
    command = ["train", "--model", "mlp", "--batch-size", 4, "--epochs", 1, "--cpu"]
    said = typed(*command, "--dataset", "own", "--fold", "2/5", "--run-dir", "run").succeeds()
    assert "own: " in said and ", 8 test images, 2 classes" in said
    assert "8 of 40 images are the test, fold 2 of 5" in said
    summary = read_json(Path("run/summary.json"))
    assert summary["dataset"]["train_rows"] == 32
    for split, score in (("test", "test_accuracy"), ("validation", "val_accuracy")):
        found = json.loads(typed("evaluate", "run", "--split", split, "--json").succeeds())
        assert found["accuracy"] == summary[score]
    shutil.copytree("own", "moved")
    found = json.loads(typed("evaluate", "run", "--dataset", "moved", "--json").succeeds())
    assert (found["count"], found["accuracy"]) == (8, summary["test_accuracy"])
    assert typed("report", "run").code == 0
    assert "fold 2 of 5" in typed("train", "--resume", "run", "--epochs", 2, "--cpu").succeeds()
    ended = typed("train", "--resume", "run", "--fold", "1/5", "--epochs", 3, "--cpu")
    assert ended.err.startswith("ddp-mnist: error: --fold 1/5: run was made with 2/5;")
    write_noise(Path("given"), *split_up())
    ended = typed(*command, "--dataset", "given", "--fold", "1/2")
    assert "--fold 1/2: --dataset given already has a split to test on; remove --fold" in ended.err
    ended = typed(*command, "--dataset", "given", "--test-size", "60")
    assert "--test-size 60: --dataset given already has a split to test on; remove" in ended.err
    noise(77).save("own/cat/more.png")  # the folds are dealt anew, so some were trained on
    ended = typed("evaluate", "run", "--dataset", "own")
    assert ended.code == 3 and "run was trained on" in ended.err
    assert "); give images that it has not seen, in test/CLASS/ (code 3)" in ended.err
