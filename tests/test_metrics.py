"""--metrics: scikit-learn's numbers and one's own, exact on any number of processes."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.splits import rows_of_splits
from ddp_mnist.errors import FailedElsewhere, UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.task import find_score
from ddp_mnist.training.model_file import from_bytes, read_bytes
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.commands import Typed
from tests.data_sets import of, write_idx
from tests.run_checks import metrics, what_it_says, with_flags
from tests.training.test_tracking import logged, scalars

OWN = """
import warnings

def ones(labels, predictions):
    warnings.warn("of a person's own")
    labels += 1  # a copy's, and of no effect on what comes after
    return (predictions == 1).sum()

def raises(labels, predictions):
    return 1 if len(labels) == 4 else {}[len(labels)]

def undefined(labels, predictions):
    return float("nan") if (labels != predictions).any() else {}["all were right"]

two_classes_only = lambda labels, predictions: [[1, 0], [0, 1]][predictions.max()][0]
no_number = lambda labels, predictions: None
recall_of_7 = lambda labels, predictions: (predictions[labels == 7] == 7).mean()
fails = lambda labels, predictions: 1 / 0
"""
LINE_OF = {"raises": 10, "two_classes_only": 15}
AVERAGED = {"average": "macro", "zero_division": 0}
# What of scikit-learn is meant for labels and predicted classes.
EXPECTED: dict[str, Any] = {
    "accuracy": sk.accuracy_score,
    "balanced_accuracy": sk.balanced_accuracy_score,
    "cohen_kappa": sk.cohen_kappa_score,
    "f1": lambda y, p: sk.f1_score(y, p, **AVERAGED),
    "hamming_loss": sk.hamming_loss,
    "jaccard": lambda y, p: sk.jaccard_score(y, p, **AVERAGED),
    "matthews_corrcoef": sk.matthews_corrcoef,
    "precision": lambda y, p: sk.precision_score(y, p, **AVERAGED),
    "recall": lambda y, p: sk.recall_score(y, p, **AVERAGED),
    "zero_one_loss": sk.zero_one_loss,
}
OF_PROBABILITIES = {"roc_auc", "log_loss", "average_precision", "brier_score_loss", "hinge_loss"}


def test_which_names_of_scikit_learn_are_taken_and_that_others_are_one_line() -> None:
    taken = set()
    for name in [word.removesuffix("_score") for word in sk.__all__]:
        try:
            find_score(name)
            taken.add(name)
        except UsageError as error:
            assert str(error).startswith(f"--metrics {name}")
    assert taken >= EXPECTED.keys()
    assert find_score("of_mine:recall_of_7")(np.array([7, 7]), np.array([7, 1])) == 0.5
    given = find_score(f"{sk.f1_score.__module__}:{sk.f1_score.__name__}")  # as from Python
    assert given(np.array([0, 1, 2]), np.array([0, 1, 1])) == pytest.approx(5 / 9)
    assert not taken & OF_PROBABILITIES


# --- In a run


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 train images of all classes; 47 for the test, of which none is a 9."""
    every, place = cache.load("digits"), tmp_path_factory.mktemp("metrics")
    train, test = of(every, "train"), of(every, "test")
    kept = (test.labels != 9).nonzero().flatten()[:47]
    files: dict[str, Any] = {"train_images": train.images[:400]}
    files |= {"train_labels": train.labels[:400], "test_labels": test.labels[kept]}
    write_idx(place / "digits", **files, test_images=test.images[kept])
    (place / "of_mine.py").write_text(OWN)
    return place


