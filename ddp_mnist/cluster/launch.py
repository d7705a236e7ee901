"""How this process was started: its rank, the world size, and where rank 0 is.

A launcher (accelerate, torchrun, srun) or the user says so in environment variables. If each
process is started by its own command, flags say it: `--init-method tcp://HOST:PORT --rank R
--world-size N`. Nothing here imports torch or opens a connection. How a rank uses it is defined
elsewhere: world.py joins the group, and device.py what it computes with.
"""

import contextlib
import ctypes
import ipaddress
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError

# The variables that give each field of Launch; the first that is set counts.
TORCHRUN_VARIABLES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "num_machines": "GROUP_WORLD_SIZE",
    "main_port": "MASTER_PORT",
}
SLURM_VARIABLES = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_STEP_NUM_TASKS SLURM_NTASKS",
    "local_rank": "SLURM_LOCALID",
    "num_machines": "SLURM_STEP_NUM_NODES SLURM_NNODES",
    "main_port": "MASTER_PORT",
}
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
PRECISION = "ACCELERATE_MIXED_PRECISION"  # each process of accelerate launch has it
# Set by accelerate launch for other kinds of training than DDP, e.g. ACCELERATE_USE_FSDP
NOT_DDP = re.compile(r"ACCELERATE_(USE_(?!CPU$)\w+|IN_TPU_POD)")
NOT_HERE = {  # other variables of Accelerate that are refused, and why
    "ACCELERATE_TORCH_DEVICE": "would move tensors to a device that the trainer does not use; unset"
    " it, and use --cpu or CUDA_VISIBLE_DEVICES",
    "ACCELERATE_DEBUG_MODE": "lets ranks send each other pickles, which can run code; unset it, or"
    " remove `debug: true` from the launcher's configuration",
}
# Without it, torchrun's agents share their store with the processes of the first round, and those
# that join later never learn its address (next_rendezvous in dynamic_rendezvous.py).
CAN_JOIN = "start torchrun everywhere with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
# What launchers and platforms call the number of processes or machines of a job, or a process's own
# number. By its words, not by a list of names, which would lack the next platform's, where each
# process would train alone. SIZE and RANK alone do not count (BATCH_SIZE, LORA_RANK), nor do what
# runs alone on purpose (parts of arrays and pipelines: JOB_COMPLETION_INDEX, CI_NODE_TOTAL), slots
# and GPUs (NSLOTS, OMPI_UNIVERSE_SIZE), a LOCAL_RANK that was left behind, or SLURM's, read below.
SAYS_HOW_MANY = re.compile(
    r"""(?!SLURM_|LOCAL_)(
    (\w+_)?(NUM_|N_?)(NODES|HOSTS|MACHINES|RANKS|TRAINERS) | (\w+_)?(NTASKS|NPROC_PER_NODE)
    | (\w+_)?(NODE|HOST|MACHINE|TRAINER)S?_(COUNT|NUM) | (\w+_)?(WORLD|JOB|NAMESPACE)_SIZE
    | (\w+_)?((WORLD|GLOBAL|LOCAL|GROUP|NODE|HOST|MACHINE|TASK|PROCESS|WORKER)_?)+RANK(ID)?
    | (PMIX?|PALS|FLUX|JSM|HOROVOD|MPI|MPIRUN|OMPI|MV2|LWS)_
      ((COMM_WORLD|JOB|NAMESPACE|LOCAL|GROUP)_?)*(SIZE|RANK(ID)?|N?RANKS|NPROCS)
    | SM_HOSTS | (MLP|ARNOLD)_WORKER_NUM | VC_\w+_(HOSTS|NUM) | AZ_BATCH_\w+_LIST
    | LSB_HOSTS | PE_HOSTFILE | \w+_(NODES?_IPS|NODEFILE))""",
    re.VERBOSE,
)
# By these three Accelerate itself would form a group of a process that is alone.
OF_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")
# All variables of launchers and batch jobs for their processes, except those on how to compute.
LAUNCHER_VARIABLES = re.compile(
    "(SLURM|PMIX?|OMPI|MV2|PET|TORCHELASTIC|ACCELERATE(?!_USE_CPU|_MIXED_PRECISION)|LOCAL|GROUP"
    f"|ROLE|MASTER)_.+|RANK|WORLD_SIZE|{SAYS_HOW_MANY.pattern}",
    re.VERBOSE,
)


@dataclass(frozen=True)
class Launch:
    """One process's place in the run, or a machine's; None for fields that are not set."""

    # python, accelerate, torchrun, slurm, environment or tcp; machine: no process yet
    launcher: str = "python"
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None  # among the processes of this machine
    local_world_size: int | None = None
    num_machines: int | None = None
    main_host: str | None = None  # where rank 0, or the launcher's agent, serves the store
    main_port: int | None = None
    agent_store: bool = False  # the launcher serves it already (torchrun, accelerate launch)

    @property
    def is_alone(self) -> bool:
        """Return whether this process forms no group; a launcher's process always forms one."""
        return self.world_size == 1 and not self.agent_store

    @property
    def child_of_launcher(self) -> bool:
        """Return whether a launcher started this process, which must end with it."""
        return self.launcher in ("accelerate", "torchrun")


