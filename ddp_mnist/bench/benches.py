"""The benchmarks of the verb `bench`, and the goals that their figures should meet.

Each alternates what it compares, discards a first round, and reports median and spread. Processes
have one CPU thread each, as under `make train` on two cores. torch is imported where it is needed,
so that `--help` lists the benchmarks at once.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_mnist.bench import commands
from ddp_mnist.bench.figures import FIX, alternate, ratio, spread
from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.local import backend_among, preload, run_world
from ddp_mnist.config import Distribution, Run, TrainConfig
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.flags import Flags, argument, flag
from ddp_mnist.run.console import Console
from ddp_mnist.run.results import CheckResult, describe, failure_summary, warned

preload("ddp_mnist.bench.steps", "ddp_mnist.run.classification")

STEPS = 380  # optimizer steps of a timed round at most: an epoch of MNIST
SEVERAL = ("loop", "strategies")  # benchmarks of a process group, which one process has not
ALONE = ("silent", "independent")  # kinds of step in which no rank waits for another


@dataclass(frozen=True)
class Options:
    """The data set, the number of processes and the rounds of a measurement."""

    dataset: str
    cache_dir: str | None
    processes: int
    repeats: int


def speeds_of(
    kinds: Sequence[str], options: Options, processes: int, precision: str = "auto"
) -> dict[str, list[float]]:
    """Return images/s over all processes, for each round of each kind of step.

    Ranks that exchange gradients are as fast as the slowest; of those that do not, each adds its
    own share.
    """
    from ddp_mnist.bench.steps import time_steps

    config = TrainConfig(
        Run(dataset=options.dataset, cache_dir=options.cache_dir, quiet=True),
        distribution=Distribution(mixed_precision=precision, backend=backend_among(processes)),
    )
    timing = (processes, time_steps, config, kinds, STEPS, options.repeats)
    ranks = run_world(*timing, folder=Path.cwd(), timeout_s=commands.TIMEOUT_S)
    speeds: dict[str, list[float]] = {}
    for kind in kinds:
        rounds = zip(*(rank[kind] for rank in ranks), strict=True)
        speeds[kind] = [statistics.fmean(each) if kind in ALONE else min(each) for each in rounds]
    return speeds


def feed(options: Options) -> list[CheckResult]:
    """Time train.py's loop against its step on one batch that lies ready (a minute)."""
    return compare_with_train("resident", "one resident batch", options)


def loop(options: Options) -> list[CheckResult]:
    """Time train.py's loop against plain_ddp.py's (a minute)."""
    return compare_with_train("plain", "plain_ddp.py", options, precision="no")  # it has no other


def evaluation(options: Options) -> list[CheckResult]:
    """Time exact metrics of a split against training on as many images (a minute)."""
    return compare_with_train("evaluation", "evaluation", options, most=0.35)


def compare_with_train(
    kind: str, name: str, options: Options, precision: str = "auto", most: float | None = None
) -> list[CheckResult]:
    """Return both speeds and their ratio, which should be nearly 1, or `most`."""
    speeds = speeds_of(["train", kind], options, options.processes, precision)
    share, results = ratio(speeds["train"], speeds[kind]), []
    for who, each in (("train.py", "train"), (name, kind)):
        results.append(spread(speeds[each]).beside(f"{who}, images/s"))
    goal, met = "lower end at least 0.95", share.low >= 0.95
    if most:
        goal, met = f"at most {most:g}", share.median <= most
    return [*results, share.beside(f"train.py over {name}", goal, met)]


def scaling(options: Options) -> list[CheckResult]:
    """Time 1 to N processes against as many independent ones; shares of a step (minutes)."""

    results, kinds = [], ["train", "independent", "resident", "silent", "lockstep"]
    for size in range(1, options.processes + 1):
        who = "1 process" if size == 1 else f"{size} processes"
        speeds = speeds_of(kinds, options, size)
        seconds = {kind: [1 / speed for speed in speeds[kind]] for kind in kinds}
        efficiency = ratio(speeds["train"], speeds["independent"])
        goal, met = ("at least 0.95", efficiency.median >= 0.95) if size > 1 else ("", True)
        results += [
            spread(speeds["train"]).beside(f"{who}: images/s"),
            efficiency.beside(f"{who}: of as many independent ones", goal, met),
        ]
        for part, kind, less in (
            ("computing", "silent", None),
            ("waiting for the slowest", "lockstep", "silent"),
            ("exchanging gradients", "resident", "lockstep"),
            ("the rest", "train", "resident"),
        ):
            share = ratio(seconds[kind], seconds["train"], less=seconds[less] if less else None)
            results.append(share.beside(f"{who}: share of {part}"))
    return results


