"""Advice to whoever waits for a run: a slow rank, other programs, a long run, overfitting."""

import math
from dataclasses import dataclass

from ddp_mnist.config.recipe import ResolvedRecipe
from ddp_mnist.run.console import Console, count, panel
from ddp_mnist.run.evaluation import Metrics
from ddp_mnist.system.neighbours import Neighbours

JUDGED_S = 30.0  # of training, after which its length is judged
BY_HEART, TOO_FAR = 0.98, 0.1  # accuracy in training, and validation's below it
HOUR_S = 3600.0


@dataclass
class Hints:
    """The advice that a run prints while it trains, each hint once."""

    console: Console
    neighbours: Neighbours | None = None  # other programs on these cores, until reported
    judges_length: bool = False  # if the recipe has chosen it, on a CPU, where somebody waits
    overfits: bool = False  # whether the hint has been printed

    def after_step(self, trained_s: float, left_s: float, epochs: int, has_launcher: bool) -> None:
        """Name other programs on the cores, and how to be done in an hour."""
        if self.neighbours and (fit := self.neighbours.judge()):
            self.console.print(neighbours_line(fit, self.neighbours.threads, has_launcher))
            self.neighbours = None
        if self.judges_length and trained_s >= JUDGED_S:
            self.judges_length = False
            if line := long_line(left_s, epochs):
                self.console.print(line)

    def after_epoch(
        self, accuracy: float | None, other: Metrics | None, recipe: ResolvedRecipe
    ) -> None:
        """Say what helps against overfitting."""
        hint = overfit_line(accuracy, other, recipe)
        if hint and not self.overfits:
            self.overfits = True
            self.console.print(hint)


def slow_line(rank: int, host: str, times: float) -> str:
    """Return the line that names a rank that takes `times` the median."""
    return (
        f"slow       rank {rank} on {host} takes {times:.1f} times as long as the others,"
        " which wait for it; see what else runs there"
    )


def neighbours_line(fit: int, threads: int, has_launcher: bool = False, fix: str = "") -> str:
    """Return the line that names the number of threads that the cores have room for.

    A launcher's processes cannot be set to one thread: see `set_threads`. A verb that cannot be
    resumed has its own `fix`.
    """
    wait = "end them, or wait until they have ended" if has_launcher and fit == 1 else ""
    fix = fix or wait or f"stop it, and resume it with OMP_NUM_THREADS={fit}"
    room = f"room for {count(fit, 'thread')} of {threads}"
    text = f"other programs use these cores, which have {room}, and each step waits for the slowest"
    return panel({"careful": f"{text}; {fix}"})


def long_line(left_s: float, epochs: int) -> str:
    """Return a line that says how to be done in an hour if it takes longer, else ""."""
    if left_s <= HOUR_S:
        return ""
    fewer = int(epochs * HOUR_S / left_s)
    fix = f"--epochs {fewer}" if fewer else "a smaller --image-size"
    took = f"this takes about {left_s / HOUR_S:.1f} hours on the CPU"
    return panel({"careful": f"{took}; for an hour or less, begin anew with {fix}"})


def overfits(trained: float, other: float, images: int) -> bool:
    """Return whether a net is far worse on `images` other images than on its own, beyond chance.

    That means by more than TOO_FAR, and by more than two standard errors of a share of so many
    images.
    """
    error = math.sqrt(other * (1 - other) / images)
    return trained - other >= max(TOO_FAR, 2 * error)


def overfitting(model: str, weights: str | None, augment: bool) -> tuple[str, list[str]]:
    """Name overfitting, in words, and return what may help a run with these flags."""
    fixes = ["more images"]
    if not augment:
        fixes.append("--augment")
    if not weights:
        net = "" if model.startswith("torchvision:") else "--model torchvision:resnet18 "
        fixes.append(f"{net}--weights DEFAULT")
    return "the net has learned its images by heart (overfitting)", fixes


def overfit_line(accuracy: float | None, validation: Metrics | None, recipe: ResolvedRecipe) -> str:
    """Return a line that says what helps if the net knows its images and not others, else ""."""
    if accuracy is None or validation is None:
        return ""
    if accuracy < BY_HEART or not overfits(accuracy, validation.accuracy, validation.count):
        return ""
    what, fixes = overfitting(recipe.model, recipe.weights, recipe.augment)
    found = f"accuracy {accuracy:.4f} and validation {validation.accuracy:.4f}: {what}"
    return panel({"hint": f"{found}; to try in a new run: {', or '.join(fixes)}"})
