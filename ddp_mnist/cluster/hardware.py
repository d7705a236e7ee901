"""Find what this machine has: its processor, and the GPUs that torch can compute on."""

import contextlib
import multiprocessing
import os
import platform
import re
import sys
from pathlib import Path

IMPORTED_BY = os.getpid()
DEVICES = Path("/dev")
WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")  # there with a driver of NVIDIA on Windows
HIDE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
GPU_FIX = "update the driver, or install the torch that fits it (see pytorch.org)"
TOO_OLD_FIX = "install a torch built for an older CUDA (see pytorch.org)"
hidden_once: list[bool] = []  # by this process, which may be a notebook's and set it free again


def describe() -> dict[str, str | int]:
    """Describe this machine, beside figures that were measured on it."""
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

    torch's own count includes those whose driver is too old for it, and all that are divided (MIG),
    of whose parts CUDA shows a process one.
    """
    import torch  # slow, so only where the answer is needed

    if not torch.cuda.is_available():
        return 0
    return min(torch.cuda.device_count(), torch._C._cuda_getDeviceCount())


def gpus_shown() -> int:
    """Return how many GPUs of NVIDIA, or else AMD, the system shows, whatever torch sees."""
    nvidia = len(list(DEVICES.glob("nvidia[0-9]*")))
    in_wsl = (DEVICES / "dxg").exists() and WSL_CUDA.exists()
    return nvidia or int(in_wsl or (DEVICES / "kfd").exists())


def unused_gpus() -> str:
    """Return in words that torch cannot use the GPUs that the system shows.

    "" if it can, there are none, or they are hidden on purpose.
    """
    import torch

    if not gpus_shown() or any(name in os.environ for name in HIDE_GPUS) or gpus():
        return ""
    cuda, rocm = torch.version.cuda, torch.version.hip
    built = f"CUDA {cuda}" if cuda else f"ROCm {rocm}" if rocm else "CPUs only"
    return f"{gpus_shown()} in /dev, but torch (built for {built}) sees none"


def gpus_for_make() -> int:
    """Return how many GPUs `make train` is to use; say on stderr why none of those that are there.

    torch takes seconds to load: without a device that may be a GPU's it is not asked.
    """
    if not any(any(DEVICES.glob(name)) for name in ("nvidia*", "nvhost*", "nvgpu*", "dxg", "kfd")):
        return 0
    if unused := unused_gpus():
        print(f"GPUs: {unused}, so this trains on the CPU; {GPU_FIX}", file=sys.stderr)
    return gpus()


def too_old(number: int) -> str:
    """Return in words that a GPU is older than all that this torch has kernels for, else ""."""
    import torch

    kernels = [int(cc) for cc in re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))]
    major, minor = torch.cuda.get_device_capability(number)
    if not kernels or 10 * major + minor >= min(kernels):
        return ""
    name, least = torch.cuda.get_device_name(number), min(kernels)
    return (
        f"{name} has compute capability {major}.{minor}, and torch {torch.__version__} needs"
        f" {least // 10}.{least % 10}"
    )


def default_processes(least: int) -> int:
    """Return one per GPU, or two where there is none; at least `least`."""
    return max(gpus() or 2, least)


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children; CUDA reads this at its first call.

    An optimizer's step on a CPU would open a GPU that torch sees, which may be broken or taken.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    hidden_once.append(True)


def is_forked() -> bool:
    """Return whether this process is a copy of one that computed, as notebook_launcher makes them.

    True if it was forked after this module was imported, or by `multiprocessing` before. False
    under a fork server, which imports but computes nothing.

    A copy lacks the threads of OpenMP that the notebook's process may have started, and would wait
    for them for good in its first parallel loop; with one thread there is none.
    """
    kind = type(multiprocessing.current_process()).__name__
    if kind == "ForkServerProcess":
        return False
    by_default = kind == "Process" and multiprocessing.get_start_method() == "fork"
    return os.getpid() != IMPORTED_BY or kind == "ForkProcess" or by_default
