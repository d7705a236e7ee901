"""A trained model on disk: model.safetensors, which says itself what it is."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from ddp_mnist.data.decode import Preparation
from ddp_mnist.errors import CheckpointError
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
    """Equal weights give equal bytes."""
    about = {
        "architecture": architecture,
        "classes": classes,
        "preparation": dataclasses.asdict(preparation),
        "version": VERSION,
    }
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    return save(tensors, metadata={METADATA_KEY: json.dumps(about, sort_keys=True)})


def read_bytes(run: str) -> bytes:
    """model.safetensors of run folder `run`.

    A run that was taken up again, for more epochs, and has not finished since still holds the
    model of its earlier part: that is read, and said on stderr.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(run) / MODEL
    try:
        content = path.read_bytes()
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
    warn_of_unfinished(run)
    return content


def warn_of_unfinished(run: str) -> None:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a model without a run
        status = read_json(Path(run) / STATUS)
        if status["state"] != "finished":
            steps = read_json(Path(run) / SUMMARY)["steps"]
            warn(
                f"{run}: was taken up again and is not finished ({status['state']}, at step"
                f" {status['step']}); this is its earlier model, of step {steps}; let it finish, or"
                f" go on: ddp-mnist train --resume {run}"
            )


def from_bytes(content: bytes, where: str) -> Trained:
    """Rebuilds the net. Raises CheckpointError if the bytes are damaged or of another program."""
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
    return Trained(model.eval(), about["architecture"], about["classes"], preparation)
