"""The loss of each image, and its mean over a batch, which training minimises.

The mean is taken here, not in a user's loss. All ranks have equally many images, so the mean of
their gradients is the gradient of the global batch; and an evaluation can ignore the rows that pad
its last batch.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_mnist.config.recipe import Recipe
from ddp_mnist.data.batches import Rows
from ddp_mnist.nets import own_code

# From logits [B, classes] and int64 labels [B] to floats [B], or to a scalar, their mean.
Loss = Callable[[Tensor, Tensor], Tensor]


def image_losses(name: str | None, smoothing: float = 0.0) -> Loss:
    """Return the function for each image's loss, floats [B]: that of --loss, or cross-entropy.

    Raise UsageError if the function does not exist, or its file cannot be imported.
    """
    if name:
        found: Loss = own_code.find("--loss", name)
        return found
    return partial(F.cross_entropy, label_smoothing=smoothing, reduction="none")


def make_loss(recipe: Recipe, rows: Rows, device: torch.device) -> Loss:
    """Return the function for a batch's mean loss, a scalar; `rows` are the train rows.

    With --class-weights it is the mean of weighted losses. PyTorch's own `weight` would divide by
    the sum of the batch's weights, which differs from rank to rank: N processes would not train as
    one.
    """
    if not recipe.loss and recipe.class_weights == "none":
        return partial(F.cross_entropy, label_smoothing=recipe.label_smoothing)
    losses_of = image_losses(recipe.loss, recipe.label_smoothing)
    if recipe.class_weights == "none":
        return lambda logits, labels: losses_of(logits, labels).mean()
    weights = balanced(rows.labels[rows.rows]).to(device)
    return lambda logits, labels: (losses_of(logits, labels) * weights[labels]).mean()


def balanced(labels: Tensor) -> Tensor:
    """Return each class's weight, float32 [classes], from int64 labels [N].

    All classes that have images get equal totals, and the mean over the images is 1.
    """
    counts = labels.bincount()
    return len(labels) / (counts.count_nonzero() * counts.clamp(min=1))
