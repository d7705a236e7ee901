"""Everything that changes in a run; a checkpoint keeps `State.content` of it."""

import copy
import math
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Self, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from .errors import Diverged
from .evaluation import EvalResult
from .recipe import Recipe
from .task import Task

Net = TypeVar("Net", bound=nn.Module)

BAD_STEPS_ALLOWED = 3  # of fp16, with losses that are not finite: see `bad_in_a_row`
# A loss scaler begins at 2**16 and halves with each step that it skips: at 2**-8 the gradients
# themselves are not finite.
SKIPPED_STEPS_ALLOWED = 24


@dataclass
class Sums:
    """Sums over steps and ranks."""

    loss: float = 0.0  # as training minimises it: with smoothing and weights, if any
    score: float = 0.0  # of classes: images that are classified correctly
    seen: float = 0.0  # images
    seconds: float = 0.0  # of this rank

    def means(self) -> dict[str, float | None]:
        """Return loss and score per image, None if no loss was finite, and images per second."""
        return {
            "loss": self.loss / self.seen if self.seen else None,
            "score": self.score / self.seen if self.seen else None,
            "images_per_second": self.seen / max(self.seconds, 1e-9),
        }


@dataclass
class Progress:
    """Counts and times of a run, summed over its first start and every resume.

    Equal on all ranks, except the seconds, which each rank measures itself.
    """

    epoch: int = 0  # epochs completed
    step: int = 0  # optimizer steps, also those that fp16's loss scaler skipped
    skipped_steps: int = 0  # of these, the skipped ones
    skipped_in_a_row: int = 0  # of these, the ones since the last that was not skipped
    train_seconds: float = 0.0  # in training steps, without validation and saving
    save_seconds: float = 0.0  # in saving checkpoints, as a run measures it
    total_seconds: float = 0.0  # since `State.start_time`
    score: float | None = None  # of the current weights' validation; None before one
    loss: float | None = None  # of the same
    best_score: float | None = None  # so far, of the validations that patience looks at
    best_loss: float | None = None  # of the validation with that score
    best_epoch: int = 0  # the epoch, counted from 1, that reached it
    stopped_by: str | None = None  # the field of the recipe that ended the run early
    resumed_from: list[int] = field(default_factory=list)  # steps
    # Micro-batches of all ranks without a finite loss, since the last sync interval without any
    bad_in_a_row: float = 0.0
    since_log: Sums = field(default_factory=Sums)  # over the steps since the last log line
    in_epoch: Sums = field(default_factory=Sums)  # over this epoch's steps

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Self:
        """Rebuild from `asdict`. Raise KeyError or TypeError if the dict is not a Progress."""
        sums = {name: Sums(**plain[name]) for name in ("since_log", "in_epoch")}
        return cls(**{**plain, **sums})

    def count_step(self, skipped: bool) -> None:
        """Count an optimizer step.

        All ranks skip it or none does: each sees the averaged gradients.
        """
        self.step += 1
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0

    def add(self, loss: float, score: float, seen: float, bad: float, seconds: float) -> None:
        """Add all ranks' counts since the last sync point."""
        for sums in (self.since_log, self.in_epoch):
            sums.loss += loss
            sums.score += score
            sums.seen += seen
            sums.seconds += seconds
        self.train_seconds += seconds
        self.bad_in_a_row = self.bad_in_a_row + bad if bad else 0.0

    def raise_if_diverged(self, recipe: Recipe, accelerator: Accelerator) -> None:
        """Raise Diverged, on all ranks alike, once the weights cannot recover.

        Without a loss scaler one loss that is not finite is fatal; fp16's skips such a step, so a
        few are allowed, until a whole stretch between two sync points has none.
        """
        batches_per_step = accelerator.num_processes * recipe.grad_accum
        allowed = BAD_STEPS_ALLOWED * batches_per_step if accelerator.scaler else 0
        if self.bad_in_a_row > allowed:
            raise Diverged(recipe.lr, self.step, "the loss")
        if self.skipped_in_a_row > SKIPPED_STEPS_ALLOWED:
            raise Diverged(recipe.lr, self.step, "the gradient")

    def end_log_line(self) -> dict[str, float | None]:
        """Return the means since the last log line, and start over."""
        line, self.since_log = self.since_log.means(), Sums()
        return line


