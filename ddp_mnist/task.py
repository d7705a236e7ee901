"""What is learned from the images: their class, or the numbers of a task of your own.

Training, validation, the report and all other verbs ask the task alone what an output means. The
mean over a batch is taken in `training_loss`: all ranks have equally many images, so the mean of
their gradients is the gradient of the global batch; and an evaluation can ignore the rows that pad
its last batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_mnist.config import own_code
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.data.batches import Rows
from ddp_mnist.errors import UsageError, blame

TASK = "--task"
# What stands beside the score in files and in the output of evaluate; no two runs agree in the last
MEASURED = ("images_per_second", "waiting_for_data", "peak_memory_mb")
OF_THE_RUN = ("loss", "count", "scores", "score_name", "lr", "epoch", "step", "gradient_norm")
TAKEN = (*OF_THE_RUN, *MEASURED)


class Task:
    """What is learned. Derive yours from it, and name it with --task MODULE:CLASS.

    The targets of an image are the numbers in `columns` of its row, float32 [B, columns] for a
    batch. The outputs are what the net returns for it, float [B, outputs]; in double precision for
    a run in fp64. `mean` and `std` are the targets' over the train images, one for each column.
    """

    columns: tuple[str, ...] = ()  # of metadata.csv or of the table
    name = "score"  # of `score`, in what is printed and written
    outputs = 0  # how many numbers the net gives for an image; by default one for each column
    names: list[str]  # what the outputs are about: the columns, or the classes

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std, self.names = mean, std, [*self.columns]
        self.outputs = self.outputs or len(self.columns)

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

    # --- What the rest of the package asks; a task of your own keeps these

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

    def answer(self, outputs: Tensor, top: int) -> dict[str, Any]:
        """Return the answer of the verb predict for one image, from its outputs [1, outputs]."""
        del top  # classes to list
        numbers = [float(f"{x:.7g}") for x in self.predict(outputs)[0].tolist()]
        return {"prediction": dict(zip(self.names, numbers, strict=True))}

    def about(self) -> dict[str, Any]:
        """Return the facts, for JSON, from which `task_from` makes this task again."""
        typed = f"{type(self).__module__}:{type(self).__qualname__}"
        found = {"task": typed, "code": own_code.digest(TASK, typed)}
        return found | {"mean": [*self.mean], "std": [*self.std]}


@dataclass
class Classification(Task):
    """Which of the classes an image shows: int64 labels [B] are learned from logits [B, classes].

    With `weights`, float32 [classes], training minimises the mean of weighted losses. PyTorch's own
    `weight` would divide by the sum of the batch's weights, which differs from rank to rank: N
    processes would not train as one. Raise UsageError if --loss cannot be found.
    """

    classes: list[str]
    own_loss: str | None = None  # what --loss names, else cross-entropy
    more: Sequence[str] = ()  # what --metrics names
    smoothing: float = 0.0  # of the labels in training
    weights: Tensor | None = None
    name = "accuracy"

    def __post_init__(self) -> None:
        self.names, self.outputs = self.classes, len(self.classes)
        self.own = own_code.find("--loss", self.own_loss) if self.own_loss else None

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return each image's --loss, or its cross-entropy without smoothing, in nats."""
        if self.own:
            return self.own(outputs, targets)
        return F.cross_entropy(outputs, targets, reduction="none")

    def training_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.own:
            losses = self.own(outputs, targets)
        else:
            how = "mean" if self.weights is None else "none"
            losses = F.cross_entropy(
                outputs, targets, reduction=how, label_smoothing=self.smoothing
            )
        return (losses if self.weights is None else losses * self.weights[targets]).mean()

    def predict(self, outputs: Tensor) -> Tensor:
        """Return the class with the highest logit, int64 [B]."""
        return outputs.argmax(1)

    def score(self, predictions: Tensor, targets: Tensor) -> Tensor:
        return predictions == targets

    def count(self, predictions: Tensor, targets: Tensor) -> dict[str, Any]:
        from ddp_mnist.metrics import classification_metrics  # imports `evaluate`: over a second

        arrays = predictions.numpy(), targets.numpy()
        found = classification_metrics(*arrays, self.outputs, self.more)
        return {"score": found.pop("accuracy"), "scores": found.pop("scores"), "details": found}

    def answer(self, outputs: Tensor, top: int) -> dict[str, Any]:
        shares = zip(self.classes, outputs.softmax(1)[0].tolist(), strict=True)
        likely = sorted(shares, key=lambda pair: -pair[1])[:top]
        probabilities = {name: round(share, 6) for name, share in likely}
        label, share = next(iter(probabilities.items()))
        return {"label": label, "probability": share, "probabilities": probabilities}

    def about(self) -> dict[str, Any]:
        return {}


def make_task(recipe: Recipe, classes: list[str], train: Rows, device: torch.device) -> Task:
    """Return the task of a run that trains on these rows. Raises as `find_task` does."""
    targets = train.targets[train.rows]
    if recipe.task:
        std = targets.double().std(0, correction=0).tolist()
        scales = [each or 1.0 for each in std]  # of equal numbers
        with blame(f"{TASK} {recipe.task}", UsageError):
            return find_task(recipe.task)(targets.double().mean(0).tolist(), scales)
    weights = balanced(targets).to(device) if recipe.class_weights == "balanced" else None
    given = recipe.loss, recipe.metrics, recipe.label_smoothing
    return Classification(classes, *given, weights)


def task_from(about: dict[str, Any], names: list[str], run: str) -> Task:
    """Return the task that `about` and `names` describe. Raise as `check_unchanged` does."""
    if not about.get("task"):
        return Classification(names)
    own_code.check_unchanged(TASK, about["task"], about["code"], run)
    return find_task(about["task"])(about["mean"], about["std"])


def find_task(name: str) -> type[Task]:
    """Return the class that --task names. Raise UsageError if it is not a Task with columns."""
    found = own_code.find(TASK, name)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UsageError(f"{TASK} {name}: must be a class derived from ddp_mnist.task.Task")
    columns = found.columns
    if not columns or isinstance(columns, str) or len({*columns}) < len(columns):
        raise UsageError(f"{TASK} {name}: needs columns, a tuple of different names")
    if found.name in TAKEN or not found.name.isidentifier():
        raise UsageError(f"{TASK} {name}: name must be one word, and not {found.name}")
    return found


def options_of(flags: Mapping[str, Any]) -> ImageOptions:
    """Return how to read the images, by a run's flags: a task of your own names its columns."""
    columns = find_task(flags["task"]).columns if flags["task"] else ()
    return replace(ImageOptions.of(flags), columns=columns)


def balanced(labels: Tensor) -> Tensor:
    """Return each class's weight, float32 [classes], from int64 labels [N].

    All classes that have images get equal totals, and the mean over the images is 1.
    """
    counts = labels.bincount()
    return len(labels) / (counts.count_nonzero() * counts.clamp(min=1))
