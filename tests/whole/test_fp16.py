"""fp16 with a real loss scaler and float16 autocast, on the CPU, in place of the GPU it is for.

The command line refuses fp16 on a CPU, where it gains nothing: float16 convolutions cost 6 ms an
image. So the runs are of 100 digits. What is not Accelerate's, torch's or this package's own here:
where the scaler comes from, that the optimizer is not fused, and an infinity in a gradient.
"""

import dataclasses
import math
import os
import signal
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from ddp_mnist.cluster import world
from ddp_mnist.cluster.device import DeviceConfig, choose_device
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core import fit
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.state import Progress
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.training import checkpoint
from ddp_mnist.verbs.verify.watch import just_train, resumed, what_stays
from tests.data_sets import few_digits
from tests.run_checks import with_flags

TRAIN_ROWS, VAL_ROWS, TEST_ROWS = 80, 20, 20
BATCH, EPOCHS = 8, 3
FIRST_SCALE, GROWTH_INTERVAL = 2.0**20, 5  # torch's 2**16 and 2,000 are for longer runs
OVERFLOWS = (10, 21)  # steps, from 0: before and after the interruption
INTERRUPTED = 12
KINDS: dict[str, dict[str, Any]] = {
    "patient": {"model": "mlp", "patience": 2, "epochs": 30, "lr": 0.03, "grad_accum": 2}
    | {"max_grad_norm": 0.5},
    "convolutions": {"model": "cnn_bn", "optimizer": "muon"},
}
PROCESSES = 2


def config(run_dir: str, **recipe: Any) -> TrainConfig:
    run = {"dataset": "few", "run_dir": run_dir, "log_every": 3, "quiet": True, "cpu": True}
    recipe = {"epochs": EPOCHS, "batch_size": BATCH, "val_size": VAL_ROWS, **recipe}
    return with_flags(TrainConfig(), **run, dist_timeout=60, **recipe)


# --- The stand-in


@dataclass
class Seen:
    """What one rank saw in a run."""

    result: Any = None  # the summary, or the error that ended the run
    skipped: list[bool] = field(default_factory=list)  # whether each step was left out
    scales: list[float] = field(default_factory=list)  # the scaler's, after each step

    @property
    def skipped_steps(self) -> list[int]:
        return [step for step, skipped in enumerate(self.skipped) if skipped]


def fp16_on_a_cpu(told: TrainConfig, overflows: Any = (), until: int | None = None) -> Seen:
    """Train as on a GPU.

    A gradient of the last rank is infinite at the steps `overflows`, and in step `until` it gets
    SIGTERM.
    """
    make_accelerator, make_optimizer = world.make_accelerator, fit.make_optimizer
    rate_of, stepped = Recipe.learning_rate, Progress.count_step
    seen, step, scalers = Seen(), [-1], list[torch.amp.GradScaler]()
    is_last = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", 1)) - 1)

    def in_fp16(*args: Any) -> DeviceConfig:
        return dataclasses.replace(choose_device(*args), precision="fp16")

    def accelerator(**given: Any) -> Accelerator:
        made = make_accelerator(**given)
        assert made.mixed_precision == "fp16"
        scalers.append(
            torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=GROWTH_INTERVAL)
        )
        made.native_amp, made.scaler = True, scalers[0]  # as its __init__ does for a GPU
        return made

    def optimizer(net: nn.Module, recipe: Recipe, scaler: Any) -> torch.optim.AdamW:
        assert scaler is scalers[0]
        made = make_optimizer(net, recipe, scaler)
        assert isinstance(made, torch.optim.AdamW)
        names = ("params", "weight_decay")
        groups = [{name: group[name] for name in names} for group in made.param_groups]
        next(net.parameters()).register_hook(overflow)
        return type(made)(groups, lr=recipe.lr, betas=made.defaults["betas"])

    def overflow(gradient: Tensor) -> Tensor | None:
        return torch.full_like(gradient, math.inf) if is_last and step[0] in overflows else None

    def rate(recipe: Recipe, now: int) -> float:
        step[0] = now
        if is_last and now == until:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
        return rate_of(recipe, now)

    def watched(progress: Progress, skipped: bool) -> None:
        stepped(progress, skipped)
        seen.skipped.append(skipped)
        seen.scales.append(scalers[0].get_scale())

    with (
        patch.object(world, "choose_device", in_fp16),
        patch.object(world, "make_accelerator", accelerator),
        patch.object(fit, "make_optimizer", optimizer),
        patch.object(Recipe, "learning_rate", rate),
        patch.object(Progress, "count_step", watched),
    ):
        try:
            seen.result = just_train(told)
        except DdpMnistError as error:
            seen.result = error.with_traceback(None)
    return seen


