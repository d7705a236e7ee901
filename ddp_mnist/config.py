"""Every flag of `train` as a field of a frozen dataclass, with its sentence and its legal values.

A dataclass is a help group; a field is a flag. Values are checked when the object is made, so a
configuration that exists is a legal one, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from ddp_mnist.errors import UsageError
from ddp_mnist.flags import Flags, OnResume, flag, flag_values, same_flag


@dataclass(frozen=True)
class Run(Flags):
    """What to train on, and where it writes."""

    dataset: str = flag(
        "mnist",
        "mnist, auto (mnist, else digits), fashion_mnist, digits, a Hub id, or a folder.",
        on_resume="same images",
        may_differ=True,  # a folder may lie elsewhere on each machine: equal is what it holds
    )
    run_dir: str | None = flag(None, "Folder of this run [runs/<dataset>-<NNN>].", may_differ=True)
    resume: str | None = flag(
        None,
        "Run folder whose newest checkpoint to go on from; auto = that of --run-dir, if any.",
        may_differ=True,
    )
    seed: int = flag(
        0,
        "Seed of the weights, the order and the augmentation.",
        least=0,
        most=2**31,
        on_resume="must equal",
    )
    cache_dir: str | None = flag(
        None,
        "Decoded images [$DDP_MNIST_CACHE, else ~/.cache/ddp_mnist]; prepare --refresh renews it.",
        on_resume="inherited",
        may_differ=True,
    )
    checkpoint_every: int = flag(
        100, "Optimizer steps between two checkpoints.", least=1, most=10**9, on_resume="may change"
    )
    keep: int = flag(
        3, "Newest checkpoints that are kept.", least=2, most=10**6, on_resume="may change"
    )
    log_every: int = flag(
        25, "Optimizer steps between two log lines.", least=1, most=10**6, on_resume="may change"
    )
    trackers: str | None = flag(
        None,
        "Beside metrics.jsonl: tensorboard, wandb, mlflow, trackio ..., or several: a,b.",
        on_resume="inherited",
    )
    profile: int = flag(
        0, "Optimizer steps to trace, after some to warm up; a trace per rank.", least=0, most=1000
    )
    quiet: bool = flag(False, "Print errors only.", may_differ=True)
    dry_run: bool = flag(False, "Print what would run, and stop.")


class Net(NamedTuple):
    """What the flags need to know of a net in models.py."""

    optimizer: str  # muon costs resnet18 on a CPU three times the rest of its step, others a tenth
    batch_norm: bool = False


NETS = {
    "cnn": Net("muon"),
    "cnn_deep": Net("muon"),
    "mlp": Net("adamw"),
    "resnet18": Net("adamw", batch_norm=True),
    "cnn_bn": Net("muon", batch_norm=True),
}


class Preset(NamedTuple):
    """What --preset stands for, chosen on MNIST; a typed flag beats it.

    Attributes:
        recipe: values of Recipe's fields.
        times_batch: the batch, as a multiple of the data set's usual one.
        least_steps: the least length of a run.
    """

    recipe: dict[str, Any]
    times_batch: int
    least_steps: int


# It was chosen with images held out, and is trained on all.
ACCURATE: dict[str, Any] = {"model": "cnn_deep", "lr": 1.4e-2, "augment": True, "val_size": 0}
PRESETS = {"fast": Preset({}, 1, 300), "accurate": Preset(ACCURATE, 2, 4000)}


@dataclass(frozen=True)
class Recipe(Flags):
    """What is learnt, and how."""

    on_resume: ClassVar[OnResume] = "must equal"

    preset: str = flag(
        "fast",
        "fast = 300 steps or more; accurate = 4,000 of a deeper net. Typed flags beat it.",
        choices=tuple(PRESETS),
    )
    model: str = flag("cnn", "The net.", choices=tuple(NETS))
    epochs: int | None = flag(
        None,
        "Passes over the train images [by data set].",
        least=1,
        most=10**6,
        on_resume="may change",
    )
    batch_size: int | None = flag(
        None,
        "GLOBAL batch: images per optimizer step over all processes [by data set].",
        least=1,
        most=10**7,
    )
    optimizer: str | None = flag(
        None,
        "muon = orthogonal steps for convolutions, AdamW for the rest [muon for cnn*, else adamw].",
        choices=("adamw", "muon"),
    )
    lr: float = flag(1e-2, "Highest learning rate.", above=0, most=100)
    weight_decay: float = flag(1e-2, "Weight decay of matrices and kernels.", least=0, most=10)
    warmup: float = flag(
        0.1, "Share of all steps in which the rate rises to --lr.", least=0, below=1
    )
    label_smoothing: float = flag(
        0.1, "Share of the target spread over all classes.", least=0, below=1
    )
    augment: bool = flag(
        False, "Rotate, scale and shift each train image at random.", negatable=True
    )
    val_size: int | None = flag(
        None,
        "Train images held out to decide by [5000, at most a fifth; 0 = none].",
        least=0,
        most=10**9,
    )
    target_accuracy: float | None = flag(
        None,
        "Stop once the validation accuracy is this high.",
        above=0,
        most=1,
        on_resume="may change",
    )
    patience: int | None = flag(
        None,
        "Stop after this many epochs without a better validation, and keep the best weights.",
        least=1,
        most=10**6,
        on_resume="may change",
    )
    grad_accum: int = flag(
        1,
        "Parts that each step is split into; changes no result.",
        least=1,
        most=10**6,
        on_resume="may change",
    )
    max_grad_norm: float | None = flag(
        None, "Clip the gradient of each step to this norm.", above=0, most=1e6
    )


@dataclass(frozen=True, kw_only=True)
class ResolvedRecipe(Recipe):
    """A recipe for one data set and one number of processes, in which nothing is left open."""

    epochs: int = same_flag(Recipe, "epochs")
    batch_size: int = same_flag(Recipe, "batch_size")
    optimizer: str = same_flag(Recipe, "optimizer")
    val_size: int = same_flag(Recipe, "val_size")
    steps_per_epoch: int

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch


@dataclass(frozen=True)
class Distribution(Flags):
    """How many processes, where, and how they talk."""

    backend: str = flag(
        "auto", "auto = nccl on GPUs, gloo on CPUs.", choices=("auto", "nccl", "gloo", "mpi")
    )
    init_method: str | None = flag(
        None, "tcp://HOST:PORT of rank 0, or env://; only without a launcher.", may_differ=True
    )
    rank: int | None = flag(
        None, "This process's rank, with --init-method.", least=0, most=10**6, may_differ=True
    )
    world_size: int | None = flag(
        None, "Number of processes, with --init-method.", least=1, most=10**6, may_differ=True
    )
    local_rank: int | None = flag(
        None,
        "This process's rank on its machine [found out].",
        least=0,
        most=10**4,
        may_differ=True,
    )
    cpu: bool = flag(False, "Use the CPU although there is a GPU.")
    dist_timeout: float = flag(
        300.0, "Seconds to wait for another process.", least=1, most=7 * 24 * 3600
    )
    mixed_precision: str | None = flag(
        None,
        "auto = fp16 on a GPU, bf16 on a CPU that has it; fp64 is for proofs"
        " [the launcher's, else auto].",
        choices=("auto", "no", "fp16", "bf16", "fp64"),
    )
    sync_bn: bool = flag(False, "BatchNorm over all processes (GPUs only).")
    comm_hook: str = flag(
        "none",
        "What DDP sends of a gradient: all of it, half precision, or low rank (not with fp16).",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    compile: bool = flag(False, "torch.compile the model.")


@dataclass(frozen=True)
class TrainConfig:
    """The flags of `train`.

    Attributes:
        typed: names of the fields that a person gave; a resumed run inherits the others.
    """

    run: Run = dataclasses.field(default_factory=Run)
    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    distribution: Distribution = dataclasses.field(default_factory=Distribution)
    typed: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        run = self.run
        if run.resume == "auto" and run.run_dir is None:
            raise UsageError("--resume auto: needs --run-dir, the folder to go on in or to begin")
        if run.resume not in (None, "auto") and run.run_dir not in (None, run.resume):
            raise UsageError(
                f"--resume {run.resume}: goes on in that folder; leave out --run-dir {run.run_dir}"
            )
        if run.resume is None:  # else they are known once the run's own flags are
            self.refuse_contradictions()

    def refuse_contradictions(self) -> None:
        """Raise UsageError for flags that do not go together."""
        recipe = self.recipe
        decides_by_validation = recipe.target_accuracy is not None or recipe.patience is not None
        if recipe.val_size == 0 and decides_by_validation:
            name = "--patience" if recipe.target_accuracy is None else "--target-accuracy"
            raise UsageError(f"{name}: needs validation images; give --val-size, e.g. 5000")
        if self.distribution.sync_bn and not NETS[recipe.model].batch_norm:
            raise UsageError(
                f"--sync-bn: {recipe.model} has no BatchNorm; use --model cnn_bn or leave it out"
            )
        if recipe.optimizer == "muon" and recipe.model == "mlp":
            raise UsageError("--optimizer muon: mlp has no convolutions; use --optimizer adamw")


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(TrainConfig):
    """All that a run does, with every default filled in."""

    recipe: ResolvedRecipe


def resolve_recipe(recipe: Recipe, rows: int, world_size: int) -> ResolvedRecipe:
    """Return the recipe with every "by data set" filled in for this data and world size.

    A step takes 144 images (1, 2, 3, 4, 6 and 8 processes divide that), or 72 of a small set, or
    what divides evenly next to it; a run takes as many epochs as make 300 steps. With --preset
    accurate it is twice the batch and 4,000 steps.

    Args:
        recipe: as given.
        rows: images in the train split, validation images still among them.
        world_size: number of processes; a step is dealt out evenly to them.

    Raises:
        UsageError: what was given does not fit the data or the world size.
    """
    val_size = min(5000, rows // 5) if recipe.val_size is None else recipe.val_size
    train_rows = rows - val_size
    if train_rows < 1:
        raise UsageError(
            f"--val-size {val_size}: the train split has {rows}; give at most {rows - 1}"
        )
    least = world_size * recipe.grad_accum
    legal = range(least, train_rows + 1, least)
    parts = _parts(world_size, recipe.grad_accum)
    there = f"{train_rows} train images ({rows} less {val_size} for validation)"
    if not legal:
        raise UsageError(
            f"--batch-size: must be at least {least} for {parts}, but only {there} are there;"
            " use fewer of them"
        )
    preset, batch_size = PRESETS[recipe.preset], recipe.batch_size
    if batch_size is None:
        usual = 144 if train_rows >= 50 * 144 else 72
        batch_size = _nearest(legal, preset.times_batch * usual)[-1]
    elif batch_size > train_rows:
        raise UsageError(f"--batch-size {batch_size}: only {there}; use at most {legal[-1]}")
    elif batch_size not in legal:
        nearest = " or ".join(map(str, _nearest(legal, batch_size)))
        raise UsageError(
            f"--batch-size {batch_size}: does not divide by {parts}; nearest legal: {nearest}"
        )
    epochs = recipe.epochs
    if epochs is None:
        epochs = math.ceil(preset.least_steps / (train_rows // batch_size))
    optimizer = recipe.optimizer or NETS[recipe.model].optimizer
    resolved = {
        "epochs": epochs,
        "batch_size": batch_size,
        "val_size": val_size,
        "optimizer": optimizer,
        "steps_per_epoch": train_rows // batch_size,
    }
    return ResolvedRecipe(**flag_values(recipe) | resolved)


def _nearest(legal: range, size: int) -> list[int]:
    """The legal batch size below `size` and the one above it, or the last one at either end."""
    below, above = size // legal.step * legal.step, -(-size // legal.step) * legal.step
    return sorted({min(max(n, legal[0]), legal[-1]) for n in (below, above)})


def _parts(world_size: int, grad_accum: int) -> str:
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    return processes if grad_accum == 1 else f"{processes} x {grad_accum} parts (--grad-accum)"
