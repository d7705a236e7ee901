"""Find this machine's hardware: its processor, and the GPUs that torch can compute on."""

import contextlib
import multiprocessing
import os
import platform
import sys
from pathlib import Path

IMPORTED_BY = os.getpid()
DEVICES = Path("/dev")
HIDE_GPUS = "CUDA_VISIBLE_DEVICES"
GPU_FIX = "update the driver, or install the torch that fits it (see pytorch.org)"


def describe() -> dict[str, str | int]:
    """Describe this machine, next to figures that were measured on it."""
    return {"cpu": cpu_model(), "cores": os.cpu_count() or 1, "system": platform.platform()}


def cpu_model() -> str:
    """Return the processor's name on Linux; elsewhere its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def gpus() -> int:
    """Return how many GPUs torch can compute on here.

    torch's own count includes GPUs whose driver is too old, and every divided one (MIG), although
    CUDA shows a process a single part.
    """
    import torch  # slow, so only if the answer is needed

    if not torch.cuda.is_available():
        return 0
    return min(torch.cuda.device_count(), torch._C._cuda_getDeviceCount())


def gpus_shown() -> int:
    """Return how many GPUs of NVIDIA the system lists, whatever torch sees."""
    return len(list(DEVICES.glob("nvidia[0-9]*")))


def unused_gpus() -> str | None:
    """Return a sentence if torch cannot use the GPUs that the system lists.

    None if torch can use them, if the machine lacks any, or if they are hidden on purpose.
    """
    import torch

    if not gpus_shown() or HIDE_GPUS in os.environ or gpus():
        return None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
    return f"{gpus_shown()} in /dev, but torch (built for {built}) sees none"


def gpus_for_make() -> int:
    """Return how many GPUs `make train` should use; print on stderr why it cannot use those here.

    torch takes seconds to load, so it is imported only if there is a device that may be a GPU.
    """
    if not any(any(DEVICES.glob(name)) for name in ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")):
        return 0
    if unused := unused_gpus():
        print(f"GPUs: {unused}, so this trains on the CPU; {GPU_FIX}", file=sys.stderr)
    return gpus()


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children; CUDA reads this at its first call.

    Otherwise an optimizer's step on the CPU would open a GPU, which may be broken or in use.
    """
    os.environ[HIDE_GPUS] = ""


def is_forked() -> bool:
    """Return whether this process was forked from one that computed, as by notebook_launcher.

    True if it was forked after this module was imported, or before that by `multiprocessing`. False
    under a fork server, which imports but computes nothing.

    A forked process lacks the OpenMP threads that its parent may have started, and would wait for
    them forever in its first parallel loop; with one thread it never enters one.
    """
    kind = type(multiprocessing.current_process()).__name__
    if kind == "ForkServerProcess":
        return False
    by_default = kind == "Process" and multiprocessing.get_start_method() == "fork"
    return os.getpid() != IMPORTED_BY or kind == "ForkProcess" or by_default
