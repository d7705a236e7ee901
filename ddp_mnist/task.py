"""The task of a run: classes, or the numbers that --task names, with its loss and its scores."""

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ddp_mnist.config import own_code
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.core.batches import Rows
from ddp_mnist.core.meter import MEASURED
from ddp_mnist.core.task import Classification, Loss, Score, Task, balanced
from ddp_mnist.errors import UsageError, blame

__all__ = ["Classification", "Task"]  # which a file of --task derives from

TASK = "--task"
# What else a line of metrics.jsonl, or the output of evaluate, has beside a task's own numbers
TAKEN = ("loss", "count", "scores", "score_name", "lr", "epoch", "step", "gradient_norm", *MEASURED)
KNOWN = "f1, precision, recall, balanced_accuracy, cohen_kappa, matthews_corrcoef"


def make_task(
    recipe: Recipe,
    classes: list[str],
    train: Rows,
    device: torch.device,
    scores: Mapping[str, Score] | None = None,
) -> Task:
    """Return the task of a run that trains on these rows. Raise UsageError if it cannot be made.

    `scores` are what --metrics names, on rank 0, which counts.
    """
    targets = train.targets[train.rows]
    if recipe.task:
        numbers = targets.double()
        # Equal numbers have no deviation.
        scales = [each or 1.0 for each in numbers.std(0, correction=0).tolist()]
        with blame(f"{TASK} {recipe.task}", UsageError):
            task = find_task(recipe.task)(numbers.mean(0).tolist(), scales)
        task.are_labels = ((numbers == 0) | (numbers == 1)).all(0).tolist()
        return task
    weights = balanced(targets).to(device) if recipe.class_weights == "balanced" else None
    loss = find_loss(recipe.loss)
    return Classification(classes, loss, scores or {}, recipe.label_smoothing, weights)


def task_from(about: dict[str, Any], names: list[str], run: str) -> Task:
    """Return the task that `about_task` described. Raise as `check_unchanged` does."""
    if not about.get("task"):
        return Classification(names)
    own_code.check_unchanged(TASK, about["task"], about["code"], run)
    task = find_task(about["task"])(about["mean"], about["std"])
    # Earlier versions did not write it: of numbers from 0 to 1, only labels have this variance.
    pairs = zip(task.mean, task.std, strict=True)
    guesses = [math.isclose(std**2, mean * (1 - mean), rel_tol=1e-9) for mean, std in pairs]
    task.are_labels = about.get("are_labels", guesses)
    return task


def about_task(task: Task) -> dict[str, Any]:
    """Return the facts, for JSON, from which `task_from` makes a task of numbers again."""
    if isinstance(task, Classification):
        return {}
    name = f"{type(task).__module__}:{type(task).__qualname__}"
    found = {"task": name, "code": own_code.digest(TASK, name)}
    return found | {"mean": [*task.mean], "std": [*task.std], "are_labels": task.are_labels}


def find_task(name: str) -> type[Task]:
    """Return the class that --task names. Raise UsageError if it is not a Task with columns."""
    found = own_code.find(TASK, name)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UsageError(f"{TASK} {name}: must be a class derived from ddp_mnist.task.Task")
    columns = found.columns
    if not columns or isinstance(columns, str) or len({*columns}) < len(columns):
        raise UsageError(f"{TASK} {name}: needs columns, a tuple of different names")
    if found.name in TAKEN or not found.name.isidentifier():
        raise UsageError(f"{TASK} {name}: name must be one word, and not {found.name}")
    return found


def find_loss(name: str | None) -> Loss | None:
    """Return the function that --loss names. Raise UsageError if it cannot be found."""
    return own_code.find("--loss", name) if name else None


def options_of(flags: Mapping[str, Any]) -> ImageOptions:
    """Return how to read the images, by a run's flags: a task of your own names its columns."""
    numbers = find_task(flags["task"]).columns if flags["task"] else ()
    return replace(ImageOptions.from_flags(flags), numbers=numbers)


# --- --metrics


def find_score(name: str) -> Score:
    """Return the function of int64 labels [N] and predictions [N] that --metrics NAME means.

    Without a colon it is scikit-learn's NAME or NAME_score, the mean over the classes if it offers
    a choice (macro). Raise UsageError if it is unknown, or if it needs more than predicted classes,
    which a trial with three classes shows.
    """
    module, _, called = name.rpartition(":")
    # scikit-learn's functions have a module too, if they are given from Python.
    is_users = module and not module.startswith("sklearn.metrics")
    if is_users:
        function = own_code.find("--metrics", name)
    else:
        from sklearn import metrics

        function = getattr(metrics, f"{called}_score", None) or getattr(metrics, called, None)
        if called.startswith("_") or not callable(function) or inspect.isclass(function):
            fix = f"choose e.g. {KNOWN}, or give MODULE:FUNCTION"
            raise UsageError(f"--metrics {name}: scikit-learn has no such metric; {fix}")
        takes = inspect.signature(function).parameters
        means = {"average": "macro", "zero_division": 0}
        options = {key: value for key, value in means.items() if key in takes}
        function = functools.partial(function, **options)
    score = functools.partial(_score, name, function)
    # The user's own function may be meant for two classes, or undefined without images of a third.
    tried = ([0, 1, 1, 1], [0, 0, 1, 1]) if is_users else ([0, 1, 2, 1], [0, 2, 2, 1])
    score(*map(np.array, tried))
    return score


def _score(
    name: str, function: Callable[[Any, Any], Any], labels: np.ndarray, predictions: np.ndarray
) -> float:
    """Call the function, silencing its warnings, e.g. about classes that have no image."""
    prefix = f"--metrics {name}, of labels and predicted classes"
    with blame(prefix, UsageError), warnings.catch_warnings(action="ignore"):
        return float(function(labels.copy(), predictions.copy()))  # it may change them
