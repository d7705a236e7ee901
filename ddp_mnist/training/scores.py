"""How scores, losses and confusion matrices are written and printed, and a run's lines."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.run import mean_text
from ddp_mnist.core.task import Task
from ddp_mnist.system.console import warn

CROSS_ENTROPY = "cross_entropy"  # the name of a run's loss without --loss
MANY_CLASSES = 40  # above it only the largest cells of a matrix are shown


def warn_unless_finite(metrics: EvalResult) -> None:
    """Warn that the mean loss or score of a split is not a number, which files write as null."""
    for name, mean in {"loss": metrics.loss, metrics.name: metrics.score}.items():
        if not math.isfinite(mean):
            warn(f"the mean {name} of {metrics.count:,} images is {mean}, null in files")


def score_texts(scores: dict[str, float | None]) -> list[str]:
    """Return each score that --metrics named, as it is printed."""
    return [f"{name} {number_text(number)}" for name, number in scores.items()]


def number_text(number: float | None) -> str:
    """Return a score as it is printed; None, which files have for NaN, is undefined."""
    if number is None or math.isnan(number):
        return "undefined"
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.4g}"


def interval(right: int, images: int) -> tuple[float, float]:
    """Return the bounds between which the share of right answers lies, at 95 %.

    Wilson's score interval: E. B. Wilson, Probable inference, 1927. Near 1 and for few images it
    holds too, where the share +- 2 standard errors does not. It takes the images as independent.
    """
    from scipy.stats import binomtest  # slow

    return tuple(binomtest(right, images).proportion_ci(method="wilson"))


def share_text(right: int, images: int) -> str:
    """Return a share with its interval, e.g. 0.67 (0.30 to 0.90), in two to four decimals.

    They are as many as the number of images has digits; more would pretend to know.
    """
    if not images:
        return "-"
    digits = min(max(2, len(str(images))), 4)
    share, low, high = (f"{x:.{digits}f}" for x in (right / images, *interval(right, images)))
    return f"{share} ({low} to {high})"


def number_texts(task: Task, numbers: Sequence[float]) -> list[str]:
    """Return the predictions of a task of numbers as they are printed; labels get two decimals."""
    pairs = zip(numbers, task.are_labels, strict=True)
    return [f"{x:z.2f}" if is_label else f"{x:.4g}" for x, is_label in pairs]


def shown_loss(outcome: dict[str, Any], loss: float) -> str:
    """Return the loss of a split as it is printed, with the name of the user's own --loss."""
    function = outcome["loss_function"]
    name = f"{function} " if outcome["classes"] and function != CROSS_ENTROPY else ""
    return f"loss {name}{loss:.4f}"


def packed(confusion: list[list[int]]) -> list[list[int]]:
    """Return the matrix as summary.json has it: for more than MANY_CLASSES classes, only its cells.

    A cell is [label, prediction, rows], and those without a row are left out: with 1,000 classes
    the whole matrix takes 9 MB.
    """
    if len(confusion) <= MANY_CLASSES:
        return confusion
    cells = np.array(confusion)
    return [[*map(int, pair), int(cells[*pair])] for pair in np.argwhere(cells)]


def unpacked(confusion: list[list[int]], classes: int) -> np.ndarray:
    """Return the whole matrix [classes, classes] from the result of `packed`."""
    if len(confusion[0]) == classes:
        return np.array(confusion)
    matrix = np.zeros((classes, classes), dtype=np.int64)
    labels, predictions, rows = np.array(confusion).T
    matrix[labels, predictions] = rows
    return matrix


def most_confused(matrix: np.ndarray, most: int) -> list[tuple[int, int, int]]:
    """Return (label, prediction, rows) for each confused pair, the most frequent first."""
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[: min(most, np.count_nonzero(wrong))]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [(int(label), int(guess), int(wrong[label, guess])) for label, guess in pairs]


# --- The lines of a run while it trains: of a step, and of an epoch


def step_line(
    line: dict[str, Any], step: int, total_steps: int, left_s: float | None, phase: str = ""
) -> str:
    """Return the line of an optimizer step, in 70 columns; a phase replaces the learning rate.

    `line` is the line for metrics.jsonl, {} before the first step; `left_s` is the time left in
    seconds, None if unknown.
    """
    parts = [f"step {step:>{len(str(total_steps))}}/{total_steps}"]
    parts += [f"loss {mean_text(line['loss'])}"] if line else []
    parts += [phase or f"lr {line['lr']:.5f}"]
    if speed := line.get("images_per_second"):
        parts += [f"{speed:,.0f} images/s"]
    if left_s is not None:
        parts += [f"{tqdm.format_interval(left_s)} left"]
    return "  ".join(parts)


def epoch_line(
    epoch: int, epochs: int, means: dict[str, Any], validation: EvalResult | None, score: str
) -> str:
    """Return the line of `epoch`, counted from 0, that has ended; `score` is its name."""
    parts = [f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}", f"loss {mean_text(means['loss'])}"]
    parts += [f"{score} {number_text(means['score'])}"] if means["score"] is not None else []
    parts += [f"{means['images_per_second']:>6,.0f} images/s"]
    if validation:
        validated = f"validation {number_text(validation.score)}"
        parts += [validated, *score_texts(validation.scores)]
    return "  ".join(parts)
