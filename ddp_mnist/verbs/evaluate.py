"""`evaluate RUN`: exact metrics of a finished run, on any number of processes.

Only rank 0's machine needs the run folder: rank 0 reads the weights and sends them to the others.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddp_mnist.cluster import rendezvous
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config import own_code
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import flag_values
from ddp_mnist.config.image_options import columns_in
from ddp_mnist.config.mistakes import wrong_on_purpose
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.core.accelerator import broadcast_bytes
from ddp_mnist.core.batches import Rows
from ddp_mnist.core.evaluation import evaluate_split, make_eval_loader
from ddp_mnist.core.task import Classification
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import NAMED_ALIKE, ImageData
from ddp_mnist.data.sources import check_still_there
from ddp_mnist.data.splits import subset
from ddp_mnist.errors import CheckpointError, DataError, UsageError, blame
from ddp_mnist.system.console import Console, warn
from ddp_mnist.system.quick_import import import_metrics_meanwhile
from ddp_mnist.system.text import as_json, joined, printable, quoted, shown_name
from ddp_mnist.task import find_loss, find_score, options_of
from ddp_mnist.training import folder, model_file, scores
from ddp_mnist.training.saved_config import why_others
from ddp_mnist.verbs.flags import Evaluate

MOST_SHOWN = 10  # classes, and pairs of them, if there are many
MOST_NAMED = 50  # files that are looked up; a line holds fewer
Matrix = list[list[int]]  # images, by what they are and what they were taken for
TABLE_COLUMNS = 80  # up to this width, class names head the columns; else numbers


def run(flags: Evaluate, distribution: Distribution) -> None:
    """Print the metrics, on rank 0."""
    metrics = evaluate_run(flags, distribution)
    if metrics is not None:
        Console(True).print(as_json(metrics) if flags.json else metrics_table(metrics))


def evaluate_run(flags: Evaluate, distribution: Distribution) -> dict[str, Any] | None:
    """Return metrics in full precision, as a dict for JSON, on rank 0; None on the other ranks."""
    run, launch = flags.run, find_launch(distribution, trains=False)
    with join_world(distribution, launch, full_precision=True) as world:
        store, accelerator = world.store, world.accelerator
        is_rank0 = store.rank == 0  # which has the run, counts and prints
        content = model_file.read_bytes(run) if is_rank0 else b""
        config = store.broadcast_from_rank0("run", lambda: _read_config(run, flags.metrics))
        extra_scores = {n: find_score(n) for n in config["metrics"]} if is_rank0 else {}
        trained = model_file.from_bytes(broadcast_bytes(accelerator, content), run)
        if loss := config["loss"]:
            was = config["own_code"].get(f"--loss {loss}", "")
            own_code.check_unchanged("--loss", loss, was, run)
        images = _load(flags, config, trained, store)
        store.barrier()
        rendezvous.check_same(store, {"the data's digest": images.digest})
        images = _parted(images, flags.split, config["val_size"], config["left_out"])
        rows = subset(images, flags.split)
        if images.digest != config["digest"]:
            said = store.broadcast_from_rank0("seen", lambda: _check_unseen(flags, images, rows))
            images = images.with_caveat(said) if said else images
        model, task = trained.model.to(accelerator.device), trained.task
        if isinstance(task, Classification):
            task = Classification(task.classes, find_loss(loss), extra_scores)
        if is_rank0:
            import_metrics_meanwhile()
        loader = make_eval_loader(accelerator, rows, flags.batch_size)
        metrics = evaluate_split(accelerator, model, loader, task)
        if not is_rank0:
            return None
        scores.warn_unless_finite(metrics)
        return {
            "run": run,
            "split": flags.split,
            "dataset": images.describe(),
            "world_size": store.world_size,
            "notes": images.notes,
            "classes": images.classes,
            "inject": config["inject"],
            "loss_function": config["task"] or loss or scores.CROSS_ENTROPY,
            "score_name": metrics.name,
            **metrics.as_json(),
        }


# --- The run and the images


def _read_config(run: str, metrics: Sequence[str]) -> dict[str, Any]:
    """Return the run's flags, and what else config.json has that is needed here.

    A flag newer than the run has its default; --metrics, if typed, replaces the run's. Raise
    CheckpointError if config.json is damaged, UsageError for an unknown metric.
    """
    config = folder.read_config(Path(run))
    with blame(f"{run}/{folder.CONFIG}", CheckpointError):
        found = flag_values(RunFlags()) | flag_values(Recipe()) | config["run"] | config["recipe"]
        found |= {name: config.get(name) for name in ("format", "digest", "own_code")}
        found["test_size"] = config.get("test_share")  # what was drawn, not what was asked for
        found["left_out"] = config.get("left_out", [])
    if metrics and found["task"]:
        raise UsageError(f"--metrics: {run} has the task {found['task']}; leave it out")
    found["metrics"] = metrics or found["metrics"]
    return found


def _load(
    flags: Evaluate, config: dict[str, Any], trained: model_file.TrainedModel, store: Store
) -> ImageData:
    """Return the run's data set, or that of --dataset with images of the run's shape and labels.

    Raise DataError if the run's own data set has changed since.
    """
    name, options, test_share = config["dataset"], options_of(config), config["test_size"]
    of_run = None if flags.dataset else cache.dir_of_run(name, config["cache_dir"], options)
    cache_dir = flags.cache_dir or of_run
    load = partial(cache.load, cache_dir=cache_dir, check=store.is_first_here)
    if not flags.dataset:
        check_still_there(name, flags.run)
        images = load(name, options=options)
        now = f"put them back, or evaluate it on the current ones: --dataset {quoted(name)}"
        if found := why_others(images, config, name, now):
            raise DataError(f"{flags.run}: {'; '.join(found)}")
        return images
    options = replace(options, test_size=0, columns=columns_in(flags.columns) or options.columns)
    known, shape = cache.cached(flags.dataset, cache_dir, options), trained.image_format.shape
    if not known or known.image_format.shape != shape:
        options = replace(options, size=shape[1:], grey=shape[0] == 1, for_evaluation=True)
    images = load(flags.dataset, options=options)

    known = store.broadcast_from_rank0("known images", lambda: _known(flags, images, name))
    is_own = images.source == f"folder:{name}"
    # Images from which the run's own test was drawn are split as they were.
    if test_share and (known >= 0.5 or (is_own and known)):
        images = load(flags.dataset, options=replace(options, test_size=test_share))
    if is_own and 0 < known < 1:
        images = images.with_caveat(
            "some images that it was trained on are not there as they were: if their files were"
            " edited, they count as unseen"
        )
    return _relabelled(images, trained.task.names, flags) if images.classes else images


def _known(flags: Evaluate, images: ImageData, dataset: str) -> float:
    """Return the share of the images that the run was trained on which are there.

    To be called on rank 0, which has the run. Raise DataError if it is its own folder, and none is:
    they may have been edited.
    """
    groups = images.groups_at(np.arange(len(images.keys)))
    known = np.setdiff1d(folder.trained_on(flags.run), groups)
    is_there = np.isin(known, np.concatenate([images.keys, images.decoded_keys]))
    if is_there.any():
        return float(is_there.mean())
    if known.size and images.source == f"folder:{dataset}":
        why = f"none of the images that {flags.run} was trained on is in its own folder as it was"
        fix = "put them back, or give images that it has not seen"
        raise DataError(f"--dataset {flags.dataset}: {why}; {fix}")
    return 0.0


def _relabelled(images: ImageData, classes: list[str], flags: Evaluate) -> ImageData:
    """Return the images with the run's labels, matched by class names; -1 for other classes.

    Raise UsageError if an image of the split has such a class.
    """
    index_of = {name: index for index, name in enumerate(classes)}
    counted = images.rows.get(flags.split, images.rows["train"])
    for label in np.unique(images.targets[counted]).tolist():
        if images.classes[label] not in index_of:
            fault = f"class {shown_name(images.classes[label])} is not one of the run's"
            fix = "rename it to one of them, or leave its images out"
            known = joined(map(shown_name, classes), 100)
            raise UsageError(f"--dataset {flags.dataset}: {fault} ({known}); {fix}")
    label_in_run = np.array([index_of.get(name, -1) for name in images.classes])
    return replace(images, classes=classes, targets=label_in_run[images.targets])


def _parted(
    images: ImageData, split: str, val_size: int, seen_by_weights: Sequence[int]
) -> ImageData:
    """Return the data set in the run's parts; it held out `val_size` of the train images."""
    there, why = len(images.rows["train"]), "the run's --weights were trained on some"
    if split == "test":
        return images.without(seen_by_weights, why)
    if images.has_validation or val_size < there:
        images = images.hold_out(val_size).without(seen_by_weights, why)
        if len(images.rows[split]):
            return images
        val_size = len(images.rows["validation"])
    held = f"{images.name} has {there:,} train images, and the run held {val_size:,} out"
    raise UsageError(f"--split {split}: {held}; use --split test")


