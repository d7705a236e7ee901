"""The verb `export`: a run's model for use elsewhere, each file checked for equal outputs.

    ddp-mnist export runs/latest                    # RUN/export/: safetensors, torch.export, a card
    ddp-mnist export runs/latest --format onnx      # needs the extra `onnx`

Every file takes uint8 images [B, C, H, W] with any B, and gives logits [B, classes]: the model
normalises the pixels itself. The card says which images these are, and so do model.onnx's metadata.
Nothing is written before all are checked, nor a file with other outputs.
"""

import contextlib
import importlib.util
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ddp_mnist import __version__
from ddp_mnist.config.faults import wrong_on_purpose
from ddp_mnist.errors import CheckFailed, CheckpointError, UsageError, printable, reason
from ddp_mnist.run import folder, weights
from ddp_mnist.run.console import Console, passing
from ddp_mnist.run.weights import Trained
from ddp_mnist.verbs.flags import EXPORTS, Export
from ddp_mnist.verbs.render import render

CARD, ABOUT, DESCRIBED = "README.md", "config.json", ("architecture", "classes")
CHECKED_IMAGES = 100
LIMIT = 1e-4  # share of the largest logit, or of 1: other libraries sum in another order
ANY_BATCH = ({0: torch.export.Dim("batch", min=1)},)
Outputs = Callable[[Tensor], Tensor]  # of images, logits


def run(flags: Export) -> None:
    """Write the files and a model card in place of an earlier export; say where, and what next."""
    packages = ("onnx", "onnxscript", "onnxruntime") if "onnx" in flags.format else ()
    if need := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise UsageError(
            f"--format onnx: needs {', '.join(need)}; pip install {' '.join(need)}, or leave it out"
        )
    out = Path(flags.out or Path(flags.run) / "export")
    refuse_other_files(out)
    trained = weights.from_bytes(weights.read_bytes(flags.run), flags.run)
    trained.model.float()
    console, about = Console(True), {name: getattr(trained, name) for name in DESCRIBED}
    contents, failed = {ABOUT: folder.to_json(about).encode()}, []
    for name in flags.format:
        file, (write, read) = EXPORTS[name], CONVERTERS[name]
        with passing(f"writing and checking {file} ..."), quiet():
            content = written(write, name, trained)
            apart, limit = largest_difference(trained, read(content))
        if apart <= limit:
            contents[file] = content
            console.print(
                f"{file}: logits of {CHECKED_IMAGES} images within {apart:.0e} of the model's"
            )
        else:
            far = f"gives logits that differ by {apart:.1e} from the model's"
            failed.append(f"{file}: {far}, allowed are {limit:.1e}")
    if len(contents) > 1:
        write_folder(out, contents, trained, flags, console)
        console.print(f"written to {out}")
        console.print(f"to the Hub: hf upload YOUR_NAME/{Path(flags.run).resolve().name} {out}")
    if failed:
        rest = ",".join(name for name in flags.format if EXPORTS[name] in contents)
        fix = f"leave that format out: --format {rest or 'safetensors'}"
        if "safetensors" in flags.format and EXPORTS["safetensors"] not in contents:
            fix = "the net's forward has to give the same each time"  # these are its weights alone
        raise CheckFailed(f"{', '.join(failed)}; not written, {fix}")


