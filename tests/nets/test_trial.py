"""Nets that are not ours: torchvision's, and a class in a user's own file."""

import contextlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import CheckpointError, FailedElsewhere, UsageError
from ddp_mnist.nets import trial
from ddp_mnist.nets.build import build_net
from ddp_mnist.task import Classification
from ddp_mnist.training import model_file
from ddp_mnist.training.recorded_run import RecordedRun
from ddp_mnist.verbs.verify import watch
from tests.commands import Typed
from tests.data_sets import COLOUR
from tests.run_checks import own_module, with_flags

OWN = """
import torch
from torch import nn

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


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_module("own_net", OWN, tmp_path, monkeypatch)


# --- What a net can get wrong is one line


def refused(name: str) -> str:
    """Return the line without its beginning, which names the net."""
    with pytest.raises(UsageError, match=f"^--model {name}[:,] ") as raised:
        trial.check(build_net(name, Classification([*"abcde"]), COLOUR), name, 5, COLOUR.shape)
    assert "\n" not in str(raised.value)
    return str(raised.value).partition(name)[2]


NOT_MADE = {
    "own_net:Nett": ": AttributeError: .* no attribute 'Nett'$",
    "torchvision:resnet19": ": torchvision has no such classifier; did you mean resnet18?",
    "torchvision:vit_b_16": r", on images \[3, 3, 32, 40\]: AssertionError: Wrong image width!",
}
NEVER = ": body.0.weight has no part in the outputs; use it in forward, or remove it$"
SOMETIMES = r": body.0.weight has no part in the outputs of \d+ of 24 steps on trial, .*; multiply"
NOT_COMPUTED = {  # what `forward` returns
    "super().forward(x)[:, :1]": r", on images \[3, .*: gives \[3, 1\], must be \[3, 5\]",
    "super().forward(x).squeeze()": r", on images \[1, 3, .*: gives \[5\], must be \[1, 5\]",
    "super().forward(x).detach()": r", in training on images \[2, .*: RuntimeError: .*require grad",
    "[super().forward(x)] if self.training else super().forward(x)": ", in training on .*list",
    "self.head(x.flatten(1))": ", on images .*: RuntimeError: .*mat1 and mat2 shapes",
    # left out by chance, for some images, of the loss
    "self.head(x.new_ones(len(x), 128) if torch.rand(()) < 0.3 else self.body(x))": SOMETIMES,
    "self.head(x.new_ones(len(x), 128) if x.mean() > 0.5 else self.body(x))": SOMETIMES,
    "self.head(self.body(x).detach() if self.training else self.body(x))": NEVER,
}
NOT_TRAINED = {  # what `__init__` adds
    "self.fc2 = nn.Linear(3, 3)": ": fc2.weight has no part in the outputs; use it",
    "self.more = [nn.Linear(3, classes)]": ": lacks parameters; put lists of layers in",
    "self.register_buffer('seen', torch.ones(4).short())": ": seen is torch.int16, which",
}


@pytest.mark.usefixtures("own_file")
@pytest.mark.parametrize("name", NOT_MADE)
def test_a_net_that_cannot_be_made(name: str) -> None:
    assert re.match(NOT_MADE[name], refused(name))


@pytest.mark.parametrize("code", NOT_COMPUTED | NOT_TRAINED)
def test_fault_63_a_net_that_cannot_be_trained(code: str, own_file: Path) -> None:
    init, forward = (code, "super().forward(x)") if code in NOT_TRAINED else ("pass", code)
    own_file.write_text(OWN + VARIANT.format(init=init, forward=forward))
    line = refused("own_net:Own")
    assert re.match((NOT_COMPUTED | NOT_TRAINED)[code], line)
    assert refused("own_net:Own") == line  # not by chance


MIXING = {
    "(lambda y: y - y.mean(0))(super().forward(x))": "depend on other images in its batch, or",
    "super().forward((x - x.mean()) / x.std())": "depend on other images in its batch, or",
    "super().forward(nn.functional.dropout(x))": "keep the images apart, and draw random numbers",
}


@pytest.mark.parametrize("forward", MIXING)
def test_a_net_that_mixes_the_images_of_a_batch(forward: str, own_file: Path) -> None:
    own_file.write_text(OWN + VARIANT.format(init="pass", forward=forward))
    net = build_net("own_net:Own", Classification([*"abcde"]), COLOUR)
    with pytest.raises(UsageError, match=f"^--model own, in eval mode: .*{MIXING[forward]}"):
        trial.check_apart(net, "own", COLOUR.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rounding_mixes_no_images(dtype: torch.dtype) -> None:
    for name in ("cnn_bn", "mlp", "cnn_deep"):
        net = build_net(name, Classification([*"abcde"]), COLOUR).to(dtype)
        trial.check_apart(net, name, COLOUR.shape)


def _sent() -> set[torch.dtype]:
    """Return the types of numbers that DDP sends to this rank."""
    sent, flags = set(), Distribution(cpu=True)
    every = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    with join_world(flags, find_launch(flags)):
        group: Any = dist.group.WORLD
        for dtype in sorted(every, key=str):
            with contextlib.suppress(RuntimeError):  # also NotImplementedError
                part = torch.empty(8, dtype=dtype)
                dist._broadcast_coalesced(group, [part], 1024, 0)
                sent.add(dtype)
    return sent


def test_the_types_of_numbers_that_ddp_sends(tmp_path: Path) -> None:
    """But for complex numbers of 32 bits, which torch calls experimental."""
    for sent in run_world(2, _sent, folder=tmp_path):
        assert {each for each in sent if "complex32" not in str(each)} == trial.SENT


def test_what_is_left_out_later_is_named_by_the_rank_that_did_it(tmp_path: Path) -> None:
    """In a step that ends with another all-reduce: gloo would abort the process."""
    rare = "self.head(x.new_ones(len(x), 128) if next(self.steps) == 45 else self.body(x))"
    init = "self.steps = itertools.count(0 if os.environ['RANK'] == '1' else 99)"
    text = f"import itertools, os\n{OWN}{VARIANT.format(init=init, forward=rare)}"
    (tmp_path / "own_net.py").write_text(text)
    config = watch.proof_config(model="own_net:Own", epochs=9)
    outcomes = LocalWorld(2, watch.just_train, config, folder=tmp_path).outcomes()
    assert [type(outcome) for outcome in outcomes] == [FailedElsewhere, RuntimeError]
    assert str(outcomes[1]).startswith("Expected to have finished reduction in the prior iterati")


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
    state = model_file.from_bytes(model_file.read_bytes("run"), "run").net.net.state_dict()
    assert torch.equal(state["alias.weight"], state["last.weight"])
    assert typed("export", "run").code == 0


def test_a_file_that_is_edited_while_it_trains_is_not_the_runs(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = RecordedRun.finish

    def edit_first(*arguments: Any) -> dict[str, Any]:
        own_file.write_text(OWN + "# edited")
        return finish(*arguments)

    monkeypatch.setattr(RecordedRun, "finish", edit_first)
    watch.just_train(watch.proof_config(model="own_net:Net", epochs=1))
    monkeypatch.delitem(sys.modules, "own_net")  # as in another process
    with pytest.raises(CheckpointError, match=r"^run: the file of --model own_net:Net was chan"):
        model_file.from_bytes(model_file.read_bytes("run"), "run")
    own_file.write_text(OWN)
    monkeypatch.delitem(sys.modules, "own_net")
    trained = model_file.from_bytes(model_file.read_bytes("run"), "run")
    assert trained.architecture == "own_net:Net"


def test_dropout_draws_anew_for_each_part_of_a_step_and_alike_in_each_run(own_file: Path) -> None:
    own_file.write_text(OWN + MORE)
    config = watch.proof_config(model="own_net:Drops", epochs=1, grad_accum=2)
    drawn = []
    for run in ("first", "second"):
        watch.just_train(with_flags(config, run_dir=run))
        masks = sys.modules["own_net"].Drops.masks
        drawn.append(torch.stack(masks[-30:]))  # the first ones are of the trial
        masks.clear()
    assert len(drawn[0].unique(dim=0)) == 30
    assert torch.equal(*drawn)
