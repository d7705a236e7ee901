"""How many cores this process may use."""

import os

from ddp_mnist import BINDING


def cores() -> int:
    """Return how many cores this process may keep busy, by affinity and quota; at least 1.

    The quota is that of the control group at /sys/fs/cgroup, a container's own. Limits of groups
    nested in it, as systemd and SLURM make them, are missed; affinity is not.
    """
    from joblib import cpu_count  # takes a moment, so not for --help

    return int(cpu_count())


def bound_together(processes_here: int) -> str | None:
    """Return a sentence if this machine's processes were bound to fewer cores than they are.

    A launcher that loads torch, as torchrun does, is bound by OpenMP's variables itself, and its
    processes inherit that. None if they were not, or if no such variable is set.
    """
    if not BINDING or "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) >= processes_here:
        return None
    name, value = next(iter(BINDING.items()))
    return (
        f"{name}={value}: bound the launcher, and so all {processes_here} processes here, to core"
        f" {', '.join(map(str, mine))}; unset it before you start the launcher"
    )
