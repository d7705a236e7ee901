"""Flags of the verbs; train's are in config.py. Imports no library, for --help."""

from dataclasses import dataclass

from ddp_mnist.cluster.launch import CONFIGS
from ddp_mnist.flags import Flags, argument, flag

RUN, CACHE_DIR = "Run folder, e.g. runs/latest.", "Folder of decoded data sets."
EXPORTS = {  # the file of each format
    "safetensors": "model.safetensors",
    "torch": "model.pt2",
    "onnx": "model.onnx",
}
FAULTS = {  # a sentence of each
    "sampler": "each rank shuffles by a seed of its own",
    "gradients": "gradients are summed over the ranks, not averaged",
    "parameter": "one parameter that DDP does not synchronise",
}
BENCHES = {  # a sentence of each
    "loop": "Time train.py's loop against plain_ddp.py's (a minute).",
    "startup": "Time train's start, to its first step, against a short program (two minutes).",
    "scaling": "Time 1 to N processes against as many alone, and parts of a step (minutes).",
}
CAUGHT_BY = {"sampler": "samples", "gradients": "gradients", "parameter": "replicas"}  # a check


@dataclass(frozen=True)
class Evaluate(Flags):
    run: str = argument("RUN", RUN)
    split: str = flag("test", "Which images.", choices=("test", "validation", "train"))
    dataset: str | None = flag(None, "Another data set than the run's.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    metrics: tuple[str, ...] = flag((), "As for train [the run's].", metavar="A,B")
    batch_size: int | None = flag(None, "Images per process and pass; changes no result.", least=1)
    json: bool = flag(False, "One JSON object on stdout.")


@dataclass(frozen=True)
class Predict(Flags):
    run: str = argument("RUN", RUN)
    images: tuple[str, ...] = argument(
        "IMAGE", "File, folder with images, also in subfolders, or - for one on stdin."
    )
    show: str | None = flag(None, "A PNG of what the model saw, and said.", metavar="FILE")
    top: int = flag(10, "How many classes to give a probability of.", least=1)
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
    image_size: str | None = flag(None, "As for train.")
    grey: bool = flag(False, "As for train.")
    test_size: int | None = flag(None, "As for train.", least=1)
    cache_dir: str | None = flag(None, CACHE_DIR)
    refresh: bool = flag(False, "Read it again; remove what other decoders made of it.")


@dataclass(frozen=True)
class Configs(Flags):
    folder: str = argument("DIR", f"Folder to write them into [{CONFIGS}].", default=CONFIGS)


@dataclass(frozen=True)
class Doctor(Flags):
    processes: int | None = flag(
        None, "To start here, without a launcher [one per GPU, else 2].", least=1, most=10**4
    )
    minutes: float = flag(0.0, "Burn-in: repeat collectives and training for so long.", least=0)
    dataset: str = flag("mnist", "The data set to look for.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    run_dir: str = flag("runs", "Where runs would be made.")
    json: bool = flag(False, "One JSON object on stdout.")
    save: str | None = flag(None, "The same into a file.", metavar="FILE")
    against: str | None = flag(
        None, "Compare speeds with what another machine of the same type saved.", metavar="FILE"
    )
    tolerance: float = flag(0.5, "Share by which a speed may be worse than there.", least=0)


@dataclass(frozen=True)
class Verify(Flags):
    processes: int = flag(
        3, "2, 3 ... N processes are compared with one, if they divide 24.", least=2, most=10**4
    )
    model: str = flag("cnn", "The net to train, as --model of train has it.")
    dataset: str = flag("digits", "What to train on, as --dataset of train; minutes if large.")
    inject: str | None = flag(
        None, "A fault to be caught, one of those below; exit code 1.", choices=FAULTS
    )
    save: str = flag("verify.json", "Where the results are written.", metavar="FILE")


@dataclass(frozen=True)
class Bench(Flags):
    what: str = argument("WHAT", "One of those below.", BENCHES)
    dataset: str = flag("mnist", "The data set to train on.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    processes: int | None = flag(
        None, "How many [one per GPU, else 2; loop: at least 2].", least=1, most=10**4
    )
    repeats: int = flag(11, "Rounds.", least=5, most=10**4)
    check: bool = flag(False, "Exit code 1 where a goal is missed.")
