"""Classification metrics as classes of `evaluate`, which need neither the Hub nor a lock file.

Importing this imports `evaluate` and `datasets`, which takes over a second: only rank 0 does, when
it has something to count.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np


@contextlib.contextmanager
def missing(*modules: str) -> Iterator[None]:
    """Make imports of these modules fail, as if they were not installed."""
    hidden = [name for name in modules if name not in sys.modules]
    # An import raises ImportError where it finds None.
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# `evaluate` imports these for its Evaluator, which is not used here: half of its import time.
with missing("scipy.stats", "transformers"):
    import evaluate
    from datasets import Features, Sequence, Value

# A split is one example with all its images: `datasets` looks at each example in Python.
WHOLE_SPLIT = Sequence(Value("int64"))

FEATURES = Features({"predictions": WHOLE_SPLIT, "references": WHOLE_SPLIT})


class Accuracy(evaluate.Metric):
    """Share of predictions that equal the reference."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__ or "", citation="", features=FEATURES)

    def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float(np.mean(np.equal(predictions, references)))}


class ConfusionMatrix(evaluate.Metric):
    """How often each class was taken for each: matrix[reference][prediction]."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__ or "", citation="", features=FEATURES)

    def _compute(
        self, predictions: Any, references: Any, classes: int
    ) -> dict[str, list[list[int]]]:
        cells = np.asarray(references) * classes + np.asarray(predictions)
        counts = np.bincount(cells.ravel(), minlength=classes * classes)
        return {"confusion": counts.reshape(classes, classes).tolist()}


def classification_metrics(
    predictions: np.ndarray, references: np.ndarray, classes: int
) -> dict[str, Any]:
    """Count int64 predictions [N] against references [N], both in 0..classes-1.

    Returns:
        {"accuracy": float, "confusion": int[classes][classes]}.
    """
    # Metric.__init__ makes a folder even for what it keeps in memory.
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        accuracy = Accuracy(keep_in_memory=True, cache_dir=scratch)
        confusion = ConfusionMatrix(keep_in_memory=True, cache_dir=scratch)
        inputs = {"predictions": [predictions], "references": [references]}
        return accuracy.compute(**inputs) | confusion.compute(**inputs, classes=classes)
