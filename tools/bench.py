"""Time the training loop here, as ratios of what ran in the same rounds.

    make bench                                            # MNIST, two minutes on two cores
    python tools/bench.py --dataset digits --processes 4

Two comparisons, each in `--repeats` rounds after one that is discarded:

    train.py over plain_ddp.py   what Accelerate, log lines and sync points cost
    N processes over one         how far training scales; N would be perfect

Every process has one CPU thread, as under `make train` on two cores. Other programs on the machine
change both sides of a ratio, but rarely by the same share: close them.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import backend_among, preload, run_world
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.config.train_config import ResolvedConfig, RunFlags
from ddp_mnist.data import cache
from ddp_mnist.data.batches import subset
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import DdpMnistError, one_line
from ddp_mnist.plain_ddp import train_plain
from ddp_mnist.task import make_task
from ddp_mnist.train import fit
from ddp_mnist.training.training_run import TrainingRun

TEST_ROWS = 1000
STEPS = 380  # optimizer steps in a measurement, at most: an epoch of MNIST
TIMEOUT_S = 600.0  # of a measurement

preload("ddp_mnist.train", "ddp_mnist.plain_ddp", "ddp_mnist.metrics")


def main() -> None:
    """Read the flags, prepare the data set, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="auto", help="as for train [auto]")
    parser.add_argument("--processes", type=int, default=2, help="at least 2 [2]")
    parser.add_argument("--repeats", type=int, default=7, help="rounds [7]")
    typed = parser.parse_args()
    if min(typed.processes, typed.repeats) < 2:
        parser.error("--processes and --repeats must be at least 2")
    try:
        dataset, notes = cache.choose(typed.dataset, None)
        print(*notes, f"{dataset}, {typed.repeats} rounds", sep="\n", flush=True)
        measure(dataset, typed.processes, typed.repeats)
    except DdpMnistError as error:
        sys.exit(one_line(error))


def measure(dataset: str, processes: int, repeats: int) -> None:
    """Alternate between all programs, and print the ratios."""
    sizes = range(1, processes + 1)
    programs = [("train", size) for size in sizes] + [("plain", processes)]
    speeds: dict[tuple[str, int], list[float]] = {program: [] for program in programs}
    for number in range(repeats + 1):
        for program in programs if number % 2 else reversed(programs):
            kind, size = program
            ranks = run_world(
                size, images_per_s, kind, dataset, size, folder=Path.cwd(), timeout_s=TIMEOUT_S
            )
            speeds[program].append(min(ranks))  # all wait for the slowest
    ours, plain = speeds["train", processes], speeds["plain", processes]
    show(f"train.py over plain_ddp.py, {processes} processes", ours, plain)
    for size in sizes[1:]:
        show(f"{size} processes over one", speeds["train", size], speeds["train", 1])


def show(name: str, over: Sequence[float], under: Sequence[float]) -> None:
    """Print both speeds and the ratio, as the median and extremes of all rounds but the first."""
    ratios = sorted(a / b for a, b in zip(over[1:], under[1:], strict=True))
    middle = statistics.median(ratios)
    print(
        f"{name:<40} {middle:.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f}, n = {len(ratios)};"
        f" {statistics.median(over[1:]):,.0f} and {statistics.median(under[1:]):,.0f} images/s)",
        flush=True,
    )


def images_per_s(kind: str, dataset: str, size: int) -> float:
    """Return the speed over all ranks of an epoch of at most STEPS full batches."""
    flags = Distribution(mixed_precision="no", backend=backend_among(size))  # as plain_ddp.py
    with join_world(flags, find_launch(flags)) as world:
        images = cache.load(dataset)
        pictures = images.image_format.pictures
        full = resolve_recipe(Recipe(), len(images.rows["train"]), size, pictures=pictures)
        steps = min(STEPS, len(images.rows["train"]) // full.batch_size)
        recipe = replace(full, epochs=1, val_size=0, steps_per_epoch=steps)
        short = first_rows(images, steps * recipe.batch_size)
        if kind == "plain":
            _, seconds = train_plain(short, recipe, 0, torch.float32)
        else:
            config = ResolvedConfig(RunFlags(dataset=dataset, quiet=True), flags, recipe=recipe)
            device = world.accelerator.device
            task = make_task(recipe, short.classes, subset(short, "train"), device)
            run = TrainingRun(config, world, short, task, StopSignals())
            seconds = fit(run)["train_seconds"]
        return steps * recipe.batch_size / seconds


def first_rows(images: ImageData, train_rows: int) -> ImageData:
    """Return the data set with the first rows of its splits alone, without a validation."""
    most = {"train": train_rows, "test": TEST_ROWS}
    rows = {name: rows[: most[name]] for name, rows in images.rows.items()}
    return replace(images, rows=rows | {"validation": np.arange(0)})


if __name__ == "__main__":
    main()
