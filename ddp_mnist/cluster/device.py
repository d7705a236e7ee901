"""."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ddp_mnist.cluster.hardware import cores, gpus, hide_gpus
from ddp_mnist.cluster.launch import CONFIGS, Launch
from ddp_mnist.cluster.store import Store
from ddp_mnist.config import Distribution
from ddp_mnist.errors import UsageError


def choose_device(flags: Distribution) -> str:
    """cuda where there is one and nobody asked for the CPU, else cpu."""
    if flags.cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        hide_gpus()
        return "cpu"
    return "cuda" if gpus() else "cpu"


def choose_backend(flags: Distribution, launch: Launch, device: str) -> str:
    """none for a process on its own, else gloo or nccl."""
    if flags.backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl: needs a GPU and this machine shows none; use gloo")
    if launch.world_size == 1 and not launch.agent_store:
        return "none"
    if flags.backend != "auto":
        return flags.backend
    return "nccl" if device == "cuda" else "gloo"


def has_native_bf16() -> bool:
    """Whether the CPU multiplies bfloat16 itself, where emulating it would be slower than fp32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def precision_in_effect(flags: Distribution, launch: Launch, device: str) -> str:
    """no, fp16, bf16 or fp64. The flag beats the launcher's YAML; neither given means auto.

    A YAML's fp16 was meant for the GPUs that --cpu leaves aside.
    """
    from_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if flags.cpu and from_launcher == "fp16":
        from_launcher = None
    asked = flags.mixed_precision or from_launcher or "auto"
    if asked == "auto":
        if device == "cuda":
            return "fp16"
        return "bf16" if has_native_bf16() else "no"
    if asked == "fp16" and device == "cpu":
        raise UsageError(fp16_on_cpu(flags, launch))
    if asked not in ("no", "fp16", "bf16", "fp64"):
        raise UsageError(f"--mixed_precision {asked}: choose from no, fp16, bf16")
    return asked


def fp16_on_cpu(flags: Distribution, launch: Launch) -> str:
    """accelerate itself would train in fp32 and still report fp16."""
    if flags.mixed_precision:
        return "--mixed-precision fp16: needs a GPU; on a CPU use bf16, no or auto"
    machines = launch.num_machines or 1
    config = "multi_node_cpu" if machines > 1 else "multi_cpu" if launch.world_size > 1 else "cpu"
    return (
        "accelerate launch: its config asks for fp16, which needs a GPU, and this machine shows"
        f" none; use --config_file {CONFIGS}/{config}.yaml"
    )


@dataclass(frozen=True)
class Place:
    """Where a rank stands among the processes of its machine.

    A launcher's node may be a part of a host: two of them in a rehearsal share its cores.
    """

    local_rank: int
    local_world_size: int
    processes_here: int


def place_on_machine(launch: Launch, store: Store) -> Place:
    """As the launcher told, else by comparing the hosts that the ranks posted."""
    if not store.hosts:
        return Place(0, 1, 1)
    here = [rank for rank, host in enumerate(store.hosts) if host == store.hosts[launch.rank]]
    return Place(
        here.index(launch.rank) if launch.local_rank is None else launch.local_rank,
        launch.local_world_size or len(here),
        len(here),
    )


def set_threads(launch: Launch, device: str, processes_here: int) -> int:
    """Shares this machine's cores among its processes.

    A launcher sets OMP_NUM_THREADS=1 of its own accord, which leaves cores idle; a larger number,
    or one set without a launcher, was meant and stays.
    """
    told = os.environ.get("OMP_NUM_THREADS") or "0"
    outermost = told.partition(",")[0]  # OpenMP takes a list, one entry per level of nesting
    if not outermost.isdecimal():
        raise UsageError(f"OMP_NUM_THREADS={told}: must be a whole number; set it or unset it")
    threads = int(outermost)
    if threads < 1 or (threads == 1 and launch.child_of_launcher):
        ours, sharers = cores(), processes_here
        if (of_task := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
            # srun starts a process for each task, or a launcher, which starts several
            sharers = (launch.local_world_size or 1) if launch.child_of_launcher else 1
            ours = min(ours, int(of_task))
        threads = max(1, ours // sharers) if device == "cpu" else 1
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    return threads


def gpu_of(place: Place) -> int:
    """Number of the GPU that a rank takes: its local rank's, as far as it is shown so many.

    Ranks that share a GPU count on from the first one again; SLURM, or CUDA_VISIBLE_DEVICES, may
    show each rank a single GPU, its own, which is number 0 to all of them.
    """
    return place.local_rank % gpus()


def check_gpus_differ(store: Store, place: Place) -> None:
    """Raises UsageError if ranks of this machine would take the same GPU, which NCCL refuses late.

    Their numbers do not tell, where each rank is shown other GPUs; their UUIDs do.
    """
    mine = torch.cuda.get_device_properties(gpu_of(place)).uuid
    store.set(f"gpu/{store.rank}", str(mine))
    here = [rank for rank, host in enumerate(store.hosts) if host == store.hosts[store.rank]]
    taken = {store.get(f"gpu/{rank}", store.patience_s) for rank in here}
    if len(taken) < len(here):
        plural = "s" if len(taken) > 1 else ""
        raise UsageError(
            f"{len(here)} processes on this machine, but {len(taken)} GPU{plural}: NCCL needs one"
            " each; start fewer, or share a GPU with --backend gloo"
        )
