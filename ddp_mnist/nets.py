"""Every net that --model can name: ours, torchvision's, or a class in a file of one's own."""

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_mnist import own_code
from ddp_mnist.data.preparation import Preparation
from ddp_mnist.errors import UsageError, did_you_mean, reason
from ddp_mnist.models import MODELS, Normalised, Shape

Factory = Callable[[int, Shape], nn.Module]
METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order


def build_net(
    name: str, classes: Sequence[str], preparation: Preparation, weights: str | None = None
) -> Normalised:
    """Return a net that takes a data set's pixels and gives logits [B, classes].

    Its weights are new, or those of a file, see `load_weights`. Raise UsageError, in one line, for
    whatever a net of somebody else's can get wrong.
    """
    shape, make = preparation.shape, factory_of(name)
    try:
        net = make(len(classes), shape)
        broken = isinstance(net, nn.Module) and lacks_parameters(net)
    except UsageError:
        raise
    except Exception as error:
        said = own_code.said_by(error, make)
        cure = "it is called with the number of classes and (channels, height, width)"
        if "Module.__init__()" in said or "'_modules'" in said:
            cure = "begin its __init__ with super().__init__()"
        raise UsageError(
            f"--model {name}: cannot be made for {len(classes)} classes of {shape} ({said}); {cure}"
        ) from error
    if not isinstance(net, nn.Module):
        raise UsageError(
            f"--model {name}: gives {type(net).__name__}, not a torch.nn.Module; name a class that"
            " is one, or a function that returns one"
        )
    if broken:
        raise UsageError(f"--model {name}: lacks parameters; put lists of layers in nn.ModuleList")
    model = Normalised(net, preparation)
    for batch in (3, 1):  # as an epoch's last batch, or predict's only one
        try_net(model.eval(), name, len(classes), (batch, *shape))
    if weights:
        load_weights(net, weights, classes)
    return model.train()


def lacks_parameters(net: nn.Module) -> bool:
    """Return whether there are none, or a plain list hides a layer's, which stay untrained."""
    modules = {*net.modules()}
    values = [value for module in modules for value in vars(module).values()]
    listed = [each for value in values if isinstance(value, list) for each in value]
    hidden = [each for each in listed if isinstance(each, nn.Module) and each not in modules]
    return bool(hidden) or not [*net.parameters()]


def factory_of(name: str) -> Factory:
    """Return what makes the net when it is called with the classes and the shape of an image."""
    if name in MODELS:
        return MODELS[name]
    if name.startswith("torchvision:"):
        return functools.partial(from_torchvision, name.partition(":")[2])
    found: Factory = own_code.find("--model", name)
    return found


def try_net(model: nn.Module, name: str, classes: int, shape: tuple[int, ...]) -> Tensor:
    """Return the logits [B, classes] of black images [B, C, H, W], in training after a backward.

    Raise UsageError if the net fails, or gives something else.
    """
    images, mode = list(shape), " in training" if model.training else ""
    try:
        with torch.set_grad_enabled(model.training):
            logits = model(torch.zeros(shape, dtype=torch.uint8))
            if getattr(logits, "requires_grad", False):
                logits.sum().backward()
    except Exception as error:
        known = name in MODELS or name.startswith("torchvision:")  # nothing for the person to mend
        raise UsageError(
            f"--model {name}: fails{mode} on images {images} ({own_code.said_by(error)});"
            f" {'' if known else 'correct its forward, or '}give another --image-size, e.g. 224"
        ) from error
    given = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if given != [shape[0], classes]:
        raise UsageError(
            f"--model {name}: gives {given}{mode} for images {images}, must be logits"
            f" [{shape[0]}, {classes}]; correct its last layer and keep the images apart"
        )
    return logits


def check_backward(model: Normalised, name: str, classes: int, shape: Shape) -> None:
    """Raise UsageError unless each parameter gets a gradient: without one DDP fails.

    Leaves gradients behind, and BatchNorm's statistics: give it a net to be thrown away.
    """
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


