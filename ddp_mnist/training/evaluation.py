"""Exact metrics of a split on any number of processes.

Predictions and targets are gathered, and the task counts them on rank 0: classes with a class that
derives from `evaluate.Metric`. Neither the Hub nor a lock file is involved; the rows are counted.
"""

import dataclasses
import importlib
import json
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from ddp_mnist.cluster.device import without_tf32
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import broadcast_bytes
from ddp_mnist.data.batches import Rows, eval_batch_size, make_loader
from ddp_mnist.system.console import finite, warn
from ddp_mnist.task import Task

CROSS_ENTROPY = "cross_entropy"  # the name of a run's loss without --loss
MANY_CLASSES = 40  # above it only the largest cells of a matrix are shown


@dataclass(frozen=True)
class EvalResult:
    """The metrics of a split."""

    name: str  # of the score
    score: float  # mean over the rows: of classes the accuracy, the share of them that is right
    loss: float  # mean over the rows: of cross-entropy without label smoothing, in nats
    count: int  # rows, each counted once
    # The values of --metrics, by name; None for one that these images leave undefined.
    scores: dict[str, float | None] = field(default_factory=dict)
    # Of classes: confusion[label][prediction] = rows, and class_accuracy[label], the share that is
    # right, None without a row
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return its entries in the output of `evaluate`."""
        numbers = {self.name: self.score, "loss": self.loss, "count": self.count}
        return {**numbers, **self.details, "scores": self.scores}

    def as_log_line(self, split: str) -> dict[str, float | None]:
        """Return its entries in metrics.jsonl: val_accuracy, val_loss, val_f1 ..."""
        numbers = {self.name: self.score, "loss": self.loss, **self.scores}
        return {f"{split}_{name}": number for name, number in numbers.items()}


def make_eval_loader(accelerator: Accelerator, rows: Rows, per_process: int | None = None) -> Any:
    """Return a loader that splits `rows` among the processes, in order."""
    # With a batch larger than the split, Accelerate would repeat rows to fill it.
    most = max(1, math.ceil(len(rows) / accelerator.num_processes))
    a_pass = per_process or eval_batch_size(rows.images, accelerator.device.type == "cuda")
    batch_size = min(a_pass, most) * accelerator.num_processes
    return accelerator.prepare_data_loader(make_loader(rows, batch_size=batch_size))


def score_texts(scores: dict[str, float | None]) -> list[str]:
    """Return each score that --metrics named, as it is printed."""
    return [f"{name} {number_text(number)}" for name, number in scores.items()]


def number_text(number: float | None) -> str:
    """Return a score as it is printed; None, which files have for NaN, is undefined."""
    if number is None or math.isnan(number):
        return "undefined"
    return f"{number:.4f}" if number == 0 or 1e-3 <= abs(number) < 1e5 else f"{number:.4g}"


def shown_loss(outcome: dict[str, Any], loss: float) -> str:
    """Return the loss of a split as it is printed, with the name of the user's own --loss."""
    function = outcome["loss_function"]
    own = f"{function} " if outcome["classes"] and function != CROSS_ENTROPY else ""
    return f"loss {own}{loss:.4f}"


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


def check_scores(names: Sequence[str]) -> None:
    """Raise UsageError if a name in --metrics is not a metric."""
    from ddp_mnist.metrics import find_score

    for name in names:
        find_score(name)


def import_evaluate_meanwhile(accelerator: Accelerator) -> None:
    """Import `evaluate` in a background thread on rank 0, during the first training steps.

    The import takes over a second. Done in the first validation, it would block every rank, and
    none would notice a signal or a lost peer.
    """
    if accelerator.is_main_process:
        module = ("ddp_mnist.metrics",)
        threading.Thread(target=importlib.import_module, args=module, daemon=True).start()


@torch.no_grad()
def evaluate_split(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader[Any],
    task: Task,
    stop: StopSignals | None = None,
) -> EvalResult:
    """Run the model over the whole split, a loader from `make_eval_loader`.

    Return the same EvalResult on every rank. Raise RuntimeError unless every row was counted
    exactly once. With `stop`, all ranks check after each batch whether any of them got a stop
    signal, and raise as `StopSignals.save_and_raise_if` does.
    """
    was_training = model.training
    model.eval()
    gathered = []
    for images, targets, _ in loader:
        with without_tf32():
            outputs = model(images)
        losses = task.loss(outputs, targets).double()
        # The last batch is padded with repeated rows so that all ranks get equally many;
        # gather_for_metrics drops these again.
        gathered.append(accelerator.gather_for_metrics((targets, task.predict(outputs), losses)))
        if stop:
            stop.ask(accelerator)
    model.train(was_training)

    targets, predictions, losses = (torch.cat(part).cpu() for part in zip(*gathered, strict=True))
    rows = len(loader.dataset)  # type: ignore[arg-type]
    if len(targets) != rows:
        raise RuntimeError(f"counted {len(targets)} rows of a split of {rows}: wrong metrics")
    counted = b""
    if accelerator.is_main_process:
        loss = losses.sum().item() / rows
        found = task.count(predictions, targets)
        found["scores"] = finite(found["scores"])  # JSON has no NaN
        metrics = EvalResult(task.name, loss=loss, count=rows, **found)
        for name, mean in {"loss": loss, task.name: metrics.score}.items():
            if not math.isfinite(mean):
                warn(f"the mean {name} of {rows:,} images is {mean}, null in files")
        counted = json.dumps(dataclasses.asdict(metrics)).encode()
    return EvalResult(**json.loads(broadcast_bytes(accelerator, counted)))
