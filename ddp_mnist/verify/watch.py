"""Small runs of the real trainer, watched from outside: what `verify` and the tests compare.

Nothing here takes part in a training: what is watched is wrapped for the time of one run. A plant
is a fault that is wrapped in likewise, to show that a comparison can fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_mnist import train
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.config import Distribution, Recipe, ResolvedRecipe, Run, TrainConfig
from ddp_mnist.data.batches import GlobalBatches, Rows, train_loader
from ddp_mnist.run.folder import METRICS, MODEL

PROOF: dict[str, Any] = {"epochs": 3, "batch_size": 72}

STEPS = 45  # of the digits' 1,150 train rows


def proof_config(run_dir: str = "run", **recipe: Any) -> TrainConfig:
    """float64 on the digits, a log line at every step."""
    return TrainConfig(
        Run(dataset="digits", run_dir=run_dir, log_every=1, quiet=True),
        Recipe(**{**PROOF, **recipe}),
        Distribution(cpu=True, mixed_precision="fp64", dist_timeout=30),
    )


# --- Runs, each one rank's part


@dataclass
class Seen:
    """What one rank did in a run.

    Attributes:
        numbers: of the images, per micro-batch.
        rates: the learning rate, per micro-batch.
        gradient_norms: Euclidean norm of the whole gradient, per optimizer step.
        weights: SHA-256 of the net that the rank ended with.
    """

    summary: dict[str, Any] = field(default_factory=dict)
    numbers: list[list[int]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    weights: str = ""


def just_train(config: TrainConfig) -> dict[str, Any]:
    return train.train(config, find_launch(config.distribution))


def train_and_watch(config: TrainConfig, fault: str | None = None) -> Seen:
    """The trainer as it is, or with a plant: sampler, gradients or parameter."""
    with watching(fault) as seen:
        seen.summary = just_train(config)
    return seen


@contextlib.contextmanager
def watching(fault: str | None = None) -> Iterator[Seen]:
    """What the run that is made within does; complete once it has ended."""
    seen, nets = Seen(), list[nn.Module]()
    make_loader, make_optimizer = train_loader, train.make_optimizer
    rate_of = train.learning_rate

    class WatchedRows(Rows):
        def __getitems__(self, numbers: list[int] | Tensor) -> tuple[Tensor, Tensor, Tensor]:
            batch = super().__getitems__(numbers)
            seen.numbers.append(batch[2].tolist())
            return batch

    def loader(rows: Rows, batches: GlobalBatches) -> Any:
        if fault == "sampler":
            batches.seed += int(os.environ.get("RANK", 0))
        return make_loader(WatchedRows(rows.images, rows.labels, rows.rows), batches)

    def optimizer(net: nn.Module, recipe: ResolvedRecipe) -> torch.optim.Optimizer:
        nets.append(net)
        plant_into(net, fault)
        made = make_optimizer(net, recipe)
        made.register_step_pre_hook(lambda *_: seen.gradient_norms.append(gradient_norm(net)))
        return made

    def rate(*args: Any) -> float:
        seen.rates.append(rate_of(*args))
        return seen.rates[-1]

    with (
        patch.object(train, "train_loader", loader),
        patch.object(train, "make_optimizer", optimizer),
        patch.object(train, "learning_rate", rate),
    ):
        yield seen
    [net] = nets
    tensors = {name: tensor.contiguous() for name, tensor in net.state_dict().items()}
    seen.weights = hashlib.sha256(save(tensors)).hexdigest()


def plant_into(net: nn.Module, fault: str | None) -> None:
    """Before DDP takes the net."""
    if fault == "gradients":
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        for parameter in net.parameters():
            parameter.register_hook(lambda gradient: gradient * world_size)
    if fault == "parameter":
        last = [name for name, _ in net.named_parameters()][-1]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, [last])


def gradient_norm(net: nn.Module) -> float:
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients).item()


def train_until(config: TrainConfig, step: int, number: int = signal.SIGTERM, by: int = 0) -> None:
    """A run in which rank `by` gets a signal as it begins optimizer step `step`."""
    rate_of = train.learning_rate

    def rate(now: int, *args: Any) -> float:
        if now == step and os.environ.get("RANK", "0") == str(by):
            os.kill(os.getpid(), number)
        return rate_of(now, *args)

    with patch.object(train, "learning_rate", rate):
        just_train(config)


def resumed(config: TrainConfig, **typed: Any) -> TrainConfig:
    """Goes on with the run of `config`; `typed` are flags of its recipe that a person gives."""
    run = dataclasses.replace(config.run, run_dir=None, resume=config.run.run_dir)
    recipe = dataclasses.replace(config.recipe, **typed)
    return dataclasses.replace(
        config, run=run, recipe=recipe, typed=frozenset({"resume", "quiet", *typed})
    )


# --- Comparisons


def per_step(ranks: list[Seen], parts: int = 1) -> list[list[int]]:
    """The image numbers of each step over all ranks, sorted."""
    batches = len(ranks[0].numbers)
    return [
        sorted(n for seen in ranks for part in seen.numbers[i : i + parts] for n in part)
        for i in range(0, batches, parts)
    ]


def weights_of(run: Path) -> dict[str, Tensor]:
    """The tensors of a run folder."""
    return load_file(run / MODEL)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest |a - b| of any element, relative to the largest |b| of its tensor."""
    assert a.keys() == b.keys()
    each = [(a[k].double() - b[k].double()).abs().max() / b[k].double().abs().max() for k in a]
    return torch.stack(each).max().item()  # NaN if any is, which Python's max may pass over


def what_stays(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The weights' bytes and the lines of metrics.jsonl, without the speeds."""
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    for line in lines:
        line.pop("images_per_second", None)
    return (run / MODEL).read_bytes(), lines
