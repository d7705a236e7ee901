"""A task of one's own: numbers instead of classes, trained, resumed, evaluated, used and shown."""

import csv
import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas
import PIL.Image
import pytest
import torch

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.batches import Rows
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import DataError
from ddp_mnist.system.files import read_json
from ddp_mnist.task import about_task, make_task, options_of, task_from
from ddp_mnist.training import model_file
from ddp_mnist.verbs.verify import watch
from tests.commands import Typed
from tests.data_sets import write_metadata
from tests.run_checks import apart, own_module, stop, with_flags

OWN = """
import numpy as np
from ddp_mnist.task import Task

class Spot(Task):
    columns = ("x", "y")
    name = "distance"

    def loss(self, outputs, targets):
        return (outputs - self.scaled(targets)).square().mean(1)

    def predict(self, outputs):
        return self.unscaled(outputs)

    def score(self, predictions, targets):
        return (predictions - targets).norm(dim=1)

    def better(self, score, best):
        return score < best

    def metrics(self, predictions, targets):
        predictions -= targets  # its own copies
        return {"worst": np.abs(predictions).max(), "odd": np.nan}

class Twice(Spot):
    columns = ("x", "x")

class Loss(Spot):
    name = "loss"

class Around(Spot):
    def score(self, predictions, targets):
        return (predictions - targets.mean(0)).norm(dim=1)

class Short(Spot):
    def predict(self, outputs):
        return outputs[:, :1]

class Again(Spot):
    def metrics(self, predictions, targets):
        return {"loss": 1.0}
"""


@pytest.fixture
def spots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of images of a spot, with its place in metadata.csv; my_task.py is beside."""
    own_module("my_task", OWN, tmp_path, monkeypatch)
    (tmp_path / "spots").mkdir()
    pixels, places = np.arange(16), np.random.default_rng(0).uniform(3, 13, (240, 2))
    for number, (x, y) in enumerate(places):
        image = np.exp(-((pixels - x) ** 2 + (pixels[:, None] - y) ** 2) / 8)
        PIL.Image.fromarray(np.uint8(255 * image)).save(tmp_path / "spots" / f"{number}.png")
    rows = [[f"{number}.png", *place] for number, place in enumerate(places)]
    write_metadata(tmp_path / "spots", rows, "file_name x y")
    return tmp_path / "spots"


def read(folder: Path) -> ImageData:
    flags = {"task": "my_task:Spot", "image_size": None, "grey": False, "test_size": None}
    return cache.load(str(folder), options=options_of(flags))


def proof(folder: Path, run_dir: str) -> TrainConfig:
    given = {"task": "my_task:Spot", "model": "mlp", "epochs": 15, "batch_size": 24, "patience": 15}
    config = watch.proof_config(run_dir, **given, lr=0.02)
    return with_flags(config, dataset=str(folder))


def test_labels_are_known_by_their_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a model tells of itself which of its columns were 0 and 1 in training, or only 0."""
    own = "from ddp_mnist.task import Task\n\nclass Four(Task):\n    columns = (*'abcd',)\n"
    own_module("four", own, tmp_path, monkeypatch)
    columns = [[0.0] * 9, [1.0] * 9, [0.0, *[1.0] * 8], [*[0.5] * 8, 2.0]]
    rows = Rows(torch.zeros(9, 1, 1, 1), torch.tensor(columns).T, torch.arange(9))
    task = make_task(Recipe(task="four:Four"), [], rows, torch.device("cpu"))
    assert task.are_labels == [True, True, True, False]
    about = json.loads(json.dumps(about_task(task)))
    assert task_from(about, [], "run").are_labels == task.are_labels
    del about["are_labels"]  # of an earlier version
    assert task_from(about, [], "run").are_labels[2]


