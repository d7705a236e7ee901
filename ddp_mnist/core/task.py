"""What is learned from the images: their class, or the numbers of a task of your own.

What the outputs mean, the task alone knows. The mean over a batch is taken in `training_loss`:
all ranks have equally many images, so the mean of their gradients is the gradient of the global
batch. A loss is of one image, so that an evaluation can drop the rows that pad its last batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and targets, of each image: float [B]
Score = Callable[[np.ndarray, np.ndarray], float]  # of labels and predictions, int64 [N]


class Task:
    """What is learned. Derive yours from it.

    The targets of an image are the numbers in `columns` of its row, float32 [B, columns] for a
    batch. The outputs are what the net returns for it, float [B, outputs]; in double precision for
    a run in float64. `mean` and `std` are the targets' over the train images, one for each column;
    `are_labels` tells whether all of them are 0 or 1. Classes have none of these.
    """

    columns: tuple[str, ...] = ()  # of the table of the images
    name = "score"  # of `score`, in what is printed and written
    outputs = 0  # how many numbers the net gives for an image; by default one for each column
    names: list[str]  # what the outputs are about: the columns, or the classes

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std, self.names = mean, std, [*self.columns]
        self.outputs = self.outputs or len(self.columns)
        self.are_labels = [False] * len(self.columns)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each image's loss, float [B], which training minimises."""
        raise NotImplementedError

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the predictions, float [B, columns], in the units of the targets."""
        return outputs

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return each image's score, float [B]. Its mean over the validation compares epochs."""
        raise NotImplementedError

    def better(self, score: float, best: float) -> bool:
        """Return whether a score is better than the best one so far."""
        return score > best

    def metrics(self, predictions: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """Return more numbers on a whole split, whose predictions and targets are [N, columns]."""
        del predictions, targets
        return {}

    def scaled(self, targets: Tensor) -> Tensor:
        """Return the targets with mean 0 and deviation 1 over the train images."""
        return (targets - targets.new_tensor(self.mean)) / targets.new_tensor(self.std)

    def unscaled(self, outputs: Tensor) -> Tensor:
        """Return the targets whose `scaled` the outputs are."""
        return outputs * outputs.new_tensor(self.std) + outputs.new_tensor(self.mean)

    # --- How a batch and a split are summed up; a task of numbers keeps these

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of a batch, a scalar."""
        return self.loss(outputs, targets).mean()

    def count(self, predictions: Tensor, targets: Tensor) -> dict[str, Any]:
        """Return the fields of `EvalResult` on a whole split, except its loss and count."""
        score = self.score(predictions, targets).double().mean().item()
        more = self.metrics(predictions.clone().numpy(), targets.clone().numpy())
        if taken := more.keys() & {self.name, "loss"}:
            raise ValueError(f"metrics gives {taken.pop()}, which has another value already")
        return {"score": score, "scores": {name: float(x) for name, x in more.items()}}


@dataclass
class Classification(Task):
    """Which of the classes an image shows: int64 labels [B] are learned from logits [B, classes].

    With `weights`, float32 [classes] on the targets' device, training minimises the mean of the
    weighted losses. PyTorch's own `weight` would divide by the sum of the batch's weights, which
    differs from rank to rank: N processes would not train as one.
    """

    classes: list[str]
    own_loss: Loss | None = None  # else cross-entropy
    scores: Mapping[str, Score] = field(default_factory=dict)  # to compute besides the accuracy
    smoothing: float = 0.0  # of the labels in training
    weights: Tensor | None = None
    name = "accuracy"

    def __post_init__(self) -> None:
        self.names, self.outputs = self.classes, len(self.classes)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each image's own loss, or its cross-entropy without smoothing, in nats."""
        if self.own_loss:
            return self.own_loss(outputs, targets)
        return F.cross_entropy(outputs, targets, reduction="none")

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.own_loss:
            losses = self.own_loss(outputs, targets)
        elif self.weights is None:
            return F.cross_entropy(outputs, targets, label_smoothing=self.smoothing)
        else:
            smoothing = self.smoothing
            losses = F.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)
        return (losses if self.weights is None else losses * self.weights[targets]).mean()

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the class with the highest logit, int64 [B]."""
        return outputs.argmax(1)

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return predictions == targets

    def count(self, predictions: Tensor, targets: Tensor) -> dict[str, Any]:
        from .metrics import classification_metrics  # imports `evaluate`: over a second

        arrays = predictions.numpy(), targets.numpy()
        found = classification_metrics(*arrays, self.outputs, self.scores)
        return {"score": found.pop("accuracy"), "scores": found.pop("scores"), "details": found}


def balanced(labels: Tensor) -> Tensor:
    """Return each class's weight, float32 [classes], from int64 labels [N].

    All classes that have images get equal totals, and the mean over the images is 1.
    """
    counts = labels.bincount()
    return len(labels) / (counts.count_nonzero() * counts.clamp(min=1))
