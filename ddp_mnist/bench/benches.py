"""The verb `bench`: what each benchmark measures, and the goal that a figure should meet.

Each alternates what it compares, repeats, and tells median and spread; what is timed within a
process is warmed up first. Processes have one CPU thread each, as under `make train` on two cores.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from ddp_mnist.bench import commands
from ddp_mnist.bench.figures import (
    Absent,
    Ratio,
    Spread,
    alternate,
    ratio,
    ratio_of_difference,
    spread,
)
from ddp_mnist.bench.flags import Bench
from ddp_mnist.bench.steps import KINDS, Kind, time_steps
from ddp_mnist.bench.strategies import STRATEGIES
from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.local import backend_among, preload, run_world
from ddp_mnist.config import Distribution, Run, TrainConfig
from ddp_mnist.data.cache import choose, load
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.run.console import Console
from ddp_mnist.run.environment import package_versions
from ddp_mnist.run.summary import count

preload("ddp_mnist.train", "ddp_mnist.run.metrics")

STEPS = 380  # optimizer steps of a timed round at most: an epoch of MNIST
BETWEEN = ("loop", "strategies")  # of a process group: one process has none
ALONE = ("silent", "independent")  # kinds of step in which no rank waits for another


@dataclass(frozen=True)
class Options:
    """What a person may choose; see the verb's flags."""

    dataset: str
    cache_dir: str | None
    processes: int
    repeats: int


@dataclass(frozen=True)
class Row:
    """A figure, and its goal on MNIST and two free CPU cores.

    Attributes:
        goal: the bound in words; None if there is none.
        met: whether the figure is within it.
    """

    what: str
    figure: Ratio | Spread | Absent
    goal: str | None = None
    met: bool = True

    @property
    def median(self) -> float:
        """Raises ValueError for what cannot be measured here."""
        if isinstance(self.figure, Absent):
            raise ValueError(f"{self.what}: {self.figure}")
        return self.figure.median

    def __str__(self) -> str:
        mark = f"  goal {'met' if self.met else 'missed'}: {self.goal}" if self.goal else ""
        return f"{self.what:<52} {self.figure}{mark}"


def run(flags: Bench) -> None:
    """Print each figure beside its goal, then all as one line of JSON.

    Raises:
        CheckFailed: a goal is missed, with --check.
    """
    console, what = Console(True), flags.what
    name, notes_on_data = choose(flags.dataset, flags.cache_dir)
    repeats = flags.repeats or (5 if what == "memory" else 11)
    options = Options(name, flags.cache_dir, flags.processes or default_processes(what), repeats)
    for note in [*notes_on_data, *notes(options)]:
        console.print(note)
    rows = BENCHES[what](options)
    for row in rows:
        console.print(str(row))
    console.print(json.dumps(describe(what, options, rows)))
    missed = [f"{row.what} {row.figure}, goal {row.goal}" for row in rows if not row.met]
    if flags.check and missed:
        raise CheckFailed(
            f"bench {what}: {'; '.join(missed)} on MNIST and two free CPU cores; close other"
            " programs and repeat"
        )


def default_processes(bench: str) -> int:
    """One per GPU; two where there is none, and at least two for what takes a process group."""
    return max(hardware.gpus() or 2, 2 if bench in BETWEEN else 1)


def notes(options: Options) -> list[str]:
    """What to know before the figures."""
    if backend_among(options.processes) != "gloo":
        return []
    gpus = count(hardware.gpus(), "GPU")
    return [
        f"{options.processes} processes share {gpus} over gloo: compare the ratios below, not the"
        " speeds, with those of processes that have a GPU each"
    ]


