"""A trained model on disk: model.safetensors, which says itself what it is."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ddp_mnist.errors import CheckpointError
from ddp_mnist.models import MODELS
from ddp_mnist.run_folder import MODEL, STATUS, read_json

METADATA_KEY = "ddp_mnist"  # one key: with several, safetensors writes them in random order


@dataclass(frozen=True)
class Trained:
    """A net with the weights of a finished run, in eval mode on the CPU, and its class names."""

    model: nn.Module
    architecture: str
    classes: list[str]


def to_bytes(state: dict[str, Tensor], architecture: str, classes: list[str]) -> bytes:
    """Equal weights give equal bytes."""
    about = json.dumps({"architecture": architecture, "classes": classes}, sort_keys=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return save(tensors, metadata={METADATA_KEY: about})


def read_bytes(run: str) -> bytes:
    """model.safetensors of run folder `run`. Raises CheckpointError if there is none."""
    path = Path(run) / MODEL
    try:
        return path.read_bytes()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            status = read_json(Path(run) / STATUS)
            state = "finished" if status["state"] == "finished" else "not finished"
            raise CheckpointError(
                f"{run}: {state}, at step {status['step']}, and has no {path.name}; let it finish,"
                f" or go on: ddp-mnist train --resume {run}"
            ) from error
        reason = "is no finished run" if Path(run).is_dir() else "there is no such run folder"
        raise CheckpointError(
            f"{run}: {reason} ({path.name}: {error.strerror}); name one, e.g. runs/latest"
        ) from error


def from_bytes(content: bytes, where: str) -> Trained:
    """Rebuilds the net. Raises CheckpointError if the bytes are damaged or of another program."""
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"][METADATA_KEY])
        if (net := about["architecture"]) not in MODELS:
            raise CheckpointError(
                f"{where}: has a net that is not known here, {net}; use the code that trained it"
            )
        model = MODELS[about["architecture"]](len(about["classes"]))
        state = load(content)
        dtypes = [t.dtype for t in state.values() if t.is_floating_point()]
        model.to(dtypes[0])
        model.load_state_dict(state)
    except (ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"{where}: {MODEL} is damaged or not from ddp_mnist ({type(error).__name__});"
            " train the run again"
        ) from error
    return Trained(model.eval(), about["architecture"], about["classes"])
