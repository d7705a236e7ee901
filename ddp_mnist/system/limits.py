"""How many cores this process may use; its machine may have more."""


def cores() -> int:
    """Return how many cores this process may keep busy, by affinity and quota; at least 1.

    The quota is that of the control group at /sys/fs/cgroup, a container's own. Limits of groups
    nested in it, as systemd and SLURM make them, are missed; affinity is not.
    """
    from joblib import cpu_count  # takes a moment, so not for --help

    return int(cpu_count())
