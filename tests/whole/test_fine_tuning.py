"""A net with BatchNorm that starts from weights: N processes equal one, also after a resume."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.optim import make_optimizer
from ddp_mnist.core.wrappers import Normalised, hold_still
from ddp_mnist.data import cache
from ddp_mnist.nets import initial_weights
from ddp_mnist.nets.initial_weights import find_weights
from ddp_mnist.system.files import read_json
from ddp_mnist.training import checkpoint
from ddp_mnist.training.resume import EarlierRun
from ddp_mnist.training.set_up import normalised
from ddp_mnist.verbs.verify.watch import just_train, proof_config, resumed, train_and_watch
from tests.commands import Typed
from tests.run_checks import apart, fit_recipe, stop, with_flags

OWN = """
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self, classes, shape):
        layers = nn.Conv2d(shape[0], 4, 5, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(3)
        super().__init__(*layers, nn.Flatten(), nn.Linear(36, classes))
"""


def lay(folder: Path) -> dict[str, torch.Tensor]:
    """Write the net's file, and weights for 1,000 classes; return those."""
    (folder / "own_bn.py").write_text(OWN)
    scope: dict[str, type[nn.Module]] = {}
    exec(OWN, scope)
    torch.manual_seed(5)
    net = scope["Net"](1000, (1, 28, 28))
    net.train()(2 * torch.rand(64, 1, 28, 28))  # so that its statistics are those of images
    torch.save(net.state_dict(), folder / "own.pth")
    return net.state_dict()


def test_n_processes_train_as_one_and_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    given = lay(tmp_path)
    named = {"model": "own_bn:Net", "weights": "own.pth"}
    config = with_flags(proof_config(**named, epochs=2, batch_size=72), image_size="28")
    runs = {size: with_flags(config, run_dir=f"on-{size}") for size in (1, 2, 3)}
    records = {size: run_world(size, train_and_watch, runs[size], folder=tmp_path) for size in runs}
    for size in (2, 3):
        assert apart(tmp_path / f"on-{size}", tmp_path / "on-1") < 1e-9
    assert records[1][0].learning_rates[2] == pytest.approx(5e-4)  # of the body
    trained = load_file(tmp_path / "on-1" / "model.safetensors")
    changed = {key for key in given if not torch.equal(trained[key].float(), given[key].float())}
    weights = [f"{layer}.{part}" for layer in (0, 1, 5) for part in ("weight", "bias")]
    assert changed == {*weights}  # no statistics
    assert read_json(tmp_path / "on-1" / "config.json")["normalised"] == [[0.449], [0.226]]

    broken = with_flags(config, run_dir="broken")
    stop(broken, tmp_path, 20, 2)
    (tmp_path / "own.pth").unlink()
    run_world(2, just_train, resumed(broken), folder=tmp_path)
    assert apart(tmp_path / "broken", tmp_path / "on-2") == 0


def rates_of_steps(config: TrainConfig) -> list[list[float]]:
    rates = list[list[float]]()
    register_optimizer_step_pre_hook(
        lambda optimizer, *_: rates.append([group["lr"] for group in optimizer.param_groups])
    )
    just_train(config)
    return rates


def test_the_last_layer_takes_ten_times_the_rate_in_each_step(tmp_path: Path) -> None:
    lay(tmp_path)
    config = proof_config(model="own_bn:Net", weights="own.pth", epochs=1, batch_size=72)
    [rates] = run_world(1, rates_of_steps, with_flags(config, image_size="28"), folder=tmp_path)
    assert max(map(max, rates)) > 0
    for body, *others in rates:
        assert others == pytest.approx([body, 10 * body, 10 * body])


def test_statistics_are_kept_at_any_depth_and_in_any_number_of_dimensions() -> None:
    layers = nn.Sequential(nn.BatchNorm2d(1)), nn.BatchNorm1d(2), nn.Dropout()
    net = hold_still(Normalised(nn.Sequential(*layers), (0.5,), (0.5,)), "statistics").train()
    for module in net.net.modules():
        assert module.training != isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d)


def test_the_last_layer_learns_at_its_own_rate_or_alone() -> None:
    scope: dict[str, type[nn.Module]] = {}
    exec(OWN, scope)
    for kept, head_rate, rates, learning in (
        ("", 1.0, [1.0, 1.0], 6),
        ("statistics", 10.0, [1.0, 1.0, 10.0, 10.0], 6),
        ("body", 10.0, [10.0, 10.0], 2),
    ):
        net = hold_still(Normalised(scope["Net"](3, (1, 9, 9)), (0.5,), (0.5,)), kept)
        groups = make_optimizer(
            net, fit_recipe(optimizer="adamw", head_rate=head_rate)
        ).param_groups
        assert [group["rate"] for group in groups] == rates
        assert sum(len(group["params"]) for group in groups) == learning
        names = {parameter: name for name, parameter in net.named_parameters()}
        head = [names[p] for group in groups[-2:] for p in group["params"]]
        assert (head == ["net.5.weight", "net.5.bias"]) == (head_rate > 1)
        norm = net.train().get_submodule("net.1")
        assert net.training and norm.training == (kept == "")
        assert not net.eval().training and not norm.training
        synced = nn.SyncBatchNorm.convert_sync_batchnorm(net).train().get_submodule("net.1")
        assert isinstance(synced, nn.SyncBatchNorm) and synced.training == (kept == "")


