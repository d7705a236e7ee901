"""The verb `verify`: proves on this machine what the trainer promises, with the trainer itself.

Each proof is a small run in float64 on the digits, so that no fault hides behind rounding: correct
float32 code on two processes drifts a hundredth away from one process, float64 some 1e-13.
"""

from __future__ import annotations

import itertools
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local import LocalWorld, run_world
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config import Distribution
from ddp_mnist.data import cache
from ddp_mnist.data.batches import Rows
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.run import weights
from ddp_mnist.run.environment import package_versions
from ddp_mnist.run.evaluation import evaluate_split, prepare_split
from ddp_mnist.run.summary import count
from ddp_mnist.verify.watch import (
    STEPS,
    Seen,
    just_train,
    largest_difference,
    per_step,
    proof_config,
    resumed,
    train_and_watch,
    train_until,
    weights_of,
    what_stays,
)

LIMIT = 1e-9  # of a relative difference

PARTS = 3  # that a step is split into

STOPS_AT = 20  # the step at which a run is interrupted

# Rows, and images per process and pass: fewer rows than processes, a short last pass, none short
SHARDS = ((1, 4), (7, 4), (101, 10), (360, 30))

SHOWN_STEPS, SHOWN_IMAGES = 2, 6

CAUGHT_BY = {"sampler": "samples", "gradients": "gradients", "parameter": "replicas"}


@dataclass(frozen=True)
class Check:
    """One comparison: what came out, and what has to."""

    name: str
    processes: int
    compared: str
    figure: str
    must_be: str
    held: bool

    def __str__(self) -> str:
        verdict = "PASS" if self.held else "FAIL"
        must = "" if self.held else f", must be {self.must_be}"
        who = f"{self.name:<12} {self.processes:>2}"
        return f"{verdict}  {who}  {self.compared:<38} {self.figure}{must}"


@dataclass(frozen=True)
class Watched:
    """A run of one world: its net and folder, and what each rank saw."""

    model: str
    folder: Path
    ranks: list[Seen]


def sizes_up_to(processes: int) -> list[int]:
    """Numbers of processes that can be compared with one: they divide a part of the batch."""
    batch_size = proof_config().recipe.batch_size
    assert batch_size
    return [n for n in range(2, processes + 1) if batch_size % (PARTS * n) == 0]


def verify(
    sizes: Sequence[int], plant: str | None = None, model: str = "cnn"
) -> Iterator[Check | str]:
    """Checks as they are done, and lines that show which rank took which images.

    Args:
        sizes: numbers of processes, each compared with one.
        plant: one of PLANTS, in all runs but that of one process; what it cannot touch is left out.
        model: the net that is trained.
    """
    with tempfile.TemporaryDirectory(prefix="ddp-mnist-verify-") as scratch:
        folder = Path(scratch)
        yield from proofs_in(folder, sizes, plant, model)


def proofs_in(
    folder: Path, sizes: Sequence[int], plant: str | None, model: str
) -> Iterator[Check | str]:
    """See `verify`. A run that breaks down is a failed check, and the last one."""
    try:
        alone = watched_run(1, folder, model)
        yield from who_took_what(alone)
        if not plant:
            yield resume_is_exact(alone)
            yield accumulation_is_exact(1, alone)
        for size in sizes:
            run = watched_run(size, folder, model, plant)
            yield from who_took_what(run)
            yield from equal_to_one(run, alone)
            if not plant:
                yield resume_is_exact(run)
                yield accumulation_is_exact(size, alone)
                yield metrics_are_exact(size, alone)
    except (DdpMnistError, OSError) as error:
        reason = f"{type(error).__name__}: {error}"
        yield Check("runs", max(sizes), "each comes to its end", reason, "no error", held=False)


def watched_run(size: int, folder: Path, model: str, plant: str | None = None) -> Watched:
    config = proof_config(f"on-{size}", model=model)
    ranks = run_world(size, train_and_watch, config, plant, folder=folder)
    return Watched(model, folder / f"on-{size}", ranks)


def who_took_what(run: Watched) -> Iterator[str]:
    """The first images of each rank in the first steps."""
    for step in range(SHOWN_STEPS):
        for rank, seen in enumerate(run.ranks):
            numbers = seen.numbers[step]
            shown = " ".join(f"{number:>4}" for number in numbers[:SHOWN_IMAGES])
            who = f"step {step + 1}, rank {rank} of {len(run.ranks)}"
            yield f"      {who}: {len(numbers)} images, {shown} ..."


# --- Proofs


def equal_to_one(run: Watched, alone: Watched) -> Iterator[Check]:
    """Images, rates, gradients and weights of N processes are those of one."""
    size, [one] = len(run.ranks), alone.ranks
    rank_0 = run.ranks[0]
    yield none_differs(
        "samples", size, "a step's images = one process's", per_step(run.ranks), per_step([one])
    )
    rates = [rank.rates for rank in run.ranks]
    yield none_differs(
        "rates", size, "each rank's rates = one process's", rates, [one.rates] * size
    )
    first = abs(rank_0.gradient_norms[0] / one.gradient_norms[0] - 1)
    yield bounded("gradients", size, "first gradient's norm = one process's", first)
    difference = largest_difference(weights_of(run.folder), weights_of(alone.folder))
    yield bounded("weights", size, f"weights after {STEPS} steps = one process's", difference)
    digests = [rank.weights for rank in run.ranks]
    yield none_differs(
        "replicas", size, "each rank's weights = rank 0's", digests, digests[:1] * size
    )


