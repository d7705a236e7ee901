"""The flags on the model and its training, and the values chosen for flags not given.

PRESETS has what --preset chooses.
"""

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ddp_mnist.config.flag_fields import Flags, changeable, flag, flag_name
from ddp_mnist.config.mistakes import MISTAKES, check_mistake
from ddp_mnist.core import recipe as core
from ddp_mnist.errors import UsageError
from ddp_mnist.system.text import did_you_mean

# Our nets, each with its optimizer. On a CPU, Muon makes their steps a tenth longer, but those of
# resnet18 four times as long, so other nets get adamw.
NETS = {"cnn": "muon", "cnn_deep": "muon", "mlp": "adamw", "cnn_bn": "muon"}
NAMED = r"timm:[\w.]+|[\w.]+:\w+"  # LIBRARY:NET or MODULE:NAME
FINE_TUNED_SIDE = 160  # of the images of a net from weights, unless these say another


class Defaults(NamedTuple):
    """The values that a preset chooses for a kind of images; a typed flag beats them."""

    model: str
    lr: float  # the peak learning rate of that net, of our others, and with sgd
    # {at least so many train images: (batch size, least number of steps)}, descending
    batches: dict[int, tuple[int, int]]
    augment: bool = True
    epochs: int = 1  # the least number
    lr_of_others: float = 1e-3  # with our nets' learning rate and AdamW, resnet18 learns nothing
    beta2: float = 0.98  # this, and the one from weights, are the better ones on validation images
    head_rate: float = 1.0  # of the last layer, as a multiple of the others'
    kept: str = ""  # see `hold_still`


class Preset(NamedTuple):
    """The values behind a --preset; a typed flag beats them."""

    recipe: dict[str, Any]  # values of any flags of train, whatever the images are
    # Chosen on MNIST, and on other data sets, see docs/benchmarks.md
    strokes: Defaults  # bright on black
    pictures: Defaults  # all other images
    fine_tuned: Defaults  # whatever the images are, of a net that starts from weights


# The net that pictures are learned with, from ImageNet's weights, if these are at hand
PRETRAINED = "torchvision:regnet_y_400mf"
FROM_WEIGHTS: dict[str, Any] = {"model": PRETRAINED, "lr": 2e-3, "lr_of_others": 5e-4}
FROM_WEIGHTS |= {"beta2": 0.999, "head_rate": 10.0, "kept": "statistics"}  # its last layer is new
PRESETS = {
    "fast": Preset(
        {},
        strokes=Defaults("cnn", 1e-2, {7200: (144, 300), 0: (72, 300)}, augment=False),
        pictures=Defaults(
            "cnn_deep", 2e-2, {7200: (144, 1000), 3600: (72, 700), 0: (24, 2000)}, epochs=10
        ),
        fine_tuned=Defaults(batches={300: (24, 150), 0: (24, 120)}, epochs=3, **FROM_WEIGHTS),
    ),
    # Chosen with images held out; a run with it trains on all of them.
    "accurate": Preset(
        {"val_size": 0},
        strokes=Defaults("cnn_deep", 1.4e-2, {7200: (288, 4000), 0: (144, 4000)}),
        pictures=Defaults(
            "cnn_deep", 2e-2, {7200: (288, 4000), 3600: (144, 4000), 0: (48, 4000)}, epochs=10
        ),
        fine_tuned=Defaults(batches={0: (24, 600)}, epochs=6, **FROM_WEIGHTS),
    ),
}