def write_folder(
    out: Path, contents: dict[str, bytes], trained: Trained, flags: Export, console: Console
) -> None:
    """Write the files and their card; remove those of an earlier export. Raise StorageError."""
    contents[CARD] = model_card(trained, flags, list(contents)).encode()
    with folder.storage_errors(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        for file, content in contents.items():
            folder.write_atomically(out / file, content)
        for name, file in EXPORTS.items():
            if file not in contents and (out / file).exists():
                (out / file).unlink()
                fix = "" if name in flags.format else "; name all in one --format"
                console.print(f"{file}: removed, of an earlier export{fix}")


def written(write: Callable[[Trained], bytes], name: str, trained: Trained) -> bytes:
    """Return the file's content. Raise UsageError for a net that the format cannot hold."""
    try:
        return write(trained)
    except Exception as error:  # of many kinds, as of an `if` on what the images are
        raise UsageError(
            f"--format {name}: {trained.architecture} cannot be exported ({reason(error)}); leave"
            " that format out: --format safetensors"
        ) from error


def refuse_other_files(out: Path) -> None:
    """Raise UsageError if something would be lost; what begins with a dot may be there."""
    others = {path.name for path in out.glob("[!.]*")} | ({"a file"} if out.is_file() else set())
    with contextlib.suppress(OSError, ValueError):
        if set(folder.read_json(out / ABOUT)) == set(DESCRIBED):  # an earlier export
            others -= {CARD, ABOUT, *EXPORTS.values()}
    if others:
        there = ", ".join(sorted(others)[:3])
        raise UsageError(f"--out {out}: is or holds other files ({there}); name a new folder")


def largest_difference(trained: Trained, outputs: Outputs) -> tuple[float, float]:
    """Return that of the logits of images of noise, all at once and one alone, and its limit."""
    stream, size = torch.Generator().manual_seed(0), (CHECKED_IMAGES, *trained.image_format.shape)
    images = torch.randint(0, 256, size, generator=stream, dtype=torch.uint8)
    with torch.no_grad():  # an exported program takes no tensor of inference mode
        expected, alone = trained.model(images), trained.model(images[:1])
        apart = torch.cat([outputs(images) - expected, outputs(images[:1]) - alone]).abs().max()
    return apart.item(), LIMIT * max(1.0, expected.abs().max().item())


# --- The formats: each is written from a trained net, and read back as others will read it


def example(trained: Trained) -> tuple[Tensor]:
    """Return the inputs with which a model is traced."""
    return (torch.zeros(2, *trained.image_format.shape, dtype=torch.uint8),)


def write_safetensors(trained: Trained) -> bytes:
    """Return the weights under the names of the net's parameters."""
    state, image_format = trained.net.net.state_dict(), trained.image_format
    return weights.to_bytes(state, trained.architecture, trained.classes, image_format)


def write_program(trained: Trained) -> bytes:
    """Return weights and computation, which torch.export.load reads without this package."""
    buffer = io.BytesIO()
    program = torch.export.export(trained.model, example(trained), dynamic_shapes=ANY_BATCH)
    torch.export.save(program, buffer)
    return buffer.getvalue()


def write_onnx(trained: Trained) -> bytes:
    """Return the model for ONNX Runtime and whatever else reads it, with `metadata` of it."""
    import onnx

    program = torch.onnx.export(
        trained.model,
        example(trained),
        input_names=["images"],
        output_names=["logits"],
        dynamic_shapes=ANY_BATCH,
        external_data=False,
        verbose=False,
    )
    assert program
    proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata(trained))
    return proto.SerializeToString()


def metadata(trained: Trained) -> dict[str, str]:
    """Return what a program needs to go from an image file to the name of a class."""
    made = trained.image_format
    channels, height, width = made.shape
    upright = "upright as EXIF says, on white where it is transparent, of 16 bits the upper 8"
    fitted = f"the middle with the sides' ratio, bilinearly resized to {height}x{width}"
    cut_out = "a digit in a photo is cut out first, as ddp-mnist predict does it"
    return {
        "classes": json.dumps(trained.classes, ensure_ascii=False),
        "input": f"images: uint8 [batch, {channels}, {height}, {width}], 0 to 255, "
        + ("RGB" if channels == 3 else "grey")
        + ", bright strokes on black" * made.bright_on_black,
        "preparation": cut_out if made.digit_photos else f"{upright}; {fitted}",
        "output": f"logits: float32 [batch, {len(trained.classes)}], in the order of classes;"
        " their softmax are probabilities. The model itself normalises the pixels",
    }


def read_onnx(content: bytes) -> Outputs:
    import onnxruntime

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch.export, which warns, logs and prints about its own workings."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        logging.disable(level)


CONVERTERS: dict[str, tuple[Callable[[Trained], bytes], Callable[[bytes], Outputs]]] = {
    "safetensors": (write_safetensors, lambda content: weights.from_bytes(content, "it").model),
    "torch": (write_program, lambda content: torch.export.load(io.BytesIO(content)).module()),
    "onnx": (write_onnx, read_onnx),
}


def model_card(trained: Trained, flags: Export, files: list[str]) -> str:
    """Return README.md as the Hugging Face Hub reads it; every figure is the run's own.

    For data in a folder it has the digest and not the place. Raise CheckpointError if summary.json
    is missing or damaged.
    """
    run = flags.run
    try:
        summary = folder.read_json(Path(run) / folder.SUMMARY)
    except (OSError, ValueError) as error:
        why = f"{folder.SUMMARY} is missing or damaged ({reason(error)})"
        raise CheckpointError(f"{run}: {why}; export a finished run") from error
    name, source = printable(summary["dataset"]["name"]), summary["dataset"]["source"]
    kind, _, place = source.partition(":")
    formats = [each for each in ("safetensors", "onnx") if EXPORTS[each] in files]  # the Hub's tags
    scores = {"accuracy": summary["test_accuracy"], **summary["metrics"]}
    return render(
        "model_card.md",
        trained=trained,
        license=flags.license,
        tags=["image-classification", "ddp_mnist", *trained.architecture.split(":"), *formats],
        scores={metric: value for metric, value in scores.items() if value is not None},
        shape=trained.image_format.shape,
        weights=Path(summary["weights"] or "").name,  # that training began from
        parameters=sum(parameter.numel() for parameter in trained.net.parameters()),
        s=summary,
        wrong=wrong_on_purpose(summary["inject"]),
        name=name,
        hub_id=place if kind == "hub" else None,
        source=name if Path(place).is_absolute() else source,
        version=__version__,
        files=files,
    )
