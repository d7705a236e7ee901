"""Choose what a process computes with: device, backend, precision, threads and which GPU."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import TorchDynamoPlugin, is_pynvml_available, parse_flag_from_env

from ddp_mnist.cluster.hardware import (
    TOO_OLD_FIX,
    gpus,
    hidden_once,
    hide_gpus,
    is_forked,
    too_old,
    unused_gpus,
)
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.launcher_options import NO_OPTIONS, PRECISION, LauncherOptions
from ddp_mnist.cluster.store import Place
from ddp_mnist.config import launch_configs
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError
from ddp_mnist.system.limits import cores

# Found in errors of torch.compile: the first two are Inductor's, on a CPU. The others are Triton's,
# on a GPU; the last is a part of its command to the C compiler, which failed.
CANNOT_COMPILE = (
    *("InvalidCxxCompiler", "CppCompileError"),
    *("Failed to find C compiler", "Failed to find C++ compiler", "'-shared', '-fPIC'"),
)

# Backends of torch.compile that torch itself includes; the others need packages, or are gone.
COMPILERS = ("inductor", "cudagraphs", "aot_eager", "eager")


def choose_device(flags: Distribution, options: LauncherOptions = NO_OPTIONS) -> str:
    """Return cuda if there is a GPU and the CPU was not requested, else cpu."""
    try:
        wants_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or flags.cpu or options.cpu
    except ValueError as error:  # Accelerate would end with it, even with --cpu
        word = f"ACCELERATE_USE_CPU={os.environ['ACCELERATE_USE_CPU']}"
        raise UsageError(f"{word}: must be true or false; correct or unset it") from error
    if wants_cpu:
        hide_gpus()
    elif torch.cuda._is_in_bad_fork() and torch.cuda.device_count():  # the count needs no CUDA
        raise UsageError(
            "notebook_launcher: a GPU was used in this notebook before, and its forked processes"
            " cannot use it; restart the kernel and begin with notebook_launcher, or add cpu=True"
        )
    count = 0 if wants_cpu else gpus()
    for number in range(count):
        if why := too_old(number):
            fix = f"{TOO_OLD_FIX}, hide it by CUDA_VISIBLE_DEVICES, or add --cpu"
            raise UsageError(f"cuda:{number}: {why}; {fix}")
    if not count and hidden_once and unused_gpus():
        raise UsageError(
            "GPU: an earlier run with cpu=True hid it from this process, and CUDA does not look"
            " again; restart the kernel, or add cpu=True"
        )
    if count and "ACCELERATE_CPU_AFFINITY" in os.environ and not is_pynvml_available():
        raise UsageError(
            "enable_cpu_affinity: Accelerate needs the package nvidia-ml-py for it; pip install it,"
            " or leave enable_cpu_affinity out"
        )
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
    elif requested == "bf16" and device == "cuda" and not has_native_bf16(device):
        typed = "--mixed-precision bf16" if flags.mixed_precision else "accelerate launch: its bf16"
        raise UsageError(
            f"{typed}: a GPU here is older than Ampere (compute capability 8.0) and would be slower"
            " with it than without; add --mixed-precision auto, which takes fp16 there"
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
    try:
        plugin = TorchDynamoPlugin()  # reads the launcher's variables
    except ValueError as error:
        raise UsageError(f"ACCELERATE_DYNAMO_*: {error}; correct or unset it") from None
    if plugin.backend.value == "NO":
        return {"backend": "inductor"} if flags.compile else {}
    if (backend := plugin.backend.value.lower()) not in COMPILERS:
        raise UsageError(f"dynamo_backend {backend}: choose from {', '.join(COMPILERS)}")
    return plugin.to_kwargs()


def choose_local_rank(launch: Launch, place: Place) -> int:
    """Return this process's rank under its launcher, or else on its machine.

    In a rehearsal of two nodes on one machine, each launcher counts from 0.
    """
    return place.index_here if launch.local_rank is None else launch.local_rank


def set_threads(
    launch: Launch, device: str, processes_here: int, options: LauncherOptions = NO_OPTIONS
) -> int:
    """Share this machine's cores among its processes, and return this one's number of threads.

    A launcher sets OMP_NUM_THREADS=1 by default, which leaves cores idle, so that is overridden. A
    larger number is kept; so is one that was typed, or set without a launcher.
    """
    given = os.environ.get("OMP_NUM_THREADS") or "0"
    outermost = given.partition(",")[0]  # OpenMP takes a list, one entry per level of nesting
    if not outermost.isdecimal():
        raise UsageError(f"OMP_NUM_THREADS={given}: must be a whole number; correct or unset it")
    threads = int(outermost)
    if is_forked():
        threads = 1
    elif threads < 1 or (threads == 1 and launch.child_of_launcher and options.threads is None):
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


@contextlib.contextmanager
def within_memory(device: torch.device, advise: Callable[[], tuple[str, str]]) -> Iterator[None]:
    """Raise UsageError, instead of torch's error, if the GPU ran out of memory.

    `advise()` returns the typed words that need so much of it, and a fix that needs less.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        typed, fix = advise()
        raise UsageError(f"{typed}: needs more memory than {card(device)}; {fix}") from error


def card(device: torch.device) -> str:
    """Return e.g. `cuda:0 has (Tesla T4, 15.6 GB, of which other programs hold 3.1 GB)`."""
    if device.type != "cuda":
        return "there is"
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    # up to a GB is the code of CUDA and of our libraries
    held = f", of which other programs hold {others / 1e9:.1f} GB" if others > 1e9 else ""
    return f"{device} has ({torch.cuda.get_device_name(device)}, {total / 1e9:.1f} GB{held})"


@contextlib.contextmanager
def able_to_compile(flags: Distribution, compiler: dict[str, Any]) -> Iterator[None]:
    """Raise UsageError if torch.compile finds no compiler, or one without Python's headers."""
    try:
        yield
    except Exception as error:
        text = str(error)  # torch wraps some errors, and keeps only their text
        if not compiler or not any(sign in text for sign in CANNOT_COMPILE):
            raise
        lines = text.splitlines()
        why = next((line for line in lines if "error: " in line), lines[0])[:120]
        typed = "--compile" if flags.compile else "dynamo_backend"
        raise UsageError(
            f"{typed}: this machine cannot compile ({why}); install a C++ compiler and Python's"
            " headers (Debian and Ubuntu: apt install g++ python3-dev), or leave it out"
        ) from error
