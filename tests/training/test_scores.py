import math
from typing import Any

import pytest
import torch

from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.task import Task
from ddp_mnist.training import scores


@pytest.mark.parametrize("right", [0, 1, 6, 18, 899, 1000])
@pytest.mark.parametrize("images", [1, 18, 1000])
def test_an_interval_is_wilsons(right: int, images: int) -> None:
    """By its formula: the shares whose own standard error is 1/1.96 of their distance."""
    if right > images:
        return
    z, share = 1.959963984540054, right / images
    middle = (share + z**2 / (2 * images)) / (1 + z**2 / images)
    half = z * math.sqrt(share * (1 - share) / images + z**2 / (4 * images**2))
    expected = middle - half / (1 + z**2 / images), middle + half / (1 + z**2 / images)
    assert scores.interval(right, images) == pytest.approx(expected, abs=1e-12)


def test_a_share_has_as_many_decimals_as_its_images_tell() -> None:
    """Cetonia and Rosalia are of a biologist's report, with their intervals by hand."""
    assert scores.share_text(6, 18) == "0.33 (0.16 to 0.56)"
    assert scores.share_text(4, 4) == "1.00 (0.51 to 1.00)"
    assert scores.share_text(100, 120) == "0.833 (0.757 to 0.889)"
    assert scores.share_text(899, 1000) == "0.8990 (0.8788 to 0.9162)"
    assert scores.share_text(0, 0) == "-"


def test_labels_are_known_by_mean_and_deviation_and_have_two_decimals() -> None:
    """So a model tells of itself which of its columns were 0 and 1 in training."""
    columns = [[0.0, 1, 1, 0, 0], [0.1, 0.9, 0.8, 0, 1], [17, 29, 24.9, 20, 21], [1, 1, 1, 1, 1]]
    numbers = torch.tensor(columns).double().T
    task = Task(numbers.mean(0).tolist(), numbers.std(0, correction=0).tolist())
    assert scores.are_labels(task) == [True, False, False, True]
    shown = scores.number_texts(task, [8.068e-05, 8.068e-05, 24.8712, -0.001])
    assert shown == ["0.00", "8.068e-05", "24.87", "0.00"]


def test_step_line() -> None:
    line: dict[str, Any] = {"loss": 0.51234, "lr": 0.0099, "images_per_second": 12345.6}
    shown = scores.step_line(line, 25, 3810, 44.1)
    assert shown == "step   25/3810  loss 0.5123  lr 0.00990  12,346 images/s  00:44 left"
    assert len(shown) <= 70  # beside a bar, in 80 columns
    shown = scores.step_line(line, 25, 3810, 44.1, "validation")  # a phase, which needs no room
    assert shown == "step   25/3810  loss 0.5123  validation  12,346 images/s  00:44 left"
    line |= {"loss": None, "images_per_second": 0.0}
    assert scores.step_line(line, 1, 10, None) == "step  1/10  loss not finite  lr 0.00990"


def test_epoch_line() -> None:
    means = {"loss": 0.51234, "score": 0.97, "images_per_second": 12345.6}
    more = {"f1": 0.98761, "recall": None}
    decided = EvalResult("accuracy", 0.99139, loss=0.1, count=10, scores=more)
    assert scores.epoch_line(1, 10, means, decided, "accuracy") == (
        "epoch  2/10  loss 0.5123  accuracy 0.9700  12,346 images/s  validation 0.9914  f1 0.9876"
        "  recall undefined"
    )