def describe(bench: str, options: Options, rows: list[Row]) -> dict[str, Any]:
    """Figures, what was run, machine and versions for JSON."""
    return {
        "bench": bench,
        "date": date.today().isoformat(),
        **{name: getattr(options, name) for name in ("dataset", "processes", "repeats")},
        "machine": {**hardware.describe(), "gpus": hardware.gpus()},
        "versions": package_versions(),
        "rows": [
            {"what": row.what, **asdict(row.figure), "goal": row.goal, "met": row.met}
            for row in rows
        ],
    }


# --- Steps


def on_processes(
    size: int, function: Callable[..., Any], options: Options, *args: Any, precision: str = "auto"
) -> list[Any]:
    """What `function(config, *args, STEPS, repeats)` returned on each of them."""
    load(options.dataset, options.cache_dir)  # into the cache: the processes have a deadline
    config = TrainConfig(
        Run(dataset=options.dataset, cache_dir=options.cache_dir, quiet=True),
        distribution=Distribution(mixed_precision=precision, backend=backend_among(size)),
    )
    args = (config, *args, STEPS, options.repeats)
    return run_world(size, function, *args, folder=Path.cwd(), timeout_s=commands.PATIENCE_S)


def speeds_of(
    kinds: dict[str, Kind], options: Options, processes: int, precision: str = "auto"
) -> dict[str, list[float]]:
    """Images/s over all processes per round of each kind.

    Ranks that exchange gradients are as fast as the slowest; of those that do not, each adds its
    own share.
    """
    ranks = on_processes(processes, time_steps, options, kinds, precision=precision)
    return {
        kind: [
            statistics.fmean(speeds) if kind in ALONE else min(speeds)
            for speeds in zip(*(rank[kind] for rank in ranks), strict=True)
        ]
        for kind in kinds
    }


def these(*names: str) -> dict[str, Kind]:
    return {name: KINDS[name] for name in names}


def loop_against(kind: str, name: str, options: Options, precision: str = "auto") -> list[Row]:
    speeds = speeds_of(these("train", kind), options, options.processes, precision)
    share = ratio(speeds["train"], speeds[kind])
    return [
        Row("train.py, images/s", spread(speeds["train"])),
        Row(f"{name}, images/s", spread(speeds[kind])),
        Row(f"train.py over {name}", share, "lower end at least 0.95", share.low >= 0.95),
    ]


def feed(options: Options) -> list[Row]:
    return loop_against("resident", "one resident batch", options)


def loop(options: Options) -> list[Row]:
    """In full precision: plain_ddp.py knows no other."""
    if options.processes == 1:
        raise UsageError("--processes 1: plain_ddp.py needs a process group; give at least 2")
    return loop_against("plain", "plain_ddp.py", options, precision="no")


def evaluation(options: Options) -> list[Row]:
    speeds = speeds_of(these("train", "evaluation"), options, options.processes)
    share = ratio(speeds["train"], speeds["evaluation"])
    met = share.median <= 0.35
    return [
        Row("train.py, images/s", spread(speeds["train"])),
        Row("evaluation, images/s", spread(speeds["evaluation"])),
        Row("time of an evaluation over that of training", share, "at most 0.35", met),
    ]


def scaling(options: Options) -> list[Row]:
    """A step: computing, waiting for the slowest rank, exchanging, and the feed and accounts."""
    kinds = ["train", "independent", "resident", "silent", "lockstep"]
    rows = []
    for size in range(1, options.processes + 1):
        speeds = speeds_of(these(*kinds), options, size)
        seconds = {kind: [1 / speed for speed in speeds[kind]] for kind in kinds}

        def share(kind: str, less: str, of: dict[str, list[float]] = seconds) -> Ratio:
            return ratio_of_difference(of[kind], of[less], of["train"])

        efficiency = ratio(speeds["train"], speeds["independent"])
        goal = "at least 0.95" if size > 1 else None
        met = goal is None or efficiency.median >= 0.95
        who = count(size, "process")
        rows += [
            Row(f"{who}: images/s", spread(speeds["train"])),
            Row(f"{who}: of as many independent ones", efficiency, goal, met),
            Row(f"{who}: share of computing", ratio(seconds["silent"], seconds["train"])),
            Row(f"{who}: share of waiting for the slowest", share("lockstep", "silent")),
            Row(f"{who}: share of exchanging gradients", share("resident", "lockstep")),
            Row(f"{who}: share of the rest", share("train", "resident")),
        ]
    return rows


