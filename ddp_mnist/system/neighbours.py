"""Other programs on this machine: how many cores they use, and whether they slow a run."""

import os
import time
from collections import Counter

import psutil

from ddp_mnist.system.limits import affinity, cores

NEIGHBOURS_S = 10.0  # of training, to tell a lasting program from a short one


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
    mine = affinity()
    shares = [busy[core] for core in mine] if max(mine) < len(busy) else busy
    free = len(shares) - sum(shares) / 100
    return max(0.0, cores() - free), cores(), programs


class Neighbours:
    """Detects that other programs leave cores for fewer threads than this process has.

    Each parallel loop waits for its slowest thread: two threads that share one core take several
    times as long as one. `ranks` is the number of processes of this run on the machine.
    """

    def __init__(self, threads: int, ranks: int) -> None:
        self.threads, self.ranks = threads, ranks
        self._before = self._look()

    def judge(self) -> int:
        """Return how many threads the cores had room for, if fewer than run here, else 0.

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
