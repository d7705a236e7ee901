"""Whole commands: seconds from their start to the first optimizer step, and their memory."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from ddp_mnist.cluster import hardware
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.run.folder import METRICS

REPOSITORY = Path(__file__).parents[2]
BASELINE = [str(Path(__file__).with_name("baseline_program.py"))]
TRAIN = ["-m", "ddp_mnist", "train", "--mixed-precision", "auto", "--log-every", "1"]
TIMEOUT_S = 1800.0
Measure = Callable[[list[str], Path], float]  # of a command that writes into a run folder


def launcher(processes: int) -> list[str]:
    """Return `accelerate launch` with the stored configuration for this machine.

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
        raise UsageError(f"bench: {config} is missing; run it in a clone of the repository")
    return [
        *("-m", "accelerate.commands.launch", "--main_process_port", "0"),
        *("--config_file", str(config), "--num_processes", str(processes)),
    ]


def run(command: list[str], poll: Callable[[psutil.Popen], bool] = lambda _: False) -> None:
    """Run `python *command` until it ends, or `poll(process)` says so.

    None of the command's processes is left afterwards.

    Raises:
        CheckFailed: it failed, or did not end within TIMEOUT_S.
    """
    deadline, typed = time.monotonic() + TIMEOUT_S, " ".join(command)
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen([sys.executable, *command], stdout=output, stderr=subprocess.STDOUT)
        try:
            while (code := process.poll()) is None and not poll(process):
                if time.monotonic() > deadline:
                    raise CheckFailed(f"{typed}: still runs after {TIMEOUT_S:.0f} s")
                time.sleep(0.005)
        finally:
            # torchrun's workers are in sessions of their own: a signal to a group misses them
            for each in (processes := family(process)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            psutil.wait_procs(processes, timeout=10)
        output.seek(0)
        printed = " ".join(output.read().decode(errors="replace").splitlines())
    if code:
        raise CheckFailed(f"{typed}: ended with code {code}: {printed}")


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return the process and its descendants; none if it has ended."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def seconds_to_first_step(command: list[str], run_dir: Path) -> float:
    """Return the seconds until metrics.jsonl has a line, which is of the first step."""
    begun, metrics = time.time(), run_dir / METRICS

    def first_step(_: Any = None) -> bool:
        return metrics.exists() and metrics.stat().st_size > 0

    run(command, first_step)
    if not first_step():
        raise CheckFailed(f"{' '.join(command)}: ended without a step; run it by hand")
    return metrics.stat().st_mtime - begun


def peak_anonymous_mb(command: list[str], _run_dir: Path | None = None) -> float:
    """Return the highest private memory of the command's largest process, in megabytes.

    Mapped files, as the cache and libraries, do not count.

    Raises:
        UsageError: there is no /proc, as on macOS.
    """
    if not Path("/proc/self/status").exists():
        raise UsageError("bench memory: needs /proc; run it on Linux")
    peak = 0

    def look(process: psutil.Popen) -> bool:
        nonlocal peak
        for each in family(process):
            with contextlib.suppress(OSError, StopIteration):  # it ended meanwhile
                status = Path(f"/proc/{each.pid}/status").read_text().splitlines()
                line = next(line for line in status if line.startswith("RssAnon:"))
                peak = max(peak, int(line.split()[1]))
        time.sleep(0.02)
        return False

    run(command, look)
    return peak * 1024 / 1e6
