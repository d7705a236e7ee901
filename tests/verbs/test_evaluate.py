import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.training import scores
from ddp_mnist.verbs import evaluate
from ddp_mnist.verbs.flags import Evaluate
from tests.commands import Typed
from tests.data_sets import write_noise
from tests.run_checks import told_once

# --- The table of `evaluate`


def table_of(
    data: str, names: list[str], accuracies: list[float | None], confusion: list[list[int]]
) -> list[str]:
    """Return its lines, for a data set and its classes."""
    counted: dict[str, Any] = {"split": "test", "count": 1234, "accuracy": 0.75, "loss": 0.5}
    counted |= {"score_name": "accuracy"}
    counted |= {"loss_function": "cross_entropy", "scores": {"f1": 0.25}, "notes": []}
    of_classes = {"class_accuracy": accuracies, "confusion": confusion}
    data_set = {"dataset": {"name": data}, "classes": names, "inject": None}
    return evaluate.metrics_table(counted | data_set | of_classes).splitlines()


def test_a_table_fits_a_terminal_and_does_not_steer_it() -> None:
    """Labels stand above the columns of names that are too long; no rows have no accuracy."""
    lines = table_of("pets", ["cat", "dog"], [0.5, 0.5], [[0, 1], [2, 3]])
    assert [line.split() for line in lines[3:]] == [
        ["class", "accuracy", "cat", "dog"],
        ["cat", "0.5000", "0", "1"],
        ["dog", "0.5000", "2", "3"],
    ]
    names = ["T - shirt / top", "a\x1b[2Jb", "c\nd\x9b", "Dress", "Ankle boot"]
    accuracies = [0.5, 1.0, 0.25, 0.0, None]
    confusion = (7 * np.eye(5, dtype=int)).tolist()
    lines = table_of("x\x1b[H", names, accuracies, confusion)
    assert lines[0] == "test split of x?[H: 1,234 images"
    assert lines[1] == "accuracy 0.7500   loss 0.5000   f1 0.2500"
    assert lines[4] == "0 T - shirt / top   0.5000       7     0     0     0     0"
    assert lines[8].split() == ["4", "Ankle", "boot", "-", *"00007"]
    assert "".join(lines).isprintable()


def test_of_many_classes_the_worst_are_shown() -> None:
    """One more than MANY_CLASSES, the last without images."""
    confusion = np.diag([10] * 40 + [0])
    confusion[3, [3, 5]] = 4, 1600
    confusion[7, [7, 8, 9]] = 5, 2, 3
    accuracies = [row[c] / sum(row) if sum(row) else None for c, row in enumerate(confusion)]
    lines = table_of("pets", [f"kind {n}" for n in range(41)], accuracies, confusion.tolist())
    assert lines[2:6] == [
        "accuracy   images   the worst of 41 classes",
        "  0.0025    1,604   kind 3",
        "  0.5000       10   kind 7",
        "  1.0000       10   kind 0",
    ]
    assert lines[13:] == [
        "images   most often taken for another (--json has all)",
        " 1,600   kind 3, taken for kind 5",
        "     3   kind 7, taken for kind 9",
        "     2   kind 7, taken for kind 8",
    ]
    sparse = scores.packed(confusion.tolist())
    assert sparse[3:6] == [[3, 3, 4], [3, 5, 1600], [4, 4, 10]]
    assert np.array_equal(scores.unpacked(sparse, 41), confusion)
    whole = confusion[:40, :40].tolist()
    assert scores.packed(whole) == whole == scores.unpacked(whole, 40).tolist()


# --- Its splits


def parted(images: ImageData, split: str, val_size: int) -> ImageData:
    return evaluate._parted(images, split, val_size, [])


def test_a_split_that_another_data_set_is_too_small_for() -> None:
    images = cache.load("digits")
    for split, val_size in itertools.product(("train", "validation"), (5000, 1437)):
        with pytest.raises(UsageError, match=rf"^--split {split}: .*{val_size:,}.*--split test$"):
            parted(images, split, val_size)
        assert len(parted(images, "test", val_size).rows["test"]) == 360
    assert len(parted(images, "train", 1436).rows["train"]) == 1
    alike = dataclasses.replace(images, keys=np.zeros_like(images.keys))  # none is held
    assert len(parted(alike, "train", 5).rows["train"]) == 1437
    with pytest.raises(UsageError, match=r"^--split validation: .* held 0 out; use --split test$"):
        parted(alike, "validation", 5)


def evaluate_on_other_images(run: str) -> Any:
    if os.environ["RANK"] == "1":
        images = dataclasses.replace(cache.load("digits"), digest="0")
        evaluate.cache.load = lambda *_, **__: images
    return evaluate.evaluate_run(Evaluate(run, dataset="digits"), Distribution(cpu=True))


def test_ranks_that_have_other_images_are_refused(alone: Path, tmp_path: Path) -> None:
    outcomes = LocalWorld(2, evaluate_on_other_images, str(alone), folder=tmp_path).outcomes()
    assert str(told_once(outcomes, 2)).startswith("the data's digest: rank 0 has ")


# --- A table's columns


def with_table(folder: Path, seed: int, **columns: str) -> Path:
    """Write twelve images, and a table with a sign for each of them in each column."""
    files = [f"{number}.png" for number in range(12)]
    write_noise(folder, *files, seed=seed)
    rows = [("file_name", *columns), *zip(files, *columns.values(), strict=True)]
    (folder / "metadata.csv").write_text("".join(",".join(row) + "\n" for row in rows))
    return folder


def test_a_run_is_evaluated_by_the_column_that_it_was_trained_on(here: Path, typed: Typed) -> None:
    """Or by that which is named now; never by another that is usual."""
    trained = with_table(here / "trained", 1, label="ab" * 6, site="xxyy" * 3)
    flags = ["--model", "mlp", "--epochs", "1", "--batch-size", "4", "--cpu", "--run-dir", "run"]
    typed("train", "--dataset", trained, "--columns", "label=site", *flags).succeeds()
    assert read_json(here / "run" / "summary.json")["classes"] == ["x", "y"]

    def evaluated(*more: object) -> Any:
        return typed("evaluate", "run", "--json", "--dataset", *more)

    of_run = json.loads(typed("evaluate", "run", "--json").succeeds())
    assert json.loads(evaluated(trained).succeeds())["accuracy"] == of_run["accuracy"]
    same = with_table(here / "same", 2, label="ba" * 6, Site="xxyy" * 3)
    counted = json.loads(evaluated(same).succeeds())
    assert np.sum(counted["confusion"], axis=1).tolist() == [6, 6]
    other = with_table(here / "other", 3, label="xy" * 6, place="yyyx" * 3)
    line = (
        "--columns label=site: metadata.csv has no such column, only 'file_name', 'label', 'place'"
    )
    assert line in evaluated(other).err
    counted = json.loads(evaluated(other, "--columns", "label=place").succeeds())
    assert np.sum(counted["confusion"], axis=1).tolist() == [3, 9]
    write_noise(here / "folders", "x/1.png", "y/2.png", "y/3.png", seed=4)
    counted = json.loads(evaluated(here / "folders").succeeds())
    assert np.sum(counted["confusion"], axis=1).tolist() == [1, 2]
    refused = typed("evaluate", "run", "--columns", "label=place")
    assert (refused.code, "--columns label=place: is for another --dataset" in refused.err) == (
        2,
        True,
    )
