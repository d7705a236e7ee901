"""All ranks agree on settings, data and folder before the first step; they get a TrainingRun."""

import contextlib
import io
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.rendezvous import check_same
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import World
from ddp_mnist.config.mistakes import wrong_on_purpose
from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.train_config import ResolvedConfig, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.batches import subset
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import initial_weights, trial
from ddp_mnist.nets.build import build_net, factory_of, has_batch_norm
from ddp_mnist.nets.ours import is_known
from ddp_mnist.system.affinity import bound_together
from ddp_mnist.system.console import Console
from ddp_mnist.task import Classification, Task, make_task, options_of
from ddp_mnist.training import plan, resume, tracking
from ddp_mnist.training.evaluation import check_scores
from ddp_mnist.training.folder import CONFIG, TRAINED_ON, RunFolder, trained_on
from ddp_mnist.training.mistakes import inject
from ddp_mnist.training.profiling import STEPS_BEFORE, profiled
from ddp_mnist.training.resume import EarlierRun
from ddp_mnist.training.saved_config import must_be_equal, saved_config
from ddp_mnist.training.training_run import TrainingRun

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum


@contextlib.contextmanager
def set_up_run(
    config: TrainConfig, world: World, launch: Launch, folder: RunFolder, stop: StopSignals
) -> Iterator[TrainingRun | None]:
    """Agree with all ranks on settings, data and folder, and yield the run.

    Yield None if there is nothing to train: after --dry-run, or if --resume names a finished run.
    Raise a DdpMnistError on all ranks for whatever is missing, damaged, contradictory or different.
    """
    verbose = not config.run.quiet
    with (
        Console(verbose and launch.rank == 0, must_arrive=False) as console,
        plan.narrated_elsewhere(world, verbose),
    ):
        earlier = resume.find(config, world.store)
        if earlier and earlier.finished:
            console.print(earlier.finished)
            yield None
            return
        config, images = load_and_resolve(config, world, console, earlier)
        train, device = subset(images, "train"), world.accelerator.device
        task = make_task(config.recipe, images.classes, train, device)
        images = try_before_training(config, images, task, world, console)
        check_same(world.store, must_be_equal(config, world, images))
        if config.run.dry_run:
            console.print(plan.of_run(config, world, images, task, None))
            yield None
            return
        run = TrainingRun(inject(config, world), world, images, task, stop, folder, console)
        open_folder(run, earlier)
        console.print(plan.of_run(config, world, images, task, folder.path))
        with (
            tracking.tracked(config, folder, world),
            profiled(world.accelerator, config.run.profile, run.where) as run.profile,
        ):
            if world.compile_options:
                console.print("compiling  the model, which can take minutes")
            run.phase("starting")
            yield run


# --- Settings and data


def load_and_resolve(
    config: TrainConfig, world: World, console: Console, earlier: EarlierRun | None
) -> tuple[ResolvedConfig, ImageData]:
    """Return the flags and the data set, once the flags are resolved for it and this world size.

    A flag that was typed counts, else the earlier run's, else what fits these images.
    """
    config = resume.inherit(config, earlier) if earlier else config
    config.refuse_contradictions()
    config, named = check_names(config, world.store)
    name, images = load_images(config, world.store, console)
    if named:
        made = initial_weights.normalised_for(named, config.recipe.model or "", images.image_format)
        images = replace(images, image_format=made)
    if earlier:
        resume.check_same_images(name, images.digest, earlier)
    images = images.hold_out(config.recipe.val_size_of(len(images.rows["train"])))
    resolved = resolve(config, name, images, world.store.world_size)
    seen = earlier.saved["left_out"] if earlier else seen_by(resolved.recipe.weights)
    images = images.without(seen, f"--weights {resolved.recipe.weights} was trained on some")
    file = None if named or len(seen) else resolved.initial_weights
    if file and initial_weights.read_weights(file)[1]:  # has the names of classes: a run made it
        lost = f"--weights {file}: without {TRAINED_ON} beside it, this may test on images that it"
        images = images.with_care(f"{lost} has seen")
    return resolved, images


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


