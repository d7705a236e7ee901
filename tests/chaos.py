"""Runs that are hit at a random moment and resumed, against the unbroken one."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddp_mnist import cli
from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.system.files import read_json
from ddp_mnist.training import checkpoint
from ddp_mnist.training.folder import STATUS, SUMMARY
from ddp_mnist.verbs.verify.watch import just_train, resumed, what_stays
from tests.commands import Started

RECIPES = {
    "plain": "",
    "augmented": "--augment --max-grad-norm 1",
    "accumulated": "--grad-accum 2",
    "patient": "--patience 100 --model mlp",
}
FLAGS = "--dataset digits --epochs 6 --batch-size 72 --log-every 7 --checkpoint-every 4 --quiet"
FLAGS += " --mixed-precision no --dist-timeout 20 --run-dir"
PATIENCE_S = 200  # for what takes some 5 s on a machine that does nothing else
# A lost rank ends the others within 5 s; later where others use the machine at the same time.
SECONDS = 5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def flags_of(recipe: str, run: Path, *more: str) -> list[str]:
    """Return what starts a run of 90 steps of the digits, with a checkpoint at each fourth."""
    return [*FLAGS.split(), str(run), *RECIPES[recipe].split(), *more]


def config_of(recipe: str, run: Path, *more: str) -> TrainConfig:
    return cli.train_config(flags_of(recipe, run, "--cpu", *more))


@dataclass
class Chaos:
    """Hit runs of one kind, which is first left alone to see what it leaves behind."""

    folder: Path
    recipe: str  # a name from RECIPES
    size: int  # number of processes
    chance: random.Random  # draws the moments
    hits: Counter[str]  # of each fault, and of each phase that one came in

    def __post_init__(self) -> None:
        run = self.folder / f"unbroken-{self.recipe}-{self.size}"
        started = self.start(run)
        wait_until(lambda: checkpoint.newest_first(run))
        first = time.time()
        started.outcomes()
        self.seconds = (run / SUMMARY).stat().st_mtime - first
        self.unbroken = what_stays(run)

    def start(self, run: Path, resume: bool = False) -> LocalWorld:
        config = config_of(self.recipe, run)
        config = resumed(config) if resume else config
        return LocalWorld(self.size, just_train, config, folder=self.folder)

    def hit(self, run: Path, fault: str) -> None:
        """Hit one run, resume it, and compare; test_resume.py goes on twice.

        A hit that finds the run finished proves nothing, and is repeated.
        """
        while not self._hit(self.start(run), run, fault):
            self.hits["too late, repeated"] += 1
            shutil.rmtree(run)
        step = newest_step(run)
        self.start(run, resume=True).outcomes()
        assert read_json(run / SUMMARY)["resumed_from"] == [step]
        weights, lines = what_stays(run)
        assert weights == self.unbroken[0], f"{run}: other weights after {fault}"
        assert lines == self.unbroken[1], f"{run}: other lines after {fault}"
        assert leftovers(run) == []
        shutil.rmtree(run)

    def _hit(self, started: LocalWorld, run: Path, fault: str) -> bool:
        """Return whether the run was alive and unfinished when the fault came."""
        wait_until(lambda: checkpoint.newest_first(run))
        time.sleep(self.chance.uniform(0, self.seconds))
        name, _, whom = fault.partition(" ")
        before, workers = read_json(run / STATUS), workers_of(started)
        if workers and before["state"] == "running":
            victims = workers if whom == "all" else [self.chance.choice(workers)]
            try:
                for victim in victims:
                    victim.send_signal(getattr(signal, name))
            except psutil.NoSuchProcess:
                workers = []
        took = seconds_until_gone(workers)
        started.outcomes()
        after = read_json(run / STATUS)
        if not workers or "finished" in (before["state"], after["state"]):
            return False
        code = after["exit_code"]
        assert took < (5 if name == "SIGKILL" else 10), f"{fault}: {took:.1f} s"
        if name != "SIGKILL":
            assert (after["state"], code) == ("preempted", 130 if name == "SIGINT" else 143)
        elif self.size > 1:
            assert code in (6, None), after
        self.hits.update([fault, f"in {before['phase']}"])
        return True


def workers_of(started: LocalWorld | Started) -> list[psutil.Process]:
    """Return a run's processes by rank; none if it has ended."""
    try:
        if isinstance(started, LocalWorld):
            return [psutil.Process(each.pid) for each in started.processes]
        return psutil.Process(started.process.pid).children()
    except psutil.NoSuchProcess:
        return []


def wait_until(condition: Callable[[], Any], timeout_s: float = 60, every_s: float = 0.01) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(every_s)


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none."""
    return next((checkpoint.step_of(path) for path in checkpoint.newest_first(run)), 0)


def trains_on(run: Path, launcher: Started) -> int:
    """Return the step of the newest checkpoint so far, once there is another one."""
    step, ended = newest_step(run), launcher.process.poll
    wait_until(lambda: newest_step(run) > step or ended() is not None, PATIENCE_S)
    assert ended() is None, launcher.ended()
    return step


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


def chaos(folder: Path, count: int, seed: str, faults: list[str]) -> str:
    """Hit `count` runs of all recipes on 1 to 3 processes; raise at the first that differs."""
    hits, chance = Counter[str](), random.Random(seed)
    kinds: dict[tuple[str, int], Chaos] = {}
    for number in range(count):
        kind = (chance.choice(list(RECIPES)), chance.choice([1, 2, 3]))
        if kind not in kinds:
            kinds[kind] = Chaos(folder, *kind, chance, hits)
        kinds[kind].hit(folder / f"run-{number}", chance.choice(faults))
    return ", ".join(f"{what}: {n}" for what, n in sorted(hits.items()))
