"""What accelerate launch was asked for, besides starting processes: done here, or refused.

Its config and its flags reach a process as variables, except for some, which are read from the
launcher's own command line. docs/reference.md has every variable that the launcher sets or
Accelerate reads, and what this trainer does with it.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ddp_mnist.config import launch_configs
from ddp_mnist.errors import UsageError, reason

DDP = (
    "this trainer is DDP on NVIDIA GPUs or CPUs;"
    f" use --config_file {launch_configs.FOLDER}/multi_gpu.yaml (multi_cpu.yaml on CPUs) instead;"
    " ddp-mnist configs writes both"
)
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")  # of distributed_type, that are not refused
PRECISION = "ACCELERATE_MIXED_PRECISION"  # each process of accelerate launch has it
OFF = ("", "0", "f", "false", "n", "no", "off")
GRAD_ACCUM, CLIPPING = "gradient_accumulation_steps", "gradient_clipping"
REFUSED = {  # variable: the key or flag that sets it; why it is refused, and what to do instead
    "ACCELERATE_USE_FSDP": ("distributed_type FSDP, or --use_fsdp", DDP),
    "ACCELERATE_USE_DEEPSPEED": ("distributed_type DEEPSPEED, or --use_deepspeed", DDP),
    "ACCELERATE_USE_MEGATRON_LM": ("distributed_type MEGATRON_LM, or --use_megatron_lm", DDP),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("parallelism_config, or --use_parallelism_config", DDP),
    "ACCELERATE_USE_SAGEMAKER": ("compute_environment AMAZON_SAGEMAKER", DDP),
    "ACCELERATE_IN_TPU_POD": ("distributed_type XLA, or --tpu", DDP),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": (
        "dynamo_use_regional_compilation",
        "the net is compiled whole; leave it out",
    ),
    "ACCELERATE_GRADIENT_CLIPPING": (
        CLIPPING,
        "is DeepSpeed's; leave it out, and add --max-grad-norm to the flags of train",
    ),
    "ACCELERATE_TORCH_DEVICE": (
        "ACCELERATE_TORCH_DEVICE",
        "does not choose the device here; unset it, and use --cpu or CUDA_VISIBLE_DEVICES",
    ),
}


@dataclass(frozen=True)
class LauncherOptions:
    """Requests to accelerate launch that it does not pass on to the processes."""

    cpu: bool = False  # use_cpu, which it does not pass on to several processes
    grad_accum: int | None = None
    threads: int | None = None  # as typed; OMP_NUM_THREADS may be the launcher's own 1
    note: str = ""  # of which it did nothing


NO_OPTIONS = LauncherOptions()


def refuse_unsupported(env: Mapping[str, str]) -> None:
    """Raise UsageError if a variable asks for something that this trainer does not support."""
    for variable, (name, refusal) in REFUSED.items():
        if env.get(variable, "").lower() not in OFF:
            # The launcher set it, or else the shell did, and then no config can change it.
            fix = "" if variable == name else f"; unset {variable} if your shell has it"
            raise UsageError(f"{name}: {refusal}{fix}")


def read_launcher_options(env: Mapping[str, str] = os.environ) -> LauncherOptions:
    """Return the requests to `accelerate launch` that it does not carry out itself.

    Raise UsageError for one that this trainer does not support.
    """
    typed, config = _flags_and_config() if PRECISION in env else ({}, {})
    block = config.get("deepspeed_config")
    given = {**(block if isinstance(block, dict) else {}), **typed}
    kind = config.get("distributed_type") or "NO"
    if kind not in KINDS:  # with --cpu, or for another device, no variable says so
        raise UsageError(f"distributed_type {kind}: {DDP}")
    if (clipping := given.get(CLIPPING)) is not None:
        refuse_unsupported({"ACCELERATE_GRADIENT_CLIPPING": str(clipping)})
    parts = str(given.get(GRAD_ACCUM, env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")))
    if parts and not (parts.isdecimal() and int(parts) > 0):
        raise UsageError(f"{GRAD_ACCUM} {parts}: must be a whole number of at least 1")
    note, rendezvous = "", config.get("rdzv_backend") or "static"
    if rendezvous != "static" and "rdzv_backend" not in typed:
        note = (
            f"rdzv_backend {rendezvous}: accelerate launch takes it as a flag only, and used"
            f" static; put --rdzv_backend {rendezvous} before -m"
        )
    cpu, threads = bool(config.get("use_cpu")), typed.get("num_cpu_threads_per_process")
    return LauncherOptions(cpu, int(parts) if parts else None, threads, note)


def _flags_and_config() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the flags that were typed, and the config, of the launcher above this process."""
    from accelerate.commands.config import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    words, folder = _command_line()
    if not words:
        return {}, {}
    args = vars(launch_command_parser().parse_args(words))
    typed = {name: args[name] for name in args["nondefault"]}
    file = typed.get("config_file")
    if file is None and (args["cpu"] or not Path(default_config_file).is_file()):
        return typed, {}
    try:
        config = load_config_from_file(str(Path(folder, file or default_config_file)))
    except OSError as error:
        raise UsageError(
            f"--config_file {file}: {reason(error)}; leave it until the run ends"
        ) from None
    return typed, config.to_dict()


def _command_line() -> tuple[list[str], str]:
    """Return the words after `accelerate launch` and its working directory; [] without it."""
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            for number, word in enumerate(words):
                name = Path(word).name.removesuffix(".py").rpartition(".")[2]
                if name in ("launch", "accelerate-launch") and any(
                    "accelerate" in each for each in words[: number + 1]
                ):
                    return words[number + 1 :], process.cwd()
    return [], ""
