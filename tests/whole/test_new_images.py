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
from tests.data_sets import flat, write_noise

CLASSES = ["blue", "green", "red", "violet", "yellow"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold `photos`, and the runs `colour` and `grey` on them; the second one's are of 28x28."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, (split, count) in enumerate((("train", 50), ("test", 100))):
        names = flat(count, classes=" ".join(CLASSES))
        write_noise(folder / "photos" / split, *names, size=(32, 32), seed=seed)
    flags: dict[str, Any] = {"model": "mlp", "epochs": 2, "batch_size": 10, "quiet": True}
    flags |= {"dataset": folder / "photos", "cpu": True}
    api.train(run_dir=folder / "colour", **flags)
    api.train(run_dir=folder / "grey", grey=True, image_size=28, **flags)
    return folder


def copied(folder: Path, place: Path, change: Callable[[PIL.Image.Image], PIL.Image.Image]) -> None:
    for path in folder.rglob("*.png"):
        (place / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
        with PIL.Image.open(path) as image:
            change(image).save(place / path.relative_to(folder))


def test_new_images_are_counted_as_predict_labels_them(
    runs: Path, here: Path, typed: Typed
) -> None:
    """Of any size and mode; of some classes, whose labels are others then, or in no split.

    Held-out images: test_held_out.py.
    """
    photos = runs / "photos"
    copied(photos, here / "grey", lambda image: image.convert("L"))
    copied(photos, here / "large", lambda image: image.resize((48, 48)))
    shutil.copytree("large/train/red", "large/train/zebra")  # which is not what is counted
    for name in ("green", "yellow"):
        shutil.copytree(photos / "test" / name, f"two/test/{name}")
    shutil.copytree(photos / "test", "whole/test")
    sets = "grey colour", "large colour", "whole grey", "two colour", "whole colour"
    for folder, run in map(str.split, sets):
        count = 40 if folder == "two" else 100
        found = api.evaluate(runs / run, dataset=folder)
        assert found and (found["count"], found["classes"]) == (count, CLASSES)
        confusion = np.zeros((5, 5), dtype=int)
        for answer in api.predict(runs / run, Path(folder, "test")):
            is_, taken_for = Path(answer["file"]).parent.name, answer["label"]
            confusion[CLASSES.index(is_), CLASSES.index(taken_for)] += 1
        assert found["confusion"] == confusion.tolist()
        if folder == "whole":
            assert found["confusion"] == read_json(runs / run / "summary.json")["confusion"]
    alone = api.evaluate(runs / "colour", dataset=photos / "test")
    assert alone and found and alone["confusion"] == found["confusion"]

    Path("whole/test/blue").rename("whole/test/sky")
    assert typed("evaluate", runs / "colour", "--dataset", "whole").err == (
        "ddp-mnist: error: --dataset whole: class sky is not one of the run's (blue, green, red,"
        " violet, yellow); rename it to one of them, or leave its images out (code 2)\n"
    )
