"""The weights that --weights names: those in a file, or torchvision's, by name."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ddp_mnist.core.task import Task
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.nets.build import FROM_TENSORFLOW, GreyAsColour
from ddp_mnist.system.files import regular
from ddp_mnist.system.locks import take

if TYPE_CHECKING:
    from torchvision.models import WeightsEnum

METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order


class InitialWeights(NamedTuple):
    """What --weights names."""

    name: str  # as typed
    entry: "WeightsEnum | None"  # torchvision's, if they have a name; else `name` is their file

    def __str__(self) -> str:
        return str(self.entry or self.name)


# --- By name


def find_weights(model: str, weights: str | None) -> InitialWeights | None:
    """Find the weights that --weights names for the net of --model; None without the flag.

    A name is a word in capitals, such as DEFAULT, perhaps after its class, as torchvision's pages
    write it: ResNet18_Weights.DEFAULT. Raise UsageError if the net has no weights of that name.
    """
    if not weights:
        return None
    if not re.fullmatch(r"(\w+_Weights\.)?[A-Z0-9_]+", weights):
        return InitialWeights(weights, None)
    library, _, net = model.partition(":")
    if library != "torchvision":
        fix = "give a .pth or .safetensors file, or use --model torchvision:NAME"
        raise UsageError(f"--weights {weights}: {model} has none by name; {fix}")
    from torchvision.models import get_model_weights

    entries = get_model_weights(net)
    # Those without categories hold only a part of the net; the rest is NaN.
    names = [name for name, each in entries.__members__.items() if each.meta["categories"]]
    if (name := weights.removeprefix(f"{entries.__name__}.")) not in names:
        legal = ", ".join(sorted(names))
        raise UsageError(f"--weights {weights}: {model} has none of that name; choose from {legal}")
    return InitialWeights(weights, entries[name])


def file_of(entry: "WeightsEnum") -> Path:
    """Return the file in torchvision's cache, below TORCH_HOME."""
    return Path(torch.hub.get_dir(), "checkpoints", entry.url.rpartition("/")[2])


def size_of(entry: "WeightsEnum") -> int:
    """Return the side, in pixels, of the squares that the weights were made for."""
    return entry.transforms().crop_size[0]


def normalised_for(entry: "WeightsEnum", model: str, image_format: ImageFormat) -> ImageFormat:
    """Return the format with the mean and deviation that the net was trained with.

    For grey images, which the net gets as three equal channels, they are the means over the
    channels.
    """
    made = entry.transforms()
    from_tensorflow = model.partition(":")[2] in FROM_TENSORFLOW
    mean, std = ([0.5] * 3, [0.5] * 3) if from_tensorflow else (made.mean, made.std)
    if image_format.shape[0] == 1:
        mean, std = [sum(mean) / 3], [sum(std) / 3]
    notes = [*image_format.notes, f"normalised as for {entry}"]
    return dataclasses.replace(image_format, mean=tuple(mean), std=tuple(std), notes=notes)


# --- Load them into the net


def load_weights(net: nn.Module, model: str, weights: InitialWeights, task: Task) -> str:
    """Load the tensors of --weights into the net of --model. Return their origin, in words.

    If they were made for other classes than the task's, the net's last layer (the one registered
    last) keeps its new weights. Raise UsageError if anything else does not fit.
    """
    name, entry = weights
    if entry:
        loaded, made_for = read_named(model, name, entry)
        cure, origin = f"use --image-size {size_of(entry)}", f"{entry}, from {file_of(entry)}"
    else:
        loaded, made_for = read_weights(name)
        cure, origin = "name the --model that it was made for", f"from {name}"
    if isinstance(net, GreyAsColour):  # a file of the net itself, or of a run on grey images
        net, loaded = net.net, {key.removeprefix("net."): loaded[key] for key in loaded}
    if getattr(net, "aux_logits", None) is False:  # torchvision's files have them
        loaded = {key: loaded[key] for key in loaded if not key.lower().startswith("aux")}
    tensors = net.state_dict()
    if not tensors.keys() & loaded.keys():  # DDP's own state_dict() has a prefix
        loaded = {key.removeprefix("module."): loaded[key] for key in loaded}

    layer = [*tensors][-1].rpartition(".")[0]
    last = [key for key in tensors if key.rpartition(".")[0] == layer]
    other_sizes = [key for key in last if key in loaded and loaded[key].shape != tensors[key].shape]
    if other_sizes or made_for not in (None, task.names):
        if any(tensors[key].shape[:1] != (task.outputs,) for key in last):
            fault = f"the net's last layer, {layer}, does not give the {task.outputs}"
            fix = "define the layer that gives them last"
            raise UsageError(f"--weights {name}: was made for other outputs, and {fault}; {fix}")
        loaded |= {key: tensors[key] for key in last}
        origin += f"; {' and '.join(last)} are initialised again: made for other classes or sizes"
    tensors.clear()  # but for the layers' versions, which mnasnet needs
    tensors.update(loaded)
    with blame(f"--weights {name}", UsageError, cure):
        net.load_state_dict(tensors)
    return origin


def read_named(
    model: str, name: str, entry: "WeightsEnum"
) -> tuple[dict[str, Tensor], list[str] | None]:
    """Return the tensors of torchvision's net with these weights, and the names of its classes.

    torchvision downloads the file, in one process per machine, and its code reads it: in old files
    tensors have other names, or are missing. Raise UsageError if that fails.
    """
    from torchvision.models import get_model

    file = file_of(entry)
    with blame(f"--weights {name}, for {file}", UsageError, f"bring {entry.url} there"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with take(file.with_name(f"{file.name}.lock"), wait=True):
            # get_model would run code in the file, and prints its progress
            entry.get_state_dict(check_hash=True, weights_only=True, progress=sys.stderr.isatty())
        net = get_model(model.partition(":")[2], weights=entry)
    return net.state_dict(), entry.meta["categories"]


def read_weights(file: str) -> tuple[dict[str, Tensor], list[str] | None]:
    """Return a file's tensors, and the names of the classes if one of our runs wrote it."""
    fix = "give model.safetensors of a finished run, save net.state_dict() alone, or name DEFAULT"
    with blame(f"--weights {file}", UsageError, fix):
        regular(Path(file))
        if file.endswith(".safetensors"):
            from safetensors import safe_open

            with safe_open(file, "pt") as opened:
                about = json.loads((opened.metadata() or {}).get(METADATA_KEY, "{}"))
                names = opened.keys()
                return {key: opened.get_tensor(key) for key in names}, about.get("classes")
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        if not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
            raise ValueError("it holds more than tensors")
        return loaded, None
