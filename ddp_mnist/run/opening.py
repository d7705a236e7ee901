"""All ranks agree on settings, data and folder before the first step; they get a TrainingRun."""

import contextlib
import io
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.device import able_to_compile, within_memory
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.launcher_options import GRAD_ACCUM, LauncherOptions
from ddp_mnist.cluster.rendezvous import check_same
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import World
from ddp_mnist.config.faults import wrong_on_purpose
from ddp_mnist.config.flags import flag_values
from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.run import ResolvedConfig, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.batches import ImageData
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import initial_weights, own_code, trial
from ddp_mnist.nets.build import build_net, factory_of, has_batch_norm
from ddp_mnist.nets.losses import image_losses
from ddp_mnist.run import resume, summary, tracking
from ddp_mnist.run.console import Console, draws, panel
from ddp_mnist.run.evaluation import check_scores
from ddp_mnist.run.faults import inject
from ddp_mnist.run.folder import CONFIG, TRAINED_ON, RunFolder
from ddp_mnist.run.identity import FORMAT, facts, identify
from ddp_mnist.run.resume import EarlierRun
from ddp_mnist.run.training_run import TrainingRun


@contextlib.contextmanager
def set_up_run(
    config: TrainConfig, world: World, launch: Launch, folder: RunFolder
) -> Iterator[TrainingRun | None]:
    """Agree with all ranks on settings, data and folder. Yield the run; None if there is none.

    There is none after --dry-run, and where the run that --resume names has finished. Raise a
    DdpMnistError on all ranks: for whatever is missing, damaged, contradictory or different.
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
        config, images = resolve_and_load(config, world, console, found)
        with listen(launch.is_signalled_by_launcher, world.store) as stop:
            check_same(world.store, facts(config, world, images))
            if config.run.dry_run:
                console.print(summary.plan(config, world, images, None))
                yield None
                return
            run = TrainingRun(inject(config, world), world, images, stop, folder, console)
            notes = open_folder(run, found)
            console.print(summary.plan(config, world, images, folder.path))
            with (
                tracking.tracked(config, folder, world, console),
                within_memory(world.accelerator.device, lambda: takes_memory(run)),
                able_to_compile(config.distribution, world.compiler),
            ):
                if world.compiler:
                    notes.append("compiling  the model, which can take minutes")
                for note in notes:
                    console.note(note)
                run.phase("starting")
                yield run


def resolve_and_load(
    config: TrainConfig, world: World, console: Console, found: EarlierRun | None
) -> tuple[ResolvedConfig, ImageData]:
    """Return the flags, with the recipe resolved for this data and world size, and the data.

    Every machine has the data before the first collective; rank 0 decides what `auto` means.
    A run that goes on keeps the values that it began with, but for the flags that were typed.
    """
    config = apply_launcher_options(config, world.launcher_options, console)
    config = resume.inherit(config, found)
    own_code.begin()
    if config.recipe.model:
        factory_of(config.recipe.model)  # a wrong name is refused before the data are read
    losses_of = image_losses(config.recipe.loss)
    config, prepare = apply_named_weights(config, console)
    store, cache_dir, image_options = world.store, config.run.cache_dir, config.run.image_options
    store.broadcast_from_rank0("trackers", lambda: tracking.named(config.run.trackers))
    if config.recipe.metrics:
        store.broadcast_from_rank0("metrics", lambda: check_scores(config.recipe.metrics))
    name, notes = store.broadcast_from_rank0(
        "dataset", lambda: cache.choose(config.run.dataset, cache_dir, image_options, console.note)
    )
    images = cache.load(name, cache_dir, image_options, log=console.note)
    wrong = wrong_on_purpose(config.recipe.inject)
    if unused := hardware.unused_gpus():
        notes = [*notes, f"GPUs: {unused}, so this trains on the CPU; {hardware.GPU_FIX}"]
    warnings = [*wrong, *notes, *images.warnings]
    images = replace(images, warnings=warnings, image_format=prepare(images.image_format))
    store.barrier()
    if found:
        resume.check_images(name, images.digest, found, found.path)
    rows = len(images.train_labels)
    images = images.hold_out(config.recipe.val_size_of(rows))
    recipe = resolve_recipe(
        config.recipe, rows, store.world_size, len(images.val_rows), images.image_format.pictures
    )
    if config.run.profile >= recipe.steps_per_epoch > 1:
        raise UsageError(
            f"--profile {config.run.profile}: an epoch has {recipe.steps_per_epoch} steps; ask for"
            f" at most {recipe.steps_per_epoch - 1}"
        )
    place = cache_dir and str(cache.cache_folder(cache_dir).absolute())
    run = replace(config.run, dataset=from_anywhere(name), cache_dir=place)
    resolved = ResolvedConfig(
        run, config.distribution, config.explicit, config.resumes, recipe=recipe
    )
    sharers = recipe.grad_accum * (1 if config.distribution.sync_bn else store.world_size)
    if taken := check_net(resolved, images, recipe.batch_size // sharers):
        console.print(panel({"weights": taken}))
    if recipe.loss:
        trial.check_loss(losses_of, recipe.loss, len(images.classes), world.accelerator.device)
    return resolved, images


def takes_memory(run: TrainingRun) -> tuple[str, str]:
    """Return the flag that fills a GPU's memory in this phase of the run, and what takes less."""
    recipe, size = run.config.recipe, run.world.accelerator.num_processes
    if run.folder.phase in ("validation", "test"):
        return f"--model {recipe.model}", "use a smaller --image-size, or another --model"
    fix = recipe.in_less_memory(size, can_shrink=not run.config.resumes)
    return f"--batch-size {recipe.batch_size}", fix


