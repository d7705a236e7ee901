"""Whole commands: seconds from their start to the first optimizer step."""

import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from ddp_mnist.cluster import hardware
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.run.folder import METRICS

REPOSITORY = Path(__file__).parents[2]
BASELINE = [str(Path(__file__).with_name("baseline_program.py"))]
TRAIN = ["-m", "ddp_mnist", "train", "--mixed-precision", "auto", "--log-every", "1"]
TIMEOUT_S = 1800.0


def launcher(processes: int) -> list[str]:
    """Return `accelerate launch` with the stored configuration for this machine.

    Raise UsageError where there are fewer GPUs, or the repository is not around the package.
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


def seconds_to_first_step(command: list[str], run_dir: Path) -> float:
    """Return the seconds from the start of `python *command` until metrics.jsonl has a line.

    That is of the first step. None of the command's processes is left then. Raise CheckFailed
    where it ends without a step, or takes none within TIMEOUT_S.
    """
    begun, metrics, code = time.time(), run_dir / METRICS, None
    typed = [*command, "--run-dir", str(run_dir)]
    with tempfile.TemporaryFile() as output:
        process = psutil.Popen([sys.executable, *typed], stdout=output, stderr=subprocess.STDOUT)
        try:
            while not (taken := metrics.exists() and metrics.stat().st_size > 0):
                if code is not None or time.time() - begun > TIMEOUT_S:
                    break
                time.sleep(0.005)
                code = process.poll()
        finally:
            end_family(process)
        output.seek(0)
        printed = " ".join(output.read().decode(errors="replace").splitlines())
    if not taken:
        how = f"still runs after {TIMEOUT_S:g} s" if code is None else f"ended with code {code}"
        text = f"{' '.join(typed)}: {how} without a first step"
        raise CheckFailed(f"{text}; run it by hand, here it printed: {printed}")
    return metrics.stat().st_mtime - begun


def end_family(process: psutil.Process) -> None:
    """Kill the process and its descendants.

    torchrun's workers are in sessions of their own: a signal to a group would miss them.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [process, *process.children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, timeout=10)
