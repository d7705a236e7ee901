"""Other programs on this machine, and how many cores they use."""

import os
from collections import Counter

import psutil

from ddp_mnist.system.limits import cores


def cores_held(seconds: float = 1.0) -> tuple[float, int, list[str]]:
    """Return how many cores others use, how many this process has, and the busiest programs.

    It measures for `seconds`. The two busiest programs are named, if they use a tenth of a core or
    more. Time that a virtual machine's host takes counts as used.
    """
    list(psutil.process_iter(["cpu_percent"]))  # the next look measures from this one on
    busy = psutil.cpu_percent(seconds, percpu=True)
    used = Counter[str]()  # by program, in percent of a core
    for process in psutil.process_iter(["name", "cpu_percent"]):
        if process.pid != os.getpid():
            used[process.info["name"]] += process.info["cpu_percent"] or 0  # None: access denied
    programs = [name for name, percent in used.most_common(2) if percent >= 10]
    on_linux = hasattr(os, "sched_getaffinity")
    mine = os.sched_getaffinity(0) if on_linux else set(range(len(busy)))
    shares = [busy[core] for core in mine] if max(mine) < len(busy) else busy
    free = len(shares) - sum(shares) / 100
    return max(0.0, cores() - free), cores(), programs
