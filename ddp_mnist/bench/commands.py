"""Whole commands, timed from the moment they are typed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ddp_mnist import run_folder
from ddp_mnist.errors import CheckFailed

REPOSITORY = Path(__file__).parents[2]
FLOOR = [str(Path(__file__).with_name("floor.py"))]
TRAIN = ["-m", "ddp_mnist", "train"]
PATIENCE_S = 1800.0


def launcher(processes: int) -> list[str]:
    """`accelerate launch` for CPU processes, as `make train-multi` types it."""
    config = str(REPOSITORY / "accelerate_configs" / "multi_cpu.yaml")
    return [
        *("-m", "accelerate.commands.launch", "--main_process_port", "0"),
        *("--config_file", config, "--num_processes", str(processes)),
    ]


def data_flags(dataset: str, cache_dir: str | None) -> list[str]:
    return ["--dataset", dataset, *(["--cache-dir", cache_dir] if cache_dir else [])]


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`python *command` in a process group of its own, of which nothing is left afterwards."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout
        process.stdout.close()


def seconds_to_end(command: list[str]) -> tuple[float, list[Any]]:
    """From start to a good end, and the lines of JSON that were printed."""
    clock = time.monotonic()
    with started(command) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
        seconds = time.monotonic() - clock
    if process.returncode:
        raise CheckFailed(f"{' '.join(command)}: ended with code {process.returncode}: {said}")
    return seconds, [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def seconds_to_first_step(before: list[str], arguments: list[str]) -> float:
    """From start to the first line of metrics.jsonl, which tells of the first optimizer step."""
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        metrics = Path(scratch) / "run" / run_folder.METRICS
        command = [*before, *TRAIN, *arguments, "--log-every", "1"]
        begun = time.time()
        with started([*command, "--run-dir", str(metrics.parent)]) as process:
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise CheckFailed(f"{' '.join(command)}: {process.communicate()[0]}")
                time.sleep(0.005)
            return metrics.stat().st_mtime - begun


def seconds_to_floors_step(before: list[str]) -> float:
    """The same of floor.py, which prints when its first step is done: of the slowest process."""
    begun = time.time()
    with started([*before, *FLOOR]) as process:
        said, _ = process.communicate(timeout=PATIENCE_S)
    times = [float(line) for line in said.split() if line.replace(".", "", 1).isdecimal()]
    if not times:
        raise CheckFailed(f"{FLOOR[0]}: took no step: {said}")
    return max(times) - begun


def peak_anonymous_mb(command: list[str]) -> float:
    """Megabytes of private memory, at their highest, of the command's largest process (Linux).

    Looked at 50 times a second; files that are mapped, as the cache and libraries, do not count.
    """
    peak = 0
    with started(command) as process:
        while process.poll() is None:
            for pid in [process.pid, *descendants(process.pid)]:
                with contextlib.suppress(OSError, StopIteration):  # it ended meanwhile
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    line = next(line for line in status if line.startswith("RssAnon:"))
                    peak = max(peak, int(line.split()[1]))
            time.sleep(0.02)
        assert process.stdout
        said = process.stdout.read()
    if process.returncode:
        raise CheckFailed(f"{' '.join(command)}: ended with code {process.returncode}: {said}")
    return peak * 1024 / 1e6


def descendants(pid: int) -> list[int]:
    """Ids of its children and theirs."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
