"""What a finished model answers for each image of a split, and how often it is right."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddp_mnist.core.evaluation import eval_batch_size
from ddp_mnist.core.task import Classification, Task
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.splits import subset
from ddp_mnist.system.text import shown_name
from ddp_mnist.training.model_file import TrainedModel
from ddp_mnist.training.scores import MANY_CLASSES, interval, number_texts

LIMITS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of `by_limit`
COUNTED = (
    *("class", "n", "groups", "right", "recall", "recall_low", "recall_high"),
    *("answered", "precision", "precision_low", "precision_high"),
)
IMAGE = ("file", "split", "group")  # of which a row of predictions.csv is


@dataclass(frozen=True)
class Answers:
    """What a model answers for the images of a split, in their order."""

    split: str
    files: list[str]  # in the folder of the data set; e.g. `test image 7` of one without a file
    targets: Tensor  # int64 [N], labels; or float32 [N, columns]
    predictions: Tensor  # of the same kind
    probabilities: Tensor  # of the classes, float [N, classes]; [N, 0] of a task of numbers
    losses: Tensor  # float [N]
    groups: Sequence[str] | None = None  # the group of each, if the data set has groups


class Counts(NamedTuple):
    """How often the model gave a class, or a label, and was right."""

    name: str
    images: int  # that show it
    right: int  # of these, those for which it was the answer
    answered: int  # all images for which it was the answer
    groups: int | None = None  # of which its images are, if the data set has groups


@torch.inference_mode()
def answers_of(trained: TrainedModel, images: ImageData, split: str) -> Answers:
    """Return the model's answers for a split of at least one image."""
    rows, numbers, task = subset(images, split), images.rows[split].tolist(), trained.task
    batches = torch.arange(len(rows)).split(eval_batch_size(rows.images))
    outputs = torch.cat([trained.model(rows.take(batch)[0]) for batch in batches])
    probabilities = outputs.softmax(1) if images.classes else outputs[:, :0]
    targets, predictions = rows.targets[rows.rows], task.predict(outputs)
    paths = images.files_of(numbers)
    files = [paths.get(number, f"{split} image {row}") for row, number in enumerate(numbers)]
    losses, groups = task.loss(outputs, targets), images.groups_of(images.rows[split])
    return Answers(split, files, targets, predictions, probabilities, losses, groups)


def written(number: float) -> float:
    """Return a predicted number as files have it, in the seven digits of float32."""
    return float(f"{number:.7g}")


def table(task: Task, splits: Sequence[Answers]) -> Iterator[list[Any]]:
    """Yield predictions.csv: a heading, then a row for each image.

    Of classes it is the truth, the answer and the probability of each; or of these two alone, if
    there are more than MANY_CLASSES. Of a task of numbers it is truth and answer of each column.
    """
    of_classes = isinstance(task, Classification)
    are_many = of_classes and len(task.names) > MANY_CLASSES
    columns = ["truth", "answer", *task.names]
    if are_many:
        columns = ["truth", "answer", "truth_probability", "answer_probability"]
    if not of_classes:
        columns = [f"{kind}_{name}" for name in task.names for kind in ("truth", "answer")]
    yield [*IMAGE, *columns]
    for each in splits:
        for row, file in enumerate(each.files):
            group = each.groups[row] if each.groups else ""
            pair: list[Any] = [of[row].tolist() for of in (each.targets, each.predictions)]
            if of_classes:
                shares = each.probabilities[row].double().round(decimals=6).tolist()
                shares = [shares[label] for label in pair] if are_many else shares
                cells = [*(task.names[label] for label in pair), *shares]
            else:
                cells = [written(x) for both in zip(*pair, strict=True) for x in both]
            yield [file, each.split, group, *cells]


# --- What it gets wrong


