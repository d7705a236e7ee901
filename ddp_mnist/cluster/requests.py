"""Read what accelerate launch is asked for beside processes: honoured, refused, without meaning.

Its config and its flags reach a process as variables, and some of them not at all: those are read
from the launcher's own command line. The tables name every variable that the launcher sets, or that
Accelerate reads; one that ends with _ begins the names of several.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddp_mnist.errors import UsageError, reason

CONFIGS = "accelerate_configs"  # a folder of the clone; the verb `configs` writes it elsewhere
DDP = (
    "this trainer is DDP, with the whole model in each process; use instead --config_file"
    f" {CONFIGS}/multi_gpu.yaml, or multi_cpu.yaml on CPUs, which ddp-mnist configs writes"
)
DEVICES = f"this trainer computes on NVIDIA GPUs and on CPUs; {DDP.partition('; ')[2]}"
KINDS = ("NO", "MULTI_CPU", "MULTI_GPU")  # of distributed_type, that are not refused
OFF = ("", "0", "f", "false", "n", "no", "off")
WHAT_ACCUMULATES = "gradient_accumulation_steps"


class Key(NamedTuple):
    """A key of accelerate's config or a flag of its launcher, and the variables that carry it."""

    name: str
    variables: str
    refusal: str = ""  # why, and what to do instead


HONOURED = (
    Key("mixed_precision", "ACCELERATE_MIXED_PRECISION"),
    Key("use_cpu, --cpu", "ACCELERATE_USE_CPU"),
    Key("gpu_ids", "CUDA_VISIBLE_DEVICES"),
    Key("num_processes, num_machines, machine_rank, main_process_ip", "MASTER_ADDR MASTER_PORT"),
    Key("num_cpu_threads_per_process", "OMP_NUM_THREADS"),
    Key("dynamo_config, --dynamo_backend", "ACCELERATE_DYNAMO_"),
    Key(WHAT_ACCUMULATES, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
    Key("debug", "ACCELERATE_DEBUG_MODE"),
    Key("enable_cpu_affinity", "ACCELERATE_CPU_AFFINITY"),
    Key("Accelerate's own messages", "ACCELERATE_LOG_LEVEL ACCELERATE_ENABLE_RICH"),
    Key("set by the launcher for GPUs that need it", "NCCL_P2P_DISABLE NCCL_IB_DISABLE"),
    Key(
        "set by notebook_launcher and debug_launcher",
        "RANK LOCAL_RANK FORK_LAUNCHED ACCELERATE_DEBUG_RDV_FILE",
    ),
)
REFUSED = (
    Key("distributed_type FSDP, or --use_fsdp", "ACCELERATE_USE_FSDP", DDP),
    Key("distributed_type DEEPSPEED, or --use_deepspeed", "ACCELERATE_USE_DEEPSPEED", DDP),
    Key("distributed_type MEGATRON_LM, or --use_megatron_lm", "ACCELERATE_USE_MEGATRON_LM", DDP),
    Key(
        "parallelism_config, or --use_parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", DDP
    ),
    Key("compute_environment AMAZON_SAGEMAKER", "ACCELERATE_USE_SAGEMAKER", DDP),
    Key("distributed_type XLA, or --tpu", "ACCELERATE_IN_TPU_POD", DEVICES),
    Key(
        "dynamo_use_regional_compilation",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        "the net is compiled whole; leave it out",
    ),
    Key(
        "gradient_clipping",
        "ACCELERATE_GRADIENT_CLIPPING",
        "is DeepSpeed's; leave it out, and add --max-grad-norm to the flags of train",
    ),
    Key(
        "ACCELERATE_TORCH_DEVICE",
        "ACCELERATE_TORCH_DEVICE",
        "does not choose the device here; unset it, and use --cpu or CUDA_VISIBLE_DEVICES",
    ),
)
WITHOUT_MEANING = (
    Key(
        "more about what is refused",
        "FSDP_ MEGATRON_LM_ PARALLELISM_CONFIG_ ACCELERATE_DEEPSPEED_ ACCELERATE_CONFIG_DS_FIELDS"
        " ACCELERATE_FP8_ ACCELERATE_ALLOW_CP_STANDALONE ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE"
        " AWS_",
    ),
    Key(
        "of TPUs alone: main_training_function, downcast_bf16, tpu_*, commands, command_file",
        "XLA_ ACCELERATE_DOWNCAST_BF16",
    ),
    Key(
        "gpu_ids of other devices",
        "ZE_AFFINITY_MASK MLU_VISIBLE_DEVICES SDAA_VISIBLE_DEVICES MUSA_VISIBLE_DEVICES"
        " ASCEND_RT_VISIBLE_DEVICES HABANA_VISIBLE_MODULES NEURON_RT_VISIBLE_CORES",
    ),
    Key("read by Intel's OpenMP, which torch's wheels do not use", "KMP_"),
    Key(
        "read for models that are loaded in parts",
        "ACCELERATE_BYPASS_DEVICE_MAP ACCELERATE_INIT_INCLUDE_BUFFERS",
    ),
    Key("read by Python", "PYTHONPATH"),
)


@dataclass(frozen=True)
class Asked:
    """Hold what accelerate launch was asked for that no variable, or a flag of ours, carries."""

    cpu: bool = False  # use_cpu, which it does not pass on to several processes
    grad_accum: int | None = None
    threads: int | None = None  # as typed; OMP_NUM_THREADS may be the launcher's own 1
    notes: list[str] = field(default_factory=list)  # what it did not do


NOTHING = Asked()


def refuse_others(env: Mapping[str, str]) -> None:
    """Raise UsageError if a variable asks for something that this trainer does not do."""
    for key in REFUSED:
        if env.get(key.variables, "").lower() not in OFF:
            raise UsageError(f"{key.name}: {key.refusal}")


def asked_of_launcher(env: Mapping[str, str] = os.environ) -> Asked:
    """Return what `accelerate launch` was asked for, and does not do by itself.

    Raise UsageError for what this trainer does not do.
    """
    typed, config = _flags_and_config() if "ACCELERATE_MIXED_PRECISION" in env else ({}, {})
    given = {**(config.get("deepspeed_config") or {}), **typed}
    kind = str(config.get("distributed_type") or "NO")
    if kind not in KINDS:  # --cpu started one process all the same; or it is for another device
        raise UsageError(
            next(
                (f"{key.name}: {key.refusal}" for key in REFUSED if f" {kind}," in key.name),
                f"distributed_type {kind}: {DEVICES}",
            )
        )
    if given.get("gradient_clipping") is not None:
        refuse_others({"ACCELERATE_GRADIENT_CLIPPING": str(given["gradient_clipping"])})
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    parts = str(given.get(WHAT_ACCUMULATES, env.get(variable, "")))
    if parts and not (parts.isdecimal() and int(parts) > 0):
        raise UsageError(f"{WHAT_ACCUMULATES} {parts}: must be a whole number of at least 1")
    notes, rendezvous = list[str](), config.get("rdzv_backend") or "static"
    if rendezvous != "static" and "rdzv_backend" not in typed:
        notes.append(
            f"rdzv_backend {rendezvous}: accelerate launch takes it as a flag only, and used"
            f" static; put --rdzv_backend {rendezvous} before -m"
        )
    cpu, threads = bool(config.get("use_cpu")), typed.get("num_cpu_threads_per_process")
    return Asked(cpu, int(parts) if parts else None, threads, notes)


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
    """Return the words behind `accelerate launch` and the folder where it began; [] without it."""
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
