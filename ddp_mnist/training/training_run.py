"""A run as every rank sees it, known before the first step; its net, and the trial of that."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from ddp_mnist.cluster.world import World, in_full_precision
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.optim import make_optimizer
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.task import Task
from ddp_mnist.core.wrappers import Normalised, hold_still, last_layer
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.splits import subset
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import trial
from ddp_mnist.nets.build import build_net, gains_by_bf16, has_batch_norm, is_known
from ddp_mnist.nets.initial_weights import load_weights
from ddp_mnist.system.console import Console
from ddp_mnist.task import make_task
from ddp_mnist.training.named_objects import NamedObjects
from ddp_mnist.training.threads import Times, time_threads


@dataclass(frozen=True)
class TrainingRun:
    """A run, as every rank sees it."""

    config: TrainConfig  # with the values that the data and the number of processes decide
    world: World  # all processes
    images: ImageData
    found: NamedObjects
    task: Task  # what is learned from the images
    recipe: Recipe  # how the net is trained; --inject may change it
    memory_format: torch.memory_format = torch.channels_last  # of weights and maps
    step_digest: str = ""  # of what this CPU makes of a step; "" for one process, and on GPUs
    step_times: Times | None = None  # with one thread and with several, if that is open

    @property
    def model(self) -> str:
        """The name of the net."""
        return str(self.config.recipe.model)


def make_run(
    config: TrainConfig,
    recipe: Recipe,
    world: World,
    images: ImageData,
    found: NamedObjects | None = None,
) -> TrainingRun:
    """Return the run on these images, whose rows are in their splits. Raises as `make_task` does.

    `config` and `recipe` are resolved; `found` is what the flags name, nothing by default.
    """
    found, device = found or NamedObjects(), world.accelerator.device
    train = subset(images, "train")
    task = make_task(config.recipe, images.classes, train, device, found.scores)
    return TrainingRun(config, world, images, found, task, recipe)


# --- The net


def make_net(run: TrainingRun) -> Normalised:
    """Return the run's net, in float64 with fp64; with the weights of --weights, if any."""
    world, net = run.world, new_net(run)
    load_initial_weights(run, net)
    net = in_format(run, net)
    if run.config.distribution.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    if world.compile_options:
        net.compile(**world.compile_options)
    return net


def new_net(run: TrainingRun) -> Normalised:
    """Return the run's net with new weights, of which it trains what it trains later."""
    net = build_net(run.model, run.task, run.images.image_format)
    return hold_still(net, run.recipe.kept)


def in_format(run: TrainingRun, net: Normalised) -> Normalised:
    """Return the net in the dtype and the memory format of the run."""
    if run.world.precision == "fp64":
        net.double()
    return net.to(memory_format=run.memory_format)


def load_initial_weights(run: TrainingRun, net: Normalised) -> str | None:
    """Load --weights into the net. Return their origin, in words.

    None without the flag, and for a resumed run, whose weights are in its checkpoint.
    """
    if not run.found.weights or run.config.resumes:
        return None
    return load_weights(net.net, run.found.weights, run.task)


def try_before_training(run: TrainingRun, console: Console) -> TrainingRun:
    """Try net, weights, loss and task on a few images, with nets that are then discarded.

    Return the run, with what may spoil it when it is resumed. Raise as the trials do, or UsageError
    for --sync-bn or --inject batchnorm without BatchNorm.
    """
    recipe, image_format, world = run.config.recipe, run.images.image_format, run.world
    make = partial(new_net, run)
    sync_bn = run.config.distribution.sync_bn
    if sync_bn and world.accelerator.device.type == "cpu":
        raise UsageError("--sync-bn: needs GPUs; on a CPU use --model cnn, which has GroupNorm")
    sharers = 1 if sync_bn else world.store.world_size
    at_once = run.recipe.batch_size // run.recipe.grad_accum // sharers
    trial.check(net := trial.made(make), run.model, run.task.outputs, image_format.shape, at_once)
    outputs, last = run.task.outputs, net.get_submodule(last_layer(net))
    if (recipe.freeze or run.recipe.head_rate != 1) and any(
        each.shape[:1] != (outputs,) for each in last.parameters()
    ):
        flag = "--freeze" if recipe.freeze else f"--weights {recipe.weights}"
        fault = f"the layer that {run.model} defines last does not give the {outputs} outputs"
        raise UsageError(f"{flag}: {fault}; define the one that does last")
    if (sync_bn or recipe.inject == "batchnorm") and not has_batch_norm(net):
        flag = "--sync-bn" if sync_bn else "--inject batchnorm"
        raise UsageError(
            f"{flag}: {run.model} has no BatchNorm; use --model cnn_bn or leave it out"
        )
    if origin := load_initial_weights(run, net):
        console.print(f"weights    {origin}")
    if recipe.loss or recipe.task:
        named = f"--task {recipe.task}" if recipe.task else f"--loss {recipe.loss}"
        train = subset(run.images, "train")
        _, targets, _ = train.take([*range(min(3, len(train)))])
        trial.check_task(run.task, named, targets.to(world.accelerator.device))
    run = choose_computation(run, net, at_once)
    if world.store.world_size > 1 and world.device == "cpu":
        run = replace(run, step_digest=trial.digest_of_step(net, run.recipe))
    if is_known(run.model):
        return run
    lost = trial.check_state(make, run.model, image_format.shape)
    trial.check_apart(net, run.model, image_format.shape)
    return replace(run, images=run.images.with_caveat(lost)) if lost else run


def choose_computation(run: TrainingRun, net: Normalised, images_at_once: int) -> TrainingRun:
    """Return the run, with how it computes where that is open and depends on the net.

    Precision and memory format follow from the net, alike on every rank; of the number of threads
    only the times are taken. The net is changed: pass one that will be discarded.
    """
    name, world, shape = run.model, run.world, run.images.image_format.shape
    if world.may_choose_precision and not gains_by_bf16(net, shape):
        run = replace(run, world=in_full_precision(world, run.config.distribution))
    if not is_known(name) and not trial.takes_channels_last(net, name, run.task.outputs, shape):
        run = replace(run, memory_format=torch.contiguous_format)
    if not world.may_choose_threads:
        return run
    step, steps = one_step(run, net), run.recipe.total_steps
    return replace(run, step_times=time_threads(step, images_at_once, steps))


def one_step(run: TrainingRun, net: Normalised) -> Callable[[int], None]:
    """Return a function that trains the net for a step, on so many of this rank's images."""
    rows, accelerator = subset(run.images, "train"), run.world.accelerator
    net = in_format(run, net).train()
    unmoved = replace(run.recipe, lr=0.0)  # the same work, but it cannot diverge
    optimizer, dtype = make_optimizer(net, unmoved), next(net.parameters()).dtype

    def step(images: int) -> None:
        pixels, targets, _ = rows.take([*range(images)])
        with accelerator.autocast():
            outputs = net(pixels)
        run.task.training_loss(outputs.to(dtype), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
