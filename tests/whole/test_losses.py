"""--loss and --class-weights: an image weighs the same whichever process has it."""

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.batches import Rows
from ddp_mnist.data import cache
from ddp_mnist.errors import CheckpointError, UsageError
from ddp_mnist.nets import trial
from ddp_mnist.system.files import read_json
from ddp_mnist.task import Classification, balanced, find_loss, make_task
from ddp_mnist.training.model_file import from_bytes, read_bytes
from ddp_mnist.verbs.verify import watch
from tests.commands import Typed
from tests.data_sets import few_digits, flat, of, write_noise
from tests.run_checks import apart, own_module, stop, with_flags

CPU = torch.device("cpu")
OWN = """
import torch
import torch.nn.functional as F

def focal(logits, labels):
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (1 - torch.exp(-losses)) ** 2 * losses

mixes = lambda logits, labels: focal(logits, labels).mean().expand(len(labels))
mean = lambda logits, labels: focal(logits, labels).mean()
whole = lambda logits, labels: labels
detached = lambda logits, labels: focal(logits.detach(), labels)
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_module("my_loss", OWN, tmp_path, monkeypatch)


# --- What may be named


ON = r", on outputs \[3, 5\] and targets \[3\]: "
WRONG = {
    "my_loss:vocal": ": AttributeError: .* no attribute 'vocal'$",
    "my_loss:mean": rf"{ON}gives a loss of shape \[\]; give that of each image, \[3\], e.g. by",
    "my_loss:mixes": f"{ON}the loss of an image depends on other images, or on chance, so N proc",
    "my_loss:whole": f"{ON}RuntimeError: .*require grad",
    "my_loss:detached": f"{ON}RuntimeError: .*require grad",
}


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize("name", WRONG)
def test_what_a_loss_can_get_wrong_is_one_line(name: str) -> None:
    with pytest.raises(UsageError, match=f"^--loss {name}{WRONG[name]}"):
        task = Classification([*"abcde"], find_loss(name))
        trial.check_task(task, f"--loss {name}", torch.arange(3))


# --- What it computes


def test_the_default_is_pytorchs_own_cross_entropy_to_the_bit() -> None:
    draws = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(72, 10, generator=draws), torch.arange(72) % 10
    rows = Rows(torch.zeros(72, 1), labels)
    for smoothing in (0.0, 0.1):
        task = make_task(Recipe(label_smoothing=smoothing), [*"abcdefghij"], rows, CPU)
        loss = task.training_loss(logits, labels)
        assert torch.equal(loss, F.cross_entropy(logits, labels, label_smoothing=smoothing))
    losses = task.loss(logits, labels)
    assert torch.equal(losses, F.cross_entropy(logits, labels, reduction="none"))


def test_weights_of_classes_are_those_of_all_images_and_not_of_the_batch() -> None:
    """Held-out images do not count; a class without an image gets no part."""
    labels = torch.tensor([0, 0, 0, 0, 2, 2, 0, 1])
    assert balanced(labels[:4]).tolist() == [1]
    assert balanced(labels[:6]).tolist() == [6 / 8, 6 / 2, 6 / 4]
    assert balanced(labels[:6])[labels[:6]].mean() == 1
    rows = Rows(torch.zeros(8, 1), labels, torch.arange(6))
    logits = torch.arange(24.0).view(8, 3).sin()[:3]
    batch = torch.tensor([0, 2, 2])
    task = make_task(Recipe(class_weights="balanced"), [*"abc"], rows, CPU)
    loss = task.training_loss(logits, batch)
    each = F.cross_entropy(logits, batch, label_smoothing=0.1, reduction="none")
    assert loss == pytest.approx(float(0.75 * each[0] + 1.5 * each[1] + 1.5 * each[2]) / 3)


# --- In a run


NET = """
from ddp_mnist.core.nets import MLP

class Net(MLP):
    def __init__(self, classes, shape):
        super().__init__(classes, shape)
        self.head.bias.requires_grad_(False)  # frozen
