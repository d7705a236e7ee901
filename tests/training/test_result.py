from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.training import result
from ddp_mnist.training.folder import RunFolder


def test_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome: dict[str, Any] = {"test_accuracy": 0.9912, "test_count": 10_000, "test_loss": 0.03456}
    outcome |= {"dataset": {"name": "mnist"}, "world_size": 2, "images_per_second": 8617.3}
    outcome |= {"metrics": {}, "train_seconds": 12.34, "total_seconds": 15.67, "inject": None}
    outcome |= {"steps": 300, "score_name": "accuracy", "classes": [*"0123456789"]}
    outcome |= {"images_per_class": {"test": [1000] * 10}, "loss_function": "cross_entropy"}
    monkeypatch.setattr(result, "program", lambda: "ddp-mnist")
    folder = RunFolder()
    folder.path = Path("run")
    scored = {**outcome, "metrics": {"f1": 0.98761, "own:score": 0.5}}
    assert result.last_lines(scored, folder).splitlines() == [
        "test accuracy 0.9912 on 10,000 images of mnist (88 wrong), loss 0.0346",
        "and        f1 0.9876, own:score 0.5000",
        "trained    12.3 s on 2 processes, 8,617 images/s; 15.7 s in all",
        "written to run",
        "see        ddp-mnist report run",
    ]
    for accuracy, images, is_guessed in (
        (0.11, [1000] * 10, True),
        (0.5, [1000] * 10, False),
        (0.905, [9000, 1000], True),  # all are taken for the larger of two
        (0.99, [5000, 5000], False),
    ):
        changed = {**outcome, "test_accuracy": accuracy, "images_per_class": {"test": images}}
        assert ("careful    " in result.last_lines(changed, folder)) is is_guessed
