"""Classification metrics as a class of `evaluate`, which needs neither the Hub nor a lock file.

Importing this imports `evaluate` and `datasets`, which takes over a second: rank 0, which counts,
does so meanwhile, in a thread.
"""

import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import evaluate
import numpy as np
from datasets import Features, Value


class ClassCounts(evaluate.Metric):
    """Share of correct predictions, how often each class was predicted as each, and more scores."""

    def _info(self) -> evaluate.MetricInfo:
        columns = Features(dict.fromkeys(("predictions", "references"), Value("int64")))
        return evaluate.MetricInfo(description=self.__doc__ or "", citation="", features=columns)

    def _compute(
        self,
        predictions: list[int],
        references: list[int],
        classes: int,
        scores: Mapping[str, Callable[[np.ndarray, np.ndarray], float]],
    ) -> dict[str, Any]:
        labels, guesses = np.array(references), np.array(predictions)
        cells = np.bincount(labels * classes + guesses, minlength=classes**2)
        confusion = cells.reshape(classes, classes).tolist()
        return {
            "accuracy": float(np.mean(guesses == labels)),
            "confusion": confusion,
            # of each class's own images, also called its recall; None without an image
            "class_accuracy": [r[c] / sum(r) if sum(r) else None for c, r in enumerate(confusion)],
            "scores": {name: score(labels, guesses) for name, score in scores.items()},
        }


def classification_metrics(
    predictions: np.ndarray,
    references: np.ndarray,
    classes: int,
    scores: Mapping[str, Callable[[np.ndarray, np.ndarray], float]],
) -> dict[str, Any]:
    """Count int64 predictions [N] against references [N], both in 0..classes-1.

    Return accuracy, confusion, class_accuracy, and the `scores` by name.
    """
    # Metric.__init__ makes a folder even if it keeps everything in memory.
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        metric = ClassCounts(keep_in_memory=True, cache_dir=scratch)
        given = {"predictions": predictions, "references": references}
        return metric.compute(**given, classes=classes, scores=scores)
