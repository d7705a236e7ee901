"""The verb `bench`: what each benchmark measures, and what it promises.

    feed       train.py's loop against the same step on one batch that lies ready
    loop       train.py's loop against plain_ddp.py's
    evaluation the exact metrics of a split, against training on as many images
    scaling    1 to N processes against as many independent ones, and where the time goes
    forecast   what exchanging gradients will cost on 2 to 1,024 processes
    startup    command to first optimizer step, against a ten-line program's
    memory     a process's private memory at its highest, against that program's
    baseline   command to the end of a run, against the conventional recipe's four epochs (long)

Each warms up, alternates what it compares, repeats, and tells median and spread.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ddp_mnist import data, run_folder
from ddp_mnist.bench import commands, idx
from ddp_mnist.bench.figures import Ratio, Spread, alternate, ratio, ratio_of_difference, spread
from ddp_mnist.bench.forecast import (
    Link,
    Round,
    all_reduce_seconds,
    efficiency,
    gradient_bytes,
    measure_rounds,
)
from ddp_mnist.bench.steps import time_steps
from ddp_mnist.config import Distribution, Run, TrainConfig
from ddp_mnist.errors import UsageError
from ddp_mnist.local_world import run_world
from ddp_mnist.summary import count
from ddp_mnist.versions import cpu_model, package_versions

STEPS = 100  # optimizer steps of a timed round: one to three seconds
ETHERNET, ETHERNET_NAME = Link(100e-6, 1.1e9), "assumed 100 us and 1,100 MB/s"  # 10 Gbit/s


@dataclass(frozen=True)
class Options:
    """What a person may choose; see the verb's flags."""

    dataset: str
    cache_dir: str | None
    processes: int
    repeats: int


@dataclass(frozen=True)
class Row:
    """A figure, and what the project promises of it on two CPU cores.

    Attributes:
        promise: the bound in words; None if nothing is promised.
        held: whether the figure is within it.
    """

    what: str
    figure: Ratio | Spread
    promise: str | None = None
    held: bool = True

    def __str__(self) -> str:
        mark = f"  {'held' if self.held else 'MISSED'}: {self.promise}" if self.promise else ""
        return f"{self.what:<52} {self.figure}{mark}"


def describe(bench: str, rows: list[Row]) -> dict[str, Any]:
    """Figures, machine and versions for JSON."""
    return {
        "bench": bench,
        "date": date.today().isoformat(),
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": package_versions(),
        "rows": [
            {"what": row.what, **asdict(row.figure), "promise": row.promise, "held": row.held}
            for row in rows
        ],
    }


# --- Steps


def on_processes(
    size: int, function: Callable[..., Any], options: Options, *args: Any
) -> list[Any]:
    """What `function(config, *args, STEPS, repeats)` returned on each of them."""
    data.load(options.dataset, options.cache_dir)  # into the cache: the processes have a deadline
    config = TrainConfig(
        Run(dataset=options.dataset, cache_dir=options.cache_dir, quiet=True),
        distribution=Distribution(mixed_precision="auto"),
    )
    return run_world(
        *(size, function, config, *args, STEPS, options.repeats),
        folder=Path.cwd(),
        timeout_s=commands.PATIENCE_S,
    )


def speeds_of(kinds: list[str], options: Options, processes: int) -> dict[str, list[float]]:
    """Images/s over all processes per round of each kind, as the slowest rank saw them."""
    ranks = on_processes(processes, time_steps, options, kinds)
    return {kind: [min(of) for of in zip(*(r[kind] for r in ranks), strict=True)] for kind in kinds}


def loop_against(kind: str, name: str, options: Options) -> list[Row]:
    speeds = speeds_of(["train", kind], options, options.processes)
    share = ratio(speeds["train"], speeds[kind])
    return [
        Row("train.py, images/s", spread(speeds["train"])),
        Row(f"{name}, images/s", spread(speeds[kind])),
        Row("ratio", share, "lower end at least 0.95", share.low >= 0.95),
    ]


