"""Nets that are not ours: torchvision's, and a class in a user's own file."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.data.preparation import Preparation
from ddp_mnist.errors import CheckpointError, UsageError
from ddp_mnist.nets import build_net, code_digest, has_batch_norm
from ddp_mnist.run import weights
from ddp_mnist.verify import watch
from tests.commands import Typed
from tests.training import with_flags

GREY = Preparation((1, 28, 28), (0.1307,), (0.3081,), [], True, True)
COLOUR = Preparation((3, 32, 40), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), [], False, False)
OWN = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, classes, shape):
        super().__init__(
            nn.Conv2d(shape[0], 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(128, classes),
        )


class OneLogit(Net):
    def forward(self, x):
        return super().forward(x)[:, :1]


class Fails(Net):
    def forward(self, x):
        raise KeyError("no such layer")


def number(classes, shape):
    return 3


def needs_more(classes, shape, depth):
    return Net(classes, shape)
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file own_net.py in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    path = tmp_path / "own_net.py"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize("preparation", [GREY, COLOUR])
@pytest.mark.parametrize(
    "name",
    ["cnn", "cnn_deep", "mlp", "cnn_bn", "torchvision:resnet18", "torchvision:squeezenet1_1"],
)
def test_a_net_for_any_channels_and_size(name: str, preparation: Preparation) -> None:
    net = build_net(name, 7, preparation).eval()
    images = torch.randint(0, 256, (3, *preparation.shape), dtype=torch.uint8)
    with torch.no_grad():
        assert list(net(images).shape) == [3, 7]
    assert has_batch_norm(net) == (name in ("cnn_bn", "torchvision:resnet18"))
    assert not code_digest(name)


def test_each_channel_is_normalised_by_its_own_mean_and_deviation() -> None:
    net = build_net("mlp", 2, COLOUR).double()
    seen: list[torch.Tensor] = []
    net.net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randint(0, 256, (2, 3, 32, 40), dtype=torch.uint8)
    net(images)
    for channel, (mean, std) in enumerate(zip(COLOUR.mean, COLOUR.std, strict=True)):
        expected = (images[:, channel].double() / 255 - mean) / std
        torch.testing.assert_close(seen[0][:, channel], expected)
    assert images.dtype == torch.uint8


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no_module:Net", "there is no module no_module in "),
        ("own_net:Nett", "own_net has no Nett; check its spelling"),
        ("own_net:number", "gives int, not a torch.nn.Module; name a class"),
        ("own_net:OneLogit", r"gives \[2, 1\] for two images, must be logits \[2, 5\]; correct"),
        ("own_net:Fails", r"fails on images of \(3, 32, 40\) \(own_net.py:20: 'no such layer'\);"),
        ("own_net:needs_more", "cannot be made for 5 classes .*depth.*; it is called with"),
        ("torchvision:resnet19", "torchvision has no such net; did you mean resnet18?"),
        ("torchvision:vit_b_16", "fails on images of .*; correct its forward, or give another"),
    ],
)
def test_what_a_net_can_get_wrong_is_one_line(name: str, line: str, own_file: Path) -> None:
    assert own_file.exists()
    with pytest.raises(UsageError, match=f"^--model {name}: {line}"):
        build_net(name, 5, COLOUR)


def test_a_net_of_ones_own_trains_resumes_and_is_not_used_once_its_file_has_changed(
    own_file: Path, tmp_path: Path
) -> None:
    config = with_flags(watch.proof_config(model="own_net:Net"), checkpoint_every=8)
    run_world(2, watch.train_and_watch, with_flags(config, run_dir="unbroken"), folder=tmp_path)
    one = with_flags(config, run_dir="one")
    run_world(1, watch.train_and_watch, one, folder=tmp_path)
    runs = (watch.weights_of(tmp_path / name) for name in ("unbroken", "one"))
    assert watch.largest_difference(*runs) < 1e-9
    trained = weights.from_bytes(weights.read_bytes("one"), "one")
    assert trained.architecture == "own_net:Net"
    own_file.write_text(OWN + "\n# another\n")
    with pytest.raises(CheckpointError, match=r"^one: the file of --model own_net:Net was changed"):
        weights.from_bytes(weights.read_bytes("one"), "one")
    more: Any = with_flags(watch.resumed(config, epochs=4), resume="one")
    with pytest.raises(CheckpointError, match=r"^--model own_net:Net: its file was changed since"):
        run_world(1, watch.just_train, more, folder=tmp_path)


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_weights_come_from_a_file_and_only_the_last_layer_may_differ(
    ending: str, tmp_path: Path
) -> None:
    file = str(tmp_path / f"weights{ending}")
    given = build_net("cnn", 3, COLOUR).net.state_dict()
    save = torch.save if ending == ".pth" else save_file
    save(given, file)
    same = build_net("cnn", 3, COLOUR, file).net.state_dict()
    assert all(torch.equal(same[name], given[name]) for name in given)
    new_head = build_net("cnn", 5, COLOUR, file).net.state_dict()
    differ = [name for name in given if not torch.equal(new_head[name], given[name])]
    assert differ == ["head.weight", "head.bias"]
    with pytest.raises(UsageError, match=rf"^--weights {file}: conv1.weight has the shape \[32, 3"):
        build_net("cnn", 3, GREY, file)
    with pytest.raises(UsageError, match=f"^--weights {file}: is of another net"):
        build_net("mlp", 3, COLOUR, file)
    with pytest.raises(UsageError, match=r"^--weights no.pth: cannot be read \(No such file"):
        build_net("cnn", 3, COLOUR, "no.pth")


def test_torchvision_weights_serve_grey_images_too(tmp_path: Path) -> None:
    name, file = "torchvision:squeezenet1_1", str(tmp_path / "weights.pth")
    in_colour = build_net(name, 3, COLOUR).net.state_dict()
    torch.save(in_colour, file)
    grey = build_net(name, 3, GREY, file).net.state_dict()
    assert grey.keys() == {f"net.{key}" for key in in_colour}
    assert all(torch.equal(grey[f"net.{key}"], tensor) for key, tensor in in_colour.items())
    torch.save(grey, file)
    again = build_net(name, 3, GREY, file).net.state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in grey.items())


def test_the_old_word_for_resnet18(typed: Typed) -> None:
    ended = typed("train", "--model", "resnet18")
    assert ended.code == 2
    assert "--model resnet18: " in ended.err
    assert "torchvision:resnet18" in ended.err