def memory_format_of(name: str) -> torch.memory_format:
    """Return the order of a net's weights and maps in memory: channels last, which is faster.

    One's own net gets contiguous ones, because it may .view its maps.
    """
    known = name in MODELS or name.startswith("torchvision:")
    return torch.channels_last if known else torch.contiguous_format


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
        what = "net for classification" if name in models.list_models() else "net"
        raise UsageError(f"--model torchvision:{name}: torchvision has no such {what}{hint}")
    # In training these two give several logits, unless they are made without.
    alone = {"aux_logits": False, "init_weights": True}
    options = alone if name in ("googlenet", "inception_v3") else {}
    net: nn.Module = models.get_model(name, num_classes=classes, **options)
    return net if shape[0] == 3 else GreyAsColour(net)


def code_digest(name: str) -> str:
    """Return the SHA-256 of the file that a user's net is written in; "" for any other."""
    if name in MODELS or name.startswith("torchvision:"):
        return ""
    code = inspect.getsource(own_code.import_module("--model", name))
    return hashlib.sha256(code.encode()).hexdigest()


# --- Weights from a file


def load_weights(net: nn.Module, file: str, classes: Sequence[str]) -> str:
    """Take over the tensors of a .pth or .safetensors file. Return a sentence that says so.

    The last layer keeps its new weights if it was made for other classes. Raises UsageError if
    anything else does not fit.
    """
    flag, cure = f"--weights {file}", "name the --model that it was made for"
    given, made_for = read_weights(file)
    if isinstance(net, GreyAsColour):  # a file of the net itself, or of a run on grey images
        net, given = net.net, {key.removeprefix("net."): given[key] for key in given}
    if getattr(net, "aux_logits", None) is False:  # torchvision's files have them
        given = {key: given[key] for key in given if not key.lower().startswith("aux")}
    own = net.state_dict()
    if odd := [key for key in (*own, *given) if (key in own) != (key in given)]:
        what = "which this net needs" if odd[0] in own else "which this net has not"
        raise UsageError(f"{flag}: has {'no ' * (odd[0] in own)}{odd[0]}, {what}; {cure}")
    layer = [*own][-1].rpartition(".")[0]
    last = [key for key in own if key.rpartition(".")[0] == layer]
    other = [key for key in own if own[key].shape != given[key].shape]
    if misfits := [key for key in other if key not in last]:
        key = misfits[0]
        raise UsageError(
            f"{flag}: {key} has the shape {list(given[key].shape)}, the net's is"
            f" {list(own[key].shape)}; {cure}"
        )
    renamed = made_for is not None and made_for != [*classes]
    anew = last if other or renamed else []
    net.load_state_dict({key: own[key] if key in anew else given[key] for key in own})
    outputs = given[last[0]].shape[:1].numel()
    what = f"{outputs} classes" if outputs != len(classes) else "other classes or sizes"
    return f"from {file}" + f"; {' and '.join(anew)} begin anew: made for {what}" * bool(anew)


def read_weights(file: str) -> tuple[dict[str, Tensor], list[str] | None]:
    """Return a file's tensors, and the names of the classes if it is of a run of ours."""
    flag, path, why = f"--weights {file}", Path(file), "it holds more than tensors, or is damaged"
    if path.is_dir() or path.match("checkpoints/step-*.pt"):
        what, run = ("a folder", path) if path.is_dir() else ("a checkpoint", path.parents[1])
        raise UsageError(f"{flag}: is {what}; give {run}/model.safetensors, of a finished run")
    try:
        if file.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                about = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
                names = opened.keys()
                return {key: opened.get_tensor(key) for key in names}, about.get("classes")
        given = torch.load(file, map_location="cpu", weights_only=True)
        if all(isinstance(tensor, Tensor) for tensor in given.values()):
            return given, None
    except FileNotFoundError as error:
        raise UsageError(f"{flag}: there is no such file; check the path") from error
    except Exception as error:
        why = reason(error) if isinstance(error, OSError) else why
    raise UsageError(f"{flag}: cannot be read ({why}); save net.state_dict() alone")
