"""Whole commands, timed from the moment they are typed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil

from ddp_mnist.cluster import hardware
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.run.folder import METRICS

REPOSITORY = Path(__file__).parents[2]
BASELINE = [str(Path(__file__).with_name("baseline_program.py"))]
TRAIN = ["-m", "ddp_mnist", "train", "--mixed-precision", "auto"]
PATIENCE_S = 1800.0


def launcher(processes: int) -> list[str]:
    """`accelerate launch` with the stored configuration for this machine.

    Raises:
        UsageError: there are fewer GPUs, or the package was installed without the repository
            around it.
    """
    gpus = hardware.gpus()
    if 0 < gpus < processes:
        raise UsageError(
            f"--processes {processes}: a launched process needs a GPU of its own, and this machine"
            f" shows {gpus}; give at most {gpus}, or CUDA_VISIBLE_DEVICES= for the CPU"
        )
    name = "multi_cpu" if not gpus else "multi_gpu" if processes > 1 else "single_gpu"
    config = REPOSITORY / "accelerate_configs" / f"{name}.yaml"
    if not config.exists():
        raise UsageError(f"bench: {config} is not there; run it in a clone of the repository")
    return [
        *("-m", "accelerate.commands.launch", "--main_process_port", "0"),
        *("--config_file", str(config), "--num_processes", str(processes)),
    ]


def data_flags(dataset: str, cache_dir: str | None) -> list[str]:
    return ["--dataset", dataset, *(["--cache-dir", cache_dir] if cache_dir else [])]


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """`python *command` and the file it writes to. Nothing of it is left afterwards."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process, output
        finally:
            # torchrun's workers are in sessions of their own: a signal to a group misses them
            children = descendants(process.pid)
            process.kill()
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=10)
            process.wait()


def descendants(pid: int) -> list[psutil.Process]:
    """Its children and theirs."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def said(command: list[str], process: subprocess.Popen[bytes], output: IO[bytes]) -> list[Any]:
    """The lines of JSON that it printed until its good end.

    Raises:
        CheckFailed: it ended otherwise, or not within PATIENCE_S.
    """
    try:
        code = process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired as error:
        raise CheckFailed(f"{' '.join(command)}: still runs after {PATIENCE_S:.0f} s") from error
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    if code:
        raise CheckFailed(f"{' '.join(command)}: ended with code {code}: {' '.join(lines)}")
    return [json.loads(line) for line in lines if line.startswith("{")]


def seconds_to_end(command: list[str]) -> tuple[float, list[Any]]:
    """From start to a good end, and the lines of JSON that were printed."""
    clock = time.monotonic()
    with started(command) as (process, output):
        lines = said(command, process, output)
        return time.monotonic() - clock, lines


def seconds_to_first_step(before: list[str], arguments: list[str]) -> float:
    """From start to the first line of metrics.jsonl, which tells of the first optimizer step."""
    with tempfile.TemporaryDirectory(prefix="ddp_mnist-") as scratch:
        metrics = Path(scratch) / "run" / METRICS
        command = [*before, *TRAIN, *arguments, "--log-every", "1"]
        begun = time.time()
        with started([*command, "--run-dir", str(metrics.parent)]) as (process, output):
            while not (metrics.exists() and metrics.stat().st_size):
                if process.poll() is not None:
                    said(command, process, output)
                    raise CheckFailed(f"{' '.join(command)}: ended without a step")
                time.sleep(0.005)
            return metrics.stat().st_mtime - begun


def seconds_to_baseline_step(before: list[str]) -> float:
    """The same of the baseline program, which prints when its first step is done: of the slowest
    process."""
    begun = time.time()
    _, lines = seconds_to_end([*before, *BASELINE])
    return max(line["first_step"] for line in lines) - begun


def peak_anonymous_mb(command: list[str]) -> float:
    """Megabytes of private memory, at their highest, of the command's largest process.

    Looked at some 40 times a second; mapped files, as the cache and libraries, do not count.

    Raises:
        UsageError: there is no /proc, as on macOS.
    """
    if not Path("/proc/self/status").exists():
        raise UsageError("bench memory: needs Linux's /proc")
    peak = 0
    with started(command) as (process, output):
        while process.poll() is None:
            for pid in [process.pid, *(child.pid for child in descendants(process.pid))]:
                with contextlib.suppress(OSError, StopIteration):  # it ended meanwhile
                    status = Path(f"/proc/{pid}/status").read_text().splitlines()
                    line = next(line for line in status if line.startswith("RssAnon:"))
                    peak = max(peak, int(line.split()[1]))
            time.sleep(0.02)
        said(command, process, output)
    return peak * 1024 / 1e6
