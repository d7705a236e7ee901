"""Every net that --model can name: ours, torchvision's, or a class in a file of one's own."""

import functools
import hashlib
import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ddp_mnist import own_code
from ddp_mnist.data.preparation import Preparation
from ddp_mnist.errors import UsageError, did_you_mean, reason
from ddp_mnist.models import MODELS, Normalised, Shape

Factory = Callable[[int, Shape], nn.Module]
LAST_LAYER = 2  # tensors of a weights file that may have another shape: a weight and a bias


def build_net(
    name: str, classes: int, preparation: Preparation, weights: str | None = None
) -> Normalised:
    """Return a net that takes a data set's pixels and gives logits [B, classes].

    Its weights are new, or those of a file, see `load_weights`.

    Raise UsageError, in one line, for whatever a net of somebody else's can get wrong.
    """
    shape, make = preparation.shape, factory_of(name)
    try:
        net = make(classes, shape)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"--model {name}: cannot be made for {classes} classes of {shape}"
            f" ({own_code.said_by(error)}); it is called with the number of classes and (channels,"
            " height, width)"
        ) from error
    if not isinstance(net, nn.Module):
        raise UsageError(
            f"--model {name}: gives {type(net).__name__}, not a torch.nn.Module; name a class that"
            " is one, or a function that returns one"
        )
    if weights:
        load_weights(net, weights)
    model = Normalised(net, preparation)
    check_logits(model, name, classes, shape)
    return model


def factory_of(name: str) -> Factory:
    """Return what makes the net when it is called with the classes and the shape of an image."""
    if name in MODELS:
        return MODELS[name]
    if name.startswith("torchvision:"):
        return functools.partial(from_torchvision, name.partition(":")[2])
    found: Factory = own_code.find("--model", name)
    return found


def check_logits(model: nn.Module, name: str, classes: int, shape: Shape) -> None:
    """Raise UsageError unless the model gives logits [2, classes] for two black images."""
    model.eval()
    try:
        with torch.no_grad():
            logits = model(torch.zeros(2, *shape, dtype=torch.uint8))
    except Exception as error:
        raise UsageError(
            f"--model {name}: fails on images of {shape} ({own_code.said_by(error)});"
            " correct its forward, or give another --image-size"
        ) from error
    given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if given != [2, classes]:
        raise UsageError(
            f"--model {name}: gives {given} for two images, must be logits [2, {classes}]; correct"
            " its last layer"
        )
    model.train()


def has_batch_norm(net: nn.Module) -> bool:
    """Return whether its steps depend on how a batch is shared out, without --sync-bn."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules())


# --- torchvision's


class GreyAsColour(nn.Module):
    """A net for colour images, given grey ones: its three channels are the same."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.expand(-1, 3, -1, -1))


def from_torchvision(name: str, classes: int, shape: Shape) -> nn.Module:
    """Return one of torchvision's nets for classification, which all take colour images."""
    from torchvision import models  # over a second, so only where it is used

    names = models.list_models(module=models)
    if name not in names:
        hint = did_you_mean(name, names) or "; see torchvision.models.list_models()"
        raise UsageError(f"--model torchvision:{name}: torchvision has no such net{hint}")
    net: nn.Module = models.get_model(name, num_classes=classes)
    return net if shape[0] == 3 else GreyAsColour(net)


def code_digest(name: str) -> str:
    """Return the SHA-256 of the file that a user's net is written in; "" for any other."""
    if name in MODELS or name.startswith("torchvision:"):
        return ""
    code = inspect.getsource(own_code.import_module("--model", name))
    return hashlib.sha256(code.encode()).hexdigest()


# --- Weights from a file


def load_weights(net: nn.Module, file: str) -> None:
    """Take over the tensors of a .pth or .safetensors file.

    The last layer may be made for other classes: it keeps its new weights. Raises UsageError if
    anything else does not fit.
    """
    flag = f"--weights {file}"
    try:
        if file.endswith(".safetensors"):
            from safetensors.torch import load_file

            given = load_file(file)
        else:
            given = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"{flag}: cannot be read ({reason(error)}); give a state_dict") from error
    if isinstance(net, GreyAsColour):  # a file of the net itself, or of a run on grey images
        net, given = net.net, {key.removeprefix("net."): given[key] for key in given}
    own = net.state_dict()
    odd = sorted(given.keys() ^ own.keys())
    if odd:
        raise UsageError(f"{flag}: is of another net ({odd[0]} is in one of both alone)")
    other = [key for key in own if own[key].shape != given[key].shape]
    last = list(own)[-LAST_LAYER:]
    if not set(other) <= set(last):
        raise UsageError(
            f"{flag}: {other[0]} has the shape {list(given[other[0]].shape)}, the net's is"
            f" {list(own[other[0]].shape)}; name the --model that it was made for"
        )
    net.load_state_dict({key: own[key] if key in other else given[key] for key in own})
