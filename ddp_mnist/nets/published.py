"""Nets that torchvision and timm build by name, and the weights that they publish for them."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_mnist.core.nets import Shape
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.system.locks import take
from ddp_mnist.system.text import did_you_mean

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

Factory = Callable[[int, Shape], nn.Module]  # of the number of outputs and an image's shape
NAME = re.compile(r"(torchvision|timm):[\w.]+")
# Trained in TensorFlow, with mean 0.5 and deviation 0.5. torchvision normalises for these weights
# as for all others, and undoes that inside the net.
FROM_TENSORFLOW = ("googlenet", "inception_v3")
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PIP = "pip install timm"


@dataclass(frozen=True)
class Published:
    """Weights that a library publishes for a net; images have to be prepared as they were made."""

    title: str  # e.g. ResNet18_Weights.IMAGENET1K_V1
    side: int  # pixels of the squares that they were made for
    is_fixed: bool  # the net takes no other size
    mean: tuple[float, ...]  # of red, green and blue, as shares of 255
    std: tuple[float, ...]
    classes: list[str]  # their names; [] if they are unknown
    url: str  # where they are published
    place: str  # their file, or the cache that holds it
    fix: str  # what to do where it cannot be fetched
    fetch: Callable[[], dict[str, Tensor]]  # reads them, after a download if they are not there


class GreyAsColour(nn.Module):
    """A net for colour images that is given grey ones, as three equal channels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.expand(-1, 3, -1, -1))


def factory_of(name: str) -> Factory:
    """Return the factory of LIBRARY:NET, for colour images. Raise UsageError for an unknown net."""
    library, _, net = name.partition(":")
    build = {"torchvision": from_torchvision, "timm": from_timm}[library](net)

    def make(outputs: int, shape: Shape) -> nn.Module:
        made = build(outputs, shape)
        return made if shape[0] == 3 else GreyAsColour(made)

    return make


def find_published(name: str, typed: str) -> Published:
    """Return the weights `typed` of LIBRARY:NET, which exists.

    Raise UsageError, which names those that there are, for others.
    """
    library, _, net = name.partition(":")
    return {"torchvision": of_torchvision, "timm": of_timm}[library](net, typed)


# --- torchvision


def from_torchvision(name: str) -> Factory:
    from torchvision import models  # takes over a second, so only where it is used

    names = models.list_models(module=models)
    if name not in names:
        hint = did_you_mean(name, names) or "; see torchvision.models.list_models()"
        raise UsageError(f"--model torchvision:{name}: torchvision has no such classifier{hint}")

    def build(outputs: int, shape: Shape) -> nn.Module:
        return models.get_model(name, num_classes=outputs, **torchvision_options(name, shape))

    return build


def torchvision_options(name: str, shape: Shape) -> dict[str, Any]:
    """Return the arguments of torchvision's `get_model` but the name and `num_classes`."""
    if name in FROM_TENSORFLOW:  # which by default also return auxiliary logits in training
        return {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_") and shape[1] % int(name[-2:]) == 0:  # whole patches
        return {"image_size": shape[1]}  # else 224, and the net takes no other size
    return {}


def of_torchvision(net: str, typed: str) -> Published:
    """A name is perhaps written as on torchvision's pages: ResNet18_Weights.DEFAULT."""
    from torchvision.models import get_model_weights

    entries = get_model_weights(net)
    # Those without categories hold only a part of the net; the rest is NaN.
    names = [name for name, each in entries.__members__.items() if each.meta["categories"]]
    if (name := typed.removeprefix(f"{entries.__name__}.")) not in names:
        legal = ", ".join(sorted(names))
        fault = f"torchvision:{net} has none of that name; choose from {legal}"
        raise UsageError(f"--weights {typed}: {fault}")
    entry: WeightsEnum = entries[name]
    made = entry.transforms()
    halves = ([0.5] * 3, [0.5] * 3)
    mean, std = halves if net in FROM_TENSORFLOW else (made.mean, made.std)
    file = Path(torch.hub.get_dir(), "checkpoints", entry.url.rpartition("/")[2])
    return Published(
        title=str(entry),
        side=made.crop_size[0],
        is_fixed=net.startswith(("vit_", "maxvit_")),
        mean=tuple(mean),
        std=tuple(std),
        classes=entry.meta["categories"],
        url=entry.url,
        place=str(file),
        fix=f"bring {entry.url} there",
        fetch=partial(read_torchvisions, net, entry, file),
    )


def read_torchvisions(net: str, entry: "WeightsEnum", file: Path) -> dict[str, Tensor]:
    """Return the tensors of torchvision's net with these weights.

    torchvision downloads the file, in one process per machine, and its code reads it: in old files
    tensors have other names, or are missing.
    """
    from torchvision.models import get_model

    file.parent.mkdir(parents=True, exist_ok=True)
    with take(file.with_name(f"{file.name}.lock"), wait=True):
        # get_model would run code in the file, and prints its progress
        entry.get_state_dict(check_hash=True, weights_only=True, progress=sys.stderr.isatty())
    return get_model(net, weights=entry).state_dict()


# --- timm


def from_timm(name: str) -> Factory:
    with blame(f"--model timm:{name}", UsageError, PIP):
        import timm
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models()) or "; see timm.list_models()"
        raise UsageError(f"--model timm:{name}: timm has no such net{hint}")

    def build(outputs: int, _: Shape) -> nn.Module:
        return timm.create_model(name, num_classes=outputs)

    return build


def of_timm(net: str, typed: str) -> Published:
    """timm names weights after the net, as in resnet18.a1_in1k, so DEFAULT is their only name."""
    import timm
    from huggingface_hub.constants import HF_HUB_CACHE

    made = timm.get_pretrained_cfg(net) if timm.is_model_pretrained(net) else None
    if typed != "DEFAULT" or not made:
        known = ", ".join(timm.list_pretrained(f"{net.partition('.')[0]}*")) or "none"
        fix = f"give --weights DEFAULT and one of these nets: {known}"
        raise UsageError(f"--weights {typed}: timm:{net} has none of that name; {fix}")
    if isinstance(made.classifier, tuple):  # as of distilled ones
        fault = f"timm:{net} has several last layers, {' and '.join(made.classifier)}"
        raise UsageError(f"--weights {typed}: {fault}; name a net with one")
    folder = f"models--{made.hf_hub_id}".replace("/", "--")
    return Published(
        title=f"timm:{made.architecture}.{made.tag}",
        side=made.input_size[1],
        is_fixed=made.fixed_input_size,
        mean=tuple(made.mean),
        std=tuple(made.std),
        classes=[],
        url=f"https://huggingface.co/{made.hf_hub_id}",
        place=HF_HUB_CACHE,
        fix=f"bring its folder {folder} there from a machine that has fetched it, or set"
        " HF_ENDPOINT to a mirror of the Hub",
        fetch=lambda: timm.create_model(net, pretrained=True).state_dict(),
    )