def find_launch(
    flags: Distribution, env: Mapping[str, str] = os.environ, trains: bool = True
) -> Launch:
    """Return this process's place, from the flags or else from the environment.

    What does not train may do its work alone in the shell of a batch job of several tasks. Raise
    UsageError if they are incomplete, contradict each other, are from a launcher under which
    this process would train alone, or ask for something other than DDP.
    """
    _refuse_variables(env)
    env = _with_flags(flags, env)
    by_variables = flags.init_method in (None, "env://")
    launch = _from_variables(flags, env, trains) if by_variables else _from_address(flags)
    rank = {"tcp": "--rank", "slurm": "SLURM_PROCID"}.get(launch.launcher, "RANK")
    for name, number in ((rank, launch.rank), ("--local-rank", flags.local_rank or 0)):
        if number >= launch.world_size:
            raise UsageError(
                f"{name} {number}: the world size is {launch.world_size}; ranks are 0 to"
                f" {launch.world_size - 1}"
            )
    if launch.main_host is not None:
        check_host("MASTER_ADDR=" if by_variables else "--init-method tcp://", launch.main_host)
    debug = env.get("TORCH_DISTRIBUTED_DEBUG", "")
    if trains and not launch.is_alone and debug.upper() == "DETAIL":
        raise UsageError(f"TORCH_DISTRIBUTED_DEBUG={debug}: torch's DDP crashes with it; use INFO")
    return launch


def _refuse_variables(env: Mapping[str, str]) -> None:
    """Raise UsageError for variables of Accelerate that ask for what this trainer does not do."""
    for name, value in env.items():
        is_off = value.lower() in ("", "0", "false")
        if not is_off and (name in NOT_HERE or NOT_DDP.fullmatch(name)):
            use = f"use {config_flag('multi_gpu')} or multi_cpu.yaml"
            not_ddp = f"this trainer is DDP on NVIDIA GPUs or CPUs; {use}"
            raise UsageError(f"{name}={value}: {NOT_HERE.get(name, not_ddp)}")


def check_host(typed: str, host: str) -> None:
    """Raise UsageError if `host`, typed after `typed`, can be no host's name or address.

    One that does not answer yet may do so in time.
    """
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host.removeprefix("[").removesuffix("]")):
            return
    if not re.fullmatch(r"[\w.-]*[^\W\d][\w.-]*", host):  # of digits alone it would be an address
        raise UsageError(f"{typed}{host}: must be one host's name or address; correct it")


def config_file(name: str) -> Path:
    """Return the path of one of accelerate launch's configurations, e.g. multi_cpu.

    It is in the working directory, or else in the package, or next to it in a clone.
    """
    file, package = Path("accelerate_configs", f"{name}.yaml"), Path(__file__).parents[1]
    return next(each for each in (file, package / file, package.parent / file) if each.exists())


def config_flag(name: str) -> str:
    """Return the words in which an error recommends a configuration."""
    return f"--config_file {config_file(name)}"


def _from_address(flags: Distribution) -> Launch:
    """Read `--init-method tcp://HOST:PORT --rank R --world-size N`, one command per process."""
    shown = f"--init-method {flags.init_method}"
    url = re.fullmatch(r"tcp://(\[[^]]+\]|[^:/?#]+):([0-9]+)/*", str(flags.init_method))
    if not url or not 0 < int(url[2]) < 2**16:
        raise UsageError(f"{shown}: must be tcp://HOST:PORT (port 1 to 65535) or env://")
    if flags.rank is None or flags.world_size is None:
        raise UsageError(
            f"{shown}: each process needs --rank R --world-size N too; under a launcher,"
            " leave out all three"
        )
    numbers = (flags.rank, flags.world_size, flags.local_rank)
    return Launch("tcp", *numbers, main_host=url[1].strip("[]"), main_port=int(url[2]))