def seen_in(folder: Path, told: TrainConfig, **options: Any) -> list[Seen]:
    """Train in two processes, and return what each rank saw."""
    few_digits(folder / "few", TRAIN_ROWS + VAL_ROWS, TEST_ROWS)
    train_as_told = partial(fp16_on_a_cpu, told, **options)
    return run_world(PROCESSES, train_as_told, folder=folder, timeout_s=240)


# --- Runs unbroken and interrupted


def last_checkpoint(run: Path) -> tuple[int, dict[str, Any]]:
    path = checkpoint.newest_first(run)[0]
    return checkpoint.step_of(path), checkpoint.from_bytes(path.read_bytes(), path)["state"]


@pytest.mark.parametrize("kind", KINDS)
def test_overflows_unbroken_or_interrupted(kind: str, tmp_path: Path) -> None:
    """All ranks leave out a step at which one overflowed; resumed is unbroken, bit for bit."""
    run, broken = tmp_path / "whole", tmp_path / "broken"
    whole, cut_short = (config(name, **KINDS[kind]) for name in ("whole", "broken"))
    always = partial(seen_in, tmp_path, overflows=OVERFLOWS)
    unbroken, interrupted = always(whole), always(cut_short, until=INTERRUPTED)
    taken_up = always(resumed(cut_short))

    first = unbroken[0]
    for seen in unbroken:
        assert not isinstance(seen.result, DdpMnistError), seen.result
        assert (seen.skipped, seen.scales) == (first.skipped, first.scales)
        assert seen.result["skipped_steps"] == len(first.skipped_steps)
    assert set(OVERFLOWS) <= set(first.skipped_steps)
    # The scale grows until gradients overflow by themselves, as float16 does; most steps are taken.
    assert len(OVERFLOWS) < len(first.skipped_steps) < len(first.skipped) / 2
    assert (first.result["precision"], first.result["test_count"]) == ("fp16", TEST_ROWS)
    assert first.result["stopped_by"] == ("--patience" if kind == "patient" else None)
    assert first.result["test_accuracy"] > {"patient": 0.3, "convolutions": 0.5}[kind]

    # the checkpoint holds the scaler and finite weights
    step, state = last_checkpoint(run)
    scaler = state["scaler"]
    assert (first.scales[-1], step) == (scaler["scale"], len(first.skipped))
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())

    assert [seen.result.code for seen in interrupted] == [143] * PROCESSES
    for one, two, three in zip(unbroken, interrupted, taken_up, strict=True):
        assert INTERRUPTED < len(two.skipped) < len(one.skipped)
        assert three.result["resumed_from"] == [len(two.skipped)]
        assert two.skipped + three.skipped == one.skipped
        assert two.scales + three.scales == one.scales
        for same in ("skipped_steps", "stopped_by", "val_accuracy"):
            assert three.result[same] == one.result[same], same
    assert what_stays(broken) == what_stays(run)
    again_at, again = last_checkpoint(broken)
    assert (again_at, again["scaler"]) == (step, scaler)
    for name in ("model", "optimizer", "best_weights"):
        torch.testing.assert_close(again[name], state[name], rtol=0, atol=0)