def resume_is_exact(run: Watched) -> Check:
    """Interrupted by a signal to its last rank and taken up again, a run is the unbroken one."""
    size, folder = len(run.ranks), run.folder.parent
    config = proof_config(f"interrupted-on-{size}", model=run.model)
    interrupted = (config, STOPS_AT, signal.SIGTERM, size - 1)
    LocalWorld(size, train_until, *interrupted, folder=folder).outcomes()
    [again, *_] = run_world(size, just_train, resumed(config), folder=folder)
    after = again.get("resumed_from", [])  # a finished run tells nothing
    here, there = (
        [weights_bytes, *log_lines]
        for weights_bytes, log_lines in (
            what_stays(folder / f"interrupted-on-{size}"),
            what_stays(run.folder),
        )
    )
    different = sum(a != b for a, b in itertools.zip_longest(here, there))
    return Check(
        "resume",
        size,
        "interrupted: weights, log = unbroken",
        f"{different} of {len(there)} differ",
        f"0, and taken up once (was: after steps {after})",
        len(after) == 1 and not different,
    )


def accumulation_is_exact(size: int, alone: Watched) -> Check:
    """A step in parts is the whole step."""
    config = proof_config(f"parts-on-{size}", model=alone.model, grad_accum=PARTS)
    run_world(size, just_train, config, folder=alone.folder.parent)
    parts = weights_of(alone.folder.parent / f"parts-on-{size}")
    difference = largest_difference(parts, weights_of(alone.folder))
    return bounded("accumulation", size, f"{PARTS} parts a step = one process's whole", difference)


def metrics_are_exact(size: int, alone: Watched) -> Check:
    """Each row of a split counts once, on shards of unequal length too."""
    run = str(alone.folder)
    counted = run_world(size, count_shards, run, folder=alone.folder.parent)[0]
    trained, images = weights.from_bytes(weights.read_bytes(run), run), cache.load("digits")
    with torch.no_grad():
        predictions = trained.model(images.test_images).argmax(1)
    expected = []
    for rows, _ in SHARDS:
        confusion = torch.zeros(len(images.classes), len(images.classes), dtype=torch.int64)
        pairs = (images.test_labels[:rows], predictions[:rows])
        confusion.index_put_(pairs, torch.tensor(1), accumulate=True)
        expected.append(confusion.tolist())
    what = f"{', '.join(str(rows) for rows, _ in SHARDS)} rows = by hand"
    return none_differs("metrics", size, what, counted, expected)


def count_shards(run: str) -> list[list[list[int]]]:
    """The confusion matrix of each of SHARDS; one rank's part."""
    flags = Distribution(cpu=True)
    with join_world(flags, find_launch(flags), full_precision=True) as world:
        trained, images = weights.from_bytes(weights.read_bytes(run), run), cache.load("digits")
        loaders = [
            prepare_split(
                world.accelerator,
                Rows(images.test_images[:rows], images.test_labels[:rows]),
                per_process,
            )
            for rows, per_process in SHARDS
        ]
        return [
            evaluate_split(world.accelerator, trained.model, each, len(images.classes)).confusion
            for each in loaders
        ]


# --- What came out


def bounded(name: str, size: int, compared: str, difference: float) -> Check:
    figure = f"differ by {difference:.1e}"
    return Check(name, size, compared, figure, f"at most {LIMIT:.0e}", difference <= LIMIT)


def none_differs(
    name: str, size: int, compared: str, found: Sequence[Any], expected: Sequence[Any]
) -> Check:
    different = sum(a != b for a, b in zip(found, expected, strict=True))
    figure = f"{different} of {len(expected)} differ"
    return Check(name, size, compared, figure, f"0 of {len(expected)}", not different)


def complaint(checks: Sequence[Check], plant: str | None, model: str = "cnn") -> str | None:
    """What is wrong, in one line, or None. A planted fault is wrong in any case."""
    failed = [check for check in checks if not check.held]
    if plant:
        meant = [check for check in checks if check.name == CAUGHT_BY[plant]]
        if meant and all(check in failed for check in meant):
            return (
                f"verify --plant {plant}: caught by '{CAUGHT_BY[plant]}', as it should be;"
                " leave the flag out to test what is really here"
            )
        return (
            f"verify --plant {plant}: NOT caught by '{CAUGHT_BY[plant]}'; verify is"
            " broken here, do not rely on it"
        )
    if not failed:
        return None
    first = failed[0]
    remedy = "do not trust results from here before it passes with the versions in constraints.txt"
    if model != "cnn":
        remedy = (
            f"if it passes without --model, {model} takes other steps with other shares of a batch,"
            " as nets with BatchNorm do"
        )
    return (
        f"verify: {len(failed)} of {len(checks)} checks failed, first '{first.name}' on"
        f" {count(first.processes, 'process')} ({first.figure}, must be {first.must_be}); {remedy}"
    )


def describe(
    checks: Sequence[Check], sizes: Sequence[int], plant: str | None, model: str
) -> dict[str, Any]:
    """verify.json."""
    return {
        "passed": all(check.held for check in checks),
        "date": date.today().isoformat(),
        "processes": [1, *sizes],
        "planted": plant,
        "model": model,
        "checks": [asdict(check) for check in checks],
        "machine": hardware.describe(),
        "versions": package_versions(),
    }
