"""Runs of the real trainer inside a world, with what each step saw and used."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ddp_mnist import data, run_folder
from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.launch import find_launch

PROOF: dict[str, Any] = {"epochs": 3, "batch_size": 72}  # 45 steps of digits


def proof_config(run_dir: str = "run", **recipe: Any) -> TrainConfig:
    """float64 on the digits, a log line at every step."""
    return TrainConfig(
        Run(dataset="digits", run_dir=run_dir, log_every=1, quiet=True),
        Recipe(**{**PROOF, **recipe}),
        Distribution(cpu=True, mixed_precision="fp64", dist_timeout=30),
    )


@dataclass
class Seen:
    """One rank's part of a run: numbers of the images per micro-batch, and the rates."""

    summary: dict[str, Any]
    numbers: list[list[int]]
    rates: list[float]


def train_and_watch(config: TrainConfig) -> Seen:
    """The trainer as it is; its loader and its rate are watched from outside."""
    from ddp_mnist import train

    numbers: list[list[int]] = []
    rates: list[float] = []
    fetch, rate_of = data.Rows.__getitems__, train.learning_rate

    def watched_fetch(rows: data.Rows, chosen: Any) -> Any:
        batch = fetch(rows, chosen)
        if len(rows) > 1000:  # the train rows, not those of an evaluation
            numbers.append(batch[2].tolist())
        return batch

    def watched_rate(*args: Any) -> float:
        rates.append(rate_of(*args))
        return rates[-1]

    with (
        patch.object(data.Rows, "__getitems__", watched_fetch),
        patch.object(train, "learning_rate", watched_rate),
    ):
        summary = train.train(config, find_launch(config.distribution))
    return Seen(summary, numbers[1:], rates)  # the first batch is that of the warm-up


def just_train(config: TrainConfig) -> dict[str, Any]:
    from ddp_mnist.train import train

    return train(config, find_launch(config.distribution))


def weights_of(run: Path) -> dict[str, Any]:
    """The tensors of a run folder."""
    from safetensors.torch import load_file

    return load_file(run / run_folder.MODEL)


def largest_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest |a - b| of any element, relative to the largest |b| of its tensor."""
    assert a.keys() == b.keys()
    return max(
        ((a[k].double() - b[k].double()).abs().max() / b[k].double().abs().max()).item() for k in a
    )


def what_it_says(config: TrainConfig) -> str:
    """What this rank prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as screen:
        just_train(config)
    return screen.getvalue()


def train_until(config: TrainConfig, step: int, number: int = signal.SIGTERM, by: int = 0) -> None:
    """A run in which rank `by` gets a signal as it begins optimizer step `step`."""
    from ddp_mnist import train

    rate_of = train.learning_rate

    def rate(now: int, *args: Any) -> float:
        if now == step and os.environ.get("RANK", "0") == str(by):
            os.kill(os.getpid(), number)
        return rate_of(now, *args)

    with patch.object(train, "learning_rate", rate):
        train.train(config, find_launch(config.distribution))


def resumed(config: TrainConfig, **typed: Any) -> TrainConfig:
    """Goes on with the run of `config`; `typed` are flags of its recipe that a person gives."""
    run = dataclasses.replace(config.run, run_dir=None, resume=config.run.run_dir)
    recipe = dataclasses.replace(config.recipe, **typed)
    return dataclasses.replace(
        config, run=run, recipe=recipe, typed=frozenset({"resume", "quiet", *typed})
    )
