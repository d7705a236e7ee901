"""The flags on data and folder, and `TrainConfig`, which holds all groups of flags of `train`.

The other groups are Recipe in recipe.py and Distribution in distribution.py.
"""

from collections.abc import Collection, Mapping
from dataclasses import Field, dataclass, field
from typing import Any, Self

from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import (
    Flags,
    changeable,
    flag,
    flag_fields,
    flag_values,
    not_kept,
    typed_flag,
)
from ddp_mnist.config.image_options import FITS, ImageOptions
from ddp_mnist.config.mistakes import MISTAKES
from ddp_mnist.config.recipe import PRESETS, Recipe
from ddp_mnist.errors import UsageError


@dataclass(frozen=True)
class RunFlags(Flags):
    """Choose the data, and where and how often the run is written."""

    dataset: str = changeable(
        "mnist",
        "mnist, auto (mnist, else digits), fashion_mnist, digits, patches, a folder, or a Hub id:"
        " owner/name, with :config, with @revision.",
    )
    image_size: str | None = flag(
        None,
        "Resize to N or HEIGHTxWIDTH [as it is if equal; else square, to 96 or 224; weights: 160].",
    )
    grey: bool = flag(False, "Convert colour images to grey.")
    fit: str = flag(
        "crop",
        "Cut images of another ratio to their middle, or pad them with grey and keep them whole.",
        choices=FITS,
    )
    columns: str | None = flag(
        None,
        "What a table calls its columns: label=species,group=animal [label, group, file_name ...].",
        metavar="USE=COLUMN,...",
    )
    class_folder: str = flag(
        "last",
        "Folder that is an image's class: the last of its path, or the first that not all share.",
        choices=("last", "first"),
    )
    group: str | None = flag(
        None,
        "Keep images on one side in whose paths it finds the same, as an animal [column group].",
        metavar="REGEX",
    )
    test_size: float | None = flag(
        None,
        "Images to hold out for the test, a share or a number, if there is no test split [0.2].",
        above=0,
    )
    fold: str | None = flag(
        None,
        "Test on fold K of N, if there is no test split: over all K, on each image once.",
        metavar="K/N",
    )
    run_dir: str | None = not_kept(None, "Folder to write the run to [runs/<dataset>-<NNN>].")
    resume: str | None = not_kept(
        None,
        "Run folder to resume; auto: resume --run-dir if it holds a run, else start there.",
    )
    seed: int = flag(0, "Seed of weights, image order and augmentation.", least=0, most=2**31)
    cache_dir: str | None = changeable(
        None,
        "Cache folder; prepare --refresh rebuilds it [$DDP_MNIST_CACHE, else ~/.cache/ddp_mnist].",
    )
    checkpoint_every: int | None = changeable(
        None, "Optimizer steps between checkpoints [100, or as many as take 5 s].", least=1
    )
    keep: int = changeable(3, "Number of newest checkpoints to keep.", least=2)
    log_every: int = changeable(25, "Optimizer steps between log lines.", least=1)
    trackers: str | None = changeable(
        None, "Log to these besides metrics.jsonl: tensorboard, wandb, mlflow, trackio ... (a,b)."
    )
    profile: int = not_kept(
        0, "Optimizer steps to profile after a warm-up; one trace per rank.", least=0, most=1000
    )
    quiet: bool = not_kept(False, "Print errors only.")
    dry_run: bool = not_kept(False, "Print what would run; write only the cache.")

    def __post_init__(self) -> None:
        super().__post_init__()
        ImageOptions.from_flags(vars(self))  # raises UsageError for a malformed one
        if self.fold and self.test_size is not None:
            raise UsageError(f"--fold {self.fold}: says what the test is; leave out --test-size")


TRAINING_FLAGS = ("sync_bn", "comm_hook", "compile", "mixed_precision")  # fields of Distribution


def fields_of(
    *groups: type[Flags], more: Collection[str] = ()
) -> dict[type[Flags], list[Field[Any]]]:
    """Return the flags of a verb with these groups.

    TRAINING_FLAGS belong to a verb with a Recipe; other verbs have only those that `more` names.
    """
    omitted = () if Recipe in groups else {*TRAINING_FLAGS}.difference(more)
    return {g: [f for f in flag_fields(g) if f.name not in omitted] for g in groups}


@dataclass(frozen=True)
class TrainConfig:
    """The flags of `train`."""

    run: RunFlags = field(default_factory=RunFlags)
    recipe: Recipe = field(default_factory=Recipe)
    distribution: Distribution = field(default_factory=Distribution)
    typed: frozenset[str] = frozenset()  # names of flags; a resumed run keeps its other ones
    resumes: bool = False  # the weights are in a checkpoint; set by resume.inherit
    typed_before: frozenset[str] = frozenset()  # for earlier parts of a resumed run, as `typed`

    @classmethod
    def from_flags(cls, typed: Mapping[str, Any]) -> Self:
        """Return the flags as typed; the preset fills in others."""
        chosen = Recipe.from_flags(typed)
        changed = MISTAKES[chosen.inject].recipe if chosen.inject else {}
        unsmoothed = {"label_smoothing": 0.0} if chosen.loss else {}
        given = {**PRESETS[chosen.preset].recipe, **changed, **unsmoothed, **typed}
        run, recipe = RunFlags.from_flags(given), Recipe.from_flags(given)
        return cls(run, recipe, Distribution.from_flags(given), frozenset(typed))

    def __post_init__(self) -> None:
        resume, run_dir = self.run.resume, self.run.run_dir
        if resume is None:  # otherwise part of the recipe is the resumed run's, not known yet
            self.refuse_contradictions()
        elif resume == "auto" and run_dir is None:
            raise UsageError("--resume auto: needs --run-dir, the folder to resume or to start in")
        elif resume != "auto" and run_dir not in (None, resume):
            raise UsageError(
                f"--resume {resume}: resumes the run in that folder; leave out --run-dir {run_dir}"
            )

    def typed_words(self) -> list[str]:
        """Return the flags that were typed and can change a result, e.g. ["--lr 0.02"].

        Those of a resumed run's earlier parts are among them, if it has kept them.
        """
        kept = {"dataset": self.run.dataset} | flag_values(self.run, "must equal")
        kept |= flag_values(self.recipe)
        of_this_part = {name: getattr(self.distribution, name) for name in TRAINING_FLAGS}
        words = [typed_flag(n, x) for n, x in kept.items() if n in self.typed | self.typed_before]
        return words + [typed_flag(n, x) for n, x in of_this_part.items() if n in self.typed]

    def refuse_contradictions(self) -> None:
        """Raise UsageError for flags that contradict each other."""
        if "val_size" in self.typed:  # else the images may have a validation split of their own
            self.recipe.refuse_unvalidated(self.recipe.val_size, "give --val-size, e.g. 5000")
        if self.recipe.optimizer == "muon" and self.recipe.model == "mlp":
            raise UsageError("--optimizer muon: mlp has no convolutions; use --optimizer adamw")
        of_classes = {"loss", "class_weights", "label_smoothing", "metrics", "target_accuracy"}
        own, unused = ("task", of_classes) if self.recipe.task else ("loss", {"label_smoothing"})
        if getattr(self.recipe, own) and (contradicting := sorted(self.typed & unused)):
            name = contradicting[0]
            typed, other = (typed_flag(each, getattr(self.recipe, each)) for each in (name, own))
            raise UsageError(f"{typed}: has no part in {other}; leave it out")