def _with_flags(flags: Distribution, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the flags on ranks added. Raise UsageError if they differ."""
    merged = dict(env)
    for name in ("rank", "world_size", "local_rank"):
        value, variable = getattr(flags, name), name.upper()
        if value is not None and merged.setdefault(variable, str(value)) != str(value):
            raise UsageError(
                f"--{name.replace('_', '-')} {value}: the environment says"
                f" {variable}={env[variable]}; leave one of them out"
            )
    return merged


def _from_variables(flags: Distribution, env: Mapping[str, str], trains: bool) -> Launch:
    """Read the variables of the launcher that set them; without one, this process is alone."""
    for flag, value in (("--rank", flags.rank), ("--world-size", flags.world_size)):
        if value is not None and "MASTER_ADDR" not in env:
            raise UsageError(f"{flag} {value}: needs --init-method tcp://HOST:PORT too")
    by_accelerate = PRECISION in env
    if flags.init_method or "WORLD_SIZE" in env or "RANK" in env:
        by_agent = "TORCHELASTIC_RUN_ID" in env
        needed = ["WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"]
        for name in needed[:2] if env.get("WORLD_SIZE") == "1" and not by_agent else needed:
            if not env.get(name):
                there = (f"{other}={env[other]}" for other in needed if other in env)
                raise UsageError(
                    f"{next(there, '--init-method env://')}: {name} is not set; set"
                    f" {', '.join(needed)}, as launchers do, or none of them"
                )
        launcher = "environment" if not by_agent else "accelerate" if by_accelerate else "torchrun"
        agent_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        host, numbers = env.get("MASTER_ADDR"), _numbers(env, TORCHRUN_VARIABLES)
        return Launch(launcher, main_host=host, agent_store=agent_store, **numbers)
    for name in ("SLURM_NTASKS", "SLURM_NNODES"):
        if (_number(env, name) or 1) > 1 and (trains or is_task_of_srun(env)):
            return _from_slurm(env, name)
    several = [name for name in env if SAYS_HOW_MANY.fullmatch(name) and how_many(name, env) > 1]
    if not trains:
        several = [name for name in several if name in OF_MPIRUN]
    if several:
        raise UsageError(
            f"{several[0]}={env[several[0]]}: asks for several processes, each of which would work"
            " alone; put torchrun or accelerate launch before the command, or unset"
            f" {' '.join(several)}"
        )
    # For MULTI_CPU, and for NO, accelerate starts one process unless mpirun is named. The only sign
    # that several were requested is a MASTER_ADDR without a WORLD_SIZE, which users may also set.
    if "ACCELERATE_USE_CPU" in env and "MASTER_ADDR" in env:
        raise UsageError(
            "distributed_type: MULTI_CPU, or NO, or --cpu: accelerate launch started one process"
            " for several; change it to distributed_type: MULTI_GPU, which works on CPUs too, or"
            f" use {config_flag('multi_cpu')}; for one process unset MASTER_ADDR"
        )
    return Launch("accelerate" if by_accelerate else "python")


def how_many(name: str, env: Mapping[str, str]) -> int:
    """Return of how many processes or machines a variable speaks.

    It is a number, 1:4 (at least, at most), a rank, a list of hosts, or a file with one in a line.
    """
    value = env[name].strip()
    if name.endswith("FILE"):
        file, value = Path(value), ""
        with contextlib.suppress(OSError, ValueError):  # of another machine, or no text
            value = re.sub(r"(\S+).*", r"\1", file.read_text())
    if name in OF_MPIRUN:
        return _number(env, name) or 1
    if number := re.fullmatch(r"(?:\d+:)?(\d+)", value):
        return int(number[1]) + name.endswith(("RANK", "RANKID"))
    return len({*re.findall(r"[^\s,;\"'\[\]]+", value)})


def is_task_of_srun(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process, or the shell in which it was typed."""
    return env.keys() >= {"SLURM_STEP_ID", "SLURM_PROCID"}


def _from_slurm(env: Mapping[str, str], size: str) -> Launch:
    """Read the variables of srun's tasks, in which SLURM_NTASKS and SLURM_NNODES are the step's.

    In the shell of a job they are the job's; there the step's own variables are not set, or left
    over from the step in which sbatch or salloc was typed.
    """
    step = {"SLURM_NTASKS": "SLURM_STEP_NUM_TASKS", "SLURM_NNODES": "SLURM_STEP_NUM_NODES"}[size]
    if not is_task_of_srun(env) or _number(env, step) not in (None, _number(env, size)):
        raise UsageError(
            f"{size}={env[size]}: this process was not started by srun and would train alone; put"
            " srun before the command, or unset SLURM_NTASKS SLURM_NNODES"
        )
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    host = env.get("MASTER_ADDR") or first_slurm_host(nodes)
    # Two jobs on one node need different ports, so the port follows the job id, in the unprivileged
    # range below the kernel's own choices (32768 and up on Linux).
    port = {"main_port": 15000 + (_number(env, "SLURM_JOB_ID") or 0) % 15000}
    return Launch("slurm", main_host=host, **(port | _numbers(env, SLURM_VARIABLES)))


def first_slurm_host(nodes: str) -> str:
    """Return the first host of SLURM's compact list, e.g. gpu[003-005,9],cpu1 -> gpu003."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0].strip()


def _numbers(env: Mapping[str, str], variables: dict[str, str]) -> dict[str, Any]:
    """Return the fields of Launch that the environment gives."""
    found = dict[str, Any]()
    for fact, names in variables.items():
        if name := next(filter(env.get, names.split()), None):  # the first that is set
            found[fact] = _number(env, name)
    return found


def _number(env: Mapping[str, str], name: str) -> int | None:
    """Return the number in a variable, at least 0; None if it is not set."""
    if not env.get(name):
        return None
    if not env[name].isdecimal():
        raise UsageError(f"{name}={env[name]}: must be a whole number; correct or unset it")
    return int(env[name])


def die_with_parent() -> None:
    """Let this worker end when its launcher is killed, instead of training on (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call, so no signal will follow
        os.kill(os.getpid(), signal.SIGTERM)
