"""Exact metrics of a split on any number of processes.

Predictions and targets are gathered, and the task counts them on rank 0: for classes, with a
subclass of `evaluate.Metric`. Neither the Hub nor a lock file is involved; the rows are counted.
"""

import dataclasses
import importlib
import json
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .accelerator import broadcast_bytes, without_tf32
from .batches import Rows, make_loader
from .task import Task


@dataclass(frozen=True)
class EvalResult:
    """The metrics of a split."""

    name: str  # of the score
    score: float  # mean over the rows: of classes the accuracy, the share of them that is right
    loss: float  # mean over the rows, as `Task.loss` gives it for each
    count: int  # rows, each counted once
    # More scores by name; None for one that these images leave undefined.
    scores: dict[str, float | None] = field(default_factory=dict)
    # Of classes: confusion[label][prediction] = rows, and class_accuracy[label], the share of a
    # class's images that is right, also called its recall; None without an image
    details: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return its entries in JSON."""
        numbers = {self.name: self.score, "loss": self.loss, "count": self.count}
        return {**numbers, **self.details, "scores": self.scores}

    def as_log_line(self, split: str) -> dict[str, float | None]:
        """Return its entries in a log: val_accuracy, val_loss, val_f1 ..."""
        numbers = {self.name: self.score, "loss": self.loss, **self.scores}
        return {f"{split}_{name}": number for name, number in numbers.items()}


def eval_batch_size(images: Tensor, on_gpu: bool = False) -> int:
    """Return how many of these images, [N, C, H, W], to evaluate at once; it changes no result.

    500 small images would not keep a GPU busy; 55 of 224x224 do.
    """
    return max(1, min(4000 if on_gpu else 500, 2**23 // math.prod(images.shape[1:])))


def make_eval_loader(accelerator: Accelerator, rows: Rows, per_process: int | None = None) -> Any:
    """Return a loader that splits `rows` among the processes, in order."""
    # A batch much larger than the split would be filled with repeated rows, only to drop them.
    most = max(1, math.ceil(len(rows) / accelerator.num_processes))
    per_forward = per_process or eval_batch_size(rows.images, accelerator.device.type == "cuda")
    batch_size = min(per_forward, most) * accelerator.num_processes
    return accelerator.prepare_data_loader(make_loader(rows, batch_size=batch_size))


def import_evaluate_meanwhile(accelerator: Accelerator) -> None:
    """Import `evaluate` in a background thread on rank 0, during the first training steps.

    The import takes over a second. Done in the first validation, it would block every rank, and
    none would notice a stop or a lost peer.
    """
    if accelerator.is_main_process:
        module = (".metrics", __package__)
        threading.Thread(target=importlib.import_module, args=module, daemon=True).start()


@torch.no_grad()
def evaluate_split(
    accelerator: Accelerator,
    model: nn.Module,
    loader: DataLoader[Any],
    task: Task,
    after_batch: Callable[[], None] = lambda: None,
) -> EvalResult:
    """Run the model over the whole split, a loader from `make_eval_loader`.

    Return the same EvalResult on every rank. Raise RuntimeError unless every row was counted
    exactly once. `after_batch` is called on all ranks after each batch, and may raise.
    """
    was_training = model.training
    model.eval()
    # BatchNorm's statistics are each rank's own since the last training step: DDP sends rank 0's
    # only before a forward pass.
    if buffers := [*model.buffers()]:
        broadcast(buffers)
    gathered = []
    for images, targets, _ in loader:
        with without_tf32():
            outputs = model(images)
        losses = task.loss(outputs, targets).double()
        # The last batch is padded with repeated rows so that all ranks get equally many;
        # gather_for_metrics drops these again.
        gathered.append(accelerator.gather_for_metrics((targets, task.predict(outputs), losses)))
        after_batch()
    model.train(was_training)

    targets, predictions, losses = (torch.cat(part).cpu() for part in zip(*gathered, strict=True))
    rows = len(loader.dataset)  # type: ignore[arg-type]
    if len(targets) != rows:
        raise RuntimeError(f"counted {len(targets)} rows of a split of {rows}: wrong metrics")
    payload = b""
    if accelerator.is_main_process:
        loss = losses.sum().item() / rows
        found = task.count(predictions, targets)
        numbers = found["scores"].items()
        found["scores"] = {name: x if math.isfinite(x) else None for name, x in numbers}
        metrics = EvalResult(task.name, loss=loss, count=rows, **found)
        payload = json.dumps(dataclasses.asdict(metrics)).encode()
    return EvalResult(**json.loads(broadcast_bytes(accelerator, payload)))
