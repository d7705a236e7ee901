"""Own nets and losses with a memory: a resumed run equals the unbroken one, or is refused first."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify.watch import just_train, proof_config, resumed
from tests.run_checks import apart, metrics, stop, with_flags

# Nets of one layer that draw or remember in forward: of(__init__, forward).
OWN = """
import random
import numpy as np
import torch
from torch import nn

GENERATOR = np.random.default_rng(0)

class Base(nn.Module):
    def __init__(self, classes, shape):
        super().__init__()
        self.layer = nn.Linear(784, classes)
        self.make()
    def make(self): ...
    def forward(self, x):
        return self.after(self.layer(x.flatten(1)))

def of(make, after):
    return type("Net", (Base,), {"make": make, "after": after})

def calls(self, logits):
    self.calls += 1
    return logits * (2 if self.calls > 500 else 1)

def running(self, logits):
    if self.training:
        self.scale.mul_(0.9).add_(0.1 * logits.detach().abs().mean())
    return logits / (self.scale + 1)

def temperature(self, logits):
    if self.training:
        self.temperature *= 0.99
    return logits * self.temperature

# Resumed, it is what it would have been: it draws from each generator, has a buffer, a number that
# was drawn when it was made, and what it keeps of its last call.
def with_all(self):
    self.mask, self.drop = np.random.rand(), nn.Dropout()
    self.register_buffer("scale", torch.ones(()))

def draws(self, logits):
    self.last, self.names = logits.detach(), ["a"]
    drawn = torch.rand(()) + np.random.rand() + random.random() + self.mask
    return running(self, self.drop(logits)) * drawn

def with_lost_buffer(self):
    self.register_buffer("scale", torch.ones(()), persistent=False)

def with_dice(self):
    self.dice = torch.Generator().manual_seed(1)

all_of_it = of(with_all, draws)
not_persistent = of(with_lost_buffer, running)
attribute = of(lambda self: setattr(self, "temperature", 1.0), temperature)
own_generator = of(with_dice, lambda self, y: y * torch.rand((), generator=self.dice))
of_the_module = of(lambda self: None, lambda self, y: y * GENERATOR.random())
centred = of(lambda self: None, lambda self, y: y - y.mean(0))  # over the images
counted = of(lambda self: setattr(self, "calls", 0), calls)

class Loss:
    calls = 0
    def __call__(self, logits, labels):
        self.calls += 1
        return nn.functional.cross_entropy(logits, labels, reduction="none") / self.calls

def overflows(logits, labels):
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    return losses if logits.requires_grad else losses * float("inf")

loss = Loss()
"""
LOST = {  # what each error names
    "not_persistent": "changes scale, ",
    "attribute": "changes temperature, ",
    "own_generator": "changes dice, ",
    "of_the_module": "has a memory, ",
}


def errors_of(flags: dict[str, str]) -> dict[str, str]:
    """Return the error of a run with each net or loss, by name; the folder may not be there."""
    found = {}
    for name, flag in flags.items():
        with pytest.raises(UsageError) as raised:
            just_train(proof_config(f"run-{name}", **{flag: f"own:{name}"}))
        found[name] = str(raised.value)
        assert not Path(f"run-{name}").exists()
    return found


def test_fault_47_state_that_a_checkpoint_would_lose_is_named_before_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    flags = {**dict.fromkeys([*LOST, "centred"], "model"), "loss": "loss"}
    [errors] = run_world(1, errors_of, flags, folder=tmp_path)
    for name, what in LOST.items():
        assert errors[name].startswith(f"--model own:{name}: forward {what}"), errors[name]
        assert "which is not in its state_dict, so a resumed run would differ" in errors[name]
    assert errors["centred"].startswith(
        "--model own:centred, in eval mode: the outputs for an image"
    )
    assert errors["loss"].startswith("--loss own:loss, on outputs [3, 10] and targets [3]: gives")


@pytest.mark.parametrize("size", [1, 2])
def test_fault_47_what_a_net_draws_or_keeps_does_not_change_a_resumed_run(
    size: int, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = proof_config(model="own:all_of_it", epochs=1, batch_size=72)
    whole, broken = (with_flags(config, run_dir=run) for run in ("whole", "broken"))
    run_world(size, just_train, whole, folder=tmp_path)
    stop(broken, tmp_path, 7, size, by=size - 1)
    run_world(size, just_train, resumed(broken), folder=tmp_path)
    assert apart(tmp_path / "whole", tmp_path / "broken") == 0


def test_fault_47_a_number_that_may_decide_later_and_one_that_is_not_finite_are_told(
    tmp_path: Path,
) -> None:
    """The latter is null in every file."""
    (tmp_path / "own.py").write_text(OWN)
    config = proof_config(loss="own:overflows", model="own:counted", epochs=1)
    [said] = run_world(1, what_is_told, config, folder=tmp_path)
    assert said.count("the mean loss of 360 images is inf, null in files") == 1
    for name in ("summary.json", "metrics.jsonl", "status.json", "config.json"):
        text = (tmp_path / "run" / name).read_text()
        lines = text.splitlines() if name.endswith("l") else [text]
        assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)
    summary = read_json(tmp_path / "run" / "summary.json")
    assert summary["test_loss"] is None
    line = "--model own:counted: forward changes calls, which is not in its state_dict; if"
    assert any(line in note for note in summary["notes"])
    assert [line["test_loss"] for line in metrics(tmp_path / "run", "test_loss")] == [None]


def what_is_told(config: TrainConfig) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as told:
        just_train(config)
    return told.getvalue()
