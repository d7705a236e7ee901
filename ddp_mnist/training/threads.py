"""The number of a process's threads, chosen by timing a few steps of the run.

Several threads wait for each other in each operation. Beside other programs, which hold a core for
milliseconds, they can take many times as long as one.
"""

import os
import time
from collections.abc import Callable, Sequence

import torch

# Of the time of all steps, what the timing may take, and seconds that it takes at least and at most
SHARE, LEAST_S, MOST_S = 0.03, 0.15, 1.0
LEAST_STEPS = 100  # of a run: a shorter one is soon over, as a rule
STEP_S = 0.1  # of a step with one thread, from which on it is timed with no more images
# Several count if they take less than this share of one thread's time: they have more to lose if
# the machine gets busy later.
MARGIN = 0.9

# Seconds of a step with 1 thread and with as many as there are cores, by the number of threads
Times = dict[str, float]


def time_threads(step: Callable[[int], None], images: int, total_steps: int) -> Times | None:
    """Time `step`, which takes a number of images, with one thread and with those that are set.

    `images` is what this rank takes at once. Return None if the run is too short for it.
    """
    if total_steps < LEAST_STEPS:
        return None
    several = torch.get_num_threads()

    def timed(count: int, threads: int) -> float:
        torch.set_num_threads(threads)
        clock = time.perf_counter()
        step(count)
        return time.perf_counter() - clock

    begun, count = time.perf_counter(), min(images, 2)
    try:
        while (step_s := timed(count, 1)) < STEP_S and count < images:
            count = min(images, 3 * count)
        timed(count, several)  # the first step of a kind takes longer
        share_s = SHARE * total_steps * step_s * images / count
        ends = begun + min(max(share_s, LEAST_S), MOST_S)
        sums, rounds = {1: 0.0, several: 0.0}, 0
        while not rounds or time.perf_counter() < ends:
            for threads in sums:
                sums[threads] += timed(count, threads)
            rounds += 1
    finally:
        torch.set_num_threads(several)
    return {str(threads): round(seconds / rounds, 5) for threads, seconds in sums.items()}


def slowest(everyone: Sequence[Times | None]) -> Times | None:
    """Return the longest times of all ranks, which wait for each other; None if one timed none."""
    timed = [[*times.values()] for times in everyone if times]
    if len(timed) < len(everyone):
        return None
    return dict(zip(everyone[0] or (), map(max, zip(*timed, strict=True)), strict=True))


def use_fastest(times: Times | None) -> None:
    """Go on with one thread unless several are faster by these times, which are all ranks'."""
    if times:
        one, several = times.values()
        if several > MARGIN * one:
            os.environ["OMP_NUM_THREADS"] = "1"
            torch.set_num_threads(1)
