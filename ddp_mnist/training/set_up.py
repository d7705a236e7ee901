"""All ranks agree on settings, data and folder before the first step; they get a RecordedRun."""

import contextlib
import io
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.rendezvous import check_same
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import World
from ddp_mnist.config.mistakes import wrong_on_purpose
from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.train_config import ResolvedConfig, TrainConfig
from ddp_mnist.core.task import Loss, Score, Task
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.data.splits import subset
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import initial_weights, trial
from ddp_mnist.nets.build import build_net, factory_of, has_batch_norm, is_known, memory_format_of
from ddp_mnist.nets.initial_weights import InitialWeights, load_weights
from ddp_mnist.system.affinity import bound_together
from ddp_mnist.system.console import Console
from ddp_mnist.task import find_loss, find_score, make_task, options_of
from ddp_mnist.training import plan, resume, tracking
from ddp_mnist.training.folder import CONFIG, FOLDER_KEY, TRAINED_ON, RunFolder, trained_on
from ddp_mnist.training.interrupts import answer_interrupts
from ddp_mnist.training.profiling import STEPS_BEFORE, profiled
from ddp_mnist.training.recorded_run import RecordedRun
from ddp_mnist.training.resume import EarlierRun
from ddp_mnist.training.saved_config import must_be_equal, saved_config
from ddp_mnist.training.training_run import TrainingRun

MakeMistake = Callable[[TrainingRun], TrainingRun]


@contextlib.contextmanager
def set_up_run(
    config: TrainConfig,
    world: World,
    launch: Launch,
    folder: RunFolder,
    stop: StopSignals,
    make_mistake: MakeMistake,
) -> Iterator[RecordedRun | None]:
    """Agree with all ranks on settings, data and folder, and yield the run.

    Yield None if there is nothing to train: after --dry-run, or if --resume names a finished run.
    `make_mistake` changes the run of --inject. Raise a DdpMnistError on all ranks for whatever is
    missing, damaged, contradictory or different.
    """
    verbose = not config.run.quiet
    answer_interrupts(stop, world, folder, verbose)
    with (
        Console(verbose and launch.rank == 0, must_arrive=False) as console,
        plan.narrated_elsewhere(world, verbose),
    ):
        earlier = resume.find(config, world.store)
        if earlier and earlier.finished:
            console.print(earlier.finished)
            yield None
            return
        found, run = make_run(config, world, console, earlier)
        run = try_before_training(run, console)
        check_same(world.store, must_be_equal(run))
        if run.config.run.dry_run:
            console.print(plan.plan_text(run, None))
            yield None
            return
        run = make_mistake(run) if run.config.recipe.inject else run
        run_id = earlier.saved["run_id"] if earlier else uuid.uuid4().hex
        where, checkpoint = open_folder(run, folder, run_id, earlier, console)
        console.print(plan.plan_text(run, folder.path))
        with (
            tracking.tracked(run, folder, found.trackers),
            profiled(world.accelerator, run.config.run.profile, where) as profile,
        ):
            if world.compile_options:
                console.print("compiling  the model, which can take minutes")
            recorded = RecordedRun(
                run,
                stop,
                folder,
                console,
                run_id=run_id,
                where=where,
                checkpoint=checkpoint,
                profile=profile,
            )
            recorded.phase("starting")
            yield recorded


# --- Settings and data


@dataclass(frozen=True)
class Found:
    """What the flags name, found before the data is read."""

    loss: Loss | None  # of --loss
    weights: InitialWeights | None  # of --weights
    scores: Mapping[str, Score]  # of --metrics, by name; on rank 0 alone, which counts
    trackers: list[str]  # of --trackers


def find_named(config: TrainConfig, store: Store) -> Found:
    """Find what the flags name. Raise UsageError for an unknown name."""
    recipe = config.recipe
    if recipe.model:
        factory_of(recipe.model)
    loss = find_loss(recipe.loss)
    weights = initial_weights.find_weights(recipe.model or "the default net", recipe.weights)
    # Rank 0 alone logs and counts; importing scikit-learn takes it a second.
    trackers = store.broadcast_from_rank0(
        "trackers", lambda: tracking.known_trackers(config.run.trackers)
    )
    scores = {n: find_score(n) for n in recipe.metrics} if store.rank == 0 else {}
    return Found(loss, weights, scores, trackers)