def test_it_is_trained_resumed_and_used_like_any_other(
    spots: Path, tmp_path: Path, typed: Typed
) -> None:
    for size in (1, 2):
        config = proof(spots, f"on-{size}")
        run_world(size, watch.just_train, config, folder=tmp_path)
    assert apart(tmp_path / "on-2", tmp_path / "on-1") < 1e-9
    broken = proof(spots, "broken")
    stop(broken, tmp_path, 50)
    run_world(1, watch.just_train, watch.resumed(broken), folder=tmp_path)
    assert watch.what_stays(tmp_path / "broken") == watch.what_stays(tmp_path / "on-1")

    summary = read_json(tmp_path / "on-1" / "summary.json")
    assert summary["score_name"] == "distance"
    assert summary["test_distance"] < 0.5
    assert summary["metrics"]["worst"] < 3
    assert summary["metrics"]["odd"] is None
    lines = (tmp_path / "on-1" / "metrics.jsonl").read_text().splitlines()
    validated = [line["val_distance"] for line in map(json.loads, lines) if "val_distance" in line]
    assert summary["val_distance"] == min(validated)  # the smallest is the best

    evaluated = json.loads(typed("evaluate", "on-1", "--json").out)
    assert evaluated["distance"] == pytest.approx(summary["test_distance"], rel=1e-6)
    assert (evaluated["count"], evaluated["classes"]) == (summary["test_count"], [])
    trained = model_file.from_bytes(model_file.read_bytes("on-1"), "on-1")
    pixels = torch.tensor(np.asarray(PIL.Image.open(spots / "7.png")))[None, None]
    expected = trained.task.predict(trained.model(pixels))[0].tolist()
    answer = json.loads(typed("predict", "on-1", str(spots / "7.png")).out)
    assert [*answer["prediction"].values()] == pytest.approx(expected, abs=1e-5)
    assert [*answer["prediction"]] == ["x", "y"]

    assert typed("report", "on-1", "--png").code == 0
    page = (tmp_path / "on-1" / "report.html").read_text()
    assert page.count("<figure") == 2
    rows = pandas.read_csv(tmp_path / "on-1" / "predictions.csv")
    of_test = rows[rows["split"] == "test"]
    off = np.hypot(*(of_test[f"answer_{c}"] - of_test[f"truth_{c}"] for c in "xy"))
    assert (len(off), off.mean()) == (
        summary["test_count"],
        pytest.approx(evaluated["distance"], rel=1e-4),
    )
    shown = re.findall(r'<img [^>]*alt="(\d+\.png): x [\d.e+-]+, is', page)
    assert len(shown) == 24 and shown[0] in of_test["file"][off.nlargest(3).index].tolist()
    drawn = {path.name for path in (tmp_path / "on-1").glob("report-scatter-*")}
    assert drawn == {f"report-scatter-{c}.{form}" for c in "xy" for form in ("png", "svg")}
    assert not (tmp_path / "on-1" / "classes.csv").exists()
    table = {row["file"]: row for _, row in rows.iterrows()}
    answers = typed("predict", "on-1", *(str(spots / file) for file in table)).out.splitlines()
    for answer in map(json.loads, answers):
        row = table[Path(answer["file"]).name]
        assert answer["prediction"] == pytest.approx(
            {c: row[f"answer_{c}"] for c in "xy"}, rel=1e-5
        )
    assert "Validation distance" in page
    assert "Loss: that of my_task:Spot." in page
    assert f"   loss {summary['test_loss']:.4f}" in typed("evaluate", "on-1").out
    assert "confusion" not in page.partition("</style>")[2]
    assert typed("export", "on-1").code == 0
    card = (tmp_path / "on-1" / "export" / "README.md").read_text()
    assert f"Test distance {summary['test_distance']:.4f} on" in card
    (tmp_path / "my_task.py").write_text(OWN + "\n")
    del sys.modules["my_task"]  # as in another process
    ended = typed("predict", "on-1", str(spots / "7.png"))
    assert "the file of --task my_task:Spot was changed since" in ended.err


ON = "on outputs [3, 2] and targets [3, 2]"
REFUSED = {
    "--task my_task:Twice": "--task my_task:Twice: needs columns, a tuple of different names",
    "--task my_task:Loss": "--task my_task:Loss: name must be one word, and not loss",
    "--task my_task:Around": f"--task my_task:Around, {ON}: the score of an image depends on other",
    "--task my_task:Short": f"--task my_task:Short, {ON}: predict gives [3, 1], must be [3, 2]",
    "--task my_task:Again": f"--task my_task:Again, {ON}: ValueError: metrics gives loss, which",
    "--task my_task:Gone": "--task my_task:Gone: AttributeError: ",
    "--task numpy:mean": "--task numpy:mean: must be a class derived from",
    "--task os.path:join": "--task os.path:join: is Python's own; name a module of yours",
    "--task my_task:Spot --loss my_task:f": "--loss my_task:f: has no part in --task my_task:Spot;",
    "--task my_task:Spot --metrics f1": "--metrics f1: has no part in --task my_task:Spot; leave",
    "--task my_task:Spot --dataset digits": "--dataset digits: has classes, and no x, y",
}


def test_what_does_not_fit_is_refused(spots: Path, typed: Typed) -> None:
    for flags, words in REFUSED.items():
        [line] = typed("train", "--dataset", str(spots), *flags.split()).error_lines
        assert line.startswith(f"ddp-mnist: error: {words}")


def test_columns_that_are_missing_are_named(spots: Path, tmp_path: Path) -> None:
    write_metadata(spots, [["0.png", 1]], "file_name x")
    there = "no metadata.csv with the columns file_name, x, y; metadata.csv has no column y, only "
    with pytest.raises(
        DataError, match=f"{there}.*, and was not used .*=ITS_NAME.; add what is missing$"
    ):
        read(spots)
    without_a_task = "which folder is the class of 0.png.*; metadata.csv has no column label, "
    with pytest.raises(DataError, match=f"{without_a_task}.*, give --task MODULE:CLASS$"):
        cache.load(str(spots))
    (tmp_path / "parquet").mkdir()
    columns = {"image": [b"-"], "x": [1.0]}
    datasets.Dataset.from_dict(columns).to_parquet(tmp_path / "parquet" / "train.parquet")
    with pytest.raises(DataError, match=r"no y column among image .*, x .*; add one, named y"):
        read(tmp_path / "parquet")


def test_the_same_numbers_are_read_from_a_folder_a_parquet_file_and_a_saved_data_set(
    spots: Path, tmp_path: Path
) -> None:
    lines = (spots / "metadata.csv").read_text().splitlines()
    rows = [*csv.DictReader(lines)]
    columns: dict[str, Any] = {name: [float(row[name]) for row in rows] for name in ("x", "y")}
    columns["image"] = [str(spots / row["file_name"]) for row in rows]
    table = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    (tmp_path / "parquet").mkdir()
    table.to_parquet(tmp_path / "parquet" / "train.parquet")
    table.save_to_disk(tmp_path / "saved")
    found = [read(tmp_path / name) for name in ("spots", "parquet", "saved")]
    expected = np.array([columns["x"], columns["y"]], np.float32).T
    assert found[1].targets.tolist() == found[2].targets.tolist() == expected.tolist()
    in_order: Any = expected.tolist()
    assert sorted(found[0].targets.tolist()) == sorted(in_order)  # of the files' names
    held_out = [sorted(images.keys[images.rows["test"]]) for images in found]
    assert held_out[0] == held_out[1] == held_out[2]
    assert [images.classes for images in found] == [[], [], []]
