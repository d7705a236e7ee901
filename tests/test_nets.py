"""Nets that are not ours: torchvision's, and a class in a user's own file."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import CheckpointError, UsageError
from ddp_mnist.nets import trial
from ddp_mnist.nets.build import build_net, has_batch_norm
from ddp_mnist.nets.initial_weights import load_weights
from ddp_mnist.nets.ours import is_known
from ddp_mnist.run import weights
from ddp_mnist.run.folder import read_json
from ddp_mnist.run.training_run import TrainingRun
from ddp_mnist.verify import watch
from tests.commands import Typed
from tests.training import own_module, with_flags

GREY = ImageFormat((1, 28, 28), (0.1307,), (0.3081,), [], True, True)
COLOUR = ImageFormat((3, 32, 40), (0.5, 0.4, 0.3), (0.2, 0.2, 0.2), [], False, False)
OWN = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self, classes, shape):
        super().__init__(
            nn.Conv2d(shape[0], 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
            nn.Linear(128, classes),
        )
        nn.init.zeros_(self[4].bias).requires_grad_(False)  # frozen


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


class TwoImages(Net):
    def forward(self, x):
        return super().forward(x.flatten()[: 2 * x[0].numel()].view(2, *x.shape[1:]))


class OneImageLess(Net):
    def forward(self, x):
        return super().forward(x).squeeze()


class Untrained(Net):
    def forward(self, x):
        with torch.no_grad():
            return super().forward(x)


class Unused(Net):
    def __init__(self, classes, shape):
        super().__init__(classes, shape)
        self.fc2 = nn.Linear(3, 3)

    def forward(self, x):
        for layer in [*self][:-1]:
            x = layer(x)
        return x


class InTraining(Net):
    def forward(self, x):
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


class InPlace(Net):
    def forward(self, x):
        scaled = super().forward(x).exp()
        scaled += scaled * scaled
        return scaled.sqrt_().mul_(2)


class DoesNotFit(Net):
    def forward(self, x):
        return self[4](x.flatten(1))


class NoSuper(nn.Module):
    def __init__(self, classes, shape):
        self.fc = nn.Linear(3, classes)


class NoSuperNorLayers(nn.Module):
    def __init__(self, classes, shape):
        self.classes = classes


class InAList(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.layers = [nn.Linear(3, classes)]


class InAListToo(Net):
    def __init__(self, classes, shape):
        super().__init__(classes, shape)
        self.more = [nn.Linear(3, classes)]


class NoLayers(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_module("own_net", OWN, tmp_path, monkeypatch)


@pytest.mark.parametrize("image_format", [GREY, COLOUR])
@pytest.mark.parametrize(
    "name",
    ["cnn", "cnn_deep", "mlp", "cnn_bn", "torchvision:resnet18", "torchvision:squeezenet1_1"],
)
def test_a_net_for_any_channels_and_size(name: str, image_format: ImageFormat) -> None:
    net = build_net(name, "abcdefg", image_format).eval()
    images = torch.randint(0, 256, (3, *image_format.shape), dtype=torch.uint8)
    with torch.no_grad():
        assert list(net(images).shape) == [3, 7]
    assert has_batch_norm(net) == (name in ("cnn_bn", "torchvision:resnet18"))
    assert is_known(name)  # no file of it is kept with the weights


def test_each_channel_is_normalised_by_its_own_mean_and_deviation() -> None:
    net = build_net("mlp", "ab", COLOUR).double()
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
        ("own_net:OneLogit", r"gives \[3, 1\] for images .*, must be logits \[3, 5\]; correct its"),
        (
            "own_net:Fails",
            r"fails on images \[3, 3, 32, 40\] \(own_net.py:22: 'no such layer'\); correct its"
            " forward, or give another --image-size",
        ),
        (
            "own_net:needs_more",
            r"cannot be made for 5 classes .* \(own_net.py:29: needs_more.*depth.*; it is called",
        ),
        ("own_net:TwoImages", r"(fails on|gives \[2, 5\] for) images \[3, 3, 32, 40\]"),
        (
            "own_net:OneImageLess",
            r"gives \[5\] for images \[1, 3, 32, 40\], must be logits \[1, 5\]",
        ),
        ("own_net:Untrained", r"its logits have no gradient; compute them without torch.no_grad"),
        (
            "own_net:Unused",
            "fc2.weight has no part in the logits; use it in forward, or remove it$",
        ),
        ("own_net:InTraining", r"gives tuple in training for images \[2, 3, 32, 40\], must be"),
        ("own_net:InPlace", r"fails in training on images \[2, .*modified by an inplace operation"),
        ("own_net:DoesNotFit", r"fails on images .* \(own_net.py:75: .*mat1 and mat2 shapes"),
        ("own_net:NoSuper", r"cannot be .* \(own_net.py:80: cannot assign module before Module"),
        ("own_net:NoSuperNorLayers", r"is incomplete; begin its __init__ with super\(\)"),
        ("own_net:InAList", "lacks parameters; put lists of layers in nn.ModuleList$"),
        ("own_net:InAListToo", "lacks parameters"),
        ("own_net:NoLayers", "lacks parameters"),
        ("torchvision:resnet19", "torchvision has no such net; did you mean resnet18?"),
        (
            "torchvision:fcn_resnet50",
            "torchvision has no such net for classification; did you mean",
        ),
        ("torchvision:vit_b_16", r"fails on .*\); give another --image-size, e.g. 224$"),
    ],
)
def test_what_a_net_can_get_wrong_is_one_line(name: str, line: str, own_file: Path) -> None:
    assert own_file.exists()
    with pytest.raises(UsageError, match=f"^--model {name}: {line}"):
        trial.check(build_net(name, "abcde", COLOUR), name, 5, COLOUR.shape)


@pytest.mark.parametrize("name", ["torchvision:googlenet", "own_net:Net", "cnn"])
def test_each_parameter_gets_a_gradient(name: str, own_file: Path) -> None:
    """torchvision's googlenet gives one output alone: its auxiliary ones are left out."""
    assert own_file.exists()
    trial.check(build_net(name, "abcde", COLOUR), name, 5, COLOUR.shape)