def _check_unseen(flags: Evaluate, images: ImageData, rows: Rows) -> str:
    """Raise DataError if the run was trained on some of these images; warn if that is unknown.

    Return a caveat if it was trained on groups with the names of theirs, else "". If it is unknown
    and the images were drawn from a train split, as the run's may have been, raise DataError too.
    """
    if flags.split == "train":
        return ""
    numbers = rows.rows.numpy()
    if not (keys := folder.trained_on(flags.run)).size:
        lost = f"{flags.run}: has no {folder.TRAINED_ON} of this version"
        unknown = f"{lost}, so whether it was trained on these is unknown"
        if images.test_share is not None:
            raise DataError(f"{unknown}; give images that it has not seen, in test/CLASS/")
        warn(unknown)
        return ""
    if len(trained_on := numbers[images.are_among(keys, numbers)]):
        paths = images.files_of(trained_on[:MOST_NAMED].tolist()).values()
        those = f"{len(trained_on):,} of these {len(numbers):,} {flags.split} images"
        those += f" ({joined(map(printable, paths), 100)})" if any(paths) else ""
        fault = f"--dataset {flags.dataset}: {flags.run} was trained on {those}"
        raise DataError(f"{fault}; give images that it has not seen, in test/CLASS/")
    if folder.UNKNOWN in keys:
        warn(f"{flags.run}: which images its --weights had seen is unknown, perhaps some of these")
    if (seen := images.of_groups(keys, numbers)).size:
        return f"{flags.run}: {len(seen):,} {flags.split} images are of groups{NAMED_ALIKE}"
    return ""