def feed(options: Options) -> list[Row]:
    return loop_against("resident", "one resident batch", options)


def loop(options: Options) -> list[Row]:
    return loop_against("plain", "plain_ddp.py", options)


def scaling(options: Options) -> list[Row]:
    """A step: computing, waiting for the slowest rank, exchanging, and the feed and accounts."""
    kinds = ["train", "independent", "resident", "silent", "lockstep"]
    rows = []
    for size in range(1, options.processes + 1):
        speeds = speeds_of(kinds, options, size)
        seconds = {kind: [1 / speed for speed in speeds[kind]] for kind in kinds}

        def share(kind: str, less: str, of: dict[str, list[float]] = seconds) -> Ratio:
            return ratio_of_difference(of[kind], of[less], of["train"])

        efficiency = ratio(speeds["train"], speeds["independent"])
        held, promise = efficiency.median >= 0.95, "at least 0.95" if size > 1 else None
        who = count(size, "process")
        rows += [
            Row(f"{who}: images/s", spread(speeds["train"])),
            Row(f"{who}: of as many independent ones", efficiency, promise, held),
            Row(f"{who}: share of computing", ratio(seconds["silent"], seconds["train"])),
            Row(f"{who}: share of waiting for the slowest", share("lockstep", "silent")),
            Row(f"{who}: share of exchanging gradients", share("resident", "lockstep")),
            Row(f"{who}: share of the rest", share("train", "resident")),
        ]
    return rows


def evaluation(options: Options) -> list[Row]:
    speeds = speeds_of(["train", "evaluation"], options, options.processes)
    share = ratio(speeds["train"], speeds["evaluation"])
    held = share.median <= 0.35
    return [
        Row("train.py, images/s", spread(speeds["train"])),
        Row("evaluation, images/s", spread(speeds["evaluation"])),
        Row("time of an evaluation over that of training", share, "at most 0.35", held),
    ]


def forecast(options: Options) -> list[Row]:
    """Of the link that is here, and of one that is only assumed."""
    if options.processes == 1:
        raise UsageError("--processes 1: an all-reduce needs at least 2")
    rounds: list[Round] = on_processes(options.processes, measure_rounds, options)[0]
    links = [each.link for each in rounds]
    classes = len(data.load(options.dataset, options.cache_dir).classes)
    size = gradient_bytes(TrainConfig(), classes)
    by_formula = [all_reduce_seconds(options.processes, size, link) for link in links]
    rows = [
        Row("latency, us", spread([1e6 * link.latency_s for link in links])),
        Row("bandwidth, MB/s", spread([link.bytes_per_s / 1e6 for link in links])),
        Row("computing a step, ms", spread([1e3 * each.step_s for each in rounds])),
        Row(
            f"all-reduce of {size:,} bytes, over the formula",
            ratio([each.exchange_s for each in rounds], by_formula),
        ),
    ]
    for where, over in {"this link": links, ETHERNET_NAME: [ETHERNET] * len(links)}.items():
        for processes in (2**power for power in range(1, 11)):
            shares = [
                efficiency(processes, size, each.step_s, link)
                for each, link in zip(rounds, over, strict=True)
            ]
            rows.append(Row(f"{where}, {processes:,} processes: efficiency", spread(shares)))
    return rows


# --- Commands


def startup(options: Options) -> list[Row]:
    launched = commands.launcher(options.processes)
    arguments = commands.data_flags(options.dataset, options.cache_dir)
    data.load(options.dataset, options.cache_dir)  # into the cache
    measures: dict[str, Callable[[], float]] = {
        "floor": lambda: commands.seconds_to_floors_step([]),
        "train": lambda: commands.seconds_to_first_step([], arguments),
        "floor, launched": lambda: commands.seconds_to_floors_step(launched),
        "train, launched": lambda: commands.seconds_to_first_step(launched, arguments),
    }
    seconds = alternate(list(measures), options.repeats, lambda kind: measures[kind]())
    rows = [Row(f"{kind}, s", spread(times)) for kind, times in seconds.items()]
    for how in ("", ", launched"):
        over = ratio(seconds[f"train{how}"], seconds[f"floor{how}"])
        rows.append(Row(f"train over floor{how}", over, "at most 1.25", over.median <= 1.25))
    return rows


