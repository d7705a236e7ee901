"""The verb `export`: a run's model for use elsewhere, each form checked for equal outputs.

    ddp-mnist export runs/latest                    # RUN/export/: safetensors, torch.export, a card
    ddp-mnist export runs/latest --format onnx      # needs the extra: pip install -e '.[onnx]'

All forms take uint8 images [B, 28, 28] with any B, and give logits [B, classes]: what normalises
the pixels is in the model. The card says what images these are. Nothing is written before all are
checked.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_mnist import __version__
from ddp_mnist.errors import CheckFailed, CheckpointError, UsageError, printable
from ddp_mnist.run import weights
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import (
    CONFIG,
    SUMMARY,
    read_json,
    storage_errors,
    to_json,
    write_atomically,
)
from ddp_mnist.run.weights import Trained
from ddp_mnist.verbs.flags import Export
from ddp_mnist.verbs.templates import render

FOLDER = "export"

CARD, ABOUT = "README.md", "config.json"

CHECKED_IMAGES = 100

LIMIT = 1e-4  # of a logit, absolute: other libraries sum in another order

Outputs = Callable[[Tensor], Tensor]  # of images, logits


def run(flags: Export) -> None:
    """Write the forms, and say where, and how they come to the Hub."""
    console = Console(True)
    folder = export(flags.run, list(flags.format), flags.out, console.print)
    console.print(f"written to {folder}")
    console.print(f"to the Hub: hf upload YOUR_NAME/{Path(flags.run).resolve().name} {folder}")


def export(
    run: str, formats: list[str], out: str | None = None, say: Callable[[str], None] = print
) -> Path:
    """Writes the forms and a model card. Returns their folder.

    Args:
        run: folder of a finished run.
        formats: of FORMS.
        out: a folder of their own; else RUN/export. An earlier export there is replaced.
        say: is told the largest difference of each form's logits from those of the run's model.

    Raises:
        CheckpointError: the run has not finished.
        UsageError: a package is missing, or the folder holds something else.
        CheckFailed: a form gives other logits than the model.
        StorageError: a file cannot be written.
    """
    if "onnx" in formats:
        require("onnx", "onnxscript", "onnxruntime")
    folder = Path(out) if out else Path(run) / FOLDER
    refuse_other_files(folder)
    trained = weights.from_bytes(weights.read_bytes(run), run)
    trained.model.float()
    contents = {}
    for name in formats:
        form = FORMS[name]
        contents[form.file] = content = form.write(trained)
        apart = largest_difference(trained.model, form.read(content), form.file)
        say(f"{form.file}: logits of {CHECKED_IMAGES} images within {apart:.0e} of the model's")
    about = {"architecture": trained.architecture, "classes": trained.classes}
    contents[CARD] = model_card(trained, run, list(contents)).encode()
    contents[ABOUT] = to_json(about).encode()
    with storage_errors(folder, "--out"):
        folder.mkdir(parents=True, exist_ok=True)
        for form in FORMS.values():
            if form.file not in contents and (folder / form.file).exists():
                (folder / form.file).unlink()
                say(f"{form.file}: taken away, of an earlier export; name all in one --format")
        for file, content in contents.items():
            write_atomically(folder / file, content)
    return folder


def refuse_other_files(folder: Path) -> None:
    """Raises UsageError if something would be lost; what begins with a dot may be there."""
    own = {CARD, ABOUT, *(form.file for form in FORMS.values())}
    with storage_errors(folder, "--out"):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--out {folder}: is a file; name a folder")
        there = {p.name for p in folder.iterdir()} if folder.exists() else set()
    others = sorted(name for name in there - own if not name.startswith("."))
    if others or (CARD in there and not is_an_export(folder)):
        found = ", ".join(others[:3]) or CARD
        raise UsageError(f"--out {folder}: holds other files ({found}); name a folder of its own")


def is_an_export(folder: Path) -> bool:
    try:
        return set(read_json(folder / ABOUT)) == {"architecture", "classes"}
    except (OSError, ValueError):
        return False


def require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(
            f"--format onnx: needs {', '.join(missing)}; pip install -e '.[onnx]', or leave it out"
        )


def check_images() -> Tensor:
    """uint8 [100, 28, 28]: noise, which no net was trained to be sure of."""
    stream = torch.Generator().manual_seed(0)
    size = (CHECKED_IMAGES, 28, 28)
    return torch.randint(0, 256, size, generator=stream, dtype=torch.uint8)


def largest_difference(model: nn.Module, outputs: Outputs, file: str) -> float:
    """Of the logits of 100 images, all at once and one alone. Raises CheckFailed above LIMIT."""
    images = check_images()
    with torch.inference_mode():
        expected = model(images)
    with torch.no_grad():  # an exported program takes no tensor of inference mode
        apart = max(
            (outputs(images) - expected).abs().max().item(),
            (outputs(images[:1]) - expected[:1]).abs().max().item(),
        )
    if not apart <= LIMIT:
        raise CheckFailed(
            f"{file}: gives logits that differ by {apart:.1e} from the model's, allowed are"
            f" {LIMIT:g}; leave that format out"
        )
    return apart


# --- The forms


@dataclass(frozen=True)
class Form:
    """How a model is written.

    Attributes:
        file: its name.
        write: makes the file's content.
        read: makes of that, as others will, what gives the logits.
    """

    file: str
    write: Callable[[Trained], bytes]
    read: Callable[[bytes], Outputs]


def as_safetensors(trained: Trained) -> bytes:
    """The weights under the names of the net's parameters."""
    state, preparation = trained.model.state_dict(), trained.preparation
    return weights.to_bytes(state, trained.architecture, trained.classes, preparation)


