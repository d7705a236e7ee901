"""Nets that are not ours: torchvision's, and a class in a user's own file."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import CheckpointError, UsageError
from ddp_mnist.nets import trial
from ddp_mnist.nets.build import build_net, has_batch_norm
from ddp_mnist.nets.initial_weights import load_weights
from ddp_mnist.nets.ours import is_known
from ddp_mnist.system.files import read_json
from ddp_mnist.task import Classification
from ddp_mnist.training import weights
from ddp_mnist.training.training_run import TrainingRun
from ddp_mnist.verbs.verify import watch
from tests.commands import Typed
from tests.data_sets import COLOUR, GREY
from tests.training import own_module, with_flags

OWN = """
import torch
from torch import nn

class NoLayers(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()

class Net(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(shape[0], 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.head = nn.Linear(128, classes)
        nn.init.zeros_(self.head.bias).requires_grad_(False)  # frozen

    def forward(self, x):
        return self.head(self.body(x))
"""
VARIANT = """
class Own(Net):
    def __init__(self, classes, shape):
        super().__init__(classes, shape)
        {init}

    def forward(self, x):
        return {forward}
"""
LOGITS = "super().forward(x)"
SQUEEZENET = "torchvision:squeezenet1_1"
ABC, XYZ = Classification([*"abc"]), Classification([*"xyz"])


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_module("own_net", OWN, tmp_path, monkeypatch)


@pytest.mark.parametrize("image_format", [GREY, COLOUR])
@pytest.mark.parametrize("name", ["cnn", "cnn_bn", "torchvision:resnet18", SQUEEZENET])
def test_a_net_for_any_channels_and_size(name: str, image_format: ImageFormat) -> None:
    net = build_net(name, Classification([*"abcdefg"]), image_format).eval()
    images = torch.randint(0, 256, (3, *image_format.shape), dtype=torch.uint8)
    with torch.no_grad():
        assert list(net(images).shape) == [3, 7]
    assert has_batch_norm(net) == (name in ("cnn_bn", "torchvision:resnet18"))
    assert is_known(name)  # no file of it is kept with the weights


def test_each_channel_is_normalised_by_its_own_mean_and_deviation() -> None:
    net = build_net("mlp", Classification([*"ab"]), COLOUR).double()
    seen: list[torch.Tensor] = []
    net.net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    images = torch.randint(0, 256, (2, 3, 32, 40), dtype=torch.uint8)
    net(images)
    for channel, (mean, std) in enumerate(zip(COLOUR.mean, COLOUR.std, strict=True)):
        expected = (images[:, channel].double() / 255 - mean) / std
        torch.testing.assert_close(seen[0][:, channel], expected)
    assert images.dtype == torch.uint8


# --- What a net can get wrong is one line


def refused(name: str) -> str:
    """Return the line without its beginning, which names the net."""
    with pytest.raises(UsageError, match=f"^--model {name}[:,] ") as raised:
        trial.check(build_net(name, Classification([*"abcde"]), COLOUR), name, 5, COLOUR.shape)
    assert "\n" not in str(raised.value)
    return str(raised.value).partition(name)[2]


NOT_MADE = {
    "own_net:Nett": ": AttributeError: .* no attribute 'Nett'$",
    "own_net:NoLayers": ": lacks parameters; put lists of layers in nn.ModuleList$",
    "torchvision:resnet19": ": torchvision has no such net.*; did you mean resnet18?",
    "torchvision:vit_b_16": r", on images \[3, 3, 32, 40\]: AssertionError: Wrong image width!",
}
NOT_COMPUTED = {  # what `forward` returns
    "super().forward(x)[:, :1]": r", on images \[3, .*: gives \[3, 1\], must be \[3, 5\]",
    "super().forward(x).squeeze()": r", on images \[1, 3, .*: gives \[5\], must be \[1, 5\]",
    "super().forward(x).detach()": r", in training on images \[2, .*: RuntimeError: .*require grad",
    "[super().forward(x)] if self.training else super().forward(x)": ", in training on .*list",
    "self.head(x.flatten(1))": ", on images .*: RuntimeError: .*mat1 and mat2 shapes",
}
NOT_TRAINED = {  # what `__init__` adds
    "self.fc2 = nn.Linear(3, 3)": ": fc2.weight has no part in the outputs; use it",
    "self.more = [nn.Linear(3, classes)]": ": lacks parameters",
}


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize("name", NOT_MADE)
def test_a_net_that_cannot_be_made(name: str) -> None:
    assert re.match(NOT_MADE[name], refused(name))


@pytest.mark.parametrize("code", NOT_COMPUTED | NOT_TRAINED)
def test_a_net_that_cannot_be_trained(code: str, own_file: Path) -> None:
    init, forward = (code, LOGITS) if code in NOT_TRAINED else ("pass", code)
    own_file.write_text(OWN + VARIANT.format(init=init, forward=forward))
    assert re.match((NOT_COMPUTED | NOT_TRAINED)[code], refused("own_net:Own"))


def test_a_net_is_refused_before_the_data_are_read_or_a_folder_is_made(
    typed: Typed, own_file: Path
) -> None:
    ended = typed("train", "--dataset", "no_such_folder", "--model", "no_module:Net")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert ended.err.startswith(
        "ddp-mnist: error: --model no_module:Net: ModuleNotFoundError: No m"
    )
    own_file.write_text(OWN + VARIANT.format(init="self.fc2 = nn.Linear(3, 3)", forward=LOGITS))
    ended = typed("train", "--dataset", "digits", "--model", "own_net:Own")
    assert ended.code == 2
    assert "--model own_net:Own: fc2.weight has no part in the outputs" in ended.err
    assert not (own_file.parent / "runs").exists()


# --- --weights


Tensors = dict[str, torch.Tensor]
ENDINGS = pytest.mark.parametrize("ending", [".pth", ".safetensors"])
AGAIN = "head.weight and head.bias are initialised again: made for other classes or sizes"
OTHER_MODEL = "name the --model that it was made for$"


def write_weights(file: Path, tensors: Tensors) -> None:
    torch.save(tensors, file) if file.suffix == ".pth" else save_file(tensors, file)


def state(image_format: ImageFormat = COLOUR) -> Tensors:
    return build_net("cnn", ABC, image_format).net.state_dict()


@ENDINGS
def test_weights_come_from_a_file_and_only_the_last_layer_may_differ(
    ending: str, tmp_path: Path
) -> None:
    file, given, five = tmp_path / f"weights{ending}", state(), Classification([*"abcde"])
    write_weights(file, given)
    same = build_net("cnn", XYZ, COLOUR, str(file)).net.state_dict()
    assert all(torch.equal(same[name], given[name]) for name in given)
    net = build_net("cnn", five, COLOUR).net
    assert load_weights(net, "cnn", str(file), five) == f"from {file}; {AGAIN}"
    new_head = net.state_dict()
    differ = [name for name in given if not torch.equal(new_head[name], given[name])]
    assert differ == ["head.weight", "head.bias"]


# What is written in the place of a cnn's tensors for images in colour, and the line.
NOT_LOADED: dict[str, tuple[Callable[[Path], object], str]] = {
    "of grey images": (
        lambda file: write_weights(file, state(GREY)),
        rf"RuntimeError: .*size mismatch for conv1.weight: .*; {OTHER_MODEL}",
    ),
    "damaged": (lambda file: file.write_bytes(b"x" * 99), "(.*Error: |it holds more than ten)"),
    "a checkpoint": (lambda file: torch.save({"model": state(), "epoch": 3}, file), ".*Error: "),
    "what runs code": (lambda file: torch.save(Path("x"), file), "(.*Error: |it holds more )"),
}


@ENDINGS
@pytest.mark.parametrize("kind", NOT_LOADED)
def test_a_file_that_holds_no_weights_of_this_net_is_refused(
    kind: str, ending: str, tmp_path: Path
) -> None:
    write, line = NOT_LOADED[kind]
    file = tmp_path / f"weights{ending}"
    write(file)
    with pytest.raises(UsageError, match=rf"^--weights {file}: {line}") as raised:
        build_net("cnn", ABC, COLOUR, str(file))
    assert "weights_only" not in str(raised.value)  # torch's advice to run what is in the file


@pytest.mark.usefixtures("here")
def test_weights_of_a_run_keep_the_last_layer_only_for_the_same_classes() -> None:
    trained = state()
    Path("w.safetensors").write_bytes(weights.to_bytes(trained, "cnn", ABC, COLOUR))
    net = build_net("cnn", ABC, COLOUR).net
    assert load_weights(net, "cnn", "w.safetensors", ABC) == "from w.safetensors"
    assert torch.equal(net.state_dict()["head.bias"], trained["head.bias"])
    assert load_weights(net, "cnn", "w.safetensors", XYZ).endswith(AGAIN)


# --- In a run

MORE = """
class Viewed(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.conv, self.last = nn.Conv2d(shape[0], 4, 5, stride=4), nn.Linear(144, classes)
        self.alias = self.last

    def forward(self, x):
        x = self.conv(x)
        return self.last(x.view(x.size(0), -1))

class Drops(nn.Module):
    masks = []

    def __init__(self, classes, shape):
        super().__init__()
        self.last, self.dropout = nn.Linear(784, classes), nn.Dropout()

    def forward(self, x):
        if self.training:
            self.masks.append(self.dropout(torch.ones(64)))
        return self.last(x.flatten(1))
"""


def test_a_net_that_views_its_maps_and_has_a_layer_under_two_names_trains_and_is_exported(
    typed: Typed, own_file: Path
) -> None:
    own_file.write_text(OWN + MORE)
    given = ["train", "--dataset", "digits", "--epochs", "1", "--quiet", "--run-dir", "run"]
    assert typed(*given, "--model", "own_net:Viewed").code == 0
    state = weights.from_bytes(weights.read_bytes("run"), "run").net.net.state_dict()
    assert torch.equal(state["alias.weight"], state["last.weight"])
    assert typed("export", "run").code == 0


def test_a_file_that_is_edited_while_it_trains_is_not_the_runs(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = TrainingRun.finish

    def edit_first(*arguments: Any) -> dict[str, Any]:
        own_file.write_text(OWN + "# edited")
        return finish(*arguments)

    monkeypatch.setattr(TrainingRun, "finish", edit_first)
    watch.just_train(watch.proof_config(model="own_net:Net", epochs=1))
    monkeypatch.delitem(sys.modules, "own_net")  # as in another process
    with pytest.raises(CheckpointError, match=r"^run: the file of --model own_net:Net was chan"):
        weights.from_bytes(weights.read_bytes("run"), "run")
    own_file.write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_net")
    trained = weights.from_bytes(weights.read_bytes("run"), "run")
    assert trained.architecture == "own_net:Net"


def test_dropout_draws_anew_for_each_part_of_a_step_and_alike_in_each_run(own_file: Path) -> None:
    own_file.write_text(OWN + MORE)
    config = watch.proof_config(model="own_net:Drops", epochs=1, grad_accum=2)
    drawn = []
    for run in ("first", "second"):
        watch.just_train(with_flags(config, run_dir=run))
        masks = sys.modules["own_net"].Drops.masks
        drawn.append(torch.stack(masks[4:]))  # the first ones are of the trial
        masks.clear()
    assert len(drawn[0]) == 30
    assert len(drawn[0].unique(dim=0)) == 30
    assert torch.equal(*drawn)


@pytest.mark.usefixtures("here")
def test_weights_are_a_record_of_a_run_that_goes_on() -> None:
    torch.save(build_net("mlp", Classification([*"0123456789"]), GREY).net.state_dict(), "w.pth")
    config = watch.proof_config(model="mlp", epochs=1, weights="w.pth")
    watch.just_train(config)
    Path("w.pth").unlink()
    summary = watch.just_train(with_flags(watch.resumed(config, epochs=2), resume="run"))
    assert summary["weights"] == "w.pth"
    assert read_json(Path("run/config.json"))["recipe"]["weights"] == "w.pth"
    other: Any = with_flags(watch.resumed(config, epochs=3, weights="v.pth"), resume="run")
    with pytest.raises(CheckpointError, match=r"^--weights v.pth: .* was made with w.pth; leave"):
        watch.just_train(other)
