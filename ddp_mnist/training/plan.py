"""The plan of a run, shown before its first step, and who reports on several machines."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ddp_mnist.cluster.world import World
from ddp_mnist.config.flag_fields import flag_fields, typed_flag
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.splits import rows_of_splits
from ddp_mnist.system.console import Console
from ddp_mnist.system.text import count, first_of, named_lines, printable, shown_name
from ddp_mnist.training.folder import FOLDER_KEY
from ddp_mnist.training.training_run import TrainingRun

# How images of a kind are called, and what augmentation does to them
KINDS = {
    "strokes": ("images of strokes on black", "rotated, scaled, shifted"),
    "characters": ("pictures of characters", "cropped, coloured"),
    "pictures": ("pictures", "mirrored, cropped, coloured"),
}

# What `hold_still` does to a net that starts from weights
KEPT = {
    "statistics": "BatchNorm keeps its statistics",
    "body": "the last layer alone is trained",
}
FEW = 20  # images of a class
WEIGHABLE = 11  # images of a class: from so many on --class-weights helped where it was tried
ONE_LINE = 69  # columns next to the name of a line


def plan_text(run: TrainingRun, folder: Path | None) -> str:
    """Return the resolved run as lines with names, to show before its first step."""
    config, world, images = run.config, run.world, run.images
    recipe, size = run.recipe, world.store.world_size
    train_rows, val_rows, test_rows = map(len, rows_of_splits(images))
    steps = recipe.steps_per_epoch
    left_out = train_rows - steps * recipe.batch_size
    share = recipe.batch_size // size // recipe.grad_accum
    parts = f" x {recipe.grad_accum} parts" if recipe.grad_accum > 1 else ""
    are = "is" if left_out == 1 else "are"
    rest = f"; {count(left_out, 'image')} {are} left out, others in each epoch" if left_out else ""
    compiled = f", compiled by {world.compiled_by}" if world.compile_options else ""
    targets = f"targets {', '.join(map(printable, run.task.names))}"
    targets = f"{len(images.classes)} classes" if images.classes else targets
    lines = {
        "data": f"{images.name}: {train_rows:,} train, {val_rows:,} validation,"
        f" {test_rows:,} test images, {targets}",
        "source": "; ".join([printable(images.source), *images.image_format.notes]),
        **(class_lines(images, config.recipe.class_weights) if images.classes else {}),
        "careful": "; ".join(map(printable, images.caveats)),
        "processes": f"{size} on {count(world.num_machines, 'machine')}, backend {world.backend},"
        f" device {world.device_name}, {count(torch.get_num_threads(), 'thread')} each,"
        f" precision {world.precision}{compiled}",
        "threads": threads_line(run),
        "batch": f"{recipe.batch_size} images a step = {count(size, 'process')}{parts} x {share}",
        "steps": f"{recipe.total_steps:,} = {count(recipe.epochs, 'epoch')} x {steps:,}{rest}",
        "model": f"{run.model}, seed {config.run.seed}"
        + (f", from {printable(str(run.found.weights))}" if run.found.weights else ""),
        "recipe": recipe_line(config, images, run.recipe),
        "writes": str(folder or "nothing but the cache of images (--dry-run)"),
    }
    return "\n".join([*images.warnings, named_lines(lines)])


def threads_line(run: TrainingRun) -> str:
    """Return how the number of threads was chosen; "" if it was set."""
    if not run.step_times:
        return ""
    took = [f"{1000 * seconds:.1f} ms with {n}" for n, seconds in run.step_times.items()]
    return f"{torch.get_num_threads()}, as a step on trial took {' and '.join(took)}"


def recipe_line(config: TrainConfig, images: ImageData, trained: Recipe) -> str:
    """Return how the images are trained on, for which it was chosen, and the flags that were typed.

    A resumed run keeps its original settings, except these flags.
    """
    recipe, classes = config.recipe, len(images.classes)
    kind, changed = KINDS[images.image_format.kind]
    changed = changed if recipe.augment else "not augmented"
    parts = [
        f"{recipe.optimizer}, learning rate up to {recipe.lr:g} in the first {recipe.warmup:.0%} of"
        " the steps",
    ]
    if trained.head_rate != 1:
        parts.append(f"{trained.head_rate:g} times that in the last layer")
    if trained.kept:
        parts.append(KEPT[trained.kept])
    parts.append(changed)
    if recipe.task or recipe.loss:
        parts.append(f"task {recipe.task}" if recipe.task else f"loss {recipe.loss}")
    elif smoothing := recipe.label_smoothing:
        target = (1 - smoothing) * torch.eye(classes)[0] + smoothing / classes
        least = torch.special.entr(target).sum()
        parts.append(
            f"label smoothing {smoothing:g} (the training loss levels off near {least:.2g})"
        )
    if recipe.class_weights == "balanced":
        parts.append("rare classes count more")
    rows = len(images.rows["train"])
    chosen = f"{recipe.preset}, {'kept' if config.resumes else 'chosen'} for {rows:,} {kind}"
    names = [field.name for field in flag_fields(recipe) if field.name in config.typed - {"preset"}]
    typed = ", ".join(printable(typed_flag(name, getattr(recipe, name))) for name in names)
    return f"{chosen}: {', '.join(parts)}" + (f"; typed: {typed}" if typed else "")


def class_lines(images: ImageData, class_weights: str = "none") -> dict[str, str]:
    """Return lines of the plan: the train images of each class, which have few and what helps."""
    labels = images.targets[images.rows["train"]]
    counts = np.bincount(labels, minlength=len(images.classes)).tolist()
    each = [*zip(map(shown_name, images.classes), counts, strict=True)]
    shown = ", ".join(f"{name}: {number:,}" for name, number in each)
    rarest = sorted(each, key=lambda named: named[1])
    (rare, least), (common, most) = rarest[0], rarest[-1]
    if len(shown) > ONE_LINE:
        shown = f"{least:,} ({rare}) to {most:,} ({common}) train images each"
    few = [f"{name} {number}" for name, number in rarest if number < FEW]
    named = ", ".join(first_of(few, 3))
    hint = f"few train images of {named}: below {FEW} a class is hard to learn; add some"
    hint += " or hold out fewer"
    if class_weights == "none" and WEIGHABLE <= least <= most / 2:
        hint += ", or let rare classes count more by --class-weights balanced"
    return {"classes": shown} | ({"hint": hint} if few else {})


@contextlib.contextmanager
def narrated_elsewhere(world: World, verbose: bool) -> Iterator[None]:
    """On each machine except rank 0's, say that it joined, and at the end where the result is."""
    store = world.store
    here = store.rank_info
    console = Console(verbose and store.rank > 0 and here.local_rank == 0, must_arrive=False)
    host = here.main_host
    console.print(
        f"joined     as rank {store.rank} of {store.world_size}; rank 0 on {host} reports"
    )
    yield
    folder = store.received.get(FOLDER_KEY)  # none of a doctor's or a dry run's
    result = f"the result is on {host}, in {folder}" if folder else f"rank 0 on {host} has reported"
    console.print(f"done       {result}")