# --- The table


def metrics_table(metrics: dict[str, Any]) -> str:
    """Return score, loss and the confusion matrix, or the worst of it if that is large."""
    names, score = [shown_name(name) for name in metrics["classes"]], metrics["score_name"]
    class_lines = _worst if len(names) > scores.MANY_CLASSES else _matrix
    loss = scores.shown_loss(metrics, metrics["loss"])
    numbers = [f"{score} {scores.number_text(metrics[score])}", loss]
    numbers += scores.score_texts(metrics["scores"])
    data = printable(metrics["dataset"]["name"])
    lines = [
        *wrong_on_purpose(metrics["inject"]),
        f"{metrics['split']} split of {data}: {metrics['count']:,} images",
        *map(printable, metrics["notes"]),
        "   ".join(numbers),
        *(class_lines(names, metrics["class_accuracy"], metrics["confusion"]) if names else ()),
    ]
    return "\n".join(lines)


def _matrix(names: list[str], accuracies: list[float | None], confusion: Matrix) -> Iterator[str]:
    """Yield the lines of the whole matrix.

    Rows and columns are headed by the names of the classes. If these are too long, columns are
    headed by labels, and rows by both.
    """
    longest, least = max(map(len, names)), max(5, len(str(max(map(max, confusion)))))
    first, heads = max(8, longest), names
    if longest > max(least, (TABLE_COLUMNS - first - 12) // len(names) - 1):
        heads = [str(label) for label in range(len(names))]
        digits = len(heads[-1])
        names = [f"{label:>{digits}} {name}" for label, name in zip(heads, names, strict=True)]
        first = max(map(len, names))
    width = max(least, *map(len, heads))
    yield "rows: what the images are; columns: what they were taken for"
    yield f"{'class':<{first}} accuracy   " + " ".join(f"{head:>{width}}" for head in heads)
    for name, accuracy, row in zip(names, accuracies, confusion, strict=True):
        shown = "-" if accuracy is None else f"{accuracy:.4f}"
        yield f"{name:<{first}} {shown:>8}   " + " ".join(f"{n:>{width}}" for n in row)


def _worst(names: list[str], accuracies: list[float | None], confusion: Matrix) -> Iterator[str]:
    """Yield the lines of the MOST_SHOWN worst classes and most frequent confusions."""
    matrix = np.array(confusion)
    known = [(each, label) for label, each in enumerate(accuracies) if each is not None]
    yield f"accuracy   images   the worst of {len(names):,} classes"
    for accuracy, label in sorted(known)[:MOST_SHOWN]:
        yield f"{accuracy:>8.4f}   {matrix[label].sum():>6,}   {names[label]}"
    yield "images   most often taken for another (--json has all)"
    for label, guess, rows in scores.most_confused(matrix, MOST_SHOWN):
        yield f"{rows:>6,}   {names[label]}, taken for {names[guess]}"
