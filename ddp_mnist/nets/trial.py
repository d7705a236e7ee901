"""Try a net and a loss, forward and backward, before a run begins; a failure is one line."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor, nn

from ddp_mnist.data.image_format import Shape
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import own_code
from ddp_mnist.nets.ours import Normalised


def check(model: Normalised, name: str, classes: int, shape: Shape, at_once: int = 2) -> None:
    """Raise UsageError if the net fails, or DDP would: each parameter has to get a gradient.

    `at_once` is how many images BatchNorm gets in training: 1x1 maps of one image have no variance.
    The trial changes gradients and BatchNorm's statistics: pass a net that will be discarded.
    """
    if lacks_parameters(model.net):
        raise UsageError(f"--model {name}: lacks parameters; put lists of layers in nn.ModuleList")
    for batch in (3, 1):  # as in an epoch's last batch, or predict's only one
        try_net(model.eval(), name, classes, (batch, *shape))
    if not try_net(model.train(), name, classes, (2, *shape)).requires_grad:
        raise UsageError(
            f"--model {name}: its logits have no gradient; compute them without torch.no_grad(),"
            " detach() and new tensors"
        )
    for key, parameter in model.net.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            raise UsageError(
                f"--model {name}: {key} has no part in the logits; use it in forward, or remove it"
            )
    if at_once == 1:
        try_net(model, name, classes, (1, *shape))


def lacks_parameters(net: nn.Module) -> bool:
    """Return whether a net lacks parameters, or hides layers in a plain list, untrained."""
    modules = {*net.modules()}
    values = chain.from_iterable(vars(module).values() for module in modules)
    listed = chain.from_iterable(value for value in values if isinstance(value, list))
    hidden = any(isinstance(each, nn.Module) and each not in modules for each in listed)
    return hidden or not [*net.parameters()]


def try_net(model: nn.Module, name: str, classes: int, shape: tuple[int, ...]) -> Tensor:
    """Return the logits [B, classes] of black images [B, C, H, W], in training after a backward.

    Raise UsageError if the net fails, or returns something else.
    """
    images, mode = list(shape), " in training" if model.training else ""
    try:
        with torch.set_grad_enabled(model.training):
            logits = model(torch.zeros(shape, dtype=torch.uint8))
            if getattr(logits, "requires_grad", False):
                logits.sum().backward()
    except own_code.FAILURES as error:
        cure = "correct its forward, or give another --image-size, e.g. 224"
        if model.training and shape[0] == 1:  # with two images it did not fail
            cure = "give a larger --batch-size, so that each process has 2 images or more at once"
        raise UsageError(
            f"--model {name}: fails{mode} on images {images} ({own_code.locate(error)}); {cure}"
        ) from error
    given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if given != [shape[0], classes]:
        raise UsageError(
            f"--model {name}: gives {given}{mode} for images {images}, must be logits"
            f" [{shape[0]}, {classes}]; correct its last layer and keep the images apart"
        )
    return logits


def check_loss(
    losses_of: Callable[[Tensor, Tensor], Tensor], name: str, classes: int, device: torch.device
) -> None:
    """Raise UsageError unless --loss gives each image's loss, and the logits a gradient.

    The trial runs on the training's device, as constants in the user's file may be on a different
    one.
    """
    for batch in (3, 1):
        logits = torch.linspace(-2, 2, batch * classes, device=device).view(batch, classes)
        labels = torch.arange(batch, device=device) % classes
        on = f"logits {list(logits.shape)} and labels [{batch}]"
        try:
            losses = torch.as_tensor(losses_of(logits.requires_grad_(), labels))
            each_has_one = losses.is_floating_point() and losses.shape == labels.shape
            if losses.requires_grad:
                losses.sum().backward()
        except own_code.FAILURES as error:
            why = own_code.locate(error, losses_of)
            raise UsageError(f"--loss {name}: fails on {on} ({why}); correct it") from error
        if not each_has_one:
            problem = "give the float loss of each image, not their mean: e.g. reduction='none'"
        elif not losses.requires_grad:
            problem = "compute it from the logits without torch.no_grad(), detach() and argmax()"
        elif not losses.isfinite().all():
            problem = "correct it, so that it is finite"
        else:
            continue
        raise UsageError(f"--loss {name}: gives {losses.tolist()} for {on}; {problem}")
