"""A run describes itself: the plan, the progress line, summary.json and the last lines."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.store import name_of
from ddp_mnist.cluster.world import World
from ddp_mnist.config.faults import wrong_on_purpose
from ddp_mnist.config.flag_fields import flag_fields, typed_flag
from ddp_mnist.config.run import ResolvedConfig
from ddp_mnist.data.augment import describe_augmentation
from ddp_mnist.data.batches import splits
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import printable, shown_name
from ddp_mnist.nets.initial_weights import find_named
from ddp_mnist.system.console import Console, count, named_lines
from ddp_mnist.task import Task
from ddp_mnist.training import evaluation
from ddp_mnist.training.evaluation import Metrics, number_text, score_texts
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.training.state import State
from ddp_mnist.training.versions import git_commit, package_versions

FEW = 20  # images of a class
WEIGHABLE = 11  # images of a class: from so many on --class-weights helped where it was tried
ONE_LINE = 69  # columns next to the name of a line
FOLDER_KEY = "run folder"  # the broadcast of its path


# --- Before the first step


def plan(
    config: ResolvedConfig, world: World, images: ImageData, task: Task, folder: Path | None
) -> str:
    """Return the resolved run as lines with names, to show before its first step."""
    recipe, size = config.recipe, world.accelerator.num_processes
    train_rows, val_rows, test_rows = map(len, splits(images))
    steps = recipe.steps_per_epoch
    left_out = train_rows - steps * recipe.batch_size
    share = recipe.batch_size // size // recipe.grad_accum
    parts = f" x {recipe.grad_accum} parts" if recipe.grad_accum > 1 else ""
    are = "is" if left_out == 1 else "are"
    rest = f"; {count(left_out, 'image')} {are} left out, others in each epoch" if left_out else ""
    compiled = f", compiled by {world.compiled_by}" if world.compile_options else ""
    lines = {
        "data": f"{images.name}: {train_rows:,} train, {val_rows:,} validation,"
        f" {test_rows:,} test images, {about_targets(images, task)}",
        "source": "; ".join([printable(images.source), *images.image_format.notes]),
        **(by_class(images, recipe.class_weights) if images.classes else {}),
        "careful": "; ".join(map(printable, images.careful)),
        "processes": f"{size} on {count(world.num_machines, 'machine')}, backend {world.backend},"
        f" device {world.device_name}, {count(world.threads, 'thread')} each,"
        f" precision {world.precision}{compiled}",
        "batch": f"{recipe.batch_size} images a step = {count(size, 'process')}{parts} x {share}",
        "steps": f"{recipe.total_steps:,} = {count(recipe.epochs, 'epoch')} x {steps:,}{rest}",
        "model": f"{recipe.model}, seed {config.run.seed}",
        "recipe": recipe_line(config, images),
        "writes": str(folder or "nothing but the cache of images (--dry-run)"),
    }
    return "\n".join([*images.warnings, named_lines(lines)])


def about_targets(images: ImageData, task: Task) -> str:
    """Return in words what an image's targets are."""
    if images.classes:
        return f"{len(images.classes)} classes"
    return f"targets {', '.join(map(printable, task.names))}"


def recipe_line(config: ResolvedConfig, images: ImageData) -> str:
    """Return how the images are trained on, for which it was chosen, and the flags that were typed.

    A resumed run keeps its original settings, except these flags.
    """
    recipe, classes = config.recipe, len(images.classes)
    kind, changed = describe_augmentation(images.image_format, recipe.augment)
    parts = [
        f"{recipe.optimizer}, learning rate up to {recipe.lr:g} in the first {recipe.warmup:.0%} of"
        " the steps",
        changed,
    ]
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


def by_class(images: ImageData, class_weights: str = "none") -> dict[str, str]:
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
    held = {"--val-size": len(images.rows["validation"])}
    held |= {"--test-size": len(images.rows["test"])} if images.test_share else {}
    largest = max(held, key=held.__getitem__)
    fix = f"give a smaller {largest}" if held[largest] > len(labels) else "add some"
    hint = f"few train images of {first_three(few)}: below {FEW} a class is hard to learn; {fix}"
    if class_weights == "none" and WEIGHABLE <= least <= most / 2:
        hint += ", or let rare classes count more by --class-weights balanced"
    return {"classes": shown} | ({"hint": hint} if few else {})


@contextlib.contextmanager
def narrated_elsewhere(world: World, verbose: bool) -> Iterator[None]:
    """On each machine except rank 0's, say that it joined, and at the end where the result is."""
    store = world.store
    console = Console(verbose and store.rank > 0 and world.local_rank == 0, must_arrive=False)
    host = store.place.main_host
    console.print(
        f"joined     as rank {store.rank} of {store.world_size}; rank 0 on {host} reports"
    )
    yield
    folder = f", in {store.received[FOLDER_KEY]}" if FOLDER_KEY in store.received else ""
    console.print(f"done       the result is on {host}{folder}")


# --- While it trains


def step_line(
    line: dict[str, Any], step: int, total_steps: int, left_s: float | None, phase: str = ""
) -> str:
    """Return the line of an optimizer step, in 70 columns; a phase replaces the learning rate.

    `line` is the line for metrics.jsonl, {} before the first step; `left_s` is the time left in
    seconds, None if unknown.
    """
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"loss {loss_text(line)}"] if line else []
    parts += [phase or f"lr {line['lr']:.5f}"]
    if speed := line.get("images_per_second"):
        parts += [f"{speed:,.0f} images/s"]
    if left_s is not None:
        parts += [f"{tqdm.format_interval(left_s)} left"]
    return "  ".join(parts)


