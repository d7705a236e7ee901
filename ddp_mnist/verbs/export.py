"""The verb `export`: a run's model for use elsewhere, each file checked for equal outputs.

    ddp-mnist export runs/latest                    # RUN/export/: safetensors and a card
    ddp-mnist export runs/latest --format onnx      # needs the extra `onnx`

Every file takes uint8 images [B, C, H, W] with any B, and returns the net's outputs, as its logits:
the model normalises the pixels itself. The card describes the images, as do model.onnx's metadata.
Nothing is written before all formats are checked, and never a file whose outputs differ.
"""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from torch import Tensor

from ddp_mnist import __version__
from ddp_mnist.config.mistakes import wrong_on_purpose
from ddp_mnist.errors import CheckFailed, CheckpointError, UsageError, blame
from ddp_mnist.system import files
from ddp_mnist.system.console import Console
from ddp_mnist.task import about_task
from ddp_mnist.training import folder, model_file
from ddp_mnist.training.model_file import TrainedModel
from ddp_mnist.verbs.flags import EXPORTS, Export
from ddp_mnist.verbs.render import render

CARD, ABOUT = "README.md", "config.json"
CHECKED_IMAGES = 100
LEAVE_OUT = "leave that format out; onnx needs pip install 'ddp-mnist[onnx]'"
LIMIT = 1e-4  # share of the largest output, or of 1: other libraries sum in another order
Outputs = Callable[[Tensor], Tensor]  # of images


def run(flags: Export) -> None:
    """Write the files and a model card, replacing an earlier export; print where.

    Raise UsageError for a net that a format cannot hold, or if its packages are missing;
    CheckFailed if a format gives other outputs.
    """
    out = Path(flags.out or Path(flags.run) / "export")
    refuse_other_files(out)
    trained = model_file.from_bytes(model_file.read_bytes(flags.run), flags.run)
    trained.model.float()
    console = Console(True)
    contents = dict[str, bytes]()
    for name in flags.format:
        file, (write, read) = EXPORTS[name], CONVERTERS[name]
        console.print(f"writing    {file}, and checking it")
        with blame(f"--format {name}", UsageError, LEAVE_OUT), quiet():
            contents[file] = write(trained)
            found, limit = largest_difference(trained, read(contents[file]))
        if not found <= limit:  # NaN too
            fault = f"{file}: gives outputs {found:.1e} from the model's, above {limit:.1e}"
            fix = "leave that format out, or have the net's forward give the same each time"
            raise CheckFailed(f"{fault}; nothing is written, {fix}")
        close = f"within {found:.0e} of the model's"
        console.print(f"{file}: outputs for {CHECKED_IMAGES} images {close}")
    write_folder(out, contents, trained, flags, console)
    console.print(f"written to {out}")
    console.print(f"to the Hub: hf upload YOUR_NAME/{Path(flags.run).resolve().name} {out}")