def most_certain_mistakes(answers: Answers, names: Sequence[str], most: int) -> dict[int, Any]:
    """Return facts for a page on the most certain mistakes among classes, by the image's row."""
    certainty, wrong = answers.probabilities.amax(1), answers.predictions != answers.targets
    certain_first = certainty.argsort(descending=True, stable=True)
    return {
        row: {
            "label": names[label := int(answers.targets[row])],
            "label_probability": float(answers.probabilities[row, label]),
            "guess": names[int(answers.predictions[row])],
            "guess_probability": float(certainty[row]),
        }
        for row in certain_first[wrong[certain_first]][:most].tolist()
    }


def worst_numbers(answers: Answers, task: Task, most: int) -> dict[int, Any]:
    """Return facts for a page on the images with the largest losses, by the image's row.

    Of labels those that are wrong are told; an image of which nothing is to be told is left out.
    """
    found: dict[int, Any] = {}
    for row in answers.losses.argsort(descending=True, stable=True).tolist():
        is_and_said = (each[row].tolist() for each in (answers.targets, answers.predictions))
        if len(found) < most and (told := wrong_numbers(task, *is_and_said)):
            found[row] = {"told": told}
    return found


def wrong_numbers(task: Task, targets: list[float], predictions: list[float]) -> list[str]:
    """Return an image's predicted numbers next to the true ones; of labels, the wrong ones."""
    names = [shown_name(name) for name in task.names]
    texts = (number_texts(task, each) for each in (targets, predictions))
    columns = zip(names, task.are_labels, targets, predictions, *texts, strict=True)
    told = []
    for name, is_label, target, prediction, is_text, said_text in columns:
        if not is_label:
            told.append(f"{name} {said_text}, is {is_text}")
        elif (target > 0.5) != (prediction > 0.5):
            told.append(f"{'missed' if target > 0.5 else 'false'} {name} ({said_text})")
    return told


# --- How often it is right


def class_counts(
    names: Sequence[str], matrix: np.ndarray, answers: Answers | None = None
) -> list[Counts]:
    """Return the counts of each class, from matrix[label, prediction]; of groups, from answers."""
    counts = (each.tolist() for each in (matrix.sum(1), matrix.diagonal(), matrix.sum(0)))
    found = [Counts(*each) for each in zip(names, *counts, strict=True)]
    if not answers or answers.groups is None:
        return found
    pairs = zip(answers.targets.tolist(), answers.groups, answers.files, strict=True)
    there = {(label, group or file) for label, group, file in pairs}  # without one: one each
    of_class = Counter(label for label, _ in there)
    return [each._replace(groups=of_class[label]) for label, each in enumerate(found)]


def mean_recall(counts: Sequence[Counts]) -> float:
    """Return the mean of the classes' recalls, of those that have images: rare ones count fully."""
    return float(np.mean([each.right / each.images for each in counts if each.images]))


def label_counts(task: Task, answers: Answers) -> list[Counts]:
    """Return the counts of each column that holds only 0 and 1; a number above 0.5 means 1."""
    there, said = answers.targets > 0.5, answers.predictions > 0.5
    sums = (each.sum(0).tolist() for each in (there, there & said, said))
    counts = [Counts(*each) for each in zip(task.names, *sums, strict=True)]
    return [each for each, is_label in zip(counts, task.are_labels, strict=True) if is_label]


def count_table(counts: Sequence[Counts]) -> Iterator[list[Any]]:
    """Yield classes.csv: a heading, then a row for each class or label; intervals are of 95 %."""
    yield [*COUNTED]
    for name, images, right, answered, groups in counts:
        recall, precision = (
            (right / of, *interval(right, of)) if of else (None,) * 3 for of in (images, answered)
        )
        yield [name, images, groups, right, *recall, answered, *precision]


def by_limit(answers: Answers) -> list[tuple[float, int, int]]:
    """Return (limit, images, right ones) of the images whose answer is at least so probable.

    Limits that every answer reaches, as one class in two does 0.5, are left out.
    """
    certainty = answers.probabilities.double().round(decimals=6).amax(1)
    right, rows = answers.predictions == answers.targets, []
    for limit in LIMITS:
        sure = certainty >= limit
        if limit * answers.probabilities.shape[1] > 1:
            rows.append((limit, int(sure.sum()), int((right & sure).sum())))
    return rows
