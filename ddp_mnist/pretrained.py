"""The weights that a net starts from, in the file that --weights names."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ddp_mnist.errors import UsageError, reason
from ddp_mnist.models import GreyAsColour

METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order


def load_weights(net: nn.Module, file: str, classes: Sequence[str]) -> str:
    """Take over the tensors of a .pth or .safetensors file. Return a sentence that says so.

    If the file was made for other classes, the net's last layer (the one registered last) keeps its
    new weights. Raise UsageError if anything else does not fit.
    """
    flag, cure = f"--weights {file}", "name the --model that it was made for"
    given, made_for = read_weights(file)
    if isinstance(net, GreyAsColour):  # a file of the net itself, or of a run on grey images
        net, given = net.net, {key.removeprefix("net."): given[key] for key in given}
    if getattr(net, "aux_logits", None) is False:  # torchvision's files have them
        given = {key: given[key] for key in given if not key.lower().startswith("aux")}
    own = net.state_dict()
    if not own.keys() & given.keys():  # DDP's own state_dict() has a prefix
        given = {key.removeprefix("module."): given[key] for key in given}
    for key in (*own, *given):
        if key not in given:
            raise UsageError(f"{flag}: has no {key}, which this net needs; {cure}")
        if key not in own:
            raise UsageError(f"{flag}: has {key}, which this net has not; {cure}")
    layer = [*own][-1].rpartition(".")[0]
    last = [key for key in own if key.rpartition(".")[0] == layer]
    other = [key for key in own if own[key].shape != given[key].shape]
    if misfits := [key for key in other if key not in last]:
        key = misfits[0]
        raise UsageError(
            f"{flag}: {key} has the shape {list(given[key].shape)}, the net's is"
            f" {list(own[key].shape)}; {cure}"
        )
    said, renamed = f"from {file}", made_for is not None and made_for != [*classes]
    if other or renamed:
        if any(own[key].shape[:1] != (len(classes),) for key in last):
            raise UsageError(
                f"{flag}: was made for other classes, and the net's last layer, {layer}, does not"
                f" give the {len(classes)}; define the layer that gives the logits last"
            )
        outputs = given[last[0]].shape[:1].numel()
        given |= {key: own[key] for key in last}
        what = f"{outputs} classes" if outputs != len(classes) else "other classes or sizes"
        said += f"; {' and '.join(last)} are initialised again: made for {what}"
    net.load_state_dict(given)
    return said


def read_weights(file: str) -> tuple[dict[str, Tensor], list[str] | None]:
    """Return a file's tensors, and the names of the classes if one of our runs wrote it."""
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