def make_run(
    config: TrainConfig, world: World, console: Console, earlier: EarlierRun | None
) -> tuple[Found, TrainingRun]:
    """Return the run, once its flags are resolved for its images and this world size.

    A flag that was typed counts, else the earlier run's, else what fits these images.
    """
    config = resume.inherit(config, earlier) if earlier else config
    config.refuse_contradictions()
    found = find_named(config, world.store)
    entry = found.weights and found.weights.entry
    if entry and not config.run.image_size:  # the size that they were made for
        size = str(initial_weights.size_of(entry))
        config = replace(config, run=replace(config.run, image_size=size))
    name, images = load_images(config, world.store, console)
    if entry:
        model, image_format = config.recipe.model or "", images.image_format
        made = initial_weights.normalised_for(entry, model, image_format)
        images = replace(images, image_format=made)
    if earlier:
        resume.check_same_images(name, images.digest, earlier)
    images = images.hold_out(config.recipe.val_size_of(len(images.rows["train"])))
    resolved = resolve(config, name, images, world.store.world_size)
    images = without_seen(images, resolved, found.weights, earlier)

    train, device = subset(images, "train"), world.accelerator.device
    task = make_task(resolved.recipe, images.classes, train, device, found.loss, found.scores)
    weights = None if config.resumes else found.weights  # they are in a checkpoint
    make_net = partial(make_net_of, resolved, world, task, images, weights)
    recipe = resolved.recipe.for_fit(images.image_format.kind)
    return found, TrainingRun(resolved, world, images, task, make_net, recipe, found.weights)


def without_seen(
    images: ImageData,
    config: ResolvedConfig,
    weights: InitialWeights | None,
    earlier: EarlierRun | None,
) -> ImageData:
    """Return the data set without the images to validate or test on that --weights has seen."""
    seen = earlier.saved["left_out"] if earlier else seen_by(config.recipe.weights)
    images = images.without(seen, f"--weights {config.recipe.weights} was trained on some")
    if not weights or weights.entry or len(seen) or config.resumes:
        return images
    if initial_weights.read_weights(weights.typed)[1]:  # has the names of classes: a run made it
        lost = f"--weights {weights}: without {TRAINED_ON} beside it, this may test on images that"
        images = images.with_caveat(f"{lost} it has seen")
    return images


def resolve(config: TrainConfig, dataset: str, images: ImageData, processes: int) -> ResolvedConfig:
    """Return the flags with the recipe resolved, and with places that hold in any folder.

    Raises as `resolve_recipe` does, and UsageError if the run has too few steps to profile.
    """
    flags, val_rows = config.run, len(images.rows["validation"])
    rows, pictures = len(images.rows["train"]) + val_rows, images.image_format.pictures
    recipe = resolve_recipe(config.recipe, rows, processes, val_rows, pictures, config.resumes)
    if flags.profile and flags.profile + STEPS_BEFORE > recipe.total_steps:
        raise UsageError(
            f"--profile {flags.profile}: the run has {recipe.total_steps} steps, of which the"
            f" first {STEPS_BEFORE} are not profiled; raise --epochs, or ask for fewer"
        )
    cache_dir = flags.cache_dir and str(cache.cache_folder(flags.cache_dir).absolute())
    run = replace(flags, dataset=from_anywhere(dataset), cache_dir=cache_dir)
    others = config.distribution, config.typed, config.resumes
    return ResolvedConfig(run, *others, recipe=recipe)


def load_images(config: TrainConfig, store: Store, console: Console) -> tuple[str, ImageData]:
    """Return the data set's name and images; each machine has them before the first collective.

    Rank 0 decides what `auto` means.
    """
    flags, options = config.run, options_of(vars(config.run) | vars(config.recipe))
    name, notes = store.broadcast_from_rank0(
        "dataset",
        lambda: cache.choose(flags.dataset, flags.cache_dir, options, console.print),
    )
    images = cache.load(name, flags.cache_dir, options, log=console.print)
    if "test_size" in config.typed and not images.test_share:
        typed = f"--test-size {options.test_size:g}: --dataset {name}"
        raise UsageError(f"{typed} already has a test split; remove --test-size")
    if unused := hardware.unused_gpus():
        notes = [*notes, f"GPUs: {unused}, so this trains on the CPU; {hardware.GPU_FIX}"]
    if bound := bound_together(store.rank_info.local_world_size):
        notes = [*notes, bound]
    warnings = [*wrong_on_purpose(config.recipe.inject), *notes, *images.warnings]
    store.barrier()
    return name, replace(images, warnings=warnings)