def apply_launcher_options(
    config: TrainConfig, options: LauncherOptions, console: Console
) -> TrainConfig:
    """Return the flags with what accelerate launch was asked for; a flag that was typed beats it.

    Print what was asked for and is not done.
    """
    notes, parts, flag = [options.note], options.grad_accum, config.recipe.grad_accum
    if parts and parts != flag:  # 1 asks for nothing: a run that goes on keeps its own
        if "grad_accum" in config.explicit:
            notes.append(f"{GRAD_ACCUM} {parts}: --grad-accum {flag} was typed, and counts")
        else:
            recipe = replace(config.recipe, grad_accum=parts)
            config = replace(config, recipe=recipe, explicit=config.explicit | {"grad_accum"})
    for note in filter(None, notes):
        console.print(panel({"launcher": note}))
    return config


def apply_named_weights(
    config: TrainConfig, console: Console
) -> tuple[TrainConfig, Callable[[ImageFormat], ImageFormat]]:
    """Fetch the weights that --weights names. Return the flags, and how images are prepared then.

    Images get the size that the weights were made for, unless --image-size was given. A run that
    goes on needs no file. Raises as `find_named` and `fetch` do.
    """
    model, weights = config.recipe.model or "the default net", config.recipe.weights
    entry = initial_weights.find_named(model, weights)
    if entry is None:
        return config, lambda image_format: image_format
    if config.initial_weights:
        progress = not config.run.quiet and draws(sys.stderr)
        initial_weights.fetch(config.initial_weights, entry, console.note, progress)
    image_size = config.run.image_size or str(initial_weights.size_of(entry))
    config = replace(config, run=replace(config.run, image_size=image_size))
    return config, partial(initial_weights.prepared_for, entry, model)


def check_net(config: ResolvedConfig, images: ImageData, at_once: int = 2) -> str:
    """Make the net once and throw it away: what is wrong with it is said before a folder is made.

    Return what --weights gives it, in words. Raise as `build_net` and `trial.check` do, or
    UsageError for --sync-bn or --inject batchnorm without BatchNorm.
    """
    recipe = config.recipe
    net = build_net(recipe.model, images.classes, images.image_format)
    trial.check(net, recipe.model, len(images.classes), images.image_format.shape, at_once)
    for needs, typed in (
        (config.distribution.sync_bn, "--sync-bn"),
        (recipe.inject == "batchnorm", "--inject batchnorm"),
    ):
        if needs and not has_batch_norm(net):
            raise UsageError(
                f"{typed}: {recipe.model} has no BatchNorm; use --model cnn_bn or leave it out"
            )
    if config.initial_weights is None:
        return ""
    return initial_weights.load_weights(
        net.net, recipe.model, config.initial_weights, images.classes
    )


def open_folder(run: TrainingRun, found: EarlierRun | None) -> list[str]:
    """Make the run's folder, or take over that of a run that goes on: on rank 0's machine.

    Return lines for the person, on rank 0. Raises as RunFolder.create and resume.load_latest do.
    """
    config, world, notes = run.config, run.world, list[str]()
    run_id = found.run_id if found else uuid.uuid4().hex
    run.identity = identity = identify(config, world, run_id, run.images.digest)
    run.checkpoint = b"" if found else None

    def open_it() -> str:
        if found:
            path = Path(found.path)
            run.checkpoint, lines = resume.load_latest(run.folder, path, identity, config)
            run.folder.begin()
            notes.extend(lines)
        else:
            begin_again = config.run.resume == "auto"
            run.folder.create(config.run.run_dir, run.images.name, begin_again=begin_again)
        return str(run.folder.path)

    run.where = world.store.broadcast_from_rank0(summary.FOLDER_KEY, open_it)
    run.folder.write_json(
        CONFIG,
        {
            "run_id": run_id,
            "format": FORMAT,
            "digest": run.images.digest,
            "own_code": identity.own_code,
            "run": flag_values(config.run) | {"run_dir": run.where, "resume": None},
            "recipe": flag_values(config.recipe),
            "distribution": flag_values(config.distribution)
            | {"backend": world.backend, "mixed_precision": world.precision}
            | {"compile": bool(world.compiler)},
        },
    )
    np.save(keys := io.BytesIO(), run.images.trained_on())
    run.folder.write_bytes(TRAINED_ON, keys.getvalue())
    return notes
