"""Choose what a process computes with: device, backend, precision, threads and which GPU."""

import os
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import TorchDynamoPlugin, parse_flag_from_env

from ddp_mnist.cluster.hardware import gpus, hide_gpus, is_forked
from ddp_mnist.cluster.launch import PRECISION, Launch
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError, blame
from ddp_mnist.system.affinity import cores

SWITCHES = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")  # with 1, torch.compile does nothing


@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """What the processes of a run compute with."""

    device: str  # cuda or cpu
    backend: str  # nccl, gloo, or none for a single process without a group
    precision: str  # no, fp16, bf16 or fp64
    compile_options: dict[str, Any]  # of torch.compile, with a `backend`; {}: not compiled
    has_bf16: bool  # natively
    may_choose_precision: bool  # bf16 of a CPU, which auto chose: some nets are slower in it
    launcher_precision: str  # which accelerate launch names; "no" by default, as without it
    notes: tuple[str, ...] = ()  # what is not as it was asked, or as an earlier part had it

    @property
    def compiled_by(self) -> str:
        """Return the compiler's backend, with the options that are set; "no" without one."""
        options = [f"{k} {v}" for k, v in self.compile_options.items() if v and k != "backend"]
        return ", ".join([self.compile_options.get("backend", "no"), *options])


def choose_device(
    flags: Distribution,
    launch: Launch,
    full_precision: bool = False,
    earlier: dict[str, Any] | None = None,
) -> DeviceConfig:
    """Decide from the flags, which beat the launcher's YAML, and from what this machine has.

    `earlier` is "distribution" of the config.json of the run that is resumed: it keeps its
    precision unless another is asked for, which auto does not. With `full_precision` it computes in
    the dtype of the weights and compiles nothing, whatever flags and launcher say.
    Raise UsageError for what does not exist here or does not fit together.
    """
    with blame("ACCELERATE_USE_CPU", UsageError):
        wants_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or flags.cpu
    if wants_cpu:
        hide_gpus()
    on_cpu = wants_cpu or not gpus()
    backend = flags.backend
    if backend == "auto":
        backend = "gloo" if on_cpu else "nccl"

    has_bf16 = has_native_bf16("cpu" if on_cpu else "cuda")
    asked, by_launcher = flags.mixed_precision, os.environ.get(PRECISION)
    before, kept = earlier or {}, None
    # accelerate launch always names a precision: that counts once it is another than at the start.
    same_launcher = not by_launcher or by_launcher == before.get("launcher_precision", "no")
    if asked == "auto" or (not asked and same_launcher):
        kept = before.get("mixed_precision")
    had_bf16 = before.get("has_bf16", True)  # else it was, and will be, emulated
    is_lost = (kept == "fp16" and on_cpu) or (kept == "bf16" and had_bf16 and not has_bf16)
    precision = "auto" if is_lost else kept or asked or by_launcher or "auto"
    if flags.cpu and not flags.mixed_precision and precision == "fp16":
        precision = "auto"  # a YAML's fp16 is meant for GPUs
    if full_precision:
        precision = "no"
    is_open = precision == "auto"
    if is_open:
        precision = "bf16" if has_bf16 else "no" if on_cpu else "fp16"

    # What does not exist here, or does not fit together.
    if on_cpu and backend == "nccl":
        raise UsageError("--backend nccl: needs a GPU, and none is visible here; use gloo")
    if precision not in ("no", "fp16", "bf16", "fp64"):
        raise UsageError(f"--mixed_precision {precision}: choose from no, fp16, bf16")
    if on_cpu and precision == "fp16":  # Accelerate would train in fp32 and report fp16
        asked = "--mixed-precision " if flags.mixed_precision else "ACCELERATE_MIXED_PRECISION="
        raise UsageError(f"{asked}fp16: needs a GPU; use --mixed-precision bf16, no or auto")
    # PowerSGD adds what it did not send to the next gradient: an infinity, which the loss scaler
    # skips once, would return in every step.
    if precision == "fp16" and flags.comm_hook == "powersgd":
        raise UsageError(
            "--comm-hook powersgd: cannot recover from an overflow, and fp16 has some in most runs;"
            f" add --mixed-precision no{', or bf16' if has_bf16 else ''}"
        )

    compile_options = {} if full_precision else choose_compiler(flags)
    off = [f"{name}=1" for name in SWITCHES if compile_options and os.environ.get(name) == "1"]
    notes = [f"{switch}: nothing is compiled; unset it, or leave out --compile" for switch in off]
    if is_lost:
        notes.append(f"--mixed-precision {kept} -> {precision}, as this machine has no {kept}")
    return DeviceConfig(
        device="cpu" if on_cpu else "cuda",
        backend="none" if launch.is_alone else backend,
        precision=precision,
        compile_options={} if off else compile_options,
        has_bf16=has_bf16,
        may_choose_precision=is_open and on_cpu and has_bf16,
        launcher_precision=by_launcher or "no",
        notes=tuple(notes),
    )


def in_effect(config: DeviceConfig, accelerator: Accelerator) -> DeviceConfig:
    """Return the backend and the precision as torch has them, not as they were asked for."""
    device = accelerator.device.type
    with accelerator.autocast():
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    full = "fp64" if config.precision == "fp64" else "no"  # of the weights
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16", None: full}[dtype]
    backend = dist.get_backend() if dist.is_initialized() else "none"
    return replace(config, precision=precision, backend=backend)


def choose_compiler(flags: Distribution) -> dict[str, Any]:
    """Return torch.compile's options; {} to compile nothing."""
    with blame("ACCELERATE_DYNAMO_*", UsageError):
        plugin = TorchDynamoPlugin()  # reads the launcher's variables
    if plugin.backend.value != "NO":  # compiles without the flag too
        return plugin.to_kwargs()
    return {"backend": "inductor"} if flags.compile else {}


def has_native_bf16(device: str) -> bool:
    """Return whether the device supports bfloat16 natively; emulated, it is slower than float32.

    GPUs do from Ampere on; every GPU of this machine must, and torch.cuda.is_bf16_supported answers
    for one. On a CPU, torch uses oneDNN for it, which its wheels for macOS lack.
    """
    if device == "cuda":
        return min(map(torch.cuda.get_device_capability, range(gpus()))) >= (8, 0)
    capabilities = torch.cpu.get_capabilities()
    return torch.backends.mkldnn.is_available() and any(
        capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")
    )


def set_threads(launch: Launch, device: str, processes_here: int, before: int = 0) -> bool:
    """Share this machine's cores among its processes, and set this one's number of threads.

    A launcher sets OMP_NUM_THREADS=1 by default, which leaves cores idle, so that is overridden. A
    larger number is kept; so is one that was set without a launcher, and else that of the run that
    is resumed, `before`, if it has as many cores here. Return whether none of them decides.
    """
    is_open = False
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
        share = max(1, available // sharers) if device == "cpu" else 1
        is_open = share > 1 and not 1 <= before <= share
        threads = min(before or share, share)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    return is_open


def gpu_of(local_rank: int) -> int:
    """Return the index of a rank's GPU: its local rank, modulo the GPUs that it sees.

    SLURM, or CUDA_VISIBLE_DEVICES, may show each rank only its own GPU, as number 0.
    """
    return local_rank % gpus()