def memory(options: Options) -> list[Row]:
    data.load(options.dataset, options.cache_dir)  # into the cache
    arguments = [*commands.data_flags(options.dataset, options.cache_dir), "--quiet"]
    rows = []
    for how, before in {"": [], ", launched": commands.launcher(options.processes)}.items():
        floor, train = [], []
        for _ in range(options.repeats):
            floor.append(commands.peak_anonymous_mb([*before, *commands.FLOOR]))
            with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
                run = ["--run-dir", f"{scratch}/run"]
                command = [*before, *commands.TRAIN, *arguments, *run]
                train.append(commands.peak_anonymous_mb(command))
        above = spread([ours - least for ours, least in zip(train, floor, strict=True)])
        rows += [
            Row(f"floor{how}, MB", spread(floor)),
            Row(f"train{how}, MB", spread(train)),
            Row(f"above the floor{how}, MB", above, "at most 150", above.median <= 150),
        ]
    return rows


def baseline(options: Options) -> list[Row]:
    """The conventional recipe needs 4 epochs for 99 %; ours has to be there when it ends."""
    launched = commands.launcher(options.processes)
    images = data.load(options.dataset, options.cache_dir)
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        idx.write(images, Path(scratch) / "MNIST" / "raw")
        accuracies: dict[str, list[float]] = {"conventional": [], "train": []}

        def conventional() -> float:
            seconds, lines = commands.seconds_to_end(
                ["-m", "ddp_mnist.bench.conventional", scratch]
            )
            accuracies["conventional"].append(lines[-1]["test_accuracy"])
            return seconds

        def train(cache_dir: str | None) -> float:
            with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as empty:
                arguments = commands.data_flags(options.dataset, cache_dir or f"{empty}/cache")
                run = f"{empty}/run"
                command = [*launched, *commands.TRAIN, *arguments, "--run-dir", run, "--quiet"]
                seconds, _ = commands.seconds_to_end([*command, "--mixed-precision", "auto"])
                outcome = run_folder.read_json(Path(run) / run_folder.SUMMARY)
                accuracies["train"].append(outcome["test_accuracy"])
            return seconds

        measures: dict[str, Callable[[], float]] = {
            "floor": lambda: commands.seconds_to_end([*launched, *commands.FLOOR])[0],
            "train": lambda: train(str(data.cache_folder(options.cache_dir))),
            "train, empty cache": lambda: train(None),
            "conventional": conventional,
        }
        order = list(measures)
        seconds = alternate(order, options.repeats, lambda kind: measures[kind](), warm_up=False)
    base = seconds["conventional"]
    times, cold = ratio(base, seconds["train"]), ratio(base, seconds["train, empty cache"])
    above = ratio_of_difference(seconds["train"], seconds["floor"], base)
    lowest = min(accuracies["train"])
    return [
        *(Row(f"{kind}, s", spread(seconds[kind])) for kind in order),
        Row("conventional, test accuracy", spread(accuracies["conventional"])),
        Row(
            "train, test accuracy",
            spread(accuracies["train"]),
            "each at least 0.99",
            lowest >= 0.99,
        ),
        Row("times faster", times, "at least 16", times.median >= 16),
        Row("times faster, empty cache", cold, "at least 12", cold.median >= 12),
        Row("share above the floor", above, "at most 1/30", above.median <= 1 / 30),
    ]


BENCHES: dict[str, Callable[[Options], list[Row]]] = {
    "feed": feed,
    "loop": loop,
    "evaluation": evaluation,
    "scaling": scaling,
    "forecast": forecast,
    "startup": startup,
    "memory": memory,
    "baseline": baseline,
}
