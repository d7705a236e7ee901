"""Classification metrics as classes of `evaluate`, which need neither the Hub nor a lock file.

What a run keeps of them is `Metrics` in evaluation.py; --metrics adds scikit-learn's and one's own.

Importing this imports `evaluate` and `datasets`, which takes over a second: only rank 0 does, when
it has something to count.
"""

import functools
import inspect
import math
import sys
import tempfile
import warnings
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np

from ddp_mnist.errors import UsageError, did_you_mean
from ddp_mnist.nets import own_code

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
KNOWN = "f1, precision, recall, balanced_accuracy, cohen_kappa, matthews_corrcoef"


class Classification(evaluate.Metric):
    """Share of correct predictions, how often each class was taken for each, and --metrics."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(description=self.__doc__ or "", citation="", features=FEATURES)

    def _compute(
        self, predictions: Any, references: Any, classes: int, scores: Several[str]
    ) -> dict[str, Any]:
        labels, guesses = np.ravel(references), np.ravel(predictions)
        confusion = np.bincount(labels * classes + guesses, minlength=classes**2)
        numbers = {name: score(name, find_score(name), labels, guesses) for name in scores}
        return {
            "accuracy": float(np.mean(guesses == labels)),
            "confusion": confusion.reshape(classes, classes).tolist(),
            # JSON has no NaN
            "scores": {name: n if math.isfinite(n) else None for name, n in numbers.items()},
        }


def find_score(name: str) -> Callable[[Any, Any], float]:
    """Return the function of int64 labels [N] and predictions [N] that --metrics NAME stands for.

    Without a colon it is scikit-learn's NAME or NAME_score, the mean over the classes where it has
    a choice (macro). Raise UsageError if there is none, or it needs more than predicted classes,
    as what is made for probabilities says of three classes.
    """
    module, _, called = name.rpartition(":")
    own = module and not module.startswith("sklearn.metrics")  # its functions are given from Python
    if own:
        function = own_code.find("--metrics", name)
    else:
        from sklearn import metrics

        function = getattr(metrics, f"{called}_score", None) or getattr(metrics, called, None)
        if called.startswith("_") or not callable(function) or inspect.isclass(function):
            functions = filter(str.islower, metrics.__all__)
            names = [word.removesuffix("_score") for word in functions if word != name]
            hint = did_you_mean(name, names) or f"; choose e.g. {KNOWN}, or give MODULE:FUNCTION"
            raise UsageError(f"--metrics {name}: scikit-learn has no such metric{hint}")
        takes = inspect.signature(function).parameters
        means = {"average": "macro", "zero_division": 0}
        given = {key: value for key, value in means.items() if key in takes}
        function = functools.partial(function, **given)
    # One's own function may be for two classes, or undefined without an image of a third.
    tried = ([0, 1, 1, 1], [0, 0, 1, 1]) if own else ([0, 1, 2, 1], [0, 2, 2, 1])
    labels, predictions = map(np.array, tried)
    number = score(name, function, labels, predictions)
    if not own and not math.isfinite(number):
        raise UsageError(
            f"--metrics {name}: gives {number} for the labels {labels.tolist()} and the predictions"
            f" {predictions.tolist()}; correct it, or choose another"
        )
    return function


def score(
    name: str, function: Callable[[Any, Any], Any], labels: np.ndarray, predictions: np.ndarray
) -> float:
    """Return what the function says, without its warnings, as of classes that have no image."""
    try:
        with warnings.catch_warnings(action="ignore"):
            return float(function(labels, predictions))
    except Exception as error:
        raise UsageError(
            f"--metrics {name}: gives no number for labels and predicted classes"
            f" ({own_code.locate(error, function)}); correct it, or choose another"
        ) from error


def classification_metrics(
    predictions: np.ndarray, references: np.ndarray, classes: int, scores: Several[str] = ()
) -> dict[str, Any]:
    """Count int64 predictions [N] against references [N], both in 0..classes-1.

    Return {"accuracy": float, "confusion": confusion[reference][prediction] = rows, "scores": those
    that --metrics names, None where one is not finite}.
    """
    # Metric.__init__ makes a folder even for what it keeps in memory.
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        given = {"predictions": [predictions], "references": [references]}
        metric = Classification(keep_in_memory=True, cache_dir=scratch)
        return metric.compute(**given, classes=classes, scores=scores)