@dataclass
class State:
    """Everything that changes in a run."""

    net: nn.Module  # without DDP around it
    optimizer: Any  # with its moments and step counts
    scaler: Any  # fp16's loss scaler, or None
    task: Task
    # time.monotonic() of the start, moved back by the seconds of earlier parts
    start_time: float = field(default_factory=time.monotonic)
    progress: Progress = field(default_factory=Progress)
    best_weights: dict[str, Tensor] | None = None  # of the best validation, with --patience

    def end_epoch(self, recipe: Recipe, validation: EvalResult | None) -> dict[str, float | None]:
        """Count an epoch, keep the best weights, decide whether to stop. Return its means."""
        progress = self.progress
        means, progress.in_epoch = progress.in_epoch.means(), Sums()
        progress.epoch += 1
        if validation:
            progress.score = score = validation.score
            progress.loss = validation.loss
            best = progress.best_score
            is_better = best is None or self.task.better(score, best)
            if score == best and progress.best_loss is not None:  # as few images often score
                is_better = validation.loss < progress.best_loss
            if math.isfinite(score) and is_better:
                progress.best_score, progress.best_epoch = score, progress.epoch
                progress.best_loss = validation.loss
                if recipe.patience is not None:
                    weights = self.net.state_dict()
                    self.best_weights = {name: w.clone() for name, w in weights.items()}
            self.decide_to_stop(recipe)
        return means

    def decide_to_stop(self, recipe: Recipe) -> None:
        """Set `stopped_by`, after a validation."""
        progress, target, patience = self.progress, recipe.target_accuracy, recipe.patience
        score = math.nan if progress.score is None else progress.score
        progress.stopped_by = None
        if target is not None and math.isfinite(score) and not self.task.better(target, score):
            progress.stopped_by = "target_accuracy"
        elif patience is not None and progress.epoch - progress.best_epoch >= patience:
            progress.stopped_by = "patience"

    def with_best_weights(self, net: Net) -> Net:
        """Return the net with the weights of the best validation, if any are kept.

        It is then a copy: a stop signal in the test still saves the last weights.
        """
        if self.best_weights:
            net = copy.deepcopy(net)
            net.load_state_dict(self.best_weights)
        return net

    def content(self, recipe: Recipe) -> dict[str, Any]:
        """Return the content of a checkpoint: tensors and plain values; note how long it took.

        Raise Diverged if a weight is not a finite number, although each loss was.
        """
        weights, progress = self.net.state_dict(), self.progress
        numbers = filter(torch.is_floating_point, weights.values())
        if not torch.stack([torch.isfinite(each).all() for each in numbers]).all():
            raise Diverged(recipe.lr, progress.step, "a weight")
        progress.total_seconds = time.monotonic() - self.start_time
        return {
            "model": weights,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "progress": asdict(progress),
            "best_weights": self.best_weights,
            "patience": recipe.patience,
        }

    def restore(self, content: dict[str, Any], recipe: Recipe) -> None:
        """Restore what `State.content` returned. The caller decides how far the recipe may differ.

        Raise ValueError for another dtype, to which load_state_dict would convert in silence, and
        whatever that raises if the tensors are not those of this net and optimizer.
        """
        for name, weight in self.net.state_dict().items():
            saved = content["model"].get(name, weight).dtype
            if saved != weight.dtype:
                raise ValueError(f"{name} was {saved}, and is {weight.dtype} here")
        groups = self.optimizer.param_groups
        for group, saved in zip(groups, content["optimizer"]["param_groups"], strict=True):
            if "fused" in group:
                saved["fused"] = group["fused"]  # as this device has it
            if "rate" in group:
                saved.setdefault("rate", group["rate"])  # an older checkpoint has none
        self.net.load_state_dict(content["model"])
        self.optimizer.load_state_dict(content["optimizer"])
        for parameter, moments in self.optimizer.state.items():
            for name, moment in moments.items():
                if moment.ndim == 4:  # fused steps take it to have the parameter's strides
                    moments[name] = torch.empty_like(parameter).copy_(moment)
        if self.scaler and content["scaler"]:
            self.scaler.load_state_dict(content["scaler"])
        if content["best_weights"] is not None:
            device = next(self.net.parameters()).device
            self.best_weights = {n: w.to(device) for n, w in content["best_weights"].items()}
        progress = self.progress = Progress.from_dict(content["progress"])
        before = content.get("patience", self.best_weights)  # older checkpoints lack it
        if recipe.patience is not None and before is None:  # it is new: the search begins here
            progress.best_score, progress.best_epoch = None, progress.epoch
        self.start_time -= progress.total_seconds
        progress.resumed_from.append(progress.step)
        if progress.step == progress.epoch * recipe.steps_per_epoch:  # an epoch has ended
            self.decide_to_stop(recipe)
