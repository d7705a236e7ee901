"""Find what this machine has, and what other programs use of it."""

import contextlib
import multiprocessing
import os
import platform
import re
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from ddp_mnist.system.limits import affinity, cores

IMPORTED_BY = os.getpid()
DEVICES = Path("/dev")
WSL_CUDA = Path("/usr/lib/wsl/lib/libcuda.so.1")  # there with a driver of NVIDIA on Windows
HIDE_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
GPU_FIX = "update the driver, or install the torch that fits it (see pytorch.org)"
TOO_OLD_FIX = "install a torch built for an older CUDA (see pytorch.org)"
hidden_once: list[bool] = []  # by this process, which may be a notebook's and set it free again
NEIGHBOURS_S = 10.0  # of training, to tell a program that stays from one that comes and goes


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


def load(seconds: float = 1.0) -> tuple[float, int, list[str]]:
    """Return how many of this process's cores others hold, how many it has, and who holds most.

    It measures for `seconds`. Named are the two programs that use most, of those that use a tenth
    of a core or more. Time that a virtual machine's host takes counts as held.
    """
    list(psutil.process_iter(["cpu_percent"]))  # the next look measures from this one on
    busy = psutil.cpu_percent(seconds, percpu=True)
    used = Counter[str]()  # by program, in percent of a core
    for process in psutil.process_iter(["name", "cpu_percent"]):
        if process.pid != os.getpid():
            used[process.info["name"]] += process.info["cpu_percent"] or 0  # None: it is not shown
    programs = [name for name, percent in used.most_common(2) if percent >= 10]
    mine = affinity()
    shares = [busy[core] for core in mine] if max(mine) < len(busy) else busy
    free = len(shares) - sum(shares) / 100
    return max(0.0, cores() - free), cores(), programs


class Neighbours:
    """Finds whether other programs leave the cores to fewer threads than this process has.

    Each parallel loop waits for the slowest of its threads: two threads that share one core take
    several times as long as one. `ranks` is the number of processes like this one on the machine.
    """

    def __init__(self, threads: int, ranks: int) -> None:
        self.threads, self.ranks = threads, ranks
        self._before = self._look()

    def judge(self) -> int:
        """Return how many threads the cores have had room for, if that are fewer, else 0.

        It measures over `NEIGHBOURS_S` or more, and returns 0 before.
        """
        if time.monotonic() - self._before[0] < NEIGHBOURS_S:
            return 0
        now = self._look()
        seconds, own, idle = (after - b for after, b in zip(now, self._before, strict=True))
        self._before = now
        fit = max(1, round((own + idle / self.ranks) / seconds))
        return fit if fit < self.threads else 0

    def _look(self) -> tuple[float, float, float]:
        """Return the time, this process's CPU seconds, and those in which its cores were idle."""
        cores, mine = psutil.cpu_times(percpu=True), affinity()
        found = [core for number, core in enumerate(cores) if number in mine] or cores
        idle = sum(core.idle + getattr(core, "iowait", 0.0) for core in found)
        return time.monotonic(), time.process_time(), idle