def not_fine_tuned(config: TrainConfig) -> None:
    """Train from weights as from none, as versions did that knew nothing of fine-tuning."""
    with patch.object(initial_weights, "are_fine_tuned", lambda *_: False):
        just_train(config)


def test_a_resume_keeps_the_rate_size_and_normalisation_that_the_run_began_with(
    tmp_path: Path,
) -> None:
    run_world(1, just_train, proof_config(epochs=1, run_dir="first"), folder=tmp_path)
    lay(tmp_path)
    for train, net in (
        (just_train, {"model": "cnn", "weights": "first/model.safetensors", "freeze": True}),
        (not_fine_tuned, {"model": "own_bn:Net", "weights": "own.pth"}),
    ):
        config = proof_config(**net, epochs=2, batch_size=72, run_dir=train.__name__)
        run_world(1, train, with_flags(config, checkpoint_every=8), folder=tmp_path)
        run = tmp_path / train.__name__
        whole = shutil.copytree(run, tmp_path / f"whole {run.name}")
        checkpoint.newest_first(run)[0].unlink()
        (run / "status.json").write_text('{"state": "preempted"}')
        saved = read_json(run / "config.json")
        assert not saved["fine_tunes"] and saved["run"]["image_size"] is None
        if train is not_fine_tuned:
            del saved["fine_tunes"], saved["normalised"]
            (run / "config.json").write_text(json.dumps(saved))
        run_world(1, just_train, resumed(config), folder=tmp_path)
        assert read_json(run / "summary.json")["resumed_from"] and apart(run, whole) == 0


def test_published_weights_normalise_a_resumed_run_as_they_did_when_it_began() -> None:
    weights = find_weights("torchvision:resnet18", "DEFAULT")
    assert weights
    earlier = EarlierRun("run", {"normalised": [[0.1], [0.2]]})
    found = normalised(cache.load("digits"), weights, "torchvision:resnet18", earlier).image_format
    assert (found.mean, found.std) == ((0.1,), (0.2,))


HEAD_FIRST = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        layers = nn.Linear(8, classes), nn.Linear(shape[1] * shape[2], 8)
        self.head, self.body = layers

    def forward(self, x):
        return self.head(self.body(x.flatten(1)))
"""


def test_the_last_layer_is_not_taken_for_the_head_if_it_does_not_give_the_outputs(
    here: Path, typed: Typed
) -> None:
    (here / "head_first.py").write_text(HEAD_FIRST)
    scope: dict[str, type[nn.Module]] = {}
    exec(HEAD_FIRST, scope)
    torch.save(scope["Net"](10, (1, 28, 28)).state_dict(), "w.pth")
    command = ["train", "--dataset", "digits", "--dry-run", "--image-size", 28, "--cpu"]
    command += ["--model", "head_first:Net", "--weights", "w.pth"]
    for flag in ("--weights w.pth", "--freeze"):
        ended = typed(*command, *flag.split())
        assert ended.code == 2 and f"error: {flag}: the layer that head_first:Net " in ended.err


def test_a_net_that_a_file_of_weights_names_is_watched_as_one_that_is_typed(
    here: Path, typed: Typed
) -> None:
    body_first = HEAD_FIRST.replace("head, self.body = layers", "body, self.head = layers[::-1]")
    (here / "watched.py").write_text(body_first)
    command = ["train", "--dataset", "digits", "--epochs", 1, "--cpu", "--quiet"]
    typed(*command, "--model", "watched:Net", "--run-dir", "one").succeeds()
    from_it = [*command, "--weights", "one/model.safetensors"]
    typed(*from_it, "--run-dir", "two").succeeds()
    assert [*read_json(Path("two/config.json"))["own_code"]] == ["--model watched:Net"]
    tensors = load_file("one/model.safetensors")
    with safe_open("one/model.safetensors", "pt") as opened:
        about = json.loads(opened.metadata()["ddp_mnist"])
    for change, line in (
        ({"code": "0"}, "the file of its net watched:Net was changed since; use it as it was"),
        ({"architecture": None}, "is of another version of ddp_mnist, or damaged: KeyError"),
    ):
        other = {name: value for name, value in (about | change).items() if value is not None}
        save_file(tensors, "other.safetensors", {"ddp_mnist": json.dumps(other)})
        ended = typed(*command, "--weights", "other.safetensors")
        assert ended.code == 2 and f"error: --weights other.safetensors: {line}" in ended.err
