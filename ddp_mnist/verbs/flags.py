"""Flags of the verbs in this folder; train's are in config.py. Imports no library, for --help."""

from __future__ import annotations

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
    """The flags of `evaluate`."""

    run: str = argument("RUN", RUN)
    split: str = flag("test", "Which images.", choices=("test", "validation", "train"))
    dataset: str | None = flag(None, "Another data set than the run's.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    batch_size: int | None = flag(
        None, "Images per process and pass; changes no result.", least=1, most=10**7
    )
    json: bool = flag(False, "One JSON object on stdout.")


@dataclass(frozen=True)
class Predict(Flags):
    """The flags of `predict`."""

    run: str = argument("RUN", RUN)
    images: tuple[str, ...] = argument(
        "IMAGE", "Image file, folder of images, or - for one on stdin."
    )
    show: str | None = flag(None, "A PNG of what the model saw, and said.", metavar="FILE")
    digit_photos: bool | None = flag(
        None,
        "Cut digits out of files that are not 28x28 and grey [if trained on MNIST or the like].",
        negatable=True,
    )


@dataclass(frozen=True)
class Report(Flags):
    """The flags of `report`."""

    runs: tuple[str, ...] = argument("RUN", RUN)
    out: str | None = flag(
        None, "The page [RUN/report.html; of several runs, beside the first].", metavar="FILE"
    )
    png: bool = flag(False, "Each curve as a PNG too, beside it.")
    dataset: str | None = flag(None, "Where the runs' images are now.")
    cache_dir: str | None = flag(None, CACHE_DIR)


@dataclass(frozen=True)
class Export(Flags):
    """The flags of `export`."""

    run: str = argument("RUN", RUN)
    format: tuple[str, ...] = flag(
        ("safetensors", "torch"),
        "safetensors, torch (torch.export) or onnx, several with commas.",
        choices=EXPORTS,
        metavar="A,B",
    )
    out: str | None = flag(None, "A folder of its own [RUN/export].", metavar="FOLDER")


@dataclass(frozen=True)
class Prepare(Flags):
    """The flags of `prepare`."""

    dataset: str = flag("mnist", "As for train.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    refresh: bool = flag(False, "Read it again; remove what other decoders made of it.")


@dataclass(frozen=True)
class Multinode(Flags):
    """The flags of `multinode`, which the Makefile gives from its variables."""

    machine_rank: int | None = flag(
        None, "This machine's number.", least=0, most=10**6, typed_as="MACHINE_RANK="
    )
    main_process_ip: str | None = flag(
        None, "Name or address of machine 0.", typed_as="MAIN_PROCESS_IP="
    )
    main_process_port: int | None = flag(
        None, "Its free port [12345].", least=1, most=65535, typed_as="MAIN_PROCESS_PORT="
    )
    num_machines: int = flag(2, "Machines.", least=1, most=10**6, typed_as="NUM_MACHINES=")
    nproc_per_node: int | None = flag(
        None,
        "Processes on each machine [one per GPU, else 1].",
        least=1,
        most=10**6,
        typed_as="NPROC_PER_NODE=",
    )
    verb: str = flag("train", "What to run.", choices=("train", "doctor"))
