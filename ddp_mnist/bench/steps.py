"""Training steps timed side by side in one group of processes, each with one CPU thread.

Each kind returns the seconds for the images of all global batches. KINDS takes a step apart:
    train         train.py's loop, by its own count of seconds in training
    plain         plain_ddp.py's
    resident      forward, backward and update on one batch that is ready: no feed
    silent        the same without the exchange of gradients: compute alone
    independent   the feed and silent steps, without train.py's bookkeeping
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ddp_mnist.bench.measurements import alternate
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import World, join_world
from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.run import ResolvedConfig, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.batches import GlobalBatchSampler, ImageData, Rows, make_loader
from ddp_mnist.nets.losses import make_loss
from ddp_mnist.nets.optim import make_optimizer
from ddp_mnist.plain_ddp import train_plain
from ddp_mnist.run.console import count
from ddp_mnist.run.training_run import TrainingRun
from ddp_mnist.train import build_model, fit


def time_steps(
    config: TrainConfig, kinds: Sequence[str], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Return images/s over all ranks, for each round of each kind. All ranks must call it."""
    with join_world(config.distribution, find_launch(config.distribution)) as world:
        images = cache.load(config.run.dataset, config.run.cache_dir)
        run = shortened(config, world, images, steps)

        def measure(kind: str) -> float:
            world.accelerator.wait_for_everyone()
            seconds = KINDS[kind](replace(run))
            world.accelerator.free_memory()
            return len(run.images.train_labels) / seconds

        who = count(world.accelerator.num_processes, "process")
        return alternate(kinds, repeats, measure, who if world.accelerator.is_main_process else "")


def shortened(config: TrainConfig, world: World, images: ImageData, steps: int) -> TrainingRun:
    """Return a run of an epoch of at most `steps` full batches, and 1,000 test images."""
    rows = len(images.train_labels)
    size, pictures = world.accelerator.num_processes, images.image_format.pictures
    full = resolve_recipe(config.recipe, rows, size, pictures=pictures)
    steps = min(steps, rows // full.batch_size)
    rows = steps * full.batch_size
    short: dict[str, Any] = {
        f"{split}_{name}": getattr(images, f"{split}_{name}")[:number]
        for split, number in (("train", rows), ("test", 1000))
        for name in ("images", "labels", "keys")
    }
    recipe = replace(full, epochs=1, val_size=0, steps_per_epoch=steps)
    resolved = ResolvedConfig(config.run, config.distribution, recipe=recipe)
    return TrainingRun(resolved, world, replace(images, **short), StopSignals())


def bare_steps(run: TrainingRun, *, feed: bool, exchange: bool) -> float:
    """Return the seconds that steps on all batches take, or as many steps on one ready batch."""
    accelerator, recipe = run.world.accelerator, run.config.recipe
    device, seed = accelerator.device, run.config.run.seed
    images = run.images.to_if_it_fits(device)
    rows = Rows(images.train_images, images.train_labels)
    batches = GlobalBatchSampler(rows, recipe.batch_size, seed)
    mean_loss = make_loss(recipe, rows, device)
    net = build_model(run.config, run.world, images)
    # Accelerate wraps a model in DDP unless it is told that no training follows.
    model = accelerator.prepare_model(net, evaluation_mode=not exchange).train()
    loader = make_loader(rows, batch_sampler=batches)
    optimizer, loader = accelerator.prepare(make_optimizer(net, recipe, accelerator.scaler), loader)

    def step(batch: Sequence[torch.Tensor]) -> None:
        accelerator.backward(mean_loss(model(batch[0]), batch[1]))
        optimizer.step()
        optimizer.zero_grad()

    ready = next(iter(loader))
    step(ready)  # the first takes longer, and is not timed
    clock = time.monotonic()
    for batch in loader if feed else itertools.repeat(ready, len(loader)):
        step(batch)
    run.world.wait_for_gpu()
    return time.monotonic() - clock


KINDS: dict[str, Callable[[TrainingRun], float]] = {  # of seconds
    "train": lambda run: fit(run)["train_seconds"],
    "plain": lambda run: train_plain(
        run.images, run.config.recipe, run.config.run.seed, torch.float32
    )[1],
    "resident": partial(bare_steps, feed=False, exchange=True),
    "silent": partial(bare_steps, feed=False, exchange=False),
    "independent": partial(bare_steps, feed=True, exchange=False),
}
