"""Classification metrics as a class of `evaluate`, which needs neither the Hub nor a lock file.

`Classification` in task.py asks for them. --metrics adds scikit-learn's and the user's own.

Importing this imports `evaluate` and `datasets`, which takes over a second, so only rank 0 does so,
when it has something to count.
"""

import functools
import importlib.abc
import inspect
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ddp_mnist.config import own_code
from ddp_mnist.errors import UsageError, blame, did_you_mean


class Hide(importlib.abc.MetaPathFinder):
    """Hide from this thread what `evaluate` imports for its Evaluator, which is not used here.

    It is half of the import's time. `evaluate` reads ImportError as "is not installed".
    """

    thread = threading.get_ident()

    def find_spec(self, name: str, *_: Any) -> None:
        if name in ("scipy.stats", "transformers") and threading.get_ident() == self.thread:
            raise ModuleNotFoundError(name, name=name)


sys.meta_path.insert(0, hide := Hide())
try:
    import evaluate
    from datasets import Features, Value
finally:
    sys.meta_path.remove(hide)

KNOWN = "f1, precision, recall, balanced_accuracy, cohen_kappa, matthews_corrcoef"


class ClassCounts(evaluate.Metric):
    """Share of correct predictions, how often each class was predicted as each, and --metrics."""

    def _info(self) -> evaluate.MetricInfo:
        columns = Features(dict.fromkeys(("predictions", "references"), Value("int64")))
        return evaluate.MetricInfo(description=self.__doc__ or "", citation="", features=columns)

    def _compute(
        self, predictions: list[int], references: list[int], classes: int, scores: Sequence[str]
    ) -> dict[str, Any]:
        labels, guesses = np.array(references), np.array(predictions)
        cells = np.bincount(labels * classes + guesses, minlength=classes**2)
        confusion = cells.reshape(classes, classes).tolist()
        return {
            "accuracy": float(np.mean(guesses == labels)),
            "confusion": confusion,
            "class_accuracy": [r[c] / sum(r) if sum(r) else None for c, r in enumerate(confusion)],
            "scores": {name: score(name, find_score(name), labels, guesses) for name in scores},
        }


def find_score(name: str) -> Callable[[Any, Any], float]:
    """Return the function of int64 labels [N] and predictions [N] that --metrics NAME means.

    Without a colon it is scikit-learn's NAME or NAME_score, the mean over the classes if it offers
    a choice (macro). Raise UsageError if it is unknown, or if it needs more than predicted classes,
    which a trial with three classes shows.
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
    # The user's own function may be meant for two classes, or undefined without images of a third.
    tried = ([0, 1, 1, 1], [0, 0, 1, 1]) if own else ([0, 1, 2, 1], [0, 2, 2, 1])
    score(name, function, *map(np.array, tried))
    return function


def score(
    name: str, function: Callable[[Any, Any], Any], labels: np.ndarray, predictions: np.ndarray
) -> float:
    """Call the function, silencing its warnings, e.g. about classes that have no image."""
    typed = f"--metrics {name}, of labels and predicted classes"
    with blame(typed, UsageError), warnings.catch_warnings(action="ignore"):
        return float(function(labels.copy(), predictions.copy()))  # it may change them


def classification_metrics(
    predictions: np.ndarray, references: np.ndarray, classes: int, scores: Sequence[str]
) -> dict[str, Any]:
    """Count int64 predictions [N] against references [N], both in 0..classes-1.

    Return accuracy, confusion, class_accuracy, and the `scores` by name.
    """
    # Metric.__init__ makes a folder even if it keeps everything in memory.
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        metric = ClassCounts(keep_in_memory=True, cache_dir=scratch)
        given = {"predictions": predictions, "references": references}
        return metric.compute(**given, classes=classes, scores=scores)
