"""Where this process stands: environment or flags in, rank, world size and main address out.

One table of cases for every way of starting: plain python, `accelerate launch`, torchrun,
`python -m torch.distributed.launch`, `srun`, variables set by hand, and one command per process
with `--init-method tcp://HOST:PORT`. Nothing here imports torch or opens a connection.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ddp_mnist.config import Distribution
from ddp_mnist.errors import UsageError

CONFIGS = "accelerate_configs"


@dataclass(frozen=True)
class Launch:
    """One process's place in the run; None where the launcher does not say.

    Attributes:
        launcher: python, accelerate, torchrun, slurm, environment or tcp; or machine, for a
            whole machine that has started no process yet.
        rank, world_size: 0 <= rank < world_size.
        local_rank, local_world_size: the same among the processes of this machine.
        num_machines: how many machines take part.
        main_host, main_port: where rank 0, or the launcher's agent, serves the store.
        agent_store: the launcher already serves a store there (torchrun, accelerate launch).
        attempt: how often an elastic launcher restarted the workers.
    """

    launcher: str = "python"
    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    local_world_size: int | None = None
    num_machines: int | None = None
    main_host: str | None = None
    main_port: int | None = None
    agent_store: bool = False
    attempt: int = 0

    @property
    def unit(self) -> str:
        """Return the word for one of those that have a rank."""
        return "machine" if self.launcher == "machine" else "process"

    @property
    def child_of_launcher(self) -> bool:
        """Whether a launcher started this process, which has to end with it."""
        return self.launcher in ("accelerate", "torchrun")


def find_launch(flags: Distribution, env: Mapping[str, str] = os.environ) -> Launch:
    """Return this process's place, from the flags or else from the environment.

    Raises:
        UsageError: they are incomplete, contradict each other, or come from a launcher with which
            this process would train alone.
    """
    if flags.backend == "mpi":
        raise UsageError(
            "--backend mpi: PyTorch's wheels are built without MPI; use gloo (CPUs) or nccl (GPUs)"
        )
    if flags.init_method in (None, "env://"):
        launch = _from_variables(flags, _with_flags(flags, env))
    else:
        launch = _from_tcp_flags(flags, env)
    if flags.local_rank is not None:
        _check_rank("--local-rank", flags.local_rank, launch.world_size)
    return launch


def _from_tcp_flags(flags: Distribution, env: Mapping[str, str]) -> Launch:
    """Read `--init-method tcp://HOST:PORT --rank R --world-size N`, one command per process."""
    shown = f"--init-method {flags.init_method}"
    try:
        url = urlsplit(flags.init_method or "")
        host, port, rest = url.hostname, url.port, (url.path + url.query + url.fragment).strip("/")
    except ValueError:  # from a port or an IPv6 address that is none
        host = port = rest = None
    if not host or not port or rest or url.scheme != "tcp":
        raise UsageError(f"{shown}: must be tcp://HOST:PORT (port 1 to 65535) or env://")
    if "TORCHELASTIC_RUN_ID" in env:
        raise UsageError(
            f"{shown}: a launcher started this process and gives rank and address itself; leave out"
            " --init-method, --rank and --world-size"
        )
    for name, value in (("--rank", flags.rank), ("--world-size", flags.world_size)):
        if value is None:
            raise UsageError(
                f"{shown}: {name} is missing; each process needs --rank R --world-size N"
            )
    place = _with_flags(flags, env)
    world_size = _number(place, "WORLD_SIZE", least=1)
    rank = _check_rank("--rank", _number(place, "RANK"), world_size)
    return Launch("tcp", rank, world_size, flags.local_rank, main_host=host, main_port=port)


def _with_flags(flags: Distribution, env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the flags for ranks in it, which may not contradict it."""
    merged = dict(env)
    for flag, name, value in (
        ("--rank", "RANK", flags.rank),
        ("--world-size", "WORLD_SIZE", flags.world_size),
        ("--local-rank", "LOCAL_RANK", flags.local_rank),
    ):
        if value is not None and merged.setdefault(name, str(value)) != str(value):
            raise UsageError(
                f"{flag} {value}: the environment says {name}={env[name]}; leave one of them out"
            )
    return merged


def _from_variables(flags: Distribution, env: Mapping[str, str]) -> Launch:
    """Find out which launcher set the variables, and read them; without one, a lone process."""
    for flag, value in (("--rank", flags.rank), ("--world-size", flags.world_size)):
        if value is not None and "MASTER_ADDR" not in env:
            raise UsageError(f"{flag} {value}: needs --init-method tcp://HOST:PORT beside it")
    if "WORLD_SIZE" in env or "RANK" in env:
        return _from_environment(env)
    if flags.init_method is not None:
        raise UsageError(
            "--init-method env://: RANK and WORLD_SIZE are not set; set them with MASTER_ADDR and"
            " MASTER_PORT, or give --init-method tcp://HOST:PORT --rank R --world-size N"
        )
    if (_optional(env, "SLURM_STEP_NUM_TASKS") or _optional(env, "SLURM_NTASKS") or 1) > 1:
        return _from_slurm(env)
    _refuse_lone_processes(env)
    return Launch(launcher="accelerate" if "ACCELERATE_MIXED_PRECISION" in env else "python")


