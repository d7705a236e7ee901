"""Runs that are hit at a random moment and resumed, against the unbroken one."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from ddp_mnist.cluster.local import LocalWorld
from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.run import checkpoint
from ddp_mnist.run.folder import STATUS, SUMMARY, read_json
from ddp_mnist.verify.watch import just_train, what_stays
from tests.commands import ACCELERATE, CONFIGS, TORCHRUN, TRAIN, Started

STEPS = 90
RECIPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "augmented": {"augment": True, "max_grad_norm": 1.0},
    "accumulated": {"grad_accum": 2},
    "patient": {"patience": 100, "model": "mlp"},
}
CHECKPOINT_EVERY = 4


def config_of(recipe: str, run: Path) -> TrainConfig:
    """Return a new run of 90 steps of the digits, with a checkpoint at each fourth."""
    return TrainConfig(
        Run(
            dataset="digits",
            run_dir=str(run),
            log_every=7,
            checkpoint_every=CHECKPOINT_EVERY,
            quiet=True,
        ),
        Recipe(**{"epochs": 6, "batch_size": 72, **RECIPES[recipe]}),
        Distribution(cpu=True, mixed_precision="no", dist_timeout=20),
    )


def resumed(config: TrainConfig) -> TrainConfig:
    run = replace(config.run, run_dir=None, resume=config.run.run_dir)
    return replace(config, run=run, typed=frozenset({"quiet"}))


def flags_of(recipe: str, run: Path) -> list[str]:
    """Return `config_of` as a person types it."""
    typed = {"epochs": 6, "batch_size": 72, **RECIPES[recipe]}
    flags = ["--dataset", "digits", "--run-dir", str(run), "--log-every", "7"]
    flags += ["--checkpoint-every", str(CHECKPOINT_EVERY), "--mixed-precision", "no"]
    for name, value in typed.items():
        flags += ["--" + name.replace("_", "-")] + ([] if value is True else [str(value)])
    return flags


@dataclass
class Tally:
    """Counts of what was tried, and of what held."""

    tried: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    too_late: int = 0
    longest_s: float = 0.0

    def __str__(self) -> str:
        rows = [f"{what}: {n} tried, {self.held[what]} held" for what, n in self.tried.items()]
        phases = ", ".join(f"{phase} {n}" for phase, n in self.phases.most_common())
        return (
            "; ".join(rows) + f"; hit in: {phases}; {self.too_late} came too late and were"
            f" repeated; longest end {self.longest_s:.1f} s"
        )


class Training:
    """A running training: its processes, rank by rank, and its launcher."""

    def __init__(self, start: Callable[[], Any]) -> None:
        self.running = start()
        self.launcher: psutil.Process | None = None
        if isinstance(self.running, Started):
            self.launcher = psutil.Process(self.running.process.pid)

    def workers(self) -> list[psutil.Process]:
        try:
            if isinstance(self.running, LocalWorld):
                return [psutil.Process(each.pid) for each in self.running.processes]
            assert self.launcher
            return self.launcher.children()
        except psutil.NoSuchProcess:
            return []  # it has ended

    def ended(self) -> None:
        if isinstance(self.running, LocalWorld):
            self.running.outcomes()
        else:
            self.running.ended()


@dataclass
class Chaos:
    """One kind of run, and what it leaves behind when nothing happens to it.

    Args:
        folder: for the runs.
        recipe: a name from RECIPES.
        size: number of processes.
        launcher: none (the forkserver), torchrun or accelerate.
        seed: of the moments.
    """

    folder: Path
    recipe: str
    size: int
    launcher: str
    random: random.Random
    tally: Tally

    def start(self, run: Path, resume: bool) -> Training:
        config = config_of(self.recipe, run)
        if self.launcher == "none":
            wanted = resumed(config) if resume else config
            return Training(lambda: LocalWorld(self.size, just_train, wanted, folder=self.folder))
        flags = flags_of(self.recipe, run)
        if resume:
            flags = ["--resume", str(run), "--mixed-precision", "no"]
        launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(self.size)]
        if self.launcher == "accelerate":
            launcher = [*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), "--num_processes"]
            launcher.append(str(self.size))
        quiet = {"OMP_NUM_THREADS": "1"}
        return Training(lambda: Started([*launcher, *TRAIN, *flags], self.folder, quiet))

    def unbroken(self) -> tuple[Any, float]:
        """Return what stays of it, and its seconds from the first checkpoint to the end."""
        run = self.folder / f"unbroken-{self.recipe}-{self.size}-{self.launcher}"
        started = self.start(run, resume=False)
        first = wait_for_checkpoint(run)
        started.ended()
        seconds = (run / SUMMARY).stat().st_mtime - first
        return what_stays(run), seconds

    def hit(self, number: int, fault: str, expected: Any, seconds: float) -> None:
        """Hit one run, resume it, perhaps hit it again, and compare.

        A hit that finds the run finished proves nothing, and is repeated.
        """
        while True:
            run = self.folder / f"run-{number}"
            started = self.start(run, resume=False)
            wait_for_checkpoint(run)
            times = 1 + (self.random.random() < 0.25)
            if self._hit(started, run, fault, seconds):
                break
            self.tally.too_late += 1
            shutil.rmtree(run)
        self.tally.tried[fault] += 1
        steps = [newest_step(run)]
        for _ in range(times - 1):
            before = (run / STATUS).read_bytes()
            started = self.start(run, resume=True)
            wait_until_changed(run / STATUS, before)
            if self._hit(started, run, fault, seconds / 2):
                steps.append(newest_step(run))
        if read_json(run / STATUS)["state"] != "finished":
            self.start(run, resume=True).ended()
        summary = read_json(run / SUMMARY)
        assert 0 < summary["resumed_from"][0] <= STEPS, summary["resumed_from"]
        assert summary["resumed_from"][-1] == steps[-1], (summary["resumed_from"], steps)
        weights, lines = what_stays(run)
        assert weights == expected[0], f"{run}: other weights after {fault}"
        assert lines == expected[1], f"{run}: other lines after {fault}"
        assert leftovers(run) == []
        self.tally.held[fault] += 1
        shutil.rmtree(run)

    def _hit(self, started: Training, run: Path, fault: str, seconds: float) -> bool:
        """Return whether the run was alive and unfinished when the fault came."""
        time.sleep(self.random.uniform(0, seconds))
        workers = started.workers()
        if not workers:
            started.ended()
            return False
        name, _, whom = fault.partition(" ")
        victims = {
            "worker": [self.random.choice(workers)],
            "all": workers,
            "launcher": [started.launcher],
            "both": [started.launcher, self.random.choice(workers)],
        }[whom]
        status = read_json(run / STATUS)
        if status["state"] != "running":
            started.ended()
            return False
        for victim in victims:
            try:
                victim.send_signal(getattr(signal, name))
            except psutil.NoSuchProcess:
                started.ended()
                return False
        took = seconds_until_gone(workers)
        started.ended()
        assert not any(is_alive(worker) for worker in workers)
        after = read_json(run / STATUS)
        if after["state"] == "finished":
            return False
        self.tally.longest_s = max(self.tally.longest_s, took)
        self.tally.phases[status["phase"]] += 1
        if name != "SIGKILL":
            assert after["state"] == "preempted", after
            assert after["exit_code"] == (130 if name == "SIGINT" else 143), after
            assert took < 10, f"{fault}: {took:.1f} s"
        elif whom == "launcher":
            assert took < 5, f"{fault}: {took:.1f} s"
        elif self.size > 1:
            # With its launcher killed first, a worker may save with the others before it dies.
            assert after["exit_code"] in ((6, None, 143) if whom == "both" else (6, None)), after
            assert took < 5, f"{fault}: {took:.1f} s"
        return True


def wait_for_checkpoint(run: Path) -> float:
    """Return time.time() when the first one is there."""
    wait_until(lambda: checkpoint.newest_first(run))
    return time.time()


def wait_until(condition: Callable[[], Any], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.002)


def wait_until_changed(file: Path, before: bytes) -> None:
    wait_until(lambda: file.read_bytes() != before)


def newest_step(run: Path) -> int:
    return checkpoint.step_of(checkpoint.newest_first(run)[0])


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_until_gone(processes: list[psutil.Process]) -> float:
    """Return how long they live on; one that ended is gone before its new parent notices."""
    began = time.monotonic()
    wait_until(lambda: not any(is_alive(process) for process in processes))
    return time.monotonic() - began


def leftovers(run: Path) -> list[str]:
    """Return temporary files, and locks that nobody holds, in a run folder or below."""
    found = [*run.rglob(".*"), *run.rglob("*.tmp")]
    return sorted({str(path.relative_to(run)) for path in found})


def chaos(folder: Path, count: int, seed: str, launcher: str, faults: list[str]) -> Tally:
    """Hit `count` runs of all recipes on 1 to 3 processes; raise at the first that differs."""
    tally, chance = Tally(), random.Random(seed)
    kinds: dict[tuple[str, int], tuple[Chaos, Any, float]] = {}
    folder.mkdir(exist_ok=True)
    for number in range(count):
        recipe = chance.choice(list(RECIPES))
        size = chance.choice([1, 2, 3] if launcher == "none" else [2, 3])
        if (recipe, size) not in kinds:
            kind = Chaos(folder, recipe, size, launcher, chance, tally)
            kinds[recipe, size] = (kind, *kind.unbroken())
        kind, expected, seconds = kinds[recipe, size]
        kind.hit(number, chance.choice(faults), expected, seconds)
    return tally
