"""How many cores and how much memory this process may use; its machine may have more."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """Return how many cores this process may keep busy, by affinity and quota; at least 1."""
    return max(1, int(min(len(affinity()), cpu_quota())))


def affinity() -> set[int]:
    """Return the numbers of the cores on which this process may run."""
    on_linux = hasattr(os, "sched_getaffinity")
    return os.sched_getaffinity(0) if on_linux else set(range(os.cpu_count() or 1))


def cpu_quota() -> float:
    """Return how many CPUs its control groups let it use at once; infinite without a limit."""
    limits = [*control_groups("", "cpu.max")]
    limits += control_groups("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    quotas = [int(quota) / int(period) for quota, period in limits if quota not in ("max", "-1")]
    return min(quotas, default=float("inf"))


def free_memory() -> float:
    """Return the free bytes of the machine, as far as its control groups allow.

    A group counts the page cache of files it has read as used, although it can be freed.
    """
    free = float(psutil.virtual_memory().available)
    groups = [*control_groups("", "memory.max", "memory.current", "memory.stat")]
    groups += control_groups(
        "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"
    )
    for most, used, *stat in groups:
        if most != "max":  # v1 has a number beyond any machine's memory
            counts = dict(zip(stat[::2], stat[1::2], strict=True))
            files = counts.get("total_inactive_file", counts["inactive_file"])
            free = min(free, int(most) - int(used) + int(files))
    return free


def control_groups(controller: str, *files: str) -> Iterator[list[str]]:
    """Yield these files' words, for each control group around this process that has the files.

    `controller` names one of cgroup v1's hierarchies; "" is that of v2. Limits of the outer groups
    hold too. A container sees its own group as the outermost.
    """
    root, lines = CGROUP / controller, OWN_CGROUPS.read_text() if OWN_CGROUPS.exists() else ""
    for line in lines.splitlines():
        _, controllers, own = line.split(":", 2)
        if controller in controllers.split(","):
            inner = root / own.strip("/")
            for group in (inner, *inner.parents):
                if group.is_relative_to(root) and all((group / file).exists() for file in files):
                    yield [word for file in files for word in (group / file).read_text().split()]
