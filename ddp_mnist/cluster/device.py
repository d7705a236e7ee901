"""What a process computes with: device, backend, precision, threads, and which of the GPUs."""

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
    """Return cuda where there is a GPU and nobody requested the CPU, else cpu."""
    if flags.cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("true", "1"):
        hide_gpus()
        return "cpu"
    return "cuda" if gpus() else "cpu"


def choose_backend(flags: Distribution, launch: Launch, device: str) -> str:
    """Return none for a process on its own, else gloo or nccl."""
    if flags.backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl: needs a GPU and this machine shows none; use gloo")
    if launch.world_size == 1 and not launch.agent_store:
        return "none"
    if flags.backend != "auto":
        return flags.backend
    return "nccl" if device == "cuda" else "gloo"


def has_native_bf16() -> bool:
    """Return whether the CPU multiplies bfloat16 itself; emulated, it would be slower than fp32."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def precision_in_effect(flags: Distribution, launch: Launch, device: str) -> str:
    """Return no, fp16, bf16 or fp64. The flag beats the launcher's YAML; neither means auto.

    A YAML's fp16 is meant for GPUs, so --cpu overrides it.
    """
    from_launcher = os.environ.get("ACCELERATE_MIXED_PRECISION")
    if flags.cpu and from_launcher == "fp16":
        from_launcher = None
    requested = flags.mixed_precision or from_launcher or "auto"
    if requested == "auto":
        if device == "cuda":
            return "fp16"
        return "bf16" if has_native_bf16() else "no"
    if requested == "fp16" and device == "cpu":
        raise UsageError(fp16_on_cpu(flags, launch))
    if requested not in ("no", "fp16", "bf16", "fp64"):
        raise UsageError(f"--mixed_precision {requested}: choose from no, fp16, bf16")
    return requested


def fp16_on_cpu(flags: Distribution, launch: Launch) -> str:
    """Return why there is no fp16: accelerate would train in fp32 and still report fp16."""
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
    """A rank's place among the processes of its launcher, and how many run on this machine.

    They differ where two nodes are rehearsed on one machine, and share its cores.
    """

    local_rank: int
    local_world_size: int
    processes_here: int


def place_on_machine(launch: Launch, store: Store) -> Place:
    """Return what the launcher says, or else what the hosts of all ranks say."""
    if not store.hosts:
        return Place(0, 1, 1)
    here = [rank for rank, host in enumerate(store.hosts) if host == store.hosts[launch.rank]]
    local_rank = here.index(launch.rank) if launch.local_rank is None else launch.local_rank
    return Place(local_rank, launch.local_world_size or len(here), len(here))


def set_threads(launch: Launch, device: str, processes_here: int) -> int:
    """Share this machine's cores among its processes, and return this one's number of threads.

    A launcher sets OMP_NUM_THREADS=1 of its own accord, which leaves cores idle; a larger number,
    or one set without a launcher, was meant and stays.
    """
    given = os.environ.get("OMP_NUM_THREADS") or "0"
    outermost = given.partition(",")[0]  # OpenMP takes a list, one entry per level of nesting
    if not outermost.isdecimal():
        raise UsageError(f"OMP_NUM_THREADS={given}: must be a whole number; set it or unset it")
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
    """Return the number of a rank's GPU: its local rank, modulo the GPUs that it sees.

    SLURM, or CUDA_VISIBLE_DEVICES, may show each rank its own GPU alone, as number 0.
    """
    return place.local_rank % gpus()


def check_gpus_differ(store: Store, place: Place) -> None:
    """Raise UsageError on every rank if two of a machine would take the same GPU.

    NCCL refuses that late. UUIDs tell GPUs apart, where each rank sees others under one number.
    """
    mine = torch.cuda.get_device_properties(gpu_of(place)).uuid
    gpus_of_ranks = store.all_gather("gpu", str(mine))
    for host in dict.fromkeys(store.hosts):
        here = [gpu for gpu, on in zip(gpus_of_ranks, store.hosts, strict=True) if on == host]
        if (count := len(set(here))) < len(here):
            raise UsageError(
                f"{len(here)} processes on {host.partition('/')[0]}, but {count}"
                f" GPU{'s' if count > 1 else ''}: NCCL needs one each; start fewer, or share a GPU"
                " with --backend gloo"
            )
