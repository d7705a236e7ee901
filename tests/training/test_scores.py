from typing import Any

from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.training import scores


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
