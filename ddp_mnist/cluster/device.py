"""Choose what a process computes with: device, backend, precision, threads and which GPU."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin, parse_flag_from_env

from ddp_mnist.cluster.hardware import gpus, hide_gpus, is_forked
from ddp_mnist.cluster.launch import PRECISION, Launch
from ddp_mnist.config import launch_configs
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.system.limits import cores


def choose_device(flags: Distribution) -> str:
    """Return cuda if there is a GPU and the CPU was not requested, else cpu."""
    with blame("ACCELERATE_USE_CPU", UsageError):
        wants_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or flags.cpu
    if wants_cpu:
        hide_gpus()
    count = 0 if wants_cpu else gpus()
    if flags.sync_bn and not count:
        raise UsageError("--sync-bn: needs GPUs; on a CPU use --model cnn, which has GroupNorm")
    return "cuda" if count else "cpu"


def choose_backend(flags: Distribution, launch: Launch, device: str) -> str:
    """Return "none" for a single process without a group, else gloo or nccl."""
    if flags.backend == "nccl" and device == "cpu":
        raise UsageError("--backend nccl: needs a GPU, and none is visible here; use gloo")
    if launch.is_alone:
        return "none"
    if flags.backend != "auto":
        return flags.backend
    return "nccl" if device == "cuda" else "gloo"


def has_native_bf16(device: str) -> bool:
    """Return whether the device supports bfloat16 natively; emulated, it is slower than float32.

    GPUs do from Ampere on; every GPU of this machine must. On a CPU, torch uses oneDNN for it,
    which its wheels for macOS lack.
    """
    if device == "cuda":
        return min(map(torch.cuda.get_device_capability, range(gpus()))) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(
        capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")
    )


def precision_in_effect(flags: Distribution, launch: Launch, device: str) -> str:
    """Return no, fp16, bf16 or fp64. The flag beats the launcher's YAML; without either it is auto.

    A YAML's fp16 is meant for GPUs, so --cpu overrides it.
    """
    from_launcher = os.environ.get(PRECISION)
    if flags.cpu and from_launcher == "fp16":
        from_launcher = None
    requested = flags.mixed_precision or from_launcher or "auto"
    if requested == "auto":
        requested = "bf16" if has_native_bf16(device) else "fp16" if device == "cuda" else "no"
    elif requested not in ("no", "fp16", "bf16", "fp64"):
        raise UsageError(f"--mixed_precision {requested}: choose from no, fp16, bf16")
    elif requested == "fp16" and device == "cpu":  # Accelerate would train in fp32 and report fp16
        if flags.mixed_precision:
            raise UsageError("--mixed-precision fp16: needs a GPU; on a CPU use bf16, no or auto")
        config = "multi_cpu" if launch.world_size > 1 else "cpu"
        config = "multi_node_cpu" if (launch.num_machines or 1) > 1 else config
        raise UsageError(
            "accelerate launch: its config asks for fp16, which needs a GPU, and none is visible"
            f" here; use {launch_configs.as_flag(config)}"
        )
    # PowerSGD adds what it did not send to the next gradient: an infinity, which the loss scaler
    # skips once, would return in every step.
    if flags.comm_hook == "powersgd" and requested == "fp16":
        raise UsageError(
            "--comm-hook powersgd: cannot recover from an overflow, and fp16 has some in most runs;"
            f" add --mixed-precision no{', or bf16' if has_native_bf16(device) else ''}"
        )
    return requested


def compile_options_in_effect(flags: Distribution) -> dict[str, Any]:
    """Return the arguments of torch.compile, with a `backend`; {} if the model is not compiled.

    --compile means inductor, unless the launcher was asked for another backend, which compiles
    without the flag too.
    """
    with blame("ACCELERATE_DYNAMO_*", UsageError):
        plugin = TorchDynamoPlugin()  # reads the launcher's variables
    if plugin.backend.value == "NO":
        return {"backend": "inductor"} if flags.compile else {}
    return plugin.to_kwargs()


def set_threads(launch: Launch, device: str, processes_here: int) -> int:
    """Share this machine's cores among its processes, and return this one's number of threads.

    A launcher sets OMP_NUM_THREADS=1 by default, which leaves cores idle, so that is overridden. A
    larger number is kept; so is one that was set without a launcher.
    """
    given = os.environ.get("OMP_NUM_THREADS") or "0"
    with blame(f"OMP_NUM_THREADS={given}", UsageError):
        threads = int(given.partition(",")[0])  # OpenMP takes a list, one entry per level
    if is_forked():
        threads = 1
    elif threads < 1 or (threads == 1 and launch.child_of_launcher):
        available, sharers = cores(), processes_here
        if (of_task := os.environ.get("SLURM_CPUS_PER_TASK", "")).isdecimal():
            # srun starts one process for each task, or a launcher, which starts several
            sharers = (launch.local_world_size or 1) if launch.child_of_launcher else 1
            available = min(available, int(of_task))
        threads = max(1, available // sharers) if device == "cpu" else 1
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    return threads


def gpu_of(local_rank: int) -> int:
    """Return the index of a rank's GPU: its local rank, modulo the GPUs that it sees.

    SLURM, or CUDA_VISIBLE_DEVICES, may show each rank only its own GPU, as number 0.
    """
    return local_rank % gpus()


@contextlib.contextmanager
def without_tf32() -> Iterator[None]:
    """Compute float32 convolutions in full precision in the block; a GPU would use TF32."""
    cudnn: Any = torch.backends.cudnn
    before, cudnn.conv.fp32_precision = cudnn.conv.fp32_precision, "ieee"
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = before