def try_before_training(
    config: ResolvedConfig, images: ImageData, task: Task, world: World, console: Console
) -> ImageData:
    """Try net, weights, loss and task on a few images: an error should not wait for the folder.

    Return the data set, with what may spoil a resumed run. Raises as the trials do.
    """
    recipe, shape = config.recipe, images.image_format.shape
    sharers = 1 if config.distribution.sync_bn else world.store.world_size
    if taken := check_net(config, images, task, recipe.batch_size // recipe.grad_accum // sharers):
        console.print(f"weights    {taken}")
    if recipe.loss or recipe.task:
        typed = f"--task {recipe.task}" if recipe.task else f"--loss {recipe.loss}"
        train = subset(images, "train")
        _, targets, _ = train.take([*range(min(3, len(train)))])
        trial.check_task(task, typed, targets.to(world.accelerator.device))
    if not is_known(recipe.model):
        make = partial(build_net, recipe.model, task, images.image_format)
        if lost := trial.check_state(make, recipe.model, shape):
            return images.with_care(lost)
    return images


def check_names(config: TrainConfig, store: Store) -> tuple[TrainConfig, "WeightsEnum | None"]:
    """Refuse unknown names of a net, loss, tracker, metric or weights, before the data is read.

    Return torchvision's weights that --weights names, and the flags with the image size that they
    were made for, unless --image-size was given. Raises as `find_named` does.
    """
    recipe = config.recipe
    if recipe.model:
        factory_of(recipe.model)
    Classification([], recipe.loss)
    named = initial_weights.find_named(recipe.model or "the default net", recipe.weights)
    if named:
        image_size = config.run.image_size or str(initial_weights.size_of(named))
        config = replace(config, run=replace(config.run, image_size=image_size))
    store.broadcast_from_rank0("trackers", lambda: tracking.known_trackers(config.run.trackers))
    if recipe.metrics:
        store.broadcast_from_rank0("metrics", lambda: check_scores(recipe.metrics))
    return config, named


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
    if bound := bound_together(store.place.ranks_here):
        notes = [*notes, bound]
    warnings = [*wrong_on_purpose(config.recipe.inject), *notes, *images.warnings]
    store.barrier()
    return name, replace(images, warnings=warnings)


def seen_by(weights: str | None) -> np.ndarray:
    """Return the keys of the images that the weights were trained on, which lie beside them."""
    if not weights or not (file := Path(weights).resolve()).is_file():
        return np.zeros(0, np.uint64)
    return trained_on(file.parent)


def check_net(config: ResolvedConfig, images: ImageData, task: Task, at_once: int) -> str:
    """Build the net once and discard it, so that errors surface before the run folder exists.

    Return, in words, the origin of its weights if --weights is given. Raise as `build_net` and
    `trial.check` do, or UsageError for --sync-bn or --inject batchnorm without BatchNorm.
    """
    recipe = config.recipe
    net = build_net(recipe.model, task, images.image_format)
    trial.check(net, recipe.model, task.outputs, images.image_format.shape, at_once)
    if (config.distribution.sync_bn or recipe.inject == "batchnorm") and not has_batch_norm(net):
        typed = "--sync-bn" if config.distribution.sync_bn else "--inject batchnorm"
        raise UsageError(
            f"{typed}: {recipe.model} has no BatchNorm; use --model cnn_bn or leave it out"
        )
    if config.initial_weights is None:
        return ""
    return initial_weights.load_weights(net.net, recipe.model, config.initial_weights, task)


# --- The folder


def open_folder(run: TrainingRun, earlier: EarlierRun | None) -> None:
    """Create the run folder on rank 0's machine, or reopen it if the run is resumed.

    Raises as RunFolder.create and resume.load_latest do.
    """
    config, world, folder, images = run.config, run.world, run.folder, run.images
    run.stop.on_first_sigint = run.acknowledge_sigint
    run.stop.on_second_sigint = run.report_second_sigint
    run.run_id = earlier.saved["run_id"] if earlier else uuid.uuid4().hex
    run.checkpoint = b"" if earlier else None

    def open_it() -> str:
        if earlier:
            now = saved_config(config, world, images, run.run_id, earlier.path)
            run.checkpoint, lines = resume.load_latest(folder, earlier, now, config)
            folder.begin()
            for line in lines:
                run.console.print(line)
        else:
            begin_again = config.run.resume == "auto"
            folder.create(config.run.run_dir, images.name, begin_again)
        return str(folder.path)

    run.where = world.store.broadcast_from_rank0(plan.FOLDER_KEY, open_it)
    folder.write_json(CONFIG, saved_config(config, world, images, run.run_id, run.where))
    seen = [images.trained_on(), seen_by(config.recipe.weights), trained_on(run.where)]
    np.save(keys := io.BytesIO(), np.unique(np.concatenate(seen)))
    folder.write_bytes(TRAINED_ON, keys.getvalue())