def strategies(options: Options) -> list[Row]:
    """Why DDP, in numbers: each strategy with the same global batch."""
    if options.processes == 1:
        raise UsageError("--processes 1: there is nothing to share; give at least 2")
    kinds = dict(STRATEGIES)
    absent: dict[str, Absent] = {}
    if (gpus := hardware.gpus()) < 2:
        del kinds["DataParallel"]
        absent["DataParallel"] = Absent(f"needs two GPUs and finds {gpus}; it knows no CPUs")
    speeds = speeds_of(kinds, options, options.processes, precision="no")
    threads = "" if gpus else f", {count(hardware.cores(), 'thread')}"
    names = {"one process": f"one process{threads}"}
    shown: dict[str, Spread | Absent] = {k: spread(speeds[k]) for k in kinds} | absent
    return [
        *(Row(f"{names.get(k, k)}: images/s", shown[k]) for k in STRATEGIES),
        *(
            Row(f"{kind} over one process", ratio(speeds[kind], speeds["one process"]))
            for kind in kinds
            if kind != "one process"
        ),
    ]


# --- Commands


def startup(options: Options) -> list[Row]:
    load(options.dataset, options.cache_dir)  # into the cache
    arguments = commands.data_flags(options.dataset, options.cache_dir)
    measures: dict[str, Callable[[], float]] = {}
    for how, before in ways(options):
        measures[f"floor{how}"] = partial(commands.seconds_to_baseline_step, before)
        measures[f"train{how}"] = partial(commands.seconds_to_first_step, before, arguments)
    seconds = alternate(list(measures), options.repeats, lambda kind: measures[kind]())
    rows = [Row(f"{kind}, s", spread(times)) for kind, times in seconds.items()]
    for how, _ in ways(options):
        over = ratio(seconds[f"train{how}"], seconds[f"floor{how}"])
        rows.append(Row(f"train over floor{how}", over, "at most 1.25", over.median <= 1.25))
    return rows


def memory(options: Options) -> list[Row]:
    load(options.dataset, options.cache_dir)  # into the cache
    arguments = commands.data_flags(options.dataset, options.cache_dir)

    def train(before: list[str]) -> float:
        with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
            command = [*before, *commands.TRAIN, *arguments, "--run-dir", f"{scratch}/run"]
            return commands.peak_anonymous_mb(command)

    measures: dict[str, Callable[[], float]] = {}
    for how, before in ways(options):
        measures[f"floor{how}"] = partial(commands.peak_anonymous_mb, [*before, *commands.BASELINE])
        measures[f"train{how}"] = partial(train, before)
    peaks = alternate(list(measures), options.repeats, lambda kind: measures[kind](), warm_up=False)
    rows = [Row(f"{kind}, MB", spread(peak)) for kind, peak in peaks.items()]
    for how, _ in ways(options):
        pairs = zip(peaks[f"train{how}"], peaks[f"floor{how}"], strict=True)
        above = spread([ours - least for ours, least in pairs])
        met = above.median <= 150
        rows.append(Row(f"above the floor{how}, MB", above, "at most 150", met))
    return rows


def ways(options: Options) -> list[tuple[str, list[str]]]:
    """How a command is started: a name for rows, and what stands before it."""
    return [("", []), (", launched", commands.launcher(options.processes))]


BENCHES: dict[str, Callable[[Options], list[Row]]] = {
    "feed": feed,
    "loop": loop,
    "evaluation": evaluation,
    "scaling": scaling,
    "strategies": strategies,
    "startup": startup,
    "memory": memory,
}