def write_folder(
    out: Path, contents: dict[str, bytes], trained: TrainedModel, flags: Export, console: Console
) -> None:
    """Write the files and their card; remove those of an earlier export. Raise StorageError."""
    card = model_card(trained, flags)
    about = {"architecture": trained.architecture, "classes": trained.task.names}
    others = {CARD: card.encode(), ABOUT: files.to_json(about).encode()}
    if (keys := Path(flags.run) / folder.TRAINED_ON).exists():  # go where the weights go
        others[folder.TRAINED_ON] = keys.read_bytes()
    with files.storage_errors(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        for file, content in (contents | others).items():
            files.write_atomically(out / file, content)
        for file in EXPORTS.values():
            if file not in contents and (out / file).exists():
                (out / file).unlink()
                console.print(f"{file}: removed, of an earlier export; name all in one --format")


def refuse_other_files(out: Path) -> None:
    """Raise UsageError if files would be lost; dotfiles do not count."""
    others = {path.name for path in out.glob("[!.]*")} | ({"a file"} if out.is_file() else set())
    if files.read_if_whole(out / ABOUT).keys() == {"architecture", "classes"}:  # of an export
        others -= {CARD, ABOUT, folder.TRAINED_ON, *EXPORTS.values()}
    if others:
        there = ", ".join(sorted(others)[:3])
        raise UsageError(f"--out {out}: is or holds other files ({there}); name a new folder")


def largest_difference(trained: TrainedModel, outputs: Outputs) -> tuple[float, float]:
    """Compare the outputs for images of noise, all at once and one alone, with the model's.

    Return the largest difference, and its limit.
    """
    stream, size = torch.Generator().manual_seed(0), (CHECKED_IMAGES, *trained.image_format.shape)
    images = torch.randint(0, 256, size, generator=stream, dtype=torch.uint8)
    with torch.no_grad():
        expected, alone = trained.model(images), trained.model(images[:1])
        differences = torch.cat([outputs(images) - expected, outputs(images[:1]) - alone])
    return differences.abs().max().item(), LIMIT * max(1.0, expected.abs().max().item())


# --- The formats: each is written from a trained net, and read back as users will read it


def write_safetensors(trained: TrainedModel) -> bytes:
    """Return the weights under the names of the net's parameters."""
    state, image_format = trained.net.net.state_dict(), trained.image_format
    return model_file.to_bytes(state, trained.architecture, trained.task, image_format)


def write_onnx(trained: TrainedModel) -> bytes:
    """Return the model for ONNX Runtime and other readers, with its `metadata`."""
    import onnx

    program = torch.onnx.export(
        trained.model,
        (torch.zeros(2, *trained.image_format.shape, dtype=torch.uint8),),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        external_data=False,
    )
    assert program
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata(trained))
    return proto.SerializeToString()


def metadata(trained: TrainedModel) -> dict[str, str]:
    """Return the facts that a program needs to get from an image file to a class name."""
    made = trained.image_format
    channels, height, width = made.shape
    colour = "RGB" if channels == 3 else "grey"
    colour += ", bright strokes on black" if made.bright_on_black else ""
    preparation = (
        "a digit in a photo is cut out first, as ddp-mnist predict does it"
        if made.digit_photos
        else "upright as EXIF says, on white where it is transparent, of 16 bits the upper 8; the"
        f" middle with the sides' ratio, bilinearly resized to {height}x{width}"
    )
    task = trained.task
    names = json.dumps(task.names, ensure_ascii=False)
    output = f"logits: float32 [batch, {task.outputs}], in the order of classes; their softmax are"
    output += " probabilities"
    if about := about_task(task):
        output = f"logits: float32 [batch, {task.outputs}], what {about['task']} predicts from,"
        output += f" with mean {about['mean']} and std {about['std']}, of {names}"
    return {
        "classes": names,
        "input": f"images: uint8 [batch, {channels}, {height}, {width}], 0 to 255, {colour}",
        "preparation": preparation,
        "output": f"{output}. The model itself normalises the pixels",
    }


def read_onnx(content: bytes) -> Outputs:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch.onnx.export, which warns, logs and prints about its internals."""
    sink = io.StringIO()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(sink), redirect_stderr(sink):
            yield
    finally:
        logging.disable(logging.NOTSET)


CONVERTERS: dict[str, tuple[Callable[[TrainedModel], bytes], Callable[[bytes], Outputs]]] = {
    "safetensors": (write_safetensors, lambda content: model_file.from_bytes(content, "it").model),
    "onnx": (write_onnx, read_onnx),
}


# --- The card


def model_card(trained: TrainedModel, flags: Export) -> str:
    """Return README.md as the Hugging Face Hub reads it.

    Raise CheckpointError if summary.json is missing or damaged.
    """
    file = Path(flags.run) / folder.SUMMARY
    with blame(str(file), CheckpointError):
        summary = files.read_json(file)
    return render(
        "model_card.md",
        s=summary,
        about=metadata(trained),
        trained=trained,
        flags=flags,
        wrong=wrong_on_purpose(summary["inject"]),
        version=__version__,
    )
