"""Over all folds, each image is in the test once: together with its copies and its group."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.data.held_out import draw_fold
from ddp_mnist.errors import UsageError
from ddp_mnist.system.files import read_json
from tests.commands import Typed
from tests.data_sets import flat, load, noise, split_up, write_noise


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
        images = load(own, ImageOptions(fold=(number, 3), group=r"A\d+"))
        files = images.files_of(range(27))
        test = [files[row] for row in images.rows["test"].tolist()]
        assert ("cat/A00.png" in test) == ("cat/A00_2.png" in test)
        assert ("dog/A01.png" in test) == ("dog/copy.png" in test)
        assert images.image_format.notes[0] == (
            f"{len(test)} of 27 images, {8 + (number == 1)} of 25 groups, are the test, fold"
            f" {number} of 3"
        )
        other = "the test has" if number > 1 else "train has, in this fold,"
        assert images.caveats == [f'{other} no image of "rare": add images']
        assert (images.test_share, len(images.rows["train"])) == (1 / 3, 27 - len(test))
        tests, digests = tests + test, digests | {images.digest}
    assert sorted(tests) == sorted(files.values())
    assert len(digests | {load(own, ImageOptions(group=r"A\d+")).digest}) == 4
    line = r"^--fold 1/26: --dataset .* has 25 images \(copies, .*; give at most 25 folds$"
    with pytest.raises(UsageError, match=line):
        load(own, ImageOptions(fold=(1, 26), group=r"A\d+"))


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
    assert "--fold 1/2: --dataset given already has a test split; remove --fold" in ended.err
    ended = typed(*command, "--dataset", "given", "--test-size", "60")
    assert "--test-size 60: --dataset given already has a test split; remove" in ended.err
    noise(77).save("own/cat/more.png")  # the folds are dealt anew, so some were trained on
    ended = typed("evaluate", "run", "--dataset", "own")
    assert ended.code == 3 and "run was trained on" in ended.err
