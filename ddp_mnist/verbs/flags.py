"""Flags of the verbs but `train`, with the examples of --help. Imports no library."""

from dataclasses import dataclass

from ddp_mnist.config.flag_fields import Flags, argument, flag
from ddp_mnist.config.image_options import FITS, columns_in
from ddp_mnist.config.mistakes import MISTAKES
from ddp_mnist.errors import UsageError

RUN = "Run folder, e.g. runs/latest."
CACHE_DIR = "Folder of decoded images [$DDP_MNIST_CACHE, else ~/.cache/ddp_mnist]."
EXPORTS = {"safetensors": "model.safetensors", "onnx": "model.onnx"}  # the file of each format


@dataclass(frozen=True)
class Evaluate(Flags):
    """The flags of `evaluate`.

    for example:
      ddp-mnist evaluate runs/latest --split validation
    """

    run: str = argument("RUN", RUN)
    split: str = flag("test", "Images to evaluate on.", choices=("test", "validation", "train"))
    dataset: str | None = flag(None, "Evaluate on this data set instead of the run's.")
    columns: str | None = flag(
        None, "Columns of its table, as for train [the run's].", metavar="USE=COLUMN,..."
    )
    cache_dir: str | None = flag(None, CACHE_DIR)
    metrics: tuple[str, ...] = flag((), "More metrics, as for train [the run's].", metavar="A,B")
    batch_size: int | None = flag(None, "Images per forward pass; changes no result.", least=1)
    json: bool = flag(False, "Print one JSON object on stdout.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if columns_in(self.columns) and not self.dataset:
            raise UsageError(f"--columns {self.columns}: is for another --dataset; give that too")


@dataclass(frozen=True)
class Predict(Flags):
    """The flags of `predict`.

    for example:
      ddp-mnist predict runs/latest new_photos --top 3 --show seen.png
    """

    run: str = argument("RUN", RUN)
    images: tuple[str, ...] = argument("IMAGE", "Image file, folder of images, or - for stdin.")
    show: str | None = flag(None, "Write a PNG of what the model saw and answered.", metavar="FILE")
    top: int | None = flag(None, "Most probable classes to list [10; in a table 3].", least=1)
    sure: float | None = flag(
        None,
        "Answer `not sure` below this probability; the report helps to choose.",
        above=0,
        below=1,
    )
    digit_photos: bool | None = flag(
        None, "Find and crop the digit in images that are not 28x28 grey [if trained on digits]."
    )
    json: bool = flag(False, "Print JSON lines on a terminal too, not a table.")
    csv: bool = flag(False, "Print CSV for spreadsheets, with a column for each class.")


@dataclass(frozen=True)
class Report(Flags):
    """The flags of `report`.

    for example:
      ddp-mnist report runs/latest --out page.html
    """

    run: str = argument("RUN", RUN)
    out: str | None = flag(None, "Page to write [RUN/report.html].", metavar="FILE")
    png: bool = flag(False, "Also write each picture as PNG and SVG, next to the page.")
    dataset: str | None = flag(None, "Where the run's images are now, if they were moved.")
    cache_dir: str | None = flag(None, CACHE_DIR)


@dataclass(frozen=True)
class Export(Flags):
    """The flags of `export`.

    for example:
      ddp-mnist export runs/latest --format safetensors,onnx
    """

    run: str = argument("RUN", RUN)
    format: tuple[str, ...] = flag(
        ("safetensors",), f"Of {', '.join(EXPORTS)}.", choices=tuple(EXPORTS), metavar="A,B"
    )
    out: str | None = flag(None, "Folder to write to [RUN/export].", metavar="FOLDER")
    license: str = flag("unknown", "License of the weights, e.g. apache-2.0.", metavar="ID")


@dataclass(frozen=True)
class Prepare(Flags):
    """The flags of `prepare`.

    for example:
      ddp-mnist prepare --dataset photos --image-size 64
    """

    dataset: str = flag("mnist", "Data set, as for train.")
    image_size: str | None = flag(None, "Size, as for train, which takes photos at 160 [as it is].")
    grey: bool = flag(False, "Convert colour images to grey.")
    fit: str = flag("crop", "Cut or pad images, as for train.", choices=FITS)
    columns: str | None = flag(None, "A table's columns, as for train.", metavar="USE=COLUMN,...")
    class_folder: str = flag("last", "That of classes, as for train.", choices=("last", "first"))
    task: str | None = flag(None, "Your own task, as for train [classes].")
    cache_dir: str | None = flag(None, CACHE_DIR)
    refresh: bool = flag(False, "Decode again even if cached.")


@dataclass(frozen=True)
class Doctor(Flags):
    """The flags of `doctor`.

    for example:
      ddp-mnist doctor --minutes 30
    """

    processes: int | None = flag(
        None, "Processes to start, without a launcher [one per GPU, else 2].", least=1, most=10**4
    )
    minutes: float = flag(0.0, "Burn-in: minutes to repeat collectives and training for.", least=0)
    expect_busbw: float | None = flag(
        None, "FAIL below this bus bandwidth of the largest all-reduce.", above=0, metavar="GB/s"
    )
    expect_tflops: float | None = flag(
        None, "FAIL if a rank multiplies matrices slower than this.", above=0, metavar="TFLOP/s"
    )
    dataset: str = flag("mnist", "Data set that should be available.")
    cache_dir: str | None = flag(None, CACHE_DIR)
    run_dir: str = flag("runs", "Folder in which runs will be written.")
    json: bool = flag(False, "Print one JSON object on stdout.")


@dataclass(frozen=True)
class Verify(Flags):
    """The flags of `verify`.

    for example:
      ddp-mnist verify --processes 4
      ddp-mnist verify --inject gradients
    """

    processes: int = flag(3, "Compare 2 ... N processes with one.", least=2, most=10**4)
    gpu: bool = flag(False, "Also compare training on this machine's GPU with the CPU.")
    model: str | None = flag(None, "Model to train, as for train [cnn].")
    loss: str | None = flag(None, "Your own loss, as for train [cross-entropy].")
    task: str | None = flag(None, "Your own task, as for train [classes].")
    dataset: str = flag("digits", "Data set, as for train without auto; a large one takes minutes.")
    inject: str | None = flag(
        None, "Inject a fault, which a check has to catch; exit code 1.", choices=tuple(MISTAKES)
    )
    save: str = flag("verify.json", "Write the results to this file.", metavar="FILE")
