"""Training steps timed side by side in one group of processes, each with one CPU thread.

Kinds, each with the images of `steps` global batches:
    train         train.py's loop, by its own count of seconds in training
    plain         plain_ddp.py's
    resident      forward, backward and update on one batch that lies ready: no feed
    silent        the same without the exchange of gradients: compute alone
    lockstep      silent, with each step as long as on the rank that was slowest in it
    independent   the feed and such silent steps; not train.py's accounts, which are charged to it
    evaluation    the exact metrics of as many images, without autocast, as in the final test
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ddp_mnist import plain_ddp
from ddp_mnist import train as trainer
from ddp_mnist.bench.figures import alternate
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import World, join_world
from ddp_mnist.config import ResolvedConfig, TrainConfig, resolve_recipe
from ddp_mnist.data import cache
from ddp_mnist.data.batches import GlobalBatches, ImageData, Rows, train_loader
from ddp_mnist.optim import make_optimizer
from ddp_mnist.run import session
from ddp_mnist.run.evaluation import evaluate_split, prepare_split

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[[Batch], None]
Kind = Callable[[ResolvedConfig, ImageData, World], float]  # seconds


def time_steps(
    config: TrainConfig, kinds: dict[str, Kind], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Images/s over all ranks, per round of each kind. Runs in every process of a group."""
    with join_world(config.distribution, find_launch(config.distribution)) as world:
        images = cache.load(config.run.dataset, config.run.cache_dir)
        config, images = shortened(config, images, steps, world)

        def measure(kind: str) -> float:
            world.accelerator.wait_for_everyone()
            seconds = kinds[kind](config, images, world)
            world.accelerator.free_memory()
            return len(images.train_labels) / seconds

        return alternate(list(kinds), repeats, measure, verbose=world.accelerator.is_main_process)


def shortened(
    config: TrainConfig, images: ImageData, steps: int, world: World
) -> tuple[ResolvedConfig, ImageData]:
    """One epoch of at most `steps` full batches, no validation, a tenth of MNIST's test images."""
    rows = len(images.train_labels)
    full = resolve_recipe(config.recipe, rows, world.accelerator.num_processes)
    steps = min(steps, rows // full.batch_size)
    rows = steps * full.batch_size
    images = replace(
        images,
        train_images=images.train_images[:rows],
        train_labels=images.train_labels[:rows],
        test_images=images.test_images[:1000],
        test_labels=images.test_labels[:1000],
    )
    recipe = replace(full, epochs=1, val_size=0, steps_per_epoch=steps)
    return ResolvedConfig(config.run, config.distribution, recipe=recipe), images


# --- Seconds of each kind


def train_loop(config: ResolvedConfig, images: ImageData, world: World) -> float:
    with listen(has_launcher=False) as stop:
        outcome = trainer.fit(session.Run(config, world, images, stop))
    return outcome["train_seconds"]


def plain_loop(config: ResolvedConfig, images: ImageData, _world: World) -> float:
    _, seconds = plain_ddp.train_plain(images, config.recipe, config.run.seed, torch.float32)
    return seconds


def resident_steps(config: ResolvedConfig, images: ImageData, world: World) -> float:
    loader, step = ready_to_step(config, images, world, exchange=True)
    return timed(step, itertools.repeat(next(iter(loader)), len(loader)), world)


def silent_steps(config: ResolvedConfig, images: ImageData, world: World) -> float:
    loader, step = ready_to_step(config, images, world, exchange=False)
    return timed(step, itertools.repeat(next(iter(loader)), len(loader)), world)


def lockstep(config: ResolvedConfig, images: ImageData, world: World) -> float:
    """What is lost by waiting for each other, were an exchange to cost nothing."""
    loader, step = ready_to_step(config, images, world, exchange=False)
    batch, device = next(iter(loader)), world.accelerator.device
    each = [timed(step, [batch], world) for _ in range(len(loader))]
    seconds = torch.tensor(each, dtype=torch.float64, device=device)
    if world.accelerator.num_processes > 1:
        torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
    return seconds.sum().item()


def independent_loop(config: ResolvedConfig, images: ImageData, world: World) -> float:
    loader, step = ready_to_step(config, images, world, exchange=False)
    return timed(step, loader, world)


def evaluation(config: ResolvedConfig, images: ImageData, world: World) -> float:
    classes, images = len(images.classes), images.to(world.accelerator.device)
    net = trainer.build_model(config, world, classes)
    rows = Rows(images.train_images, images.train_labels)
    loader = prepare_split(world.accelerator, rows)
    clock = time.monotonic()
    evaluate_split(world.accelerator, net, loader, classes)
    return time.monotonic() - clock


KINDS: dict[str, Kind] = {
    "train": train_loop,
    "plain": plain_loop,
    "resident": resident_steps,
    "silent": silent_steps,
    "lockstep": lockstep,
    "independent": independent_loop,
    "evaluation": evaluation,
}


def ready_to_step(
    config: ResolvedConfig, images: ImageData, world: World, *, exchange: bool
) -> tuple[Any, Step]:
    """The prepared loader, and a step on a batch of it that has been taken once."""
    accelerator, recipe = world.accelerator, config.recipe
    net = trainer.build_model(config, world, len(images.classes))
    images = images.to(accelerator.device)
    rows = Rows(images.train_images, images.train_labels)
    batches = GlobalBatches(
        len(rows), recipe.batch_size, config.run.seed, device=accelerator.device
    )
    # Accelerate wraps a model in DDP unless it is told that no training follows.
    model = accelerator.prepare_model(net, evaluation_mode=not exchange)
    optimizer, loader = accelerator.prepare(
        make_optimizer(net, recipe), train_loader(rows, batches)
    )
    model.train()

    def step(batch: Batch) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1], label_smoothing=recipe.label_smoothing)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    step(next(iter(loader)))
    return loader, step


def timed(step: Step, batches: Iterable[Batch], world: World) -> float:
    """Seconds until the last step is done."""
    clock = time.monotonic()
    for batch in batches:
        step(batch)
    if world.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - clock