@dataclass(frozen=True)
class Recipe(Flags):
    """Choose the model, and how it is trained."""

    preset: str = flag(
        "fast",
        "fast: short, longer on pictures; accurate: for long, on all images. Flags override it.",
        choices=tuple(PRESETS),
    )
    model: str | None = flag(
        None, f"{', '.join(NETS)}, torchvision:NAME, timm:NAME, or own MODULE:NAME [see the docs]."
    )
    weights: str | None = flag(
        None,
        "Start from a .pth or .safetensors file, or a library's weights: DEFAULT; none: from new"
        " ones [photos: ImageNet's].",
    )
    freeze: bool = flag(False, "Train the last layer alone; the rest keeps its --weights.")
    epochs: int | None = changeable(
        None,
        "Passes over train data [300 steps; pictures: 700 to 2000, from weights 120 or 150].",
        least=1,
    )
    batch_size: int | None = flag(
        None,
        "GLOBAL batch size: images per step of all processes [144; small data: 72, pictures: 24].",
        least=1,
    )
    optimizer: str | None = flag(
        None,
        "muon: Muon for kernels, AdamW for the rest; sgd: with momentum [cnn*: muon, else adamw].",
        choices=("adamw", "muon", "sgd"),
    )
    lr: float | None = flag(
        None,
        "Peak learning rate [0.01; pictures: 0.02; other nets: 0.001, from weights 0.0005].",
        above=0,
        most=100,
    )
    weight_decay: float = flag(1e-2, "Weight decay of matrices and kernels.", least=0, most=10)
    warmup: float = flag(0.1, "Share of steps with a rising learning rate.", least=0, below=1)
    label_smoothing: float = flag(
        0.1, "Share of a label spread over all classes.", least=0, below=1
    )
    loss: str | None = flag(None, "Your own loss of each image, MODULE:FUNCTION [cross entropy].")
    task: str | None = flag(None, "Your own task, MODULE:CLASS, not classes [see the docs].")
    class_weights: str = flag(
        "none", "balanced: in training all classes count alike.", choices=("none", "balanced")
    )
    augment: bool | None = flag(
        None,
        "Mirror, crop and colour pictures [yes]; rotate, scale and shift strokes on black [no].",
    )
    val_size: int | None = flag(
        None, "Train images to hold out for validation; 0: none [5000, at most a fifth].", least=0
    )
    target_accuracy: float | None = changeable(
        None, "Stop once the validation accuracy reaches this.", above=0, most=1
    )
    patience: int | None = changeable(
        None, "Stop after N epochs without a better validation score; keep the best.", least=1
    )
    metrics: tuple[str, ...] = changeable(
        (), "Metrics: scikit-learn's, e.g. f1,balanced_accuracy, or MODULE:FUNCTION.", metavar="A,B"
    )
    grad_accum: int = changeable(
        1, "Micro-batches per step; changes results only with BatchNorm or Dropout.", least=1
    )
    max_grad_norm: float | None = flag(None, "Clip each step's gradient to this norm.", above=0)
    inject: str | None = flag(None, "Make this mistake on purpose.", choices=tuple(MISTAKES))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in (None, *NETS) and not re.fullmatch(NAMED, str(self.model)):
            raise UsageError(
                f"--model {self.model}: choose from {', '.join(NETS)}, torchvision:NAME (e.g."
                " torchvision:resnet18), timm:NAME or MODULE:NAME"
                f"{did_you_mean(str(self.model), NETS)}"
            )

    def val_size_of(self, rows: int) -> int:
        """Return the number of train images, of `rows`, to hold out. Raise UsageError for all."""
        val_size = min(5000, rows // 5) if self.val_size is None else self.val_size
        if val_size >= rows:
            raise UsageError(
                f"--val-size {val_size}: the train split has {rows}; give at most {rows - 1}"
            )
        return val_size

    def refuse_unvalidated(self, held_out: int | None, fix: str) -> None:
        """Raise UsageError if --patience or --target-accuracy lacks validation images."""
        for name in ("target_accuracy", "patience"):
            if held_out == 0 and getattr(self, name) is not None:
                raise UsageError(f"{flag_name(name)}: needs validation images; {fix}")


def resolve_recipe(
    recipe: Recipe,
    rows: int,
    world_size: int,
    val_rows: int | None = None,
    kind: str = "strokes",
    fine_tunes: bool = False,
) -> tuple[Recipe, core.Recipe]:
    """Return the flags, each open value chosen for this data and world size, and core's Recipe.

    `rows` is the size of the train split, including the `val_rows` held out for validation (by
    default as many as asked for). `kind` is `ImageFormat.kind`. With `fine_tunes`, the net starts
    from weights, and BatchNorm keeps its statistics. Raise UsageError for values that do not fit
    the data or the world size.
    """
    preset = PRESETS[recipe.preset]
    defaults = preset.strokes if kind == "strokes" else preset.pictures
    defaults = preset.fine_tuned if fine_tunes else defaults
    model = recipe.model or defaults.model
    val_size = recipe.val_size_of(rows)
    val_rows = val_size if val_rows is None else val_rows
    train_rows = rows - val_rows
    batch, steps = next(each for least, each in defaults.batches.items() if train_rows >= least)
    batch_size = _batch_size(recipe, train_rows, val_rows, world_size, batch)
    steps_per_epoch = train_rows // batch_size
    epochs = max(math.ceil(steps / steps_per_epoch), defaults.epochs)
    optimizer = recipe.optimizer or NETS.get(model, "adamw")
    lr = defaults.lr if model in NETS or optimizer == "sgd" else defaults.lr_of_others
    augment = recipe.augment
    if augment is None:  # a mirrored or shifted image may have other targets
        augment = defaults.augment and not recipe.task
    flags = replace(
        recipe,
        model=model,
        epochs=recipe.epochs or epochs,
        batch_size=batch_size,
        val_size=val_size,
        optimizer=optimizer,
        lr=recipe.lr or lr,
        augment=augment,
    )
    chosen: dict[str, Any] = {
        "steps_per_epoch": steps_per_epoch,
        "augment": kind if augment else "",
        "beta2": defaults.beta2,
        "head_rate": defaults.head_rate,
        "kept": "body" if recipe.freeze else defaults.kept,
    }
    shared = {f.name for f in fields(core.Recipe)} - chosen.keys()
    found = core.Recipe(**chosen, **{name: getattr(flags, name) for name in shared})
    # A fifth of four images or fewer rounds down to 0.
    fix = "add images, as each class has only one" if val_size else "give --val-size, e.g. 1"
    recipe.refuse_unvalidated(val_rows, fix)
    if recipe.inject:
        check_mistake(recipe.inject, world_size, found.epochs, found.total_steps)
    return flags, found


def _batch_size(recipe: Recipe, train_rows: int, val_rows: int, world_size: int, usual: int) -> int:
    """Return the number of images per step: as typed, else the `usual` or the next legal one.

    144, 72 and 24 can be divided by 1, 2, 3, 4, 6 and 8 processes. Raise UsageError if the typed
    number cannot be divided, or if there are too few images.
    """
    least = world_size * recipe.grad_accum
    largest = train_rows // least * least
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    rule = f"divisible by {least} ({processes} x --grad-accum {recipe.grad_accum})"
    most = f"{train_rows}, the train images without {val_rows} for validation"
    if not largest:
        fix = "use fewer processes or micro-batches"
        raise UsageError(f"--batch-size: must be {rule} and at most {most}; {fix}")
    size = recipe.batch_size or usual
    multiples = (size // least * least, -(-size // least) * least)
    nearest = sorted({min(max(each, least), largest) for each in multiples})
    if recipe.batch_size and size not in nearest:
        problem = f"not {rule}" if size % least else f"above {most}"
        fix = f"use {' or '.join(map(str, nearest))}"
        more = ", or another number of processes" if size % least else ""
        raise UsageError(f"--batch-size {size}: is {problem}; {fix}{more}")
    return nearest[-1]
