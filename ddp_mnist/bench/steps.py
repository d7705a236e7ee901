"""Training steps timed side by side in one group of processes.

Kinds, each with the images of `steps` global batches:
    train         train.py's loop, by its own count of seconds in training
    plain         plain_ddp.py's
    resident      forward, backward and update on one batch that lies ready: no feed
    silent        the same without the exchange of gradients: compute alone
    lockstep      silent, with each step as long as on the rank that was slowest in it
    independent   train.py's feed and step, without the exchange of gradients
    evaluation    the exact metrics of as many images, without a step
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from ddp_mnist import data, plain_ddp, runtime, stopping
from ddp_mnist import train as trainer
from ddp_mnist.bench.figures import alternate
from ddp_mnist.config import TrainConfig, resolve_recipe
from ddp_mnist.evaluation import evaluate_split, prepare_split
from ddp_mnist.launch import find_launch
from ddp_mnist.optim import make_optimizer
from ddp_mnist.resume import Opened
from ddp_mnist.run_folder import RunFolder
from ddp_mnist.runtime import World
from ddp_mnist.screen import Screen


def time_steps(
    config: TrainConfig, kinds: list[str], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Images/s over all ranks, per round of each kind. Runs in every process of a group."""
    with runtime.start(config.distribution, find_launch(config.distribution)) as world:
        images = data.load(config.run.dataset, config.run.cache_dir)
        config, images = shortened(config, images, steps, world)
        steppers = {
            "train": train_loop,
            "plain": plain_loop,
            "resident": resident_steps,
            "silent": silent_steps,
            "lockstep": lockstep,
            "independent": independent_loop,
            "evaluation": evaluation,
        }

        def measure(kind: str) -> float:
            world.accelerator.wait_for_everyone()
            seconds = steppers[kind](config, images, world)
            world.accelerator.free_memory()
            return len(images.train_labels) / seconds

        return alternate(kinds, repeats, measure)


def shortened(
    config: TrainConfig, images: data.ImageData, steps: int, world: World
) -> tuple[TrainConfig, data.ImageData]:
    """One epoch of `steps` full batches, no validation, a tenth of MNIST's test images."""
    size = world.accelerator.num_processes
    full = resolve_recipe(config.recipe, len(images.train_labels), size)
    assert full.batch_size
    rows = min(steps * full.batch_size, len(images.train_labels))
    images = dataclasses.replace(
        images,
        train_images=images.train_images[:rows],
        train_labels=images.train_labels[:rows],
        test_images=images.test_images[:1000],
        test_labels=images.test_labels[:1000],
    )
    recipe = dataclasses.replace(full, epochs=1, val_size=0)
    return dataclasses.replace(config, recipe=recipe), images


def train_loop(config: TrainConfig, images: data.ImageData, world: World) -> float:
    nowhere = Opened(RunFolder(None), {}, {}, goes_on=False)
    with stopping.listen(has_launcher=False) as stop:
        outcome = trainer.train_in(nowhere, config, world, images, Screen(False), stop)
    return outcome["train_seconds"]


def plain_loop(config: TrainConfig, images: data.ImageData, world: World) -> float:
    with world.accelerator.autocast():
        _, seconds = plain_ddp.train_plain(images, config.recipe, config.run.seed, torch.float32)
    return seconds


@contextlib.contextmanager
def ready_to_step(
    config: TrainConfig, images: data.ImageData, world: World, *, exchange: bool
) -> Iterator[tuple[Any, Callable[[Any], None]]]:
    """The prepared loader, and a function that takes one step on a batch of it."""
    accelerator, recipe = world.accelerator, config.recipe
    assert recipe.batch_size
    net = trainer.build_model(config, world, len(images.classes))
    images = images.to(accelerator.device)
    rows = data.Rows(images.train_images, images.train_labels)
    batches = data.GlobalBatches(
        len(rows), recipe.batch_size, config.run.seed, device=accelerator.device
    )
    # Accelerate wraps a model in DDP unless it is told that no training follows.
    model = accelerator.prepare_model(net, evaluation_mode=not exchange)
    optimizer, loader = accelerator.prepare(
        make_optimizer(net, recipe), data.train_loader(rows, batches)
    )
    model.train()

    def step(batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        loss = F.cross_entropy(model(batch[0]), batch[1], label_smoothing=recipe.label_smoothing)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    yield loader, step


def resident_steps(
    config: TrainConfig, images: data.ImageData, world: World, *, exchange: bool = True
) -> float:
    with ready_to_step(config, images, world, exchange=exchange) as (loader, step):
        batch = next(iter(loader))
        step(batch)
        clock = time.monotonic()
        for _ in range(len(loader)):
            step(batch)
        synchronise(world)
        return time.monotonic() - clock


def silent_steps(config: TrainConfig, images: data.ImageData, world: World) -> float:
    return resident_steps(config, images, world, exchange=False)


def lockstep(config: TrainConfig, images: data.ImageData, world: World) -> float:
    """What is lost by waiting for each other, were an exchange to cost nothing."""
    with ready_to_step(config, images, world, exchange=False) as (loader, step):
        batch = next(iter(loader))
        step(batch)
        clock = [time.monotonic()]
        for _ in range(len(loader)):
            step(batch)
            synchronise(world)
            clock.append(time.monotonic())
    seconds = torch.tensor(clock, dtype=torch.float64).diff().to(world.accelerator.device)
    if world.accelerator.num_processes > 1:
        torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
    return seconds.sum().item()


def independent_loop(config: TrainConfig, images: data.ImageData, world: World) -> float:
    with ready_to_step(config, images, world, exchange=False) as (loader, step):
        step(next(iter(loader)))
        clock = time.monotonic()
        for batch in loader:
            step(batch)
        synchronise(world)
        return time.monotonic() - clock


def evaluation(config: TrainConfig, images: data.ImageData, world: World) -> float:
    classes, images = len(images.classes), images.to(world.accelerator.device)
    net = trainer.build_model(config, world, classes)
    rows = data.Rows(images.train_images, images.train_labels)
    clock = time.monotonic()
    evaluate_split(world.accelerator, net, prepare_split(world.accelerator, rows), classes)
    return time.monotonic() - clock


def synchronise(world: World) -> None:
    if world.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
