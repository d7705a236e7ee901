"""The weights that --weights names: those in a file, or a library's, by name."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddp_mnist.config.recipe import FINE_TUNED_SIDE, NETS
from ddp_mnist.core.task import Task
from ddp_mnist.core.wrappers import last_layer
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.nets.published import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    NAME,
    GreyAsColour,
    Published,
    find_published,
)
from ddp_mnist.system.files import regular

METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order


class InitialWeights(NamedTuple):
    """What --weights names."""

    typed: str
    published: Published | None  # else `typed` is a file
    about: dict[str, Any]  # what a run of ours wrote into its file; else {}

    def __str__(self) -> str:
        return self.published.title if self.published else self.typed


def find_weights(model: str, weights: str | None) -> InitialWeights | None:
    """Find the weights that --weights names for the net of --model; None without any.

    A name is a word in capitals, such as DEFAULT, perhaps after its class. Raise UsageError if the
    net has no weights of that name, or the file cannot be read.
    """
    if weights in (None, "none"):
        return None
    if not re.fullmatch(r"(\w+_Weights\.)?[A-Z0-9_]+", weights):
        return InitialWeights(weights, None, about_file(weights))
    if not NAME.match(model):
        fix = "give a .pth or .safetensors file, or use --model torchvision:NAME or timm:NAME"
        raise UsageError(f"--weights {weights}: {model} has none by name; {fix}")
    return InitialWeights(weights, find_published(model, weights), {})


# --- What they want of the images


def are_fine_tuned(weights: InitialWeights | None, model: str | None) -> bool:
    """Return whether there are weights, of another net than ours, whose recipes suit them too."""
    return bool(weights) and model not in (None, *NETS)


def size_for(weights: InitialWeights, model: str | None) -> str | None:
    """Return the --image-size that suits a net which starts from these weights; None: any."""
    if not are_fine_tuned(weights, model):
        return None
    if weights.published and weights.published.is_fixed:
        return str(weights.published.side)
    if weights.about:  # a run's
        _, height, width = weights.about["preparation"]["shape"]
        return f"{height}x{width}"
    return str(FINE_TUNED_SIDE)


def normalised_for(
    weights: InitialWeights, model: str | None, image_format: ImageFormat
) -> ImageFormat:
    """Return the format with the mean and deviation that the weights were made with.

    Those of an unknown file are taken to be ImageNet's, by which nearly all are made. For grey
    images, which the net gets as three equal channels, they are the means over the channels. Our
    own nets take the images' own.
    """
    if not are_fine_tuned(weights, model):
        return image_format
    made = weights.published
    mean, std = (made.mean, made.std) if made else (IMAGENET_MEAN, IMAGENET_STD)
    as_for = made.title if made else "ImageNet"
    if weights.about:
        mean, std = (weights.about["preparation"][name] for name in ("mean", "std"))
        as_for = "the run of --weights"  # where it lies is not for others
    if image_format.shape[0] != len(mean):  # a run's on grey images may have one channel
        mean, std = ((sum(each) / len(each),) * image_format.shape[0] for each in (mean, std))
    notes = [*image_format.notes, f"normalised as for {as_for}"]
    return dataclasses.replace(image_format, mean=tuple(mean), std=tuple(std), notes=notes)


def guess_of(weights: InitialWeights, model: str | None, image_format: ImageFormat) -> str | None:
    """Tell what was guessed about the images, if nothing tells; else None."""
    is_told = weights.published or weights.about or NAME.match(model or "")
    if is_told or not are_fine_tuned(weights, model):
        return None
    _, height, width = image_format.shape
    guess = f"so {height}x{width} and ImageNet's mean and deviation are a guess"
    return f"--weights {weights.typed}: does not tell how its images were made, {guess}"


# --- Load them into the net


def load_weights(net: nn.Module, weights: InitialWeights, task: Task) -> str:
    """Load the tensors of --weights into the net of --model. Return their origin, in words.

    If they were made for other classes than the task's, the net's last layer keeps its new weights.
    Raise UsageError if they cannot be had, or if anything else does not fit.
    """
    typed, made, about = weights
    made_for: list[str] | None
    if made:
        with blame(f"--weights {typed}, for {made.place}", UsageError, made.fix):
            loaded, made_for = made.fetch(), made.classes
        cure, origin = f"use --image-size {made.side}", f"{made.title}, from {made.place}"
    else:
        loaded, made_for = read_weights(typed), about.get("classes")
        cure, origin = "name the --model that it was made for", f"from {typed}"
    if isinstance(net, GreyAsColour):  # a file of the net itself, or of a run on grey images
        net, loaded = net.net, {key.removeprefix("net."): loaded[key] for key in loaded}
    if getattr(net, "aux_logits", None) is False:  # torchvision's files have them
        loaded = {key: loaded[key] for key in loaded if not key.lower().startswith("aux")}
    tensors, layer = net.state_dict(), last_layer(net)
    if not tensors.keys() & loaded.keys():  # DDP's own state_dict() has a prefix
        loaded = {key.removeprefix("module."): loaded[key] for key in loaded}

    last = [key for key in tensors if key.rpartition(".")[0] == layer]
    other_sizes = [key for key in last if key in loaded and loaded[key].shape != tensors[key].shape]
    if other_sizes or made_for not in (None, task.names):
        if any(tensors[key].shape[:1] != (task.outputs,) for key in last):
            fault = f"the net's last layer, {layer}, does not give the {task.outputs}"
            fix = "define the layer that gives them last"
            raise UsageError(f"--weights {typed}: was made for other outputs, and {fault}; {fix}")
        loaded |= {key: tensors[key] for key in last}
        origin += f"; {' and '.join(last)} are initialised again: made for other classes or sizes"
    tensors.clear()  # but for the layers' versions, which mnasnet needs
    tensors.update(loaded)
    with blame(f"--weights {typed}", UsageError, cure):
        net.load_state_dict(tensors)
    return origin


def about_file(file: str) -> dict[str, Any]:
    """Return what a run of ours wrote into its file of weights; {} for any other file."""
    if not file.endswith(".safetensors") or not Path(file).is_file():
        return {}  # a resumed run does without it
    with blame(f"--weights {file}", UsageError, "give model.safetensors of a finished run"):
        from safetensors import safe_open

        with safe_open(file, "pt") as opened:
            about: dict[str, Any] = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
            return about


def read_weights(file: str) -> dict[str, Tensor]:
    """Return a file's tensors. Raise UsageError if it holds anything else."""
    fix = "give model.safetensors of a finished run, save net.state_dict() alone, or name DEFAULT"
    with blame(f"--weights {file}", UsageError, fix):
        regular(Path(file))
        if file.endswith(".safetensors"):
            from safetensors.torch import load_file

            return load_file(file)
        loaded: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
        if not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
            raise ValueError("it holds more than tensors")
        return loaded