def strategies(options: Options) -> list[CheckResult]:
    """Time one process, DataParallel, and DDP with several hooks on equal batches (minutes)."""
    from ddp_mnist.bench.steps import STRATEGIES

    gpus = hardware.gpus()
    kinds = [kind for kind in STRATEGIES if gpus >= 2 or kind != "DataParallel"]
    speeds = speeds_of(kinds, options, options.processes, precision="no")
    results = [spread(speeds[kind]).beside(f"{kind}: images/s") for kind in kinds]
    if "DataParallel" not in kinds:
        text = f"needs two GPUs and finds {gpus}; it knows no CPUs"
        results.insert(1, warned("DataParallel: images/s", text, "run it where there are two"))
    for kind in kinds[1:]:
        over = ratio(speeds[kind], speeds["one process"])
        results.append(over.beside(f"{kind} over one process"))
    return results


def startup(options: Options) -> list[CheckResult]:
    """Time train from command to first optimizer step against a ten-line program (minutes)."""
    return compare_commands(options, "s", commands.seconds_to_first_step)


def memory(options: Options) -> list[CheckResult]:
    """Compare the peak of train's private memory with that program's (minutes)."""
    return compare_commands(options, "MB", commands.peak_anonymous_mb)


def compare_commands(options: Options, unit: str, measure: commands.Measure) -> list[CheckResult]:
    """Return what train and the baseline program take, alone and launched, and how they compare."""
    flags = ["--dataset", options.dataset]
    flags += ["--cache-dir", options.cache_dir] if options.cache_dir else []
    programs = {"baseline program": commands.BASELINE, "train": [*commands.TRAIN, *flags]}
    launchers = {"": [], ", launched": commands.launcher(options.processes)}
    started = {
        f"{name}{how}": [*launcher, *programs[name]]
        for how, launcher in launchers.items()
        for name in programs
    }

    def measure_once(kind: str) -> float:
        with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
            run_dir = Path(scratch) / "run"
            return measure([*started[kind], "--run-dir", str(run_dir)], run_dir)

    measured = alternate(list(started), options.repeats, measure_once)
    results = [spread(values).beside(f"{kind}, {unit}") for kind, values in measured.items()]
    for how in launchers:
        train, baseline = measured[f"train{how}"], measured[f"baseline program{how}"]
        name, most, over = f"train over baseline program{how}", 1.25, ratio(train, baseline)
        if unit == "MB":
            name, most = f"above the baseline program{how}, MB", 150
            over = spread([ours - least for ours, least in zip(train, baseline, strict=True)])
        results.append(over.beside(name, f"at most {most:g}", over.median <= most))
    return results


# A function's docstring is its line in --help.
BENCHES: dict[str, Callable[[Options], list[CheckResult]]] = {
    bench.__name__: bench
    for bench in (feed, loop, evaluation, scaling, strategies, startup, memory)
}


@dataclass(frozen=True)
class Bench(Flags):
    """The flags of `bench`."""

    what: str = argument(
        "WHAT",
        "One of those below.",
        {name: bench.__doc__ or "" for name, bench in BENCHES.items()},
    )
    dataset: str = flag("mnist", "The data set to train on.")
    cache_dir: str | None = flag(None, "Folder of decoded data sets.")
    processes: int | None = flag(
        None, "How many [one per GPU, else 2; loop, strategies: at least 2].", least=1, most=10**4
    )
    repeats: int | None = flag(None, "Rounds [11; memory: 5].", least=5, most=10**4)
    check: bool = flag(False, "Exit code 1 where a goal is missed.")


def run(flags: Bench) -> None:
    """Print each figure beside its goal, then all as one line of JSON.

    Raises:
        CheckFailed: a goal is missed, with --check.
    """
    from ddp_mnist.data import cache

    console, what = Console(True), flags.what
    name, notes = cache.choose(flags.dataset, flags.cache_dir)
    processes = flags.processes or default_processes(what)
    if processes == 1 and what in SEVERAL:
        raise UsageError(f"--processes 1: bench {what} needs a process group; give at least 2")
    repeats = flags.repeats or (5 if what == "memory" else 11)
    for note in [*notes, *sharing_notes(processes)]:
        console.print(note)
    cache.load(name, flags.cache_dir)  # decodes the images before anything is timed
    results = BENCHES[what](Options(name, flags.cache_dir, processes, repeats))
    for result in results:
        console.print(f"{result.name:<52} {result.text}")
    head = {"bench": what, "dataset": name, "processes": processes, "repeats": repeats}
    console.print(json.dumps(describe(results, "rows", **head)))
    if flags.check and (summary := failure_summary(f"bench {what}", results, FIX)):
        raise CheckFailed(summary)


def default_processes(what: str) -> int:
    """Return one per GPU, or two; at least two for a benchmark of a process group."""
    return max(hardware.gpus() or 2, 2 if what in SEVERAL else 1)


def sharing_notes(processes: int) -> list[str]:
    """Return a note for the reader of figures of processes that share GPUs."""
    note = (
        f"{processes} processes share the GPUs of this machine ({hardware.gpus()}) over gloo:"
        " compare the ratios below, not the speeds, with those of processes that have one each"
    )
    return [note] if backend_among(processes) == "gloo" else []