def of_safetensors(content: bytes) -> Outputs:
    return weights.from_bytes(content, "the export").model


def as_program(trained: Trained) -> bytes:
    """Weights and computation, which torch.export.load reads without this package."""
    written = io.BytesIO()
    with quiet():
        program = torch.export.export(
            trained.model, (EXAMPLE,), dynamic_shapes=({0: ANY_BATCH},), strict=False
        )
        torch.export.save(program, written)
    return written.getvalue()


def of_program(content: bytes) -> Outputs:
    with quiet():
        return torch.export.load(io.BytesIO(content)).module()


def as_onnx(trained: Trained) -> bytes:
    """For ONNX Runtime and what else reads it."""
    with quiet():
        program = torch.onnx.export(
            trained.model,
            (EXAMPLE,),
            dynamo=True,
            external_data=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: ANY_BATCH},),
            verbose=False,
        )
    assert program
    return program.model_proto.SerializeToString()


def of_onnx(content: bytes) -> Outputs:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch.export warns and logs of its own workings."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


EXAMPLE = torch.zeros(2, 28, 28, dtype=torch.uint8)

ANY_BATCH = torch.export.Dim("batch", min=1)

FORMS = {
    "safetensors": Form("model.safetensors", as_safetensors, of_safetensors),
    "torch": Form("model.pt2", as_program, of_program),
    "onnx": Form("model.onnx", as_onnx, of_onnx),
}

# --- The card


def model_card(trained: Trained, run: str, files: list[str]) -> str:
    """README.md as the Hugging Face Hub reads it; every figure is the run's own.

    What stands between the lines of hyphens is YAML, of which JSON is a part. Of data that lie in a
    folder it tells the digest and not where; a licence is for who gives the weights away to choose.

    Raises:
        CheckpointError: a file of the run is missing or damaged.
    """
    summary = read(run, SUMMARY)
    val_size = read(run, CONFIG)["recipe"]["val_size"]
    dataset = summary["dataset"]
    name = printable(dataset["name"])
    kind, _, place = dataset["source"].partition(":")
    hub_id = place if kind == "hub" else None
    source = name if Path(place).is_absolute() else dataset["source"]
    front = {
        "library_name": "pytorch",
        "pipeline_tag": "image-classification",
        "tags": ["ddp_mnist", trained.architecture],
        **({"datasets": [hub_id]} if hub_id else {}),
        "model-index": [
            {
                "name": f"ddp_mnist {trained.architecture}",
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": name, "type": hub_id or name},
                        "metrics": [
                            {
                                "type": "accuracy",
                                "value": summary["test_accuracy"],
                                "name": f"accuracy on the {summary['test_count']:,} test images",
                            }
                        ],
                    }
                ],
            }
        ],
    }
    return render(
        "model_card.md",
        front=json.dumps(front, indent=2, ensure_ascii=False),
        architecture=trained.architecture,
        classes=trained.classes,
        preparation=trained.preparation,
        parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        s=summary,
        source=source,
        val_size=val_size,
        version=__version__,
        files=files,
    )


def read(run: str, file: str) -> dict[str, Any]:
    try:
        return read_json(Path(run) / file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{run}: {file} is missing or damaged; export a finished run"
        ) from error
