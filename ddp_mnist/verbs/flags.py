"""Flags of the verbs in this folder; train's are in config.py. Imports no library, for --help."""

from dataclasses import dataclass

from ddp_mnist.flags import Flags, argument, flag

RUN, CACHE_DIR = "Run folder, e.g. runs/latest.", "Folder of decoded data sets."
EXPORTS = {  # the file of each format
    "safetensors": "model.safetensors",
    "torch": "model.pt2",
    "onnx": "model.onnx",
}


@dataclass(frozen=True)
class Evaluate(Flags):
    run: str = argument("RUN", RUN)
    split: str = flag("test", "Which images.", choices=("test", "validation", "train"))
    dataset: str | None = flag(None, "Another data set than the run's.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    batch_size: int | None = flag(None, "Images per process and pass; changes no result.", least=1)
    json: bool = flag(False, "One JSON object on stdout.")


@dataclass(frozen=True)
class Predict(Flags):
    run: str = argument("RUN", RUN)
    images: tuple[str, ...] = argument("IMAGE", "File, folder of images, or - for one on stdin.")
    show: str | None = flag(None, "A PNG of what the model saw, and said.", metavar="FILE")
    digit_photos: bool | None = flag(
        None,
        "Cut digits out of files that are not 28x28 and grey [if trained on MNIST or the like].",
        negatable=True,
    )


@dataclass(frozen=True)
class Report(Flags):
    runs: tuple[str, ...] = argument("RUN", RUN)
    out: str | None = flag(
        None, "The page [RUN/report.html; of several runs, beside the first].", metavar="FILE"
    )
    png: bool = flag(False, "Each curve as a PNG too, beside it.")
    dataset: str | None = flag(None, "Where the runs' images are now.")
    cache_dir: str | None = flag(None, CACHE_DIR)


@dataclass(frozen=True)
class Export(Flags):
    run: str = argument("RUN", RUN)
    format: tuple[str, ...] = flag(
        ("safetensors", "torch"),
        "safetensors, torch (torch.export) or onnx, several with commas.",
        choices=tuple(EXPORTS),
        metavar="A,B",
    )
    out: str | None = flag(None, "A folder of its own [RUN/export].", metavar="FOLDER")


@dataclass(frozen=True)
class Prepare(Flags):
    dataset: str = flag("mnist", "As for train.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    refresh: bool = flag(False, "Read it again; remove what other decoders made of it.")
