"""The flags on processes, their devices and how they communicate."""

from dataclasses import dataclass

from ddp_mnist.config.flag_fields import Flags, flag


@dataclass(frozen=True)
class Distribution(Flags):
    """Set the processes, their devices and how they communicate."""

    backend: str = flag(
        "auto", "auto: nccl on GPUs, gloo on CPUs.", choices=("auto", "nccl", "gloo")
    )
    init_method: str | None = flag(
        None, "tcp://HOST:PORT of rank 0, or env://, instead of a launcher."
    )
    rank: int | None = flag(None, "Rank, with --init-method.", least=0)
    world_size: int | None = flag(
        None, "Number of processes, with --init-method.", least=1, most=10**4
    )
    local_rank: int | None = flag(None, "Rank of this process on its machine [detected].", least=0)
    cpu: bool = flag(False, "Use the CPU even if there is a GPU.")
    dist_timeout: float = flag(300.0, "Seconds to wait for another process.", least=1)
    start_timeout: float | None = flag(None, "Seconds to wait for all to join [as long].", least=1)
    mixed_precision: str | None = flag(
        None,
        "auto: bf16 if the GPU or CPU has it, else fp16 on GPUs, no on CPUs [launcher's].",
        choices=("auto", "no", "fp16", "bf16", "fp64"),
    )
    sync_bn: bool = flag(False, "Synchronise BatchNorm over all processes (GPUs only).")
    comm_hook: str = flag(
        "none",
        "Compress gradients to send them: half precision, or powersgd (not with fp16 training).",
        choices=("none", "fp16", "bf16", "powersgd"),
    )
    compile: bool = flag(False, "Compile the model with torch.compile.")
