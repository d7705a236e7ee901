"""A finished run and images that it has not seen: evaluate counts what predict answers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from ddp_mnist import api
from ddp_mnist.system.files import read_json
from tests.commands import Typed

CLASSES = ["blue", "green", "red", "violet", "yellow"]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Squares anywhere on noise of 32x32, told by their colour alone: all have the same grey."""
    place, stream = tmp_path_factory.mktemp("shapes") / "shapes", np.random.default_rng(0)
    hues = dict(zip(CLASSES, ((0, 0, 1), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0)), strict=True))
    for split, count in (("train", 60), ("test", 20)):
        for name, hue in hues.items():
            (place / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = stream.integers(90, 110, (32, 32, 1)).repeat(3, 2).astype(float)
                luma = np.dot(hue, (0.299, 0.587, 0.114))
                colour = 100 + 60 * (np.array(hue) - luma)  # of grey 100
                top, left, side = (*stream.integers(0, 20, 2), stream.integers(6, 12))
                pixels[top : top + side, left : left + side] = colour
                image = PIL.Image.fromarray(pixels.round().astype(np.uint8))
                image.save(place / split / name / f"{number}.png")
    return place


@pytest.fixture(scope="module")
def runs(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs `colour` and `grey` on them; the second one's images are of 28x28."""
    folder = tmp_path_factory.mktemp("runs")
    flags: dict[str, Any] = {"model": "cnn", "epochs": 8, "quiet": True, "cpu": True}
    api.train(dataset=shapes, run_dir=folder / "colour", **flags)
    api.train(dataset=shapes, run_dir=folder / "grey", grey=True, image_size=28, **flags)
    return folder


def test_colours_are_told_apart_unless_grey(runs: Path) -> None:
    accuracies = [read_json(runs / n / "summary.json")["test_accuracy"] for n in ("colour", "grey")]
    assert accuracies[0] >= 0.95 and accuracies[1] <= 0.4


def copied(folder: Path, place: Path, change: Callable[[PIL.Image.Image], PIL.Image.Image]) -> None:
    for path in folder.rglob("*.png"):
        (place / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        with PIL.Image.open(path) as image:
            change(image).save(place / path.relative_to(folder))


def test_new_images_are_counted_as_predict_labels_them(
    shapes: Path, runs: Path, here: Path, typed: Typed
) -> None:
    """Of any size and mode; of some classes, whose labels are others then, or in no split.

    Held-out images: test_held_out.py.
    """
    copied(shapes, here / "grey", lambda image: image.convert("L"))
    copied(shapes, here / "large", lambda image: image.resize((48, 48)))
    shutil.copytree("large/train/red", "large/train/zebra")  # which is not what is counted
    for name in ("green", "yellow"):
        shutil.copytree(shapes / "test" / name, f"two/test/{name}")
    shutil.copytree(shapes / "test", "whole/test")
    for folder, run, count, is_known in (
        ("grey", "colour", 100, False),
        ("large", "colour", 100, True),
        ("whole", "grey", 100, False),
        ("two", "colour", 40, True),
        ("whole", "colour", 100, True),
    ):
        found = api.evaluate(runs / run, dataset=folder)
        assert found and (found["count"], found["classes"]) == (count, CLASSES)
        confusion = np.zeros((5, 5), dtype=int)
        for answer in api.predict(runs / run, Path(folder, "test")):
            is_, taken_for = Path(answer["file"]).parent.name, answer["label"]
            confusion[CLASSES.index(is_), CLASSES.index(taken_for)] += 1
        assert found["confusion"] == confusion.tolist()
        assert (found["accuracy"] > 0.9) == is_known
    alone = api.evaluate(runs / "colour", dataset=shapes / "test")
    assert alone and found and alone["confusion"] == found["confusion"]

    Path("whole/test/blue").rename("whole/test/sky")
    assert typed("evaluate", runs / "colour", "--dataset", "whole").err == (
        "ddp-mnist: error: --dataset whole: class sky is not one of the run's (blue, green, red,"
        " violet, yellow); rename it to one of them, or leave its images out (code 2)\n"
    )
