"""A trained model on disk: model.safetensors, which holds its net, classes and image format."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load, save
from torch import Tensor, nn

from ddp_mnist.config import own_code
from ddp_mnist.core.task import Task
from ddp_mnist.core.wrappers import Normalised, as_tested
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import CheckpointError, UsageError, blame
from ddp_mnist.nets.build import build_net, is_known
from ddp_mnist.nets.initial_weights import METADATA_KEY
from ddp_mnist.system.console import warn
from ddp_mnist.system.files import read_if_whole, regular
from ddp_mnist.system.text import quoted
from ddp_mnist.task import about_task, task_from
from ddp_mnist.training.folder import MODEL, STATUS, SUMMARY, check_one_run, name_a_run

# Raise it when a net of ours gives other results for the same weights: older files are then refused
NETS_VERSION = 4


@dataclass(frozen=True)
class TrainedModel:
    """A net with the weights of a finished run, in eval mode on the CPU."""

    net: Normalised  # with the weights
    model: nn.Module  # returns the outputs: the net, with its test-time augmentation if it has any
    architecture: str  # its name, as typed after --model
    task: Task  # what the outputs mean
    image_format: ImageFormat  # how its training images were prepared


def to_bytes(
    state: dict[str, Tensor], architecture: str, task: Task, image_format: ImageFormat
) -> bytes:
    """Return the file's content. Equal weights give equal bytes."""
    about = {
        "architecture": architecture,
        "classes": task.names,
        "code": "" if is_known(architecture) else own_code.digest("--model", architecture),
        "preparation": dataclasses.asdict(image_format),
        "version": NETS_VERSION,
        **({"task": about_numbers} if (about_numbers := about_task(task)) else {}),
    }
    # safetensors refuses tensors that share their memory
    tensors = {name: each.detach().cpu().clone().contiguous() for name, each in state.items()}
    return save(tensors, metadata={METADATA_KEY: json.dumps(about, sort_keys=True)})


def read_bytes(run: str) -> bytes:
    """Return model.safetensors of run folder `run`. Raise CheckpointError if it is missing.

    A run that was resumed for more epochs, and has not finished since, still holds the model of its
    earlier part, which is then returned, with a warning on stderr.
    """
    status, summary = (read_if_whole(Path(run) / name) for name in (STATUS, SUMMARY))
    with blame(run, CheckpointError):
        check_one_run(Path(run))
        is_damaged = not status and (Path(run) / STATUS).exists()
    unfinished = is_damaged or status.get("state", "finished") != "finished"
    so_far = f"state {status.get('state')}, step {status.get('step')}"
    so_far = f"{STATUS} is damaged" if is_damaged else so_far
    go_on = f"let it finish, or add --resume {quoted(run)} to the command that started it"
    fix = f"{so_far}; {go_on}" if unfinished else name_a_run()
    with blame(f"{run}: no final {MODEL}", CheckpointError, fix):
        content = regular(Path(run) / MODEL).read_bytes()
    if summary.get("model_sha256", found := hashlib.sha256(content).hexdigest()) != found:
        fix = f"remove it, and train --resume {quoted(run)} writes it again"
        raise CheckpointError(f"{run}: {MODEL} is damaged, or not that of {SUMMARY}; {fix}")
    if unfinished and "steps" in summary:
        earlier = f"this is the model of step {summary['steps']}"
        when = "perhaps from before" if is_damaged else "from before"
        warn(f"{run}: {earlier}, {when} the run was resumed ({so_far}); {go_on}")
    return content


def from_bytes(content: bytes, where: str) -> TrainedModel:
    """Rebuild the net. Raise CheckpointError if the bytes are damaged or of another program."""
    with blame(f"{where}: {MODEL}", CheckpointError):
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"][METADATA_KEY])
        name, classes, version = about["architecture"], about["classes"], about.get("version", 1)
        if version != NETS_VERSION:
            raise CheckpointError(
                f"{where}: holds a net of version {version}, these are of version {NETS_VERSION};"
                " use the code that trained it, or train it again"
            )
        image_format = ImageFormat.from_dict(about["preparation"])
        try:
            if not is_known(name):
                own_code.check_unchanged("--model", name, about["code"], where)
            task = task_from(about.get("task", {}), classes, where)
            net, state = build_net(name, task, image_format), load(content)
        except UsageError as error:  # of --model, as typed for the training
            raise CheckpointError(f"{where}: {error}") from error
        dtypes = [tensor.dtype for tensor in state.values() if tensor.is_floating_point()]
        net.to(dtypes[0])
        net.net.load_state_dict(state)
    return TrainedModel(net, as_tested(net).eval(), name, task, image_format)
