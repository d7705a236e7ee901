"""A net with BatchNorm that starts from weights: N processes equal one, also after a resume."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.core.optim import make_optimizer
from ddp_mnist.core.wrappers import Normalised, hold_still
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify.watch import just_train, proof_config, resumed, train_and_watch
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
    assert records[1][0].learning_rates[2] == pytest.approx(2.5e-4)  # of the body
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
