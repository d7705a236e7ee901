"""Classification metrics as a class of `evaluate`, which needs neither the Hub nor a lock file.

Importing this imports `evaluate` and `datasets`, which takes over a second: only rank 0 does, when
it has something to count.
"""

import sys
import tempfile
from typing import Any

import numpy as np

# `evaluate` imports these for its Evaluator, which is not used here: half of its import time. An
# import that finds None raises ImportError, which `evaluate` takes for "is not installed".
hidden = [name for name in ("scipy.stats", "transformers") if name not in sys.modules]
sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
try:
    import evaluate
    from datasets import Features, Sequence, Value
finally:
    for name in hidden:
        del sys.modules[name]

# A split is one example with all its images: `datasets` looks at each example in Python.
WHOLE_SPLIT = Sequence(Value("int64"))
FEATURES = Features({"predictions": WHOLE_SPLIT, "references": WHOLE_SPLIT})


class Classification(evaluate.Metric):
    """Share of correct predictions, and how often each class was taken for each."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__ or "", citation="", features=FEATURES)

    def _compute(self, predictions: Any, references: Any, classes: int) -> dict[str, Any]:
        cells = np.asarray(references) * classes + np.asarray(predictions)
        confusion = np.bincount(cells.ravel(), minlength=classes**2).reshape(classes, classes)
        accuracy = float(np.mean(np.equal(predictions, references)))
        return {"accuracy": accuracy, "confusion": confusion.tolist()}


def classification_metrics(
    predictions: np.ndarray, references: np.ndarray, classes: int
) -> dict[str, Any]:
    """Count int64 predictions [N] against references [N], both in 0..classes-1.

    Return {"accuracy": float, "confusion": confusion[reference][prediction] = rows}.
    """
    # Metric.__init__ makes a folder even for what it keeps in memory.
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        metric = Classification(keep_in_memory=True, cache_dir=scratch)
        return metric.compute(predictions=[predictions], references=[references], classes=classes)