"""


def proof(run_dir: str) -> TrainConfig:
    given = {"loss": "my_loss:focal", "class_weights": "balanced", "model": "my_net:Net"}
    config = watch.proof_config(run_dir, **given, epochs=2, batch_size=24, augment=True)
    return with_flags(config, dataset="photos", checkpoint_every=4)


def test_with_ones_own_net_and_loss_two_equal_one_and_a_resumed_run_the_unbroken_one(
    own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On images in colour, augmented, of one class twice as many as of the other."""
    (net := tmp_path / "my_net.py").write_text(NET)
    for seed, (split, count) in enumerate((("train", 180), ("test", 20))):
        names = flat(count, classes="cat dog dog")
        write_noise(tmp_path / "photos" / split, *names, seed=seed)
    [one] = run_world(1, watch.train_and_watch, proof("one"), folder=tmp_path)
    two = run_world(2, watch.train_and_watch, proof("two"), folder=tmp_path)
    assert watch.per_step(two) == watch.per_step([one])
    assert len(one.images) == 12
    assert apart(tmp_path / "two", tmp_path / "one") < 1e-9
    assert two[0].summary["test_loss"] == pytest.approx(one.summary["test_loss"], rel=1e-9)

    stopped_at = stop(proof("broken"), tmp_path, step=7, size=2, by=1)
    again = watch.resumed(proof("broken"))
    for file, typed in ((own_file, "--loss my_loss:focal"), (net, "--model my_net:Net")):
        for module in ("my_loss", "my_net"):  # as in another process
            monkeypatch.delitem(sys.modules, module, raising=False)
        text = file.read_text()
        file.write_text(f"{text}\n# another\n")
        with pytest.raises(CheckpointError, match=f"the file of {typed} was changed since"):
            watch.just_train(again)
        file.write_text(text)
    [ended, _] = run_world(2, watch.just_train, again, folder=tmp_path)
    assert ended["resumed_from"] == [stopped_at]
    assert watch.what_stays(tmp_path / "broken") == watch.what_stays(tmp_path / "two")


def test_all_that_speaks_of_the_loss_names_it(
    typed: Typed, own_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = few_digits(tmp_path / "few", 300, 40)
    flags = ["--dataset", few, "--model", "mlp", "--epochs", "2", "--log-every", "1"]
    printed = typed("train", *flags, "--loss", "my_loss:focal", "--run-dir", "run").succeeds()
    said = " ".join(printed.split())
    assert "not augmented, loss my_loss:focal; typed: --model mlp, --epochs 2, --loss" in said
    summary = read_json(tmp_path / "run" / "summary.json")
    assert f"wrong), loss my_loss:focal {summary['test_loss']:.4f}" in said
    assert (summary["loss_function"], summary["class_weights"]) == ("my_loss:focal", "none")

    evaluated = json.loads(typed("evaluate", "run", "--json").out)
    assert evaluated["loss"] == summary["test_loss"]
    assert evaluated["loss_function"] == "my_loss:focal"
    images, trained_net = cache.load(str(few)), from_bytes(read_bytes("run"), "run").model
    with torch.no_grad():
        task = Classification(images.classes, find_loss("my_loss:focal"))
        losses = task.loss(trained_net(of(images, "test").images), of(images, "test").labels)
    assert losses.double().mean().item() == pytest.approx(summary["test_loss"], rel=1e-6)
    shown = typed("evaluate", "run").out
    assert f"   loss my_loss:focal {summary['test_loss']:.4f}\n" in shown

    assert typed("report", "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Loss: my_loss:focal." in page
    assert "cross" not in (printed + shown + page).lower()

    own_file.write_text(OWN + "\n# another\n")
    monkeypatch.delitem(sys.modules, "my_loss")  # as in another process
    ended = typed("evaluate", "run")
    assert ended.code == 4
    assert "run: the file of --loss my_loss:focal was changed since; use it as it was" in ended.err
