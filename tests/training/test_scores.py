from typing import Any

from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.task import Task
from ddp_mnist.training import scores


def test_a_share_has_as_many_decimals_as_its_images_tell() -> None:
    """Cetonia and Rosalia are of a biologist's report, with their intervals by hand."""
    assert scores.share_text(6, 18) == "0.33 (0.16 to 0.56)"
    assert scores.share_text(4, 4) == "1.00 (0.51 to 1.00)"
    assert scores.share_text(100, 120) == "0.833 (0.757 to 0.889)"
    assert scores.share_text(899, 1000) == "0.8990 (0.8788 to 0.9162)"
    assert scores.share_text(0, 0) == "-"


def test_labels_have_two_decimals() -> None:
    task = Task([0.4, 24.0, 1.0], [0.5, 4.0, 1.0])
    task.are_labels = [True, False, True]
    shown = scores.number_texts(task, [8.068e-05, 24.8712, -0.001])
    assert shown == ["0.00", "24.87", "0.00"]


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
