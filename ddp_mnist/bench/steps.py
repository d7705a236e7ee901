"""Training steps timed side by side in one group of processes, each with one CPU thread.

Each kind returns the seconds for the images of all global batches. KINDS take apart a step:
    train         train.py's loop, by its own count of seconds in training
    plain         plain_ddp.py's
    resident      forward, backward and update on one batch that lies ready: no feed
    silent        the same without the exchange of gradients: compute alone
    lockstep      silent, with each step as long as on the rank that was slowest in it
    independent   the feed and silent steps, without train.py's bookkeeping
    evaluation    the exact metrics of as many images, without autocast, as in the final test

STRATEGIES share a global batch among devices. DataParallel is one process with a thread per GPU: in
each step it copies the net to all of them, scatters the batch, and gathers the outputs on the
first. DDP has a process per device, each with a net of its own; only gradients travel, while the
rest of them is still being computed.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from ddp_mnist.bench.figures import alternate
from ddp_mnist.cluster.hardware import cores
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import COMM_HOOKS, POWERSGD, World, join_world
from ddp_mnist.config import ResolvedConfig, TrainConfig, resolve_recipe
from ddp_mnist.data import cache
from ddp_mnist.data.batches import GlobalBatches, ImageData, Rows, make_loader
from ddp_mnist.optim import make_optimizer
from ddp_mnist.plain_ddp import train_plain
from ddp_mnist.run.evaluation import evaluate_split, prepare_split
from ddp_mnist.run.session import Run
from ddp_mnist.train import build_model, fit

ROUNDS = itertools.count()  # of `on_rank0`, the same on every rank
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Step = Callable[[Batch], None]


def time_steps(
    config: TrainConfig, kinds: Sequence[str], steps: int, repeats: int
) -> dict[str, list[float]]:
    """Return images/s over all ranks, for each round of each kind; all ranks have to call it."""
    with join_world(config.distribution, find_launch(config.distribution)) as world:
        images = cache.load(config.run.dataset, config.run.cache_dir)
        run = shortened(config, world, images, steps)

        def measure(kind: str) -> float:
            world.accelerator.wait_for_everyone()
            seconds = (KINDS | STRATEGIES)[kind](replace(run))
            world.accelerator.free_memory()
            return len(run.images.train_labels) / seconds

        return alternate(kinds, repeats, measure, verbose=world.accelerator.is_main_process)


def shortened(config: TrainConfig, world: World, images: ImageData, steps: int) -> Run:
    """Return a run of an epoch of at most `steps` full batches, and 1,000 test images."""
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
    resolved = ResolvedConfig(config.run, config.distribution, recipe=recipe)
    return Run(resolved, world, images, StopSignals())


def train_data(run: Run) -> tuple[Rows, GlobalBatches]:
    """Return the train images on the device, and their order."""
    device, config = run.world.accelerator.device, run.config
    images = run.images.to(device)
    rows = Rows(images.train_images, images.train_labels)
    return rows, GlobalBatches(len(rows), config.recipe.batch_size, config.run.seed, device=device)


def make_step(
    run: Run, model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], None]
) -> Step:
    smoothing = run.config.recipe.label_smoothing

    def step(batch: Batch) -> None:
        backward(F.cross_entropy(model(batch[0]), batch[1], label_smoothing=smoothing))
        optimizer.step()
        optimizer.zero_grad()

    return step


def prepare_step(run: Run, exchange: bool) -> tuple[Any, Step]:
    """Return the prepared loader, and a step that has been taken once."""
    accelerator, (rows, batches) = run.world.accelerator, train_data(run)
    net = build_model(run.config, run.world, len(run.images.classes))
    # Accelerate wraps a model in DDP unless it is told that no training follows.
    model = accelerator.prepare_model(net, evaluation_mode=not exchange).train()
    optimizer, loader = accelerator.prepare(
        make_optimizer(net, run.config.recipe), make_loader(rows, batch_sampler=batches)
    )
    step = make_step(run, model, optimizer, accelerator.backward)
    step(next(iter(loader)))
    return loader, step


def timed(run: Run, step: Step, batches: Iterable[Batch]) -> float:
    """Return the seconds until the last step is done."""
    clock = time.monotonic()
    for batch in batches:
        step(batch)
    if run.world.accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - clock


def bare_steps(run: Run, *, feed: bool, exchange: bool) -> float:
    """Take steps on all batches, or as many on one batch that lies ready."""
    loader, step = prepare_step(run, exchange)
    batches = loader if feed else itertools.repeat(next(iter(loader)), len(loader))
    return timed(run, step, batches)


def lockstep(run: Run) -> float:
    """Return how long silent steps take if ranks wait for each other, and an exchange is free."""
    accelerator, (loader, step) = run.world.accelerator, prepare_step(run, exchange=False)
    batch = next(iter(loader))
    each = [timed(run, step, [batch]) for _ in range(len(loader))]
    seconds = torch.tensor(each, dtype=torch.float64, device=accelerator.device)
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(seconds, torch.distributed.ReduceOp.MAX)
    return seconds.sum().item()


def evaluation(run: Run) -> float:
    accelerator, classes = run.world.accelerator, len(run.images.classes)
    net = build_model(run.config, run.world, classes)
    loader = prepare_split(accelerator, train_data(run)[0])
    clock = time.monotonic()
    evaluate_split(accelerator, net, loader, classes)
    return time.monotonic() - clock


def on_rank0(run: Run, wrap: Callable[[nn.Module], nn.Module]) -> float:
    """Give rank 0 the whole batch and every CPU core.

    The other ranks poll for its seconds: in a collective they would keep their GPUs busy.
    """

    def seconds() -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(cores())
        try:
            return without_others(run, wrap)
        finally:
            torch.set_num_threads(threads)

    return run.world.store.broadcast_from_rank0(f"bench/{next(ROUNDS)}", seconds)


def without_others(run: Run, wrap: Callable[[nn.Module], nn.Module]) -> float:
    net = build_model(run.config, run.world, len(run.images.classes))
    optimizer = make_optimizer(net, run.config.recipe)
    step = make_step(run, wrap(net), optimizer, torch.Tensor.backward)
    rows, batches = train_data(run)
    step(rows.__getitems__(next(iter(batches))))
    return timed(run, step, map(rows.__getitems__, batches))


def with_ddp(run: Run, hook: str) -> float:
    """Give each process its share, and send its gradients as --comm-hook says."""
    handler = run.world.accelerator.ddp_handler
    assert isinstance(handler, DistributedDataParallelKwargs)
    handler.comm_hook = COMM_HOOKS[hook]
    handler.comm_state_option = POWERSGD if hook == "powersgd" else {}
    return bare_steps(run, feed=True, exchange=True)


KINDS: dict[str, Callable[[Run], float]] = {  # of seconds
    "train": lambda run: fit(run)["train_seconds"],
    "plain": lambda run: train_plain(
        run.images, run.config.recipe, run.config.run.seed, torch.float32
    )[1],
    "resident": partial(bare_steps, feed=False, exchange=True),
    "silent": partial(bare_steps, feed=False, exchange=False),
    "lockstep": lockstep,
    "independent": partial(bare_steps, feed=True, exchange=False),
    "evaluation": evaluation,
}
STRATEGIES: dict[str, Callable[[Run], float]] = {
    "one process": partial(on_rank0, wrap=lambda net: net),
    "DataParallel": partial(on_rank0, wrap=nn.DataParallel),
    "DDP": partial(with_ddp, hook="none"),
    "DDP, fp16 hook": partial(with_ddp, hook="fp16"),
    "DDP, PowerSGD hook": partial(with_ddp, hook="powersgd"),
}
