"""What this process may use of its machine, where a container or its affinity allows less."""

from __future__ import annotations

import contextlib
import os
import platform
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


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

    torch's own count includes those whose driver is too old for it.
    """
    import torch  # slow, so only where the answer is needed

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def hide_gpus() -> None:
    """Hide all GPUs from this process and its children; CUDA reads this at its first call.

    An optimizer's step on a CPU would open a GPU that torch sees, which may be broken or taken.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def cores() -> int:
    """Return how many cores this process may keep busy, by its affinity and quota; at least 1."""
    return max(1, int(min(len(affinity()), cpu_quota())))


def affinity() -> set[int]:
    """Return the numbers of the cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class Load:
    """Load of other programs on the cores that this process may keep busy.

    Attributes:
        held: cores that they hold, from 0 to `cores`.
        cores: that this process may keep busy.
        programs: names of the two that use most; none that uses less than a tenth of a core.
    """

    held: float
    cores: int
    programs: list[str]


def load(seconds: float = 1.0) -> Load:
    """Sleep for `seconds` and measure; time that a virtual machine's host takes counts as held."""
    before = cpu_seconds()
    busy = psutil.cpu_percent(seconds, percpu=True)
    used: dict[str, float] = defaultdict(float)
    for process, total in cpu_seconds().items():
        used[process[1]] += total - before.get(process, total)
    most = sorted(used, key=used.__getitem__, reverse=True)[:2]
    mine = affinity()
    shares = [busy[core] for core in mine] if max(mine) < len(busy) else busy
    free = len(shares) - sum(shares) / 100
    programs = [name for name in most if used[name] >= 0.1 * seconds]
    return Load(max(0.0, cores() - free), cores(), programs)


def cpu_seconds() -> dict[tuple[int, str], float]:
    """Return the CPU seconds of every other process that can be seen, by PID and name."""
    return {
        (process.pid, process.info["name"]): sum(process.info["cpu_times"][:2])
        for process in psutil.process_iter(["name", "cpu_times"])
        if process.info["cpu_times"] and process.pid != os.getpid()
    }


def cpu_quota() -> float:
    """Return how many CPUs its control groups let it use at once; infinite without a limit."""
    allowed = float("inf")
    for group in control_groups("cpu"):
        for files in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # v2, v1
            if limit := numbers(group, *files):
                quota, period = limit
                allowed = min(allowed, quota / period) if quota > 0 else allowed
    return allowed


def free_memory() -> float:
    """Return the free bytes of the machine, as far as its control groups allow."""
    free = float(psutil.virtual_memory().available)
    for group in control_groups("memory"):
        for files in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            if limit := numbers(group, *files):
                most, used = limit
                free = min(free, most - used + reclaimable(group))
    return free


def numbers(group: Path, *files: str) -> list[int]:
    """Return the numbers in files of a group; [] if one is not there, or is "max"."""
    with contextlib.suppress(OSError, ValueError):
        return [int(word) for file in files for word in (group / file).read_text().split()]
    return []


def reclaimable(group: Path) -> int:
    """Return the bytes of files that the group has read, which count as used but can be freed."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        sizes = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(sizes.get("total_inactive_file") or sizes["inactive_file"])
    return 0


def control_groups(controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, of cgroup v2 or else v1.

    A limit of any of them holds. A container sees its own group as the outermost.
    """
    with contextlib.suppress(OSError, ValueError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = CGROUP / controllers if controllers else CGROUP
            inner = root / path.lstrip("/")
            while inner != root:
                yield inner
                inner = inner.parent
            yield root
