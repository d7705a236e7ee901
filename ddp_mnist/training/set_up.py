"""All ranks agree on settings, data and folder before the first step; they get a RecordedRun.

Find the earlier run, what the flags name and the images; choose what is open; try the net; agree;
open the folder.
"""

import contextlib
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.rendezvous import first_difference
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import World
from ddp_mnist.config.flag_fields import flag_name, typed_flag
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.mistakes import wrong_on_purpose
from ddp_mnist.config.recipe import PRETRAINED, resolve_recipe
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.sources import check_still_there, from_anywhere
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import initial_weights
from ddp_mnist.nets.initial_weights import InitialWeights
from ddp_mnist.system.affinity import bound_together
from ddp_mnist.system.console import Console, tell_at_once
from ddp_mnist.system.text import quoted
from ddp_mnist.training import checkpoint, plan, resume, threads, tracking
from ddp_mnist.training.folder import CONFIG, FOLDER_KEY, TRAINED_ON, UNKNOWN, RunFolder
from ddp_mnist.training.named_objects import NamedObjects, find_named
from ddp_mnist.training.pretrained import net_for_photos, net_of_weights
from ddp_mnist.training.profiling import STEPS_BEFORE, profiled
from ddp_mnist.training.recorded_run import OpenedFolder, RecordedRun
from ddp_mnist.training.resume import EarlierRun
from ddp_mnist.training.saved_config import must_be_equal, saved_config
from ddp_mnist.training.threads import Times
from ddp_mnist.training.training_run import TrainingRun, make_run, try_before_training


@contextlib.contextmanager
def set_up_run(
    config: TrainConfig, world: World, folder: RunFolder, stop: StopSignals
) -> Iterator[RecordedRun | None]:
    """Agree with all ranks on settings, data and folder, and yield the run.

    Yield None if there is nothing to train: after --dry-run, or if --resume names a finished run.
    Raise a DdpMnistError on all ranks for whatever is missing, damaged, contradictory or different.
    """
    verbose = not config.run.quiet
    if verbose:
        stop.on_first_sigint = partial(acknowledge, world)
    stop.on_second_sigint = partial(report_last_checkpoint, folder)
    with (
        Console(verbose and world.store.rank == 0, must_arrive=False) as console,
        plan.narrated_elsewhere(world, verbose),
    ):
        earlier = resume.find(config, world.store)
        if earlier and earlier.finished:
            console.print(earlier.finished)
            yield None
            return
        run = resolve_run(config, world, console, earlier)
        run = agree(try_before_training(run, console))
        if run.config.run.dry_run:
            console.print(plan.plan_text(run, None))
            yield None
            return
        opened = open_folder(run, folder, earlier, console)
        console.print(plan.plan_text(run, folder.path))
        with tracking.tracked(run, folder), profiled(run, opened.where) as profile:
            if world.compile_options:
                console.print("compiling  the model, which can take minutes")
            world.store.record_end = folder.record_end
            recorded = RecordedRun(run, stop, folder, console, opened, profile)
            recorded.phase("starting")
            yield recorded
        folder.finished()


# --- Settings and data


def resolve_run(
    config: TrainConfig, world: World, console: Console, earlier: EarlierRun | None
) -> TrainingRun:
    """Return the run, once its flags are resolved for its images and this world size.

    A flag that was typed counts, else the earlier run's, else what fits these images.
    """
    config = resume.inherit(config, earlier) if earlier else config
    config.refuse_contradictions()
    if config.recipe.weights == "DEFAULT" and not config.recipe.model:
        config = replace(config, recipe=replace(config.recipe, model=PRETRAINED))
    named = net_of_weights(config, find_named(config, world.store))

    config, found, lacking = net_for_photos(*named, world)
    config, name, images = images_for_net(config, found, lacking, world, console, earlier)
    misled = found is not named[1] and images.image_format.kind == "strokes"
    if world.store.broadcast_from_rank0("misled by a few images", lambda: misled):
        config, found = named
        config, name, images = images_for_net(config, found, lacking, world, console, earlier)

    if earlier:
        resume.check_same_images(name, images.digest, earlier)
    if images.has_validation:
        given = replace(config.recipe, val_size=len(images.rows["validation"]))
        config = replace(config, recipe=given)
    else:
        images = images.hold_out(config.recipe.val_size_of(len(images.rows["train"])))
    fine_tunes = initial_weights.are_fine_tuned(found.weights, config.recipe.model)
    fine_tunes = fine_tunes and (not earlier or earlier.saved.get("fine_tunes", False))
    config, recipe = resolve(config, name, images, world.store.world_size, fine_tunes)
    images = without_seen(images, config, found, earlier)
    return make_run(config, recipe, world, images, found)


