"""The ways of sharing a global batch among devices, timed side by side in one group.

DataParallel is one process with a thread per GPU: in each step it copies the net to all of them,
scatters the batch, and gathers the outputs on the first. DDP has a process per device, each with a
net of its own; only gradients travel, while the rest of them is still being computed.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from ddp_mnist import train as trainer
from ddp_mnist.bench.steps import ready_to_step, timed
from ddp_mnist.cluster.hardware import cores
from ddp_mnist.cluster.world import COMM_HOOKS, POWERSGD, World
from ddp_mnist.config import ResolvedConfig
from ddp_mnist.data.batches import GlobalBatches, ImageData, Rows
from ddp_mnist.optim import make_optimizer

ROUNDS = itertools.count()  # of `alone`, the same on every rank
Strategy = Callable[[ResolvedConfig, ImageData, World], float]


def one_process(config: ResolvedConfig, images: ImageData, world: World) -> float:
    """Rank 0 alone takes the whole batch, with every CPU core; the other ranks wait."""
    return alone(config, images, world, lambda net: net)


def data_parallel(config: ResolvedConfig, images: ImageData, world: World) -> float:
    """Rank 0 alone, on all GPUs."""
    return alone(config, images, world, nn.DataParallel)


def alone(
    config: ResolvedConfig,
    images: ImageData,
    world: World,
    wrap: Callable[[nn.Module], nn.Module],
) -> float:
    """The other ranks poll for its seconds: in a collective they would keep their GPUs busy."""

    def seconds() -> float:
        with all_cores():
            return train_alone(config, images, world.accelerator.device, wrap)

    return world.store.broadcast_from_rank0(f"alone/{next(ROUNDS)}", seconds)


def train_alone(
    config: ResolvedConfig,
    images: ImageData,
    device: torch.device,
    wrap: Callable[[nn.Module], nn.Module],
) -> float:
    """Seconds of an epoch, after a step that is not counted."""
    recipe = config.recipe
    images = images.to(device)
    rows = Rows(images.train_images, images.train_labels)
    batches = GlobalBatches(len(rows), recipe.batch_size, config.run.seed, device=device)
    torch.manual_seed(config.run.seed)
    net = trainer.MODELS[recipe.model](len(images.classes)).to(device)
    net.to(memory_format=torch.channels_last)
    model, optimizer = wrap(net), make_optimizer(net, recipe)

    def step(numbers: torch.Tensor) -> None:
        inputs, labels, _ = rows.__getitems__(numbers)
        loss = F.cross_entropy(model(inputs), labels, label_smoothing=recipe.label_smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step(next(iter(batches)))
    clock = time.monotonic()
    for numbers in batches:
        step(numbers)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - clock


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(cores())
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def ddp(config: ResolvedConfig, images: ImageData, world: World) -> float:
    return with_hook("none", config, images, world)


def ddp_fp16(config: ResolvedConfig, images: ImageData, world: World) -> float:
    return with_hook("fp16", config, images, world)


def ddp_powersgd(config: ResolvedConfig, images: ImageData, world: World) -> float:
    return with_hook("powersgd", config, images, world)


def with_hook(hook: str, config: ResolvedConfig, images: ImageData, world: World) -> float:
    """Each process takes its share; its gradients are sent as --comm-hook says."""
    handler = world.accelerator.ddp_handler
    assert isinstance(handler, DistributedDataParallelKwargs)
    before = handler.comm_hook, handler.comm_state_option
    handler.comm_hook = COMM_HOOKS[hook]
    handler.comm_state_option = POWERSGD if hook == "powersgd" else {}
    try:
        loader, step = ready_to_step(config, images, world, exchange=True)
        return timed(step, loader, world)
    finally:
        handler.comm_hook, handler.comm_state_option = before


STRATEGIES: dict[str, Strategy] = {
    "one process": one_process,
    "DataParallel": data_parallel,
    "DDP": ddp,
    "DDP, fp16 hook": ddp_fp16,
    "DDP, PowerSGD hook": ddp_powersgd,
}