@pytest.fixture(autouse=True)
def there(digits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(digits)


def config(run: str, *names: str, **flags: Any) -> TrainConfig:
    short = {"epochs": 1, "batch_size": 6, "val_size": 31, "mixed_precision": "no", "quiet": False}
    found = proof_config(run, model="mlp", metrics=names)
    return with_flags(found, **{**short, "dataset": "digits-of-mine", **flags})


def expected(labels: torch.Tensor, predictions: torch.Tensor) -> dict[str, Any]:
    y, p = labels.numpy(), predictions.numpy()
    with warnings.catch_warnings(action="ignore"):
        return {name: function(y, p) for name, function in EXPECTED.items()}


def test_scores_are_scikit_learns_on_two_processes_and_evaluates_on_one(
    digits: Path, typed: Typed
) -> None:
    """Equal to the last bit, of 31 and of 47 images; a class without images makes no noise."""
    names = ["of_mine:ones", *EXPECTED, "of_mine:undefined"]
    run = digits / "run"
    asked = config(run.name, *names, dataset=str(digits / "digits"), trackers="tensorboard")
    said, silent = run_world(2, what_it_says, asked, folder=digits)
    assert silent == ""
    summary, images = read_json(run / "summary.json"), cache.load(str(digits / "digits"))
    trained = from_bytes(read_bytes(str(run)), str(run))
    _, validation, test = rows_of_splits(images.hold_out(31))
    for rows, prefix in ((validation, "val"), (test, "test")):
        pixels, labels, _ = rows.__getitems__(torch.arange(len(rows)))
        with torch.inference_mode():
            predictions = trained.model(pixels).argmax(1)
        wanted = expected(labels, predictions)
        wanted["of_mine:ones"] = int((predictions == 1).sum())
        wanted["of_mine:undefined"] = None
        [line] = metrics(run, f"{prefix}_f1")
        assert {name: line[f"{prefix}_{name}"] for name in names} == wanted
        assert sk.confusion_matrix(labels, predictions).sum() == (31, 47)[prefix == "test"]
    assert 0.3 < wanted["f1"] < wanted["accuracy"] < 1
    assert sum(summary["confusion"][9]) == 0
    assert sum(row[9] for row in summary["confusion"])  # of which scikit-learn warns
    assert summary["metrics"] == wanted
    assert summary["test_accuracy"] == wanted["accuracy"]
    words = " ".join(said.split())
    for name, number in wanted.items():
        assert f"{name} " + ("undefined" if number is None else f"{number:.4f}") in words
    counted = typed("evaluate", run, "--json")
    assert (counted.err, json.loads(counted.out)["scores"]) == ("", wanted)
    assert scalars(run) == logged(run)
    assert {"val_f1", "test_of_mine:ones"} <= scalars(run).keys()

    others = typed("evaluate", run, "--metrics", "f1,of_mine:undefined")
    assert f"   f1 {wanted['f1']:.4f}   of_mine:undefined undefined\n" in others.out
    assert typed("report", run).code == 0
    page = (run / "report.html").read_text()
    tiles = dict(re.findall(r'data-figure="([\w:]+)">([^<]*)</data>', page))
    assert tiles["f1"] == f"{wanted['f1']:.4f}"
    assert tiles["of_mine:undefined"] == "undefined"
    assert f"metrics of_mine:ones</th><td>{wanted['of_mine:ones']}" in page


def test_a_function_that_fails_on_the_images_ends_all_ranks_in_one_line(digits: Path) -> None:
    """One that is for two classes is not refused before they are known to be ten."""
    flags = {"dataset": str(digits / "digits"), "quiet": True}
    for name, why in (("raises", "KeyError: 31"), ("two_classes_only", "IndexError: list index")):
        asked = config(name, f"of_mine:{name}", **flags)
        first, second = LocalWorld(2, just_train, asked, folder=digits).outcomes()
        assert isinstance(first, UsageError) and isinstance(second, FailedElsewhere)
        said = f"--metrics of_mine:{name}, of labels and predicted classes: {why}"
        assert str(first).startswith(said)
        kept = (digits / name / "traceback.txt").read_text()
        assert f'of_mine.py", line {LINE_OF[name]}' in kept


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("precison", ": scikit-learn has no such metric; choose e.g. f1, precision, recall, bal"),
        ("cluster", ": scikit-learn has no such metric; choose e.g. f1, precision, recall, bal"),
        ("roc_auc", ", of labels and predicted classes: ValueError: multi_class"),
        ("of_mine:nine", ": AttributeError: module 'of_mine' has no attribute 'nine'"),
        ("of_mien:ones", ": ModuleNotFoundError: No module named 'of_mien'"),
        ("of_mine:no_number", ", of labels and predicted classes: TypeError: float()"),
        ("of_mine:fails", ", of labels and predicted classes: ZeroDivisionError: division by"),
    ],
)
def test_what_is_no_metric_is_one_line_before_the_first_step(
    name: str, says: str, digits: Path, typed: Typed
) -> None:
    ended = typed("train", "--dataset", "digits", "--quiet", "--metrics", f"f1,{name}")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(f"ddp-mnist: error: --metrics {name}{says}")
    assert not (digits / "runs").exists()
