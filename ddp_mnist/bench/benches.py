"""The benchmarks of the verb `bench`, and the goals that their figures should meet.

Each alternates between what it compares, discards a first round, and reports median and spread.
Processes have one CPU thread each, as under `make train` on two cores.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_mnist.bench.measurements import FIX, alternate, ratio, spread
from ddp_mnist.bench.steps import time_steps
from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import own_environment
from ddp_mnist.cluster.local_world import backend_among, preload, run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.run import RunFlags, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.run.console import Console, coloured, count, fitted
from ddp_mnist.run.folder import METRICS
from ddp_mnist.run.hints import neighbours_line
from ddp_mnist.system import neighbours
from ddp_mnist.verbs.check_result import CheckResult, describe, failure_summary
from ddp_mnist.verbs.flags import Bench

preload("ddp_mnist.bench.steps", "ddp_mnist.run.scores")

STEPS = 380  # optimizer steps in a timed round, at most: an epoch of MNIST
TIMEOUT_S = 1800.0  # of all rounds of a group of processes
# The smallest program that trains with Accelerate: one step, and one line of metrics.
BASELINE = """
import os, pathlib, sys, accelerate, torch
accelerator = accelerate.Accelerator(cpu=not torch.cuda.is_available())
net = torch.nn.Linear(784, 10)
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
accelerator.backward(model(torch.zeros(72, 784, device=accelerator.device)).sum())
optimizer.step()
pathlib.Path(sys.argv[-1]).mkdir()
pathlib.Path(sys.argv[-1], "metrics.jsonl").write_text("{}")
os._exit(0)
"""
ALONE = ("silent", "independent")  # kinds of step in which no rank waits for another


def speeds_of(
    kinds: Sequence[str], flags: Bench, processes: int, precision: str = "auto"
) -> dict[str, list[float]]:
    """Return images/s over all processes, for each round of each kind of step.

    If ranks exchange gradients, all are as fast as the slowest; if not, each adds its own share.
    """
    config = TrainConfig(
        RunFlags(dataset=flags.dataset, cache_dir=flags.cache_dir, quiet=True),
        distribution=Distribution(mixed_precision=precision, backend=backend_among(processes)),
    )
    timing = (processes, time_steps, config, kinds, STEPS, flags.repeats)
    ranks = run_world(*timing, folder=Path.cwd(), timeout_s=TIMEOUT_S)
    speeds: dict[str, list[float]] = {}
    for kind in kinds:
        rounds = zip(*(rank[kind] for rank in ranks), strict=True)
        speeds[kind] = list(map(statistics.fmean if kind in ALONE else min, rounds))
    return speeds


def loop(flags: Bench, processes: int) -> list[CheckResult]:
    """Time train.py's loop against plain_ddp.py's."""
    speeds = speeds_of(["train", "plain"], flags, processes, precision="no")  # as plain_ddp.py
    share = ratio(speeds["train"], speeds["plain"])
    return [
        spread(speeds["train"]).beside("train.py, images/s"),
        spread(speeds["plain"]).beside("plain_ddp.py, images/s"),
        share.beside("train.py over plain_ddp.py", "lower end at least 0.95", share.low >= 0.95),
    ]


def scaling(flags: Bench, processes: int) -> list[CheckResult]:
    """Time 1 to N processes against as many independent ones; shares of a step."""
    results = list[CheckResult]()
    for size in range(1, processes + 1):
        speeds = speeds_of(["train", "independent", "resident", "silent"], flags, size)
        train, resident, silent = (
            [1 / speed for speed in speeds[kind]] for kind in ("train", "resident", "silent")
        )
        who = count(size, "process")
        efficiency = ratio(speeds["train"], speeds["independent"])
        goal = "at least 0.95" if size > 1 else ""
        met = size == 1 or efficiency.median >= 0.95
        results += [
            spread(speeds["train"]).beside(f"{who}: images/s"),
            efficiency.beside(f"{who}: of as many independent ones", goal, met),
            ratio(silent, train).beside(f"{who}: share of computing"),
            # and of waiting for the slowest rank
            ratio(resident, train, silent).beside(f"{who}: share of exchanging gradients"),
            ratio(train, train, resident).beside(f"{who}: share of the rest"),
        ]
    return results


def startup(flags: Bench, _processes: int) -> list[CheckResult]:
    """Time train in one process, from command to first optimizer step, against a short program."""
    train = ["-m", "ddp_mnist", "train", "--log-every", "1", "--dataset", flags.dataset]
    train += ["--cache-dir", flags.cache_dir] if flags.cache_dir else []
    commands = {"baseline program": ["-c", BASELINE], "train": train}
    measured = alternate(
        list(commands), flags.repeats, lambda kind: seconds_to_first_step(commands[kind]), "startup"
    )
    over = ratio(measured["train"], measured["baseline program"])
    return [
        *(spread(seconds).beside(f"{kind}, s") for kind, seconds in measured.items()),
        over.beside("train over baseline program", "at most 1.25", over.median <= 1.25),
    ]


def seconds_to_first_step(command: Sequence[str]) -> float:
    """Return the seconds from the start of `python *command` until metrics.jsonl has a line."""
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        run, begun = Path(scratch) / "run", time.monotonic()
        typed, metrics = [sys.executable, *command, "--run-dir", str(run)], run / METRICS
        with subprocess.Popen(typed, stdout=subprocess.DEVNULL, env=own_environment()) as process:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise CheckFailed(
                        f"{' '.join(typed)}: ended without a first step; run it by hand"
                    )
                time.sleep(0.005)
            seconds = time.monotonic() - begun
            process.kill()
    return seconds


BENCHES = {bench.__name__: bench for bench in (loop, startup, scaling)}


def run(flags: Bench) -> None:
    """Print each figure next to its goal, or all as one line of JSON.

    With --check, raise CheckFailed if a goal is missed.
    """
    console, what = Console(not flags.json), flags.what
    dataset, notes = cache.choose(flags.dataset, flags.cache_dir)
    processes = flags.processes or hardware.default_processes(2 if what == "loop" else 1)
    if processes == 1 and what == "loop":
        raise UsageError("--processes 1: bench loop needs a process group; give at least 2")
    if backend_among(processes) == "gloo":
        notes.append(
            f"{processes} processes share the GPUs of this machine ({hardware.gpus()}) over gloo:"
            " compare the ratios below, not the speeds, with those of processes that have one each"
        )
    # This decodes the images before anything is timed.
    notes += cache.load(dataset, flags.cache_dir).warnings
    notes.append(f"{what} on {dataset}: a warm-up and {flags.repeats} rounds of each comparison")
    held, there, _ = neighbours.cores_held()
    if (fit := round(there - held)) < (wanted := min(processes, there)):
        notes.append(neighbours_line(fit, wanted, fix="end them, and repeat"))
    console.print("\n".join(notes))
    results = BENCHES[what](replace(flags, dataset=dataset), processes)
    width = max((len(result.name) for result in results), default=0)
    for status, name, text, *_ in results:  # in a narrow terminal a goal is below its figure
        line = fitted(f"{name:<{width}} {text}", " " * (width + 1))
        figure, word, goal = line.partition("goal ")
        console.print(figure + (word and coloured(status, word + goal)))
    head = {"bench": what, "dataset": dataset, "processes": processes, "repeats": flags.repeats}
    Console(flags.json).print(json.dumps(describe(results, "rows", **head)))
    if flags.check and (summary := failure_summary(f"bench {what}", results, FIX)):
        raise CheckFailed(summary)
