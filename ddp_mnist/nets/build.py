"""Every net that --model can name: ours, a library's, or a class in the user's own file."""

from typing import Any

import torch
from torch import Tensor, nn

from ddp_mnist.config import own_code
from ddp_mnist.core.nets import MODELS, Shape
from ddp_mnist.core.task import Classification, Task
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.nets import published
from ddp_mnist.nets.published import Factory

# Below it, nets were faster in float32 on a CPU with bf16: ten of eleven.
DENSE_PER_DEPTHWISE = 600


def build_net(name: str, task: Task, image_format: ImageFormat) -> Normalised:
    """Return the net `name`, which takes a data set's pixels and returns the task's outputs.

    The pixels are uint8 [B, C, H, W], the outputs float [B, outputs]: of classes, logits. Raise
    UsageError for a user's net that cannot be made.
    """
    shape, make = image_format.shape, factory_of(name)
    fix = "it is called with the number of outputs and (channels, height, width)"
    # A view of an image may have other numbers, but has the same class.
    shifted_views = name == "cnn_deep" and isinstance(task, Classification)
    with blame(f"--model {name}", UsageError, fix):
        net = make(task.outputs, shape)
        model = Normalised(net, image_format.mean, image_format.std, shifted_views)
        if any(map(nn.parameter.is_lazy, net.parameters())):  # the first images decide their shapes
            with torch.no_grad():
                model.eval()(torch.zeros((2, *shape), dtype=torch.uint8))
    return model.train()


def factory_of(name: str) -> Factory:
    """Return the net's factory.

    Raise UsageError if the net does not exist, or its file cannot be imported.
    """
    if name in MODELS:
        return MODELS[name]
    if is_known(name):
        return published.factory_of(name)
    return own_code.find("--model", name)


def is_known(name: str) -> bool:
    """Return whether the net is built in or a library's, not the user's own."""
    return name in MODELS or bool(published.NAME.match(name))


def gains_by_bf16(net: Normalised, shape: Shape) -> bool:
    """Return whether a CPU that multiplies in bfloat16 trains the net faster in it.

    Depthwise convolutions take longer there than in float32: docs/benchmarks.md has the figures.
    """
    dense, depthwise = 0, 0  # multiplications of other layers; numbers that depthwise ones return

    def count(layer: Any, _images: Any, output: Tensor) -> None:
        nonlocal dense, depthwise
        if isinstance(layer, nn.Conv2d) and layer.groups == layer.in_channels > 1:
            depthwise += output.numel()
        else:
            dense += output.numel() * layer.weight[0].numel()

    layers = (module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear))
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        net.eval()(torch.zeros((1, *shape), dtype=torch.uint8))
    for hook in hooks:
        hook.remove()
    return dense >= DENSE_PER_DEPTHWISE * depthwise


def has_batch_norm(net: nn.Module) -> bool:
    """Return whether the net has BatchNorm, whose results depend on how batches are split."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())