def _from_environment(env: Mapping[str, str]) -> Launch:
    """Read RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, set by torchrun or by hand."""
    for name, other in (("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")):
        if name not in env:
            raise UsageError(
                f"{other}={env[other]}: {name} is not set; a launcher sets both: set both, or none"
            )
    world_size = _number(env, "WORLD_SIZE", least=1)
    rank = _check_rank("RANK", _number(env, "RANK"), world_size)
    by_agent = "TORCHELASTIC_RUN_ID" in env
    if world_size > 1 or by_agent:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise UsageError(
                    f"WORLD_SIZE={world_size}: {name} is not set; it says where rank 0 serves"
                )
    launcher = "environment"
    if by_agent:
        launcher = "accelerate" if "ACCELERATE_MIXED_PRECISION" in env else "torchrun"
    return Launch(
        launcher=launcher,
        rank=rank,
        world_size=world_size,
        local_rank=_optional(env, "LOCAL_RANK"),
        local_world_size=_optional(env, "LOCAL_WORLD_SIZE", least=1),
        num_machines=_optional(env, "GROUP_WORLD_SIZE", least=1) if by_agent else None,
        main_host=env.get("MASTER_ADDR"),
        main_port=_optional(env, "MASTER_PORT", least=1, most=65535),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_optional(env, "TORCHELASTIC_RESTART_COUNT") or 0,
    )


def _from_slurm(env: Mapping[str, str]) -> Launch:
    """Read the variables that `srun` gives each task.

    A batch script has SLURM_NTASKS too, but no SLURM_STEP_ID.
    """
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env:
        raise UsageError(
            f"SLURM_NTASKS={env.get('SLURM_NTASKS')}: this process was not started by srun and"
            " would train alone; put srun before the command, or unset SLURM_NTASKS"
        )
    tasks = "SLURM_STEP_NUM_TASKS" if env.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = _number(env, tasks, least=1)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "")
    host = env.get("MASTER_ADDR") or first_slurm_host(nodes)
    if not host:
        raise UsageError(
            "SLURM_JOB_NODELIST: is not set; set MASTER_ADDR to the host of SLURM_PROCID 0"
        )
    # Two jobs on one node need different ports, so the port follows the job id, in the unprivileged
    # range below the kernel's own choices (32768 and up on Linux).
    port = 15000 + (_optional(env, "SLURM_JOB_ID") or 0) % 15000
    return Launch(
        launcher="slurm",
        rank=_check_rank("SLURM_PROCID", _number(env, "SLURM_PROCID"), world_size),
        world_size=world_size,
        local_rank=_optional(env, "SLURM_LOCALID"),
        num_machines=_optional(env, "SLURM_STEP_NUM_NODES") or _optional(env, "SLURM_NNODES"),
        main_host=host,
        main_port=_optional(env, "MASTER_PORT", least=1, most=65535) or port,
    )


def first_slurm_host(nodes: str) -> str:
    """Return the first host of SLURM's compact list, e.g. gpu[003-005,9],cpu1 -> gpu003."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")[0].strip()


def _refuse_lone_processes(env: Mapping[str, str]) -> None:
    """Raise UsageError under launchers whose processes do not know of each other."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if (_optional(env, name) or 1) > 1:
            raise UsageError(
                f"{name}={env[name]}: mpirun is not supported as a launcher, each process would"
                " train alone; use torchrun or accelerate launch"
            )
    # accelerate's MULTI_CPU path starts one process unless mpirun is named. Only a MASTER_ADDR
    # without a WORLD_SIZE, which a person may have set too, shows that several were requested.
    if "ACCELERATE_USE_CPU" in env and "MASTER_ADDR" in env:
        raise UsageError(
            f"MASTER_ADDR={env['MASTER_ADDR']}: is set, but accelerate launch started one process;"
            f" for several use --config_file {CONFIGS}/multi_cpu.yaml, for one unset MASTER_ADDR"
        )


def _number(env: Mapping[str, str], name: str, least: int = 0, most: int | None = None) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise UsageError(
            f"{name}={env[name]}: must be a whole number {bounds}; correct or unset it"
        )
    return value


def _optional(
    env: Mapping[str, str], name: str, least: int = 0, most: int | None = None
) -> int | None:
    return _number(env, name, least, most) if env.get(name) else None


def _check_rank(name: str, rank: int, world_size: int) -> int:
    if rank >= world_size:
        raise UsageError(
            f"{name} {rank}: the world size is {world_size}; ranks are 0 to {world_size - 1}"
        )
    return rank
