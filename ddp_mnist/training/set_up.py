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
from ddp_mnist.config.faults import wrong_on_purpose
from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.run import ResolvedConfig, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.batches import split
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import initial_weights, trial
from ddp_mnist.nets.build import build_net, factory_of, has_batch_norm
from ddp_mnist.nets.ours import is_known
from ddp_mnist.system.console import Console
from ddp_mnist.system.limits import bound_together
from ddp_mnist.task import Classification, Task, find_task, make_task, options_of
from ddp_mnist.training import resume, summary, tracking
from ddp_mnist.training.evaluation import check_scores
from ddp_mnist.training.faults import inject
from ddp_mnist.training.folder import CONFIG, TRAINED_ON, RunFolder, trained_on
from ddp_mnist.training.profiling import STEPS_BEFORE, profiled
from ddp_mnist.training.resume import EarlierRun
from ddp_mnist.training.saved_config import facts, saved_config
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
        summary.narrated_elsewhere(world, verbose),
    ):
        found = resume.find(config, world.store)
        if found and found.finished:
            console.print(found.finished)
            yield None
            return
        config, images, task = resolve_and_load(config, world, console, found)
        check_same(world.store, facts(config, world, images))
        if config.run.dry_run:
            console.print(summary.plan(config, world, images, task, None))
            yield None
            return
        run = TrainingRun(inject(config, world), world, images, task, stop, folder, console)
        open_folder(run, found)
        console.print(summary.plan(config, world, images, task, folder.path))
        with (
            tracking.tracked(config, folder, world),
            profiled(world.accelerator, config.run.profile, run.where) as run.profile,
        ):
            if world.compile_options:
                console.print("compiling  the model, which can take minutes")
            run.phase("starting")
            yield run


# --- Settings and data


def resolve_and_load(
    config: TrainConfig, world: World, console: Console, found: EarlierRun | None
) -> tuple[ResolvedConfig, ImageData, Task]:
    """Return the flags, with the recipe resolved for this data and world size, the data, the task.

    A resumed run keeps its original settings, except those typed on the command line.
    """
    config = resume.inherit(config, found) if found else config
    config.refuse_contradictions()
    config, named = check_names(config, world.store)
    name, images = load_images(config, world.store, console)
    if named:
        made = initial_weights.normalised_for(named, config.recipe.model or "", images.image_format)
        images = replace(images, image_format=made)
    if found:
        resume.check_same_images(name, images.digest, found)
    rows, size = len(images.rows["train"]), world.store.world_size
    images = images.hold_out(config.recipe.val_size_of(rows))
    pictures = images.image_format.pictures
    val_rows = len(images.rows["validation"])
    recipe = resolve_recipe(config.recipe, rows, size, val_rows, pictures, config.resumes)
    if config.run.profile and config.run.profile + STEPS_BEFORE > recipe.total_steps:
        raise UsageError(
            f"--profile {config.run.profile}: the run has {recipe.total_steps} steps, of which the"
            f" first {STEPS_BEFORE} are not profiled; raise --epochs, or ask for fewer"
        )
    place = config.run.cache_dir and str(cache.cache_folder(config.run.cache_dir).absolute())
    run = replace(config.run, dataset=from_anywhere(name), cache_dir=place)
    flags = (run, config.distribution, config.typed, config.resumes)
    resolved = ResolvedConfig(*flags, recipe=recipe)
    sharers = recipe.grad_accum * (1 if config.distribution.sync_bn else size)
    seen = found.saved["left_out"] if found else seen_by(recipe.weights)
    images = images.without(seen, f"--weights {recipe.weights} was trained on some")
    file = None if named or len(seen) else resolved.initial_weights
    if file and initial_weights.read_weights(file)[1]:  # has the names of classes: a run made it
        lost = f"--weights {file}: without {TRAINED_ON} beside it, this may test on images that it"
        images = replace(images, careful=[*images.careful, f"{lost} has seen"])
    device, train = world.accelerator.device, split(images, "train")
    task = make_task(recipe, images.classes, train, device)
    if taken := check_net(resolved, images, task, recipe.batch_size // sharers):
        console.print(f"weights    {taken}")
    if not is_known(recipe.model):
        make = partial(build_net, recipe.model, task, images.image_format)
        if lost := trial.check_state(make, recipe.model, images.image_format.shape):
            images = replace(images, careful=[*images.careful, lost])
    if recipe.loss or recipe.task:
        typed = f"--task {recipe.task}" if recipe.task else f"--loss {recipe.loss}"
        trial.check_task(task, typed, train.take([*range(min(3, len(train)))])[1].to(device))
    return resolved, images, task


def check_names(config: TrainConfig, store: Store) -> tuple[TrainConfig, "WeightsEnum | None"]:
    """Refuse unknown names of a net, loss, tracker, metric or weights, before the data is read.

    Return torchvision's weights that --weights names, and the flags with the image size that they
    were made for, unless --image-size was given. Raises as `find_named` does.
    """
    recipe = config.recipe
    if recipe.model:
        factory_of(recipe.model)
    Classification([], recipe.loss)
    if recipe.task:
        find_task(recipe.task)
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


def open_folder(run: TrainingRun, found: EarlierRun | None) -> None:
    """Create the run folder on rank 0's machine, or reopen it if the run is resumed.

    Raises as RunFolder.create and resume.load_latest do.
    """
    config, world, folder, images = run.config, run.world, run.folder, run.images
    run.stop.answer, run.stop.at_once = run.answer, run.give_up  # of Ctrl-C, from here on
    run.run_id = found.saved["run_id"] if found else uuid.uuid4().hex
    run.checkpoint = b"" if found else None

    def open_it() -> str:
        if found:
            now = saved_config(config, world, images, run.run_id, found.path)
            run.checkpoint, lines = resume.load_latest(folder, found, now, config)
            folder.begin()
            for line in lines:
                run.console.print(line)
        else:
            begin_again = config.run.resume == "auto"
            folder.create(config.run.run_dir, images.name, begin_again)
        return str(folder.path)

    run.where = world.store.broadcast_from_rank0(summary.FOLDER_KEY, open_it)
    folder.write_json(CONFIG, saved_config(config, world, images, run.run_id, run.where))
    seen = [images.trained_on(), seen_by(config.recipe.weights), trained_on(run.where)]
    np.save(keys := io.BytesIO(), np.unique(np.concatenate(seen)))
    folder.write_bytes(TRAINED_ON, keys.getvalue())