def epoch_line(
    epoch: int,
    epochs: int,
    means: dict[str, Any],
    validation: Metrics | None,
    score: str,
) -> str:
    """Return the line of `epoch`, counted from 0, that has ended; `score` is its name."""
    parts = [f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}", f"loss {loss_text(means)}"]
    parts += [f"{score} {number_text(means['score'])}"] if means["score"] is not None else []
    parts += [f"{means['images_per_second']:>6,.0f} images/s"]
    if validation:
        parts += [
            f"validation {number_text(validation.score)}",
            *score_texts(validation.scores),
        ]
    return "  ".join(parts)


def loss_text(line: dict[str, Any]) -> str:
    """Return a mean loss as it is printed; it is None if no batch had a finite one."""
    return "not finite" if line["loss"] is None else f"{line['loss']:.4f}"


# --- At the end


def summarise(
    config: ResolvedConfig,
    world: World,
    images: ImageData,
    state: State,
    test: Metrics,
) -> dict[str, Any]:
    """Return summary.json: the result, and everything needed to judge it.

    Seconds are wall-clock, summed over the parts of a run that was resumed.
    """
    progress, recipe = state.progress, config.recipe
    images_trained_on = progress.step * recipe.batch_size
    named = find_named(recipe.model, recipe.weights)
    device = world.device_name
    gpu = "none used" if device == "cpu" else torch.cuda.get_device_name(device)
    return {
        "outcome": "finished",
        "stopped_by": progress.stopped_by,
        "score_name": test.name,
        f"test_{test.name}": test.score,
        "test_loss": test.loss,
        "test_count": test.count,
        f"val_{test.name}": progress.best_score if state.best_weights else progress.score,
        "epochs": progress.epoch,
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "resumed_from": progress.resumed_from,
        "global_batch_size": recipe.batch_size,
        "world_size": world.accelerator.num_processes,
        "num_machines": world.num_machines,
        "device": device,
        "backend": world.backend,
        "precision": world.precision,
        "compile": world.compiled_by,
        "seed": config.run.seed,
        **{n: getattr(recipe, n) for n in ("model", "inject", "grad_accum", "class_weights")},
        "loss_function": recipe.task or recipe.loss or evaluation.CROSS_ENTROPY,
        "weights": str(named) if named else recipe.weights,  # DEFAULT may mean others one day
        "train_seconds": round(progress.train_seconds, 3),
        "save_seconds": round(progress.save_seconds, 3),
        "total_seconds": round(time.monotonic() - state.started, 3),
        "images_per_second": round(images_trained_on / max(progress.train_seconds, 1e-9), 1),
        "hosts": [name_of(host) for host in world.store.hosts],  # by rank
        "dataset": images.describe(),
        "classes": images.classes,
        "images_per_class": images.per_class() if images.classes else {},
        "notes": [*images.warnings, *images.careful, *images.image_format.notes],
        "metrics": test.scores,
        **test.details,
        **({"confusion": evaluation.packed(test.details["confusion"])} if images.classes else {}),
        "machine": hardware.describe() | {"gpu": gpu},
        "versions": package_versions(),
        "git": git_commit(),
    }


def changed_since(run: str, dataset: str, summary: dict[str, Any], images: ImageData) -> str:
    """Return in words how a run's images have changed; `summary` is its own, {} if that is lost."""
    now, then = images.describe(), summary.get("dataset", {})
    had = "train {train_rows:,}, test {test_rows:,} images"
    counts = [had.format(**each) for each in (then, now) if each]
    what = "other pixels, labels or names" if len({*counts}) < 2 else " then, now ".join(counts)
    return f"{run}: the images of {dataset} have changed since the run ({what})"


def first_three(parts: list[str]) -> str:
    """Return three of the parts at most, and how many more there are."""
    more = [f"{len(parts) - 3} more"] if len(parts) > 3 else []
    return ", ".join([*parts[:3], *more])


def last_lines(outcome: dict[str, Any], run: RunFolder) -> str:
    """Return the result as lines; the first says it all."""
    name, classes = outcome["score_name"], outcome["classes"]
    score, images = outcome[f"test_{name}"], outcome["test_count"]
    wrong = f" ({round((1 - score) * images):,} wrong)" if classes else ""
    loss = evaluation.shown_loss(outcome["loss_function"], outcome["test_loss"])
    of = f"{images:,} images of {outcome['dataset']['name']}"
    result = f"test {name} {number_text(score)} on {of}{wrong}, {loss}"
    lines = {
        "and": ", ".join(score_texts(outcome["metrics"])),
        "trained": f"{outcome['train_seconds']:.1f} s on {count(outcome['world_size'], 'process')},"
        f" {outcome['images_per_second']:,.0f} images/s; {outcome['total_seconds']:.1f} s in all",
        "written to": str(run.path),
    }
    guessed = max(outcome["images_per_class"]["test"]) / images if classes else 0  # largest class
    if classes and score < guessed + 0.1 * (1 - guessed):
        fix = "look at its images (report), then try more --epochs or a lower --lr"
        lines["careful"] = f"that is hardly better than guessing: {fix}"
    lines["see"] = f"{program()} report {run.path}"
    return "\n".join([result, named_lines(lines), *wrong_on_purpose(outcome["inject"])])


def program() -> str:
    """Return the command that starts this program here: `make` activates no environment."""
    if shutil.which("ddp-mnist"):
        return "ddp-mnist"
    return f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m ddp_mnist"
