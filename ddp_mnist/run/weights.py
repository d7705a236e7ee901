"""A trained model on disk: model.safetensors, which holds its net, classes and preparation."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ddp_mnist.data.decode import Preparation
from ddp_mnist.errors import CheckpointError, reason
from ddp_mnist.models import MODELS, VERSION
from ddp_mnist.run.console import warn
from ddp_mnist.run.folder import MODEL, STATUS, SUMMARY, read_json

METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order


@dataclass(frozen=True)
class Trained:
    """A net with the weights of a finished run, in eval mode on the CPU.

    Attributes:
        model: the net.
        architecture: its name in MODELS.
        classes: the class names, in the order of the logits.
        preparation: how the images were made that it was trained on.
    """

    model: nn.Module
    architecture: str
    classes: list[str]
    preparation: Preparation


def to_bytes(
    state: dict[str, Tensor], architecture: str, classes: list[str], preparation: Preparation
) -> bytes:
    """Return the file's content. Equal weights give equal bytes."""
    about = {
        "architecture": architecture,
        "classes": classes,
        "preparation": dataclasses.asdict(preparation),
        "version": VERSION,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return save(tensors, metadata={METADATA_KEY: json.dumps(about, sort_keys=True)})


def read_bytes(run: str) -> bytes:
    """Return model.safetensors of run folder `run`.

    A run that was resumed for more epochs, and has not finished since, still holds the model of
    its earlier part: that is returned, with a warning on stderr.

    Raises:
        CheckpointError: there is none.
    """
    folder = Path(run)
    status, summary = _read(folder / STATUS), _read(folder / SUMMARY)
    state, step = status.get("state"), status.get("step")
    go_on = f"let it finish, or go on: ddp-mnist train --resume {run}"
    try:
        content = (folder / MODEL).read_bytes()
    except OSError as error:
        if state:
            state = "finished" if state == "finished" else "not finished"
            message = f"{run}: {state}, at step {step}, and has no {MODEL}; {go_on}"
        else:
            what = "is no finished run" if folder.is_dir() else "there is no such run folder"
            message = f"{run}: {what} ({MODEL}: {reason(error)}); name one, e.g. runs/latest"
        raise CheckpointError(message) from error
    if state and state != "finished" and summary:
        warn(
            f"{run}: was resumed and is not finished ({state}, at step {step}); this is its earlier"
            f" model, of step {summary.get('steps')}; {go_on}"
        )
    return content


def _read(path: Path) -> dict[str, Any]:
    """Return the file's object; {} where there is none, as a model may lie alone."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return dict(read_json(path))
    return {}


def from_bytes(content: bytes, where: str) -> Trained:
    """Rebuild the net. Raises CheckpointError if the bytes are damaged or of another program."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"][METADATA_KEY])
        if (net := about["architecture"]) not in MODELS:
            raise CheckpointError(
                f"{where}: has a net that is not known here, {net}; use the code that trained it"
            )
        if (version := about.get("version", 1)) != VERSION:
            raise CheckpointError(
                f"{where}: was trained with nets of version {version}, here they are {VERSION};"
                " use the code that trained it, or train it again"
            )
        preparation = Preparation(**about["preparation"])
        model = MODELS[net](len(about["classes"]))
        state = load(content)
        dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
        model.to(dtypes[0])
        model.load_state_dict(state)
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{where}: {MODEL} is damaged or not from ddp_mnist ({type(error).__name__});"
            " train the run again"
        ) from error
    return Trained(model.eval(), net, about["classes"], preparation)
