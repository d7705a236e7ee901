"""The verb `export`: a run's model for use elsewhere, each form checked for equal outputs.

    ddp-mnist export runs/latest                    # RUN/export/: safetensors, torch.export, a card
    ddp-mnist export runs/latest --format onnx      # needs the extra: pip install 'ddp-mnist[onnx]'

All forms take uint8 images [B, 28, 28], bright strokes on black, with any B, and give logits
[B, classes]: what normalises the pixels is in the model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ddp_mnist import __version__, run_folder, weights
from ddp_mnist.errors import CheckFailed, CheckpointError, UsageError
from ddp_mnist.templates import render
from ddp_mnist.weights import Trained

FOLDER = "export"
CHECKED_IMAGES = 100
LIMIT = 1e-4  # of a logit, absolute: other libraries sum in another order
FORMATS = ("safetensors", "torch", "onnx")


def export(run: str, formats: list[str], out: str | None = None) -> list[tuple[Path, float]]:
    """Files written, each with the largest difference of its logits from the run's model.

    Args:
        run: folder of a finished run.
        formats: of FORMATS.
        out: folder for the files; else RUN/export.

    Raises:
        CheckpointError: the run has not finished.
        UsageError: a package is missing.
        CheckFailed: a form gives other logits than the model.
        StorageError: a file cannot be written.
    """
    if "onnx" in formats:
        require("onnx", "onnxscript", "onnxruntime")
    content = weights.read_bytes(run)
    trained = weights.from_bytes(content, run)
    trained.model.float()
    folder = Path(out) if out else Path(run) / FOLDER
    with run_folder.storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in formats:
        path, outputs = WRITERS[name](trained, folder)
        written.append((path, largest_difference(trained.model, outputs, path)))
    with run_folder.storage_errors(folder):
        card = model_card(trained, run, [path.name for path, _ in written])
        run_folder.write_atomically(folder / "README.md", card.encode())
        about = {"architecture": trained.architecture, "classes": trained.classes}
        run_folder.write_atomically(folder / "config.json", run_folder.to_json(about).encode())
    return written


def read(run: str, file: str) -> dict[str, Any]:
    try:
        return run_folder.read_json(Path(run) / file)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{run}: {file} is missing or damaged; export a finished run"
        ) from error


def require(*packages: str) -> None:
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UsageError(
            f"--format onnx: needs {', '.join(missing)}; pip install 'ddp-mnist[onnx]', or leave it"
            " out"
        )


def check_images() -> Tensor:
    """uint8 [100, 28, 28]: noise, which no net was trained to be sure of."""
    stream = torch.Generator().manual_seed(0)
    size = (CHECKED_IMAGES, 28, 28)
    return torch.randint(0, 256, size, generator=stream, dtype=torch.uint8)


def largest_difference(model: nn.Module, outputs: Callable[[Tensor], Tensor], path: Path) -> float:
    """Of the logits of 100 images, all at once and one alone. Raises CheckFailed above LIMIT."""
    images = check_images()
    with torch.inference_mode():
        expected = model(images)
    apart = max(
        (outputs(images) - expected).abs().max().item(),
        (outputs(images[:1]) - expected[:1]).abs().max().item(),
    )
    if not apart <= LIMIT:
        raise CheckFailed(
            f"{path}: gives logits that differ by {apart:.1e} from the model's, allowed are"
            f" {LIMIT:g}; do not use it"
        )
    return apart


# --- The forms


def write_safetensors(trained: Trained, folder: Path) -> tuple[Path, Callable[[Tensor], Tensor]]:
    """The weights under the names of the net's parameters."""
    path = folder / "model.safetensors"
    state = trained.model.state_dict()
    content = weights.to_bytes(state, trained.architecture, trained.classes)
    with run_folder.storage_errors(path):
        run_folder.write_atomically(path, content)
    again = weights.from_bytes(content, str(path)).model
    again.load_state_dict(load_file(path))

    def outputs(images: Tensor) -> Tensor:
        with torch.inference_mode():
            return again(images)

    return path, outputs


def write_torch(trained: Trained, folder: Path) -> tuple[Path, Callable[[Tensor], Tensor]]:
    """Weights and computation, which torch.export.load reads without this package."""
    path = folder / "model.pt2"
    example = torch.zeros(2, 28, 28, dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1)
    with quiet(), run_folder.storage_errors(path):
        program = torch.export.export(
            trained.model, (example,), dynamic_shapes=({0: batch},), strict=False
        )
        torch.export.save(program, path)
        again = torch.export.load(path).module()

    def outputs(images: Tensor) -> Tensor:
        with torch.no_grad():
            return again(images)

    return path, outputs


def write_onnx(trained: Trained, folder: Path) -> tuple[Path, Callable[[Tensor], Tensor]]:
    """For ONNX Runtime and what else reads it."""
    import onnxruntime

    path = folder / "model.onnx"
    with quiet(), run_folder.storage_errors(path):
        torch.onnx.export(
            trained.model,
            (torch.zeros(2, 28, 28, dtype=torch.uint8),),
            path,
            dynamo=True,
            external_data=False,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            verbose=False,
        )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def outputs(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"images": images.numpy()})[0])

    return path, outputs


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


WRITERS: dict[str, Callable[[Trained, Path], tuple[Path, Callable[[Tensor], Tensor]]]] = {
    "safetensors": write_safetensors,
    "torch": write_torch,
    "onnx": write_onnx,
}


# --- The card


def model_card(trained: Trained, run: str, files: list[str]) -> str:
    """README.md as the Hugging Face Hub reads it; every figure is the run's own.

    What stands between the lines of hyphens is YAML, of which JSON is a part.
    """
    summary = read(run, run_folder.SUMMARY)
    val_size = read(run, run_folder.CONFIG)["recipe"]["val_size"]
    dataset = summary["dataset"]
    is_hub = dataset["source"].startswith("hub:")
    hub_id = dataset["source"].removeprefix("hub:") if is_hub else None
    front = {
        "license": "apache-2.0",
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
                        "dataset": {"name": dataset["name"], "type": hub_id or dataset["name"]},
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
        parameters=sum(parameter.numel() for parameter in trained.model.parameters()),
        s=summary,
        val_size=val_size,
        version=__version__,
        files=files,
    )
