"""Small runs of the real trainer, watched from outside: what `verify` and the tests compare.

Nothing here takes part in training: torch's public hooks see the net's inputs and the optimizer's
gradients.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ddp_mnist import train
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import preload
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.core.meter import MEASURED
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.training.folder import METRICS, MODEL
from ddp_mnist.verbs.verify.mistakes import make_mistake

preload("ddp_mnist.train", "ddp_mnist.core.metrics")

PROOF: dict[str, Any] = {"model": "cnn", "epochs": 3, "batch_size": 72}
STEPS = 45  # of the digits' 1,150 train rows


def proof_config(run_dir: str = "run", **recipe: Any) -> TrainConfig:
    """Return a short run in float64 on the digits, with a log line at every step."""
    run = RunFlags(dataset="digits", run_dir=run_dir, log_every=1, quiet=True)
    distribution = Distribution(cpu=True, mixed_precision="fp64", dist_timeout=30)
    return TrainConfig(run, Recipe(**{**PROOF, **recipe}), distribution)


@dataclass
class RankRecord:
    """What one rank of a run did."""

    summary: dict[str, Any] = field(default_factory=dict)
    images: list[list[str]] = field(default_factory=list)  # a digest of each, per optimizer step
    learning_rates: list[float] = field(default_factory=list)  # per optimizer step
    gradient_norms: list[float] = field(default_factory=list)  # of all averaged gradients, per step


def just_train(config: TrainConfig) -> dict[str, Any]:
    return train.train(config, find_launch(config.distribution), make_mistake)


def train_and_watch(config: TrainConfig) -> RankRecord:
    """Train, and return this rank's record. The run has not finished, and is not just tried."""
    record, batches = RankRecord(), list[list[str]]()

    def look(net: nn.Module, inputs: tuple[Tensor]) -> None:
        if isinstance(net, Normalised) and net.training:
            batches.append([digest_of_image(image) for image in inputs[0]])

    def look_at_step(optimizer: Optimizer, gradients: list[Tensor]) -> None:
        micro_batches = batches[-config.recipe.grad_accum :]  # the trial's are before them
        record.images.append([*itertools.chain(*micro_batches)])
        batches.clear()
        record.learning_rates.append(optimizer.param_groups[0]["lr"])
        record.gradient_norms.append(torch.nn.utils.get_total_norm(gradients).item())

    with before_each_step(look_at_step), register_module_forward_pre_hook(look):
        record.summary = just_train(config)
    return record


def before_each_step(function: Callable[[Optimizer, list[Tensor]], None]) -> RemovableHandle:
    """Call `function` before each optimizer step, with the averaged gradients too.

    The returned context manager ends it.
    """

    def hook(optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        # Muon's step ends with AdamW's, in which the hook may run again, without kernels'
        # gradients.
        if len(gradients) == sum(p.requires_grad for p in parameters):
            function(optimizer, gradients)

    return register_optimizer_step_pre_hook(hook)


def train_until(config: TrainConfig, step: int, number: int = signal.SIGTERM, by: int = 0) -> None:
    """Train; rank `by` gets the signal `number` just before the process's step `step`."""

    calls = itertools.count()

    def strike(*_: Any) -> None:
        if next(calls) == step and os.environ.get("RANK", "0") == str(by):
            os.kill(os.getpid(), number)

    with before_each_step(strike):
        just_train(config)


def resumed(config: TrainConfig, **typed: Any) -> TrainConfig:
    """Return the flags that resume the run of `config`, with `typed` flags of its recipe."""
    run = dataclasses.replace(config.run, run_dir=None, resume=config.run.run_dir)
    recipe, names = dataclasses.replace(config.recipe, **typed), {"resume", "quiet", *typed}
    return dataclasses.replace(config, run=run, recipe=recipe, typed=frozenset(names))


def digest_of_image(image: Tensor) -> str:
    """Return a digest of the pixels, uint8 [C, H, W]."""
    return hashlib.sha256(image.cpu().numpy().tobytes()).hexdigest()


def per_step(ranks: list[RankRecord]) -> list[list[str]]:
    """Return the digests of each step's images over all ranks, sorted."""
    steps = itertools.zip_longest(*(record.images for record in ranks), fillvalue=[])
    return [sorted(itertools.chain(*step)) for step in steps]


def weights_of(run: Path) -> dict[str, Tensor]:
    """Return the tensors of a run folder."""
    return load_file(run / MODEL)


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest |a - b| of any element, relative to the largest |b| of its tensor."""
    assert a.keys() == b.keys()
    each = torch.stack([(a[k].double() - b[k].double()).abs().max() for k in a])
    largest = torch.stack([b[k].double().abs().max() for k in a]).clamp(min=1e-300)  # a frozen 0
    return (each / largest).max().item()  # NaN if any is; Python's max may overlook one


def what_stays(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the weights' bytes and the lines of metrics.jsonl, without the speeds."""
    lines = map(json.loads, (run / METRICS).read_text().splitlines())
    kept = [{key: line[key] for key in line if key not in MEASURED} for line in lines]
    return (run / MODEL).read_bytes(), kept