def test_a_net_of_ones_own_trains_resumes_and_is_not_used_once_its_file_has_changed(
    own_file: Path, tmp_path: Path
) -> None:
    config = with_flags(watch.proof_config(model="own_net:Net"), checkpoint_every=8)
    run_world(2, watch.train_and_watch, with_flags(config, run_dir="unbroken"), folder=tmp_path)
    one = with_flags(config, run_dir="one")
    [seen] = run_world(1, watch.train_and_watch, one, folder=tmp_path)
    assert len(seen.gradient_norms) == watch.STEPS
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
    given = build_net("cnn", "abc", COLOUR).net.state_dict()
    save = torch.save if ending == ".pth" else save_file
    save(given, file)
    same = build_net("cnn", "xyz", COLOUR, file).net.state_dict()
    assert all(torch.equal(same[name], given[name]) for name in given)
    net = build_net("cnn", "abcde", COLOUR).net
    said = load_weights(net, "cnn", file, "abcde")
    assert (
        said == f"from {file}; head.weight and head.bias are initialised again: made for 3 classes"
    )
    new_head = net.state_dict()
    differ = [name for name in given if not torch.equal(new_head[name], given[name])]
    assert differ == ["head.weight", "head.bias"]
    with pytest.raises(UsageError, match=rf"^--weights {file}: conv1.weight has the shape \[32, 3"):
        build_net("cnn", "abc", GREY, file)
    needed = f"^--weights {file}: has no hidden1.weight, which this net needs; name the --model"
    with pytest.raises(UsageError, match=needed):
        build_net("mlp", "abc", COLOUR, file)
    save({**given, "fc.bias": torch.zeros(3)}, file)
    with pytest.raises(
        UsageError, match=f"^--weights {file}: has fc.bias, which this net does not have;"
    ):
        build_net("cnn", "abc", COLOUR, file)
    Path(file).write_bytes(b"x" * 99)
    with pytest.raises(UsageError, match=r"cannot be read \(it holds more than tensors, or is dam"):
        build_net("cnn", "abc", COLOUR, file)
    with pytest.raises(
        UsageError, match=f"^--weights no{ending}: there is no such file; check the"
    ):
        build_net("cnn", "abc", COLOUR, f"no{ending}")