def images_for_net(
    config: TrainConfig,
    found: NamedObjects,
    lacking: str | None,
    world: World,
    console: Console,
    earlier: EarlierRun | None,
) -> tuple[TrainConfig, str, ImageData]:
    """Return the flags, and the data set's name and images, as its weights want them, if any.

    `lacking` tells why it has none.
    """
    if config.recipe.freeze and not found.weights:
        without = "keeps weights, and the net would start from new ones; name them: --weights"
        raise UsageError(f"--freeze: {lacking or without}")
    if found.weights and not (config.run.image_size or earlier):
        size = initial_weights.size_for(found.weights, config.recipe.model)
        config = replace(config, run=replace(config.run, image_size=size))
    if earlier and "dataset" not in config.typed:
        check_still_there(config.run.dataset, f"--resume {earlier.path}")
    name, images = load_images(config, found, world, console)
    if found.weights:
        images = normalised(images, found.weights, config.recipe.model, earlier)
    if lacking:
        images = replace(images, warnings=[lacking, *images.warnings])
    return config, name, images


def without_seen(
    images: ImageData, config: TrainConfig, found: NamedObjects, earlier: EarlierRun | None
) -> ImageData:
    """Return the images; those that --weights has seen neither validate nor test."""
    seen, typed = earlier.saved["left_out"] if earlier else found.seen, config.recipe.weights
    images = images.without(seen, f"--weights {typed} was trained on some")
    if UNKNOWN in found.seen and not earlier:
        without = f"--weights {typed}: without a {TRAINED_ON} of this version next to it"
        images = images.with_caveat(f"{without}, this may test on images that it has seen")
    return images


def normalised(
    images: ImageData, weights: InitialWeights, model: str | None, earlier: EarlierRun | None
) -> ImageData:
    """Return the images with the mean and deviation that the weights were made with.

    A resumed run keeps its own: a file may be gone, and a library may say others by now.
    """
    found = images.image_format
    made = initial_weights.normalised_for(weights, model, found)
    if earlier:
        before = made if weights.published else found  # of a run that does not tell
        mean, std = earlier.saved.get("normalised", (before.mean, before.std))
        made = replace(made, mean=tuple(mean), std=tuple(std))
    guess = None if earlier else initial_weights.guess_of(weights, model, made)
    images = replace(images, image_format=made)
    return images.with_caveat(guess) if guess else images


def load_images(
    config: TrainConfig, found: NamedObjects, world: World, console: Console
) -> tuple[str, ImageData]:
    """Return the data set's name and images; each machine has them before the first collective.

    Rank 0 decides what `auto` means; any other name may stand for another place on each machine.
    """
    flags, store, numbers = config.run, world.store, found.task.columns if found.task else ()
    options = replace(ImageOptions.from_flags(vars(flags)), numbers=numbers)
    chosen, notes = store.broadcast_from_rank0(
        "dataset", lambda: cache.choose(flags.dataset, flags.cache_dir, options, console.print)
    )
    name = chosen if flags.dataset == "auto" else flags.dataset
    images = cache.load(
        name, flags.cache_dir, options, check=store.is_first_here, log=console.print
    )
    refuse_to_draw(config, name, images)
    if unused := hardware.unused_gpus():
        notes = [*notes, f"GPUs: {unused}, so this trains on the CPU; {hardware.GPU_FIX}"]
    if bound := bound_together(store.rank_info.local_world_size):
        notes = [*notes, bound]
    wrong = wrong_on_purpose(config.recipe.inject)
    warnings = [*wrong, *world.notes, *notes, *images.warnings]
    store.barrier()
    return name, replace(images, warnings=warnings)


