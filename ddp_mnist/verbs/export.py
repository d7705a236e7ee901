"""The verb `export`: a run's model for use elsewhere, each file checked for equal outputs.

    ddp-mnist export runs/latest                    # RUN/export/: safetensors and a card
    ddp-mnist export runs/latest --format onnx      # needs the extra `onnx`

model.onnx takes uint8 images [B, C, H, W] with any B, and returns the net's outputs, as its logits:
it normalises the pixels itself. model.safetensors holds the weights of the net alone. The card says
how to use each, as model_card.py words it. Nothing is written before all formats are checked, and
never a file whose outputs differ. What is written names no image and no folder of this machine.
"""

import re
from collections.abc import Callable
from pathlib import Path
from warnings import catch_warnings

import torch
from torch import Tensor

from ddp_mnist.errors import CheckFailed, StorageError, UsageError, blame
from ddp_mnist.system import files
from ddp_mnist.system.console import Console
from ddp_mnist.system.text import escaped, quoted
from ddp_mnist.training import folder, model_file
from ddp_mnist.training.model_file import TrainedModel
from ddp_mnist.verbs.flags import EXPORTS, Export
from ddp_mnist.verbs.model_card import config_of, metadata, model_card, publishable

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
    trained = publishable(model_file.from_bytes(model_file.read_bytes(flags.run), flags.run))
    out = Path(flags.out or Path(flags.run) / "export")
    with blame(f"--out {out}", StorageError):
        refuse_other_files(out)
    trained.model.float()
    console = Console(True)
    contents = dict[str, bytes]()
    for name in flags.format:
        file, (write, read) = EXPORTS[name], CONVERTERS[name]
        console.print(f"writing    {file}, and checking it")
        with blame(f"--format {name}", UsageError, LEAVE_OUT), catch_warnings(action="ignore"):
            contents[file] = write(trained)
            found, limit = largest_difference(trained, read(contents[file]))
        if not found <= limit:  # NaN too
            fault = f"{file}: gives outputs {found:.1e} from the model's, above {limit:.1e}"
            fix = "leave that format out, or have the net's forward give the same each time"
            raise CheckFailed(f"{fault}; nothing is written, {fix}")
        close = f"within {found:.0e} of the model's"
        console.print(f"{file}: outputs for {CHECKED_IMAGES} images {close}")
    write_folder(out, contents, trained, flags, console)
    console.print(f"written to {escaped(out)}")
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(flags.run).resolve().name).strip("-.")
    console.print(f"to the Hub: hf upload YOUR_NAME/{name or 'model'} {quoted(out)}")


def write_folder(
    out: Path, contents: dict[str, bytes], trained: TrainedModel, flags: Export, console: Console
) -> None:
    """Write the files and their card; remove those of an earlier export. Raise StorageError."""
    card = model_card(trained, flags)
    others = {CARD: card.encode(), ABOUT: files.to_json(config_of(trained)).encode()}
    earlier = dict.fromkeys(EXPORTS.values(), "of an earlier export; name all in one --format")
    earlier[folder.TRAINED_ON] = "as hashes of the images are not for others"
    with files.storage_errors(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        for file, content in (contents | others).items():
            files.write_atomically(out / file, content)
        for file, why in earlier.items():
            if file not in contents and (out / file).exists():
                (out / file).unlink()
                console.print(f"{file}: removed, {why}")


def refuse_other_files(out: Path) -> None:
    """Raise UsageError if files would be lost; dotfiles do not count."""
    others = {path.name for path in out.glob("[!.]*")} | ({"a file"} if out.is_file() else set())
    about = files.read_if_whole(out / ABOUT)
    is_earlier = about.keys() == {"architecture", "classes"}  # of an export without made_by
    if is_earlier or str(about.get("made_by")).startswith("ddp_mnist"):
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
        verbose=False,
    )
    assert program
    proto = program.model_proto
    for node in proto.graph.node:  # torch notes which line of which file made it
        node.ClearField("metadata_props")
    onnx.helper.set_model_props(proto, metadata(trained))
    return proto.SerializeToString()


def read_onnx(content: bytes) -> Outputs:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


CONVERTERS: dict[str, tuple[Callable[[TrainedModel], bytes], Callable[[bytes], Outputs]]] = {
    "safetensors": (write_safetensors, lambda content: model_file.from_bytes(content, "it").model),
    "onnx": (write_onnx, read_onnx),
}