def test_weights_of_a_run_keep_the_last_layer_only_for_the_same_classes(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    trained = build_net("cnn", "abc", COLOUR).net.state_dict()
    file.write_bytes(weights.to_bytes(trained, "cnn", list("abc"), COLOUR))
    net = build_net("cnn", "abc", COLOUR).net
    assert load_weights(net, "cnn", str(file), "abc") == f"from {file}"
    assert torch.equal(net.state_dict()["head.bias"], trained["head.bias"])
    other = load_weights(build_net("cnn", "xyz", COLOUR).net, "cnn", str(file), "xyz")
    assert other.endswith(
        "head.weight and head.bias are initialised again: made for other classes or sizes"
    )


def test_a_file_that_holds_no_weights_is_one_line_with_the_file_to_give(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    step, whole = tmp_path / "checkpoints" / "step-00000008.pt", tmp_path / "whole.pth"
    for file in (step, whole):
        torch.save({"model": {"bias": torch.zeros(3)}, "epoch": 3}, file)
    pickled = tmp_path / "pickled.pth"
    torch.save(Path("x"), pickled)
    more = r"cannot be read \(it holds more .*, or is damaged\); save net.state_dict\(\) alone$"
    model = f"give {tmp_path}/model.safetensors, of a finished run$"
    lines = {
        whole: more,
        pickled: more,
        tmp_path: f"is a folder; {model}",
        step: f"is a checkpoint; {model}",
    }
    for file, line in lines.items():
        with pytest.raises(UsageError, match=f"^--weights {file}: {line}"):
            build_net("cnn", "abc", COLOUR, str(file))


def test_torchvision_weights_serve_grey_images_too(tmp_path: Path) -> None:
    name, file = "torchvision:squeezenet1_1", str(tmp_path / "weights.pth")
    in_colour = build_net(name, "abc", COLOUR).net.state_dict()
    torch.save(in_colour, file)
    grey = build_net(name, "abc", GREY, file).net.state_dict()
    assert grey.keys() == {f"net.{key}" for key in in_colour}
    assert all(torch.equal(grey[f"net.{key}"], tensor) for key, tensor in in_colour.items())
    torch.save(grey, file)
    again = build_net(name, "abc", GREY, file).net.state_dict()
    assert all(torch.equal(again[key], tensor) for key, tensor in grey.items())


def test_googlenet_takes_torchvisions_file_without_its_auxiliary_outputs(tmp_path: Path) -> None:
    name, file = "torchvision:googlenet", str(tmp_path / "weights.pth")
    inner = build_net(name, "abc", COLOUR).net.state_dict()
    torch.save({**inner, "aux1.fc1.weight": torch.zeros(3)}, file)
    taken = build_net(name, "abc", COLOUR, file).net.state_dict()
    assert all(torch.equal(taken[key], tensor) for key, tensor in inner.items())


def test_the_weights_are_said_and_a_net_is_tried_before_a_folder_is_made(
    typed: Typed, own_file: Path
) -> None:
    torch.save(build_net("mlp", "abc", GREY).net.state_dict(), "weights.pth")
    given = ["train", "--dataset", "digits", "--model"]
    ended = typed(*given, "mlp", "--weights", "weights.pth", "--dry-run")
    assert ended.code == 0
    said = " ".join(ended.out.split())
    assert (
        "weights from weights.pth; head.weight and head.bias are initialised again: made for 3 "
        in said
    )
    ended = typed(*given, "own_net:Unused")
    assert ended.code == 2
    assert "--model own_net:Unused: fc2.weight has no part in the logits" in ended.err
    assert not (own_file.parent / "runs").exists()


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


class Branches(Net):
    def forward(self, x):
        logits = super().forward(x)
        return logits if logits.sum() > 0 else -logits


class HeadFirst(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.head, self.body = nn.Linear(8, classes), nn.Linear(784, 8)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)))
"""


def test_a_net_that_views_its_maps_and_has_a_layer_under_two_names_trains_and_is_exported(
    typed: Typed, own_file: Path
) -> None:
    own_file.write_text(OWN + MORE)
    given = ["train", "--dataset", "digits", "--epochs", "1", "--quiet", "--run-dir", "run"]
    assert typed(*given, "--model", "own_net:Viewed").code == 0
    own_file.write_text(OWN + MORE)
    state = weights.from_bytes(weights.read_bytes("run"), "run").net.net.state_dict()
    assert torch.equal(state["alias.weight"], state["last.weight"])
    assert typed("export", "run").code == 0


def test_a_file_that_is_edited_while_it_trains_is_not_the_runs(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_file.write_text(OWN + MORE)
    finish = TrainingRun.finish

    def edit_first(*arguments: Any) -> dict[str, Any]:
        own_file.write_text("class Net(:")
        return finish(*arguments)

    monkeypatch.setattr(TrainingRun, "finish", edit_first)
    config = watch.proof_config(model="own_net:Net", epochs=1)
    assert watch.just_train(config)["steps"]
    with pytest.raises(CheckpointError, match="own_net:Net: cannot be imported"):
        weights.from_bytes(weights.read_bytes("run"), "run")
    own_file.write_text(OWN)
    with pytest.raises(CheckpointError, match="own_net:Net was changed"):
        weights.from_bytes(weights.read_bytes("run"), "run")
    own_file.write_text(OWN + MORE)
    assert weights.from_bytes(weights.read_bytes("run"), "run")


def test_dropout_draws_anew_for_each_part_of_a_step_and_alike_in_each_run(own_file: Path) -> None:
    own_file.write_text(OWN + MORE)
    config = watch.proof_config(model="own_net:Drops", epochs=1, grad_accum=2)
    drawn = []
    for run in ("first", "second"):
        watch.just_train(with_flags(config, run_dir=run))
        masks = sys.modules["own_net"].Drops.masks
        drawn.append(torch.stack(masks[1:]))  # the first is of the trial
        masks.clear()
    assert len(drawn[0]) == 30
    assert len(drawn[0].unique(dim=0)) == 30
    assert torch.equal(*drawn)


def test_a_net_that_cannot_be_exported_is_one_line(typed: Typed, own_file: Path) -> None:
    own_file.write_text(OWN + MORE)
    net = build_net("own_net:Branches", "abc", GREY).net
    Path("run").mkdir()
    content = weights.to_bytes(net.state_dict(), "own_net:Branches", list("abc"), GREY)
    Path("run/model.safetensors").write_bytes(content)
    ended = typed("export", "run")
    assert ended.code == 2
    assert ended.err.count("\n") == 1
    assert "--format torch: own_net:Branches cannot be exported (" in ended.err


def test_a_last_layer_that_gives_no_logits_is_not_begun_anew(own_file: Path) -> None:
    own_file.write_text(OWN + MORE)
    net = build_net("own_net:HeadFirst", "abc", GREY).net
    content = weights.to_bytes(net.state_dict(), "own_net:HeadFirst", list("abc"), GREY)
    Path("w.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=r"^--weights .* last layer, body, does not give the 3;"):
        load_weights(net, "own_net:HeadFirst", "w.safetensors", "xyz")


def test_weights_are_a_record_of_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save(build_net("mlp", [*"0123456789"], GREY).net.state_dict(), "w.pth")
    config = watch.proof_config(model="mlp", epochs=1, weights="w.pth")
    watch.just_train(config)
    Path("w.pth").unlink()
    summary = watch.just_train(with_flags(watch.resumed(config, epochs=2), resume="run"))
    assert summary["weights"] == "w.pth"
    assert read_json(Path("run/config.json"))["recipe"]["weights"] == "w.pth"
    other: Any = with_flags(watch.resumed(config, epochs=3, weights="v.pth"), resume="run")
    with pytest.raises(CheckpointError, match=r"^--weights v.pth: .* was made with w.pth; leave"):
        watch.just_train(other)


def test_a_missing_net_is_refused_before_the_data_are_read(typed: Typed) -> None:
    for name in ("torchvision:resnet19", "no_module:Net"):
        ended = typed("train", "--dataset", "no_such_folder", "--model", name)
        assert f"--model {name}: " in ended.err