def seen_by(weights: str | None) -> np.ndarray:
    """Return the keys of the images that the weights were trained on, which lie beside them."""
    if not weights or not (file := Path(weights).resolve()).is_file():
        return np.zeros(0, np.uint64)
    return trained_on(file.parent)


# --- The net


def make_net_of(
    config: ResolvedConfig,
    world: World,
    task: Task,
    images: ImageData,
    weights: InitialWeights | None,
) -> Normalised:
    """Return the run's net, in float64 with fp64; with the weights of --weights, if any."""
    name = config.recipe.model
    net = build_net(name, task, images.image_format)
    if weights:
        load_weights(net.net, name, weights, task.names, task.outputs)
    if world.precision == "fp64":
        net.double()
    if config.distribution.sync_bn:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net.to(memory_format=memory_format_of(name))
    if world.compile_options:
        net.compile(**world.compile_options)
    return net


def try_before_training(run: TrainingRun, console: Console) -> TrainingRun:
    """Try net, weights, loss and task on a few images: an error should not wait for the folder.

    Return the run, with what may spoil it when it is resumed. Raises as the trials do.
    """
    recipe, images, task, world = run.config.recipe, run.images, run.task, run.world
    make = partial(build_net, recipe.model, task, images.image_format)
    sharers = 1 if run.config.distribution.sync_bn else world.store.world_size
    at_once = recipe.batch_size // recipe.grad_accum // sharers
    check_net(run, net := make(), at_once)
    if run.weights and not run.config.resumes:
        taken = load_weights(net.net, recipe.model, run.weights, task.names, task.outputs)
        console.print(f"weights    {taken}")
    if recipe.loss or recipe.task:
        typed = f"--task {recipe.task}" if recipe.task else f"--loss {recipe.loss}"
        train = subset(images, "train")
        _, targets, _ = train.take([*range(min(3, len(train)))])
        trial.check_task(task, typed, targets.to(world.accelerator.device))
    if not is_known(recipe.model) and (
        lost := trial.check_state(make, recipe.model, images.image_format.shape)
    ):
        return replace(run, images=images.with_caveat(lost))
    return run


def check_net(run: TrainingRun, net: Normalised, at_once: int) -> None:
    """Try a net that is then discarded, so that errors surface before the run folder exists.

    Raise as `trial.check` does, or UsageError for --sync-bn or --inject batchnorm without
    BatchNorm.
    """
    recipe, shape = run.config.recipe, run.images.image_format.shape
    trial.check(net, recipe.model, run.task.outputs, shape, at_once)
    sync_bn = run.config.distribution.sync_bn
    if (sync_bn or recipe.inject == "batchnorm") and not has_batch_norm(net):
        typed = "--sync-bn" if sync_bn else "--inject batchnorm"
        raise UsageError(
            f"{typed}: {recipe.model} has no BatchNorm; use --model cnn_bn or leave it out"
        )


# --- The folder


def open_folder(
    run: TrainingRun,
    folder: RunFolder,
    run_id: str,
    earlier: EarlierRun | None,
    console: Console,
) -> tuple[str, bytes | None]:
    """Create the run folder on rank 0's machine, or reopen it if the run is resumed.

    Return its path there, and the checkpoint to resume from: whole on rank 0, empty on other ranks,
    None for a new run. Raises as RunFolder.create and resume.load_latest do.
    """
    config, images = run.config, run.images
    checkpoint = b"" if earlier else None

    def open_it() -> str:
        nonlocal checkpoint
        if earlier:
            now = saved_config(run, run_id, earlier.path)
            checkpoint, lines = resume.load_latest(folder, earlier, now, config)
            folder.begin()
            for line in lines:
                console.print(line)
        else:
            begin_again = config.run.resume == "auto"
            folder.create(config.run.run_dir, images.name, begin_again)
        return str(folder.path)

    where = run.world.store.broadcast_from_rank0(FOLDER_KEY, open_it)
    folder.write_json(CONFIG, saved_config(run, run_id, where))
    seen = [images.trained_on(), seen_by(config.recipe.weights), trained_on(where)]
    np.save(keys := io.BytesIO(), np.unique(np.concatenate(seen)))
    folder.write_bytes(TRAINED_ON, keys.getvalue())
    return where, checkpoint
