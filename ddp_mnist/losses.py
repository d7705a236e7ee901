"""The loss: of each image, and its mean over a batch, which is what training minimises.

The mean is taken here and not in a loss of one's own. All ranks have equally many images, so the
mean of their gradients is then that of the global batch; and where a split is evaluated, the rows
that pad its last batch can be left out.
"""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ddp_mnist import own_code
from ddp_mnist.config import Recipe

# Of logits [B, classes] and int64 labels [B]: floats [B], or a scalar, their mean
Loss = Callable[[Tensor, Tensor], Tensor]


def image_losses(name: str | None) -> Loss:
    """Return what gives each image's loss: the function that --loss names, or cross-entropy.

    Raise UsageError if there is no such function, or its file cannot be imported.
    """
    if name:
        found: Loss = own_code.find("--loss", name)
        return found
    return partial(F.cross_entropy, reduction="none")


def make_loss(recipe: Recipe) -> Loss:
    """Return what gives a batch's mean loss."""
    if not recipe.loss:
        return partial(F.cross_entropy, label_smoothing=recipe.label_smoothing)
    losses_of = image_losses(recipe.loss)
    return lambda logits, labels: losses_of(logits, labels).mean()