def refuse_to_draw(config: TrainConfig, dataset: str, images: ImageData) -> None:
    """Raise UsageError for a typed flag on how to draw a split that the data set has."""
    run, has_test = config.run, not images.test_share
    test_size = None if run.test_size is None else f"{run.test_size:g}"
    for name, value, is_there, split in (
        ("test_size", test_size, has_test, "split to test on"),
        ("fold", run.fold, has_test, "split to test on"),
        ("val_size", config.recipe.val_size, images.has_validation, "validation split"),
    ):
        if name in config.typed and is_there:
            fault = f"--dataset {dataset} already has a {split}"
            raise UsageError(f"{typed_flag(name, value)}: {fault}; remove {flag_name(name)}")


def resolve(
    config: TrainConfig, dataset: str, images: ImageData, processes: int, fine_tunes: bool
) -> tuple[TrainConfig, Recipe]:
    """Return the flags, resolved and with places that hold in any folder, and the recipe of `fit`.

    Raises as `resolve_recipe` does, and UsageError if the run has too few steps to profile.
    """
    flags, kind, val_rows = config.run, images.image_format.kind, len(images.rows["validation"])
    rows = len(images.rows["train"]) + val_rows
    resolved, recipe = resolve_recipe(config.recipe, rows, processes, val_rows, kind, fine_tunes)
    if flags.profile and flags.profile + STEPS_BEFORE > recipe.total_steps:
        raise UsageError(
            f"--profile {flags.profile}: the run has {recipe.total_steps} steps, of which the"
            f" first {STEPS_BEFORE} are not profiled; raise --epochs, or ask for fewer"
        )
    cache_dir = flags.cache_dir and str(cache.cache_folder(flags.cache_dir).absolute())
    run = replace(flags, dataset=from_anywhere(dataset), cache_dir=cache_dir)
    return replace(config, run=run, recipe=resolved), recipe


def agree(run: TrainingRun) -> TrainingRun:
    """Return the run, with the step times of the slowest rank, by which all set their threads.

    Raise UsageError if the ranks are about to train differently.
    """

    def decide(everyone: list[tuple[dict[str, Any], Times | None]]) -> tuple[str | None, Any]:
        facts, times = zip(*everyone, strict=True)
        return first_difference([*facts]), threads.slowest(times)

    mine = must_be_equal(run), run.step_times
    difference, times = run.world.store.decide_for_all("facts", mine, decide)
    if difference:
        raise UsageError(difference)
    threads.use_fastest(times)
    return replace(run, step_times=times)


# --- The folder


def open_folder(
    run: TrainingRun, folder: RunFolder, earlier: EarlierRun | None, console: Console
) -> OpenedFolder:
    """Create the run folder on rank 0's machine, or reopen it if the run is resumed.

    Raises as RunFolder.create and resume.load_latest do.
    """
    flags, images = run.config.run, run.images
    run_id = earlier.saved["run_id"] if earlier else uuid.uuid4().hex
    raw, folder.run_id = b"" if earlier else None, run_id

    def open_it() -> str:
        nonlocal raw
        if earlier:
            raw, lines = resume.load_latest(run, folder, earlier)
            folder.begin()
            for line in lines:
                console.print(line)
            trained_on = earlier.saved["trained_on"]  # the images are the same
        else:
            folder.create(flags.run_dir, images.name, begin_again=flags.resume == "auto")
            trained_on = folder.write_keys(np.union1d(images.train_keys(), run.found.seen))
        folder.write_json(CONFIG, saved_config(run, run_id, str(folder.path), trained_on))
        return str(folder.path)

    where = run.world.store.broadcast_from_rank0(FOLDER_KEY, open_it)
    return OpenedFolder(run_id, where, raw)


# --- What is said of Ctrl-C as it is pressed; what it does then, `fit` and the folder decide


def acknowledge(world: World) -> None:
    """Tell what a first Ctrl-C does, once on each machine on which it is pressed."""
    if FOLDER_KEY in world.store.received and world.store.rank_info.local_rank == 0:
        tell_at_once("ddp-mnist: stopping after this step")


def report_last_checkpoint(folder: RunFolder) -> None:
    """After a second Ctrl-C, report the last checkpoint; nothing more is saved."""
    if folder.path is None:
        return
    folder.record_outcome("failed", 130, "interrupted twice")
    rest = "nothing is saved"
    if saved := checkpoint.newest_first(folder.path):
        step = checkpoint.step_of(saved[0])
        go_on = f"to go on, add --resume {quoted(folder.path)}"
        rest = f"nothing after step {step} is saved; {go_on}"
    tell_at_once(f"ddp-mnist: interrupted twice: stopped at once, {rest} (code 130)")
