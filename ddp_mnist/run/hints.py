"""Advice on a slow rank, other programs on the cores, and overfitting."""

import math

from ddp_mnist.run.console import count, panel

TOO_FAR = 0.1  # between the accuracy in training and that of other images


def slow_line(rank: int, host: str, times: float) -> str:
    """Return the line that names a rank that takes `times` the median."""
    return (
        f"slow       rank {rank} on {host} takes {times:.1f} times as long as the others,"
        " which wait for it; see what else runs there"
    )


def neighbours_line(fit: int, threads: int, has_launcher: bool = False, fix: str = "") -> str:
    """Return the line that names the number of threads that the cores have room for.

    Of a launcher's processes, one thread cannot be asked for: see `set_threads`. A verb that cannot
    be resumed has its own `fix`.
    """
    wait = "end them, or wait until they have ended" if has_launcher and fit == 1 else ""
    fix = fix or wait or f"stop it, and resume it with OMP_NUM_THREADS={fit}"
    text = (
        f"other programs use these cores, which have room for {count(fit, 'thread')} of {threads},"
        f" and each step waits for the slowest; {fix}"
    )
    return panel({"careful": text})


def overfits(trained: float, other: float, images: int) -> bool:
    """Return whether a net is far worse on `images` others than on its own, and not by chance.

    That is by TOO_FAR, and by two standard errors of a share of so many images.
    """
    error = math.sqrt(other * (1 - other) / images)
    return trained - other >= max(TOO_FAR, 2 * error)


def overfitting(model: str, weights: str | None, augment: bool) -> tuple[str, list[str]]:
    """Return what it is, in words, and what may help a run with these flags."""
    fixes = ["more images"] + ["--augment"] * (not augment)
    net = "" if model.startswith("torchvision:") else "--model torchvision:resnet18 "
    fixes += [f"{net}--weights DEFAULT"] * (not weights)
    return "the net has learned its images by heart (overfitting)", fixes
