import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_mnist.cluster.launch import (
    LAUNCHER_VARIABLES,
    Launch,
    config_flag,
    find_launch,
    first_slurm_host,
)
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError
from tests.chaos import seconds_until_gone, wait_until
from tests.commands import REPOSITORY, Started

Variables = dict[str, str]

# Of a worker, as Python imports it before all else: PyTorch takes a minute to import.
SLOW = """
import importlib.abc, os, sys, time
from pathlib import Path

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            Path(sys.argv[1]).write_text(str(os.getpid()))
            time.sleep(15)

sys.meta_path.insert(0, Slow())
"""
# A launcher that starts a worker and waits for it.
LAUNCHER = (
    "import subprocess, sys; subprocess.run([sys.executable, '-m', 'ddp_mnist', *sys.argv[1:]])"
)


def variables(text: str) -> Variables:
    return dict(word.split("=") for word in text.split())


# What each launcher was seen to set (accelerate 1.15, torch 2.15), without what says nothing.
TORCHRUN = variables("""
    GROUP_RANK=0 GROUP_WORLD_SIZE=1 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
    MASTER_PORT=29500 OMP_NUM_THREADS=1 RANK=1 TORCHELASTIC_RESTART_COUNT=0
    TORCHELASTIC_RUN_ID=none TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2
""")
SECOND = variables("GROUP_RANK=1 GROUP_WORLD_SIZE=2 RANK=3 WORLD_SIZE=4 MASTER_ADDR=gpu1")
NOT_SHARED = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
ACCELERATE = variables("ACCELERATE_MIXED_PRECISION=no ACCELERATE_USE_CPU=True OMP_NUM_THREADS=2")
BY_HAND = variables("RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.1 MASTER_PORT=12345")
SRUN = variables("""
    SLURM_JOB_ID=70007 SLURM_JOB_NODELIST=gpu[003-005,9],cpu1 SLURM_LOCALID=1 SLURM_NNODES=2
    SLURM_NTASKS=4 SLURM_PROCID=3 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[003-004]
    SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=4
""")
ONE_TASK = variables("""
    SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_NODELIST=gpu003
    SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1
""")
IN_TORCHRUN = Launch("torchrun", 1, 2, 1, 2, 1, "127.0.0.1", 29500, agent_store=True)
IN_SECOND = Launch("torchrun", 3, 4, 1, 2, 2, "gpu1", 29500, agent_store=True)
IN_SRUN = Launch("slurm", 3, 4, 1, None, 2, "gpu003", 25007)
FOUND_BY_HAND = Launch("environment", 1, 2, None, None, None, "10.0.0.1", 12345)


def without(env: Variables, *names: str) -> Variables:
    return {name: value for name, value in env.items() if name not in names}


TCP: dict[str, Any] = {"init_method": "tcp://h:1", "rank": 0, "world_size": 2}
FOUND: dict[str, tuple[Variables, Launch]] = {
    "python": ({}, Launch()),
    "accelerate, one process": (ACCELERATE, Launch("accelerate")),
    "accelerate, several": (TORCHRUN | ACCELERATE, replace(IN_TORCHRUN, launcher="accelerate")),
    "torchrun": (TORCHRUN, IN_TORCHRUN),
    "torchrun, store not shared": (TORCHRUN | NOT_SHARED, replace(IN_TORCHRUN, agent_store=False)),
    "torchrun, second node": (TORCHRUN | SECOND, IN_SECOND),
    "torchrun inside a SLURM job": (TORCHRUN | SRUN, IN_TORCHRUN),
    "by hand": (BY_HAND, FOUND_BY_HAND),
    "by hand, one process": (variables("RANK=0 WORLD_SIZE=1"), Launch("environment")),
    "srun": (SRUN, IN_SRUN),
    "srun, fewer variables": (
        without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
        IN_SRUN,
    ),
    "srun, MASTER_ADDR and MASTER_PORT": (
        SRUN | variables("MASTER_ADDR=10.1.1.1 MASTER_PORT=4711"),
        replace(IN_SRUN, main_host="10.1.1.1", main_port=4711),
    ),
    "srun of one task in a larger job": (SRUN | ONE_TASK, Launch()),
    "mpirun of one": ({"OMPI_COMM_WORLD_SIZE": "1"}, Launch()),
}


@pytest.mark.parametrize(("env", "expected"), FOUND.values(), ids=FOUND)
def test_the_place_that_a_launcher_gives(env: Variables, expected: Launch) -> None:
    assert find_launch(Distribution(), env) == expected


@pytest.mark.parametrize(
    ("flags", "env", "expected"),
    [
        ({"local_rank": 0}, {}, Launch()),
        ({"init_method": "env://"}, TORCHRUN, IN_TORCHRUN),
        ({"local_rank": 1}, TORCHRUN, IN_TORCHRUN),  # by torch.distributed.launch
        (
            {"init_method": "env://", "rank": 1, "world_size": 3, "local_rank": 0},
            {"MASTER_ADDR": "h", "MASTER_PORT": "1"},
            Launch("environment", 1, 3, 0, None, None, "h", 1),
        ),
        ({"rank": 1, "world_size": 2}, BY_HAND, FOUND_BY_HAND),
        (TCP, SRUN, Launch("tcp", 0, 2, main_host="h", main_port=1)),
        (
            TCP | {"init_method": "tcp://[::1]:65535/", "local_rank": 1},
            {},
            Launch("tcp", 0, 2, 1, main_host="::1", main_port=65535),
        ),
    ],
)
def test_the_place_that_flags_give(flags: dict[str, Any], env: Variables, expected: Launch) -> None:
    assert find_launch(Distribution(**flags), env) == expected


NO_NUMBERS: list[tuple[Variables, str]] = [
    (TORCHRUN, "RANK=one WORLD_SIZE=2.0 LOCAL_RANK=x RANK=-1 MASTER_PORT=http"),
    (SRUN, "SLURM_STEP_NUM_TASKS=abc SLURM_PROCID=x SLURM_LOCALID=-1 SLURM_JOB_ID=job"),
    ({}, "SLURM_NTASKS=abc OMPI_COMM_WORLD_SIZE=x"),
]
REFUSED: list[tuple[Variables, str]] = [
    *(
        (env | variables(word), f"{word}: must be a whole number; ")
        for env, words in NO_NUMBERS
        for word in words.split()
    ),
    ({"RANK": "0"}, "RANK=0: WORLD_SIZE is not set"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2: RANK is not set"),
    (without(BY_HAND, "MASTER_ADDR"), "WORLD_SIZE=2: MASTER_ADDR is not set"),
    (BY_HAND | {"RANK": "2"}, "RANK 2: the world size is 2; ranks are 0 to 1"),
    (SRUN | {"SLURM_PROCID": "4"}, "SLURM_PROCID 4: the world size is 4"),
    (
        variables("SLURM_NTASKS=4 SLURM_PROCID=0 SLURM_JOB_NODELIST=n[1-2]"),
        "SLURM_NTASKS=4: this process was not started by srun",
    ),
    (variables("SLURM_NNODES=2 SLURM_PROCID=0"), "SLURM_NNODES=2: this process was not started by"),
    # sbatch in the shell of a step, whose variables the job inherits
    (SRUN | ONE_TASK | {"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4: this process was not started by"),
    (
        variables("PET_NNODES=2 X=2 PET_NODE_RANK=1"),
        "PET_NNODES=2: asks for several processes, each of which would work alone; put torchrun or"
        " accelerate launch before the command, or unset PET_NNODES PET_NODE_RANK",
    ),
    # a file of accelerate's wizard; accelerate launch --cpu --num_processes 2
    (
        ACCELERATE | {"MASTER_ADDR": "127.0.0.1"},
        "distributed_type: MULTI_CPU, or NO, or --cpu: acce",
    ),
    *(
        (BY_HAND | {"MASTER_ADDR": host}, f"MASTER_ADDR={host}: must be one host's name or address")
        for host in ("10.0.0.1 10.0.0.2 ", "'h'", "http://h", "10.0.0.1:29500", "10.0.0.256", "h,i")
    ),
    (
        BY_HAND | {"TORCH_DISTRIBUTED_DEBUG": "detail"},
        "TORCH_DISTRIBUTED_DEBUG=detail: torch's DDP",
    ),
    ({"ACCELERATE_TORCH_DEVICE": "meta"}, "ACCELERATE_TORCH_DEVICE=meta: would move tensors to"),
    ({"ACCELERATE_DEBUG_MODE": "true"}, "ACCELERATE_DEBUG_MODE=true: lets ranks send each other p"),
]
# Of platforms and launchers that this program does not know by name, and of what is none.
SEVERAL = """
    PET_NNODES=1:4 PET_NPROC_PER_NODE=2 PET_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NODE_RANK=1
    SKYPILOT_NODE_IPS=10.0.0.1,10.0.0.2 FLUX_JOB_SIZE=2 FLUX_TASK_RANK=1 PALS_RANKID=1
    PALS_LOCAL_SIZE=2 PALS_LOCAL_RANKID=1 PMIX_RANK=1 PMI_SIZE=2 PMI_RANK=1 JSM_NAMESPACE_SIZE=2
    JSM_NAMESPACE_LOCAL_SIZE=4 MPI_LOCALNRANKS=2 MPI_LOCALRANKID=1 SM_HOSTS=["algo-1","algo-2"]
    MLP_WORKER_NUM=2
    NNODES=2 NUM_NODES=2 NODE_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1
    MV2_COMM_WORLD_SIZE=2 AZUREML_NODE_COUNT=2 AZ_BATCH_NODE_LIST=10.0.0.4;10.0.0.5 VC_WORKER_NUM=2
    VC_WORKER_HOSTS=a,b MA_NUM_HOSTS=2 AWS_BATCH_JOB_NUM_NODES=2 DSTACK_NODES_NUM=2 LWS_GROUP_SIZE=2
    HOROVOD_RANK=1 PADDLE_TRAINERS_NUM=2 PBS_NUM_NODES=2 NHOSTS=2 PBS_NODEFILE=two PE_HOSTFILE=two
    MACHINE_RANK=1 NEXT_NUM_NODES=2 NEXT_COMM_WORLD_SIZE=2 NEXT_TASK_RANK=1
"""
ALONE = """
    MY_RANK=1 LORA_RANK=16 PAGE_RANK=7 LOGNAME=5 NUM_WORKERS=8 CI_NODE_TOTAL=4 CI_NODE_INDEX=2
    CIRCLE_NODE_INDEX=1 SLURM_ARRAY_TASK_ID=3 SLURM_JOB_NUM_NODES=2 PBS_ARRAY_INDEX=3 NSLOTS=8
    JOB_COMPLETION_INDEX=3 PBS_NODEFILE=one PBS_NODEFILE=none OMPI_UNIVERSE_SIZE=8 NPROC=8 NPROCS=8
    BATCH_SIZE=64 GROUP_SIZE=128 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 SKYPILOT_NUM_GPUS_PER_NODE=8
    SM_HOSTS=["algo-1"] PET_NNODES=1:1 PET_NODE_RANK=0 PET_NPROC_PER_NODE=auto ALLOWED_HOSTS=a,b
    PYTEST_XDIST_WORKER_COUNT=4 MV2_VBUF_TOTAL_SIZE=9000 NODE_VERSION=20 OMPI_COMM_WORLD_SIZE=1
"""
CONTRADICTED = "the environment says"
NOT_DDP = "FSDP DEEPSPEED MEGATRON_LM PARALLELISM_CONFIG SAGEMAKER"
ADDRESS = "must be tcp://HOST:PORT (port 1 to 65535) or env://"
NO_ADDRESSES = """
    tcp tcp:// tcp://h tcp://h: tcp://:1 tcp://h:0 tcp://h:-1 tcp://h:65536 tcp://h:port
    tcp://h:1/path tcp://h:1?rank=0 tcp://[::1 tcp://::1:80 tcp:/h:1 h:1 udp://h:1 file:///tmp/x
    env:/ env://h:1 数://机:1
"""


@pytest.mark.parametrize(
    ("flags", "env", "message"),
    [
        *(({}, env, message) for env, message in REFUSED),
        ({"world_size": 2}, {}, "--world-size 2: needs --init-method tcp://HOST:PORT"),
        (TCP | {"local_rank": 2}, {}, "--local-rank 2: the world size is 2; ranks are 0 to 1"),
        (TCP | {"rank": 2}, {}, "--rank 2: the world size is 2; ranks are 0 to 1"),
        ({"init_method": "env://"}, {}, "--init-method env://: WORLD_SIZE is not set; set"),
        ({"rank": 0}, BY_HAND, f"--rank 0: {CONTRADICTED} RANK=1; leave one of them out"),
        ({"local_rank": 0}, TORCHRUN, f"--local-rank 0: {CONTRADICTED} LOCAL_RANK=1"),
        (TCP, BY_HAND, f"--rank 0: {CONTRADICTED} RANK=1"),
        (TCP | {"rank": None}, {}, "--init-method tcp://h:1: each process needs --rank R --w"),
        (TCP | {"world_size": None}, {}, "--init-method tcp://h:1: each process needs --rank R"),
        *(
            (TCP | {"init_method": word}, {}, f"--init-method {word}: {ADDRESS}")
            for word in NO_ADDRESSES.split()
        ),
    ],
)
def test_refused(flags: dict[str, Any], env: Variables, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        find_launch(Distribution(**flags), env)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    "variable",
    [*(f"ACCELERATE_USE_{x}" for x in NOT_DDP.split()), "ACCELERATE_IN_TPU_POD"],
)
def test_a_variable_that_asks_for_something_else_than_ddp_is_refused(variable: str) -> None:
    for off in ("", "0", "False"):
        find_launch(Distribution(), {variable: off})
    with pytest.raises(UsageError) as raised:
        find_launch(Distribution(), {variable: "true"})
    use = f"use {config_flag('multi_gpu')} or multi_cpu.yaml"
    told = f"{variable}=true: this trainer is DDP on NVIDIA GPUs or CPUs; {use}"
    assert str(raised.value) == told


def test_fault_62_asked_for_several_by_any_name_none_trains_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one").write_text("n1\nn1\n")
    (tmp_path / "two").write_text("n1 4 all.q@n1 UNDEFINED\nn2 4 all.q@n2 UNDEFINED\n")
    for word in SEVERAL.split():
        env = dict([word.split("=", 1)])
        with pytest.raises(UsageError, match=f"^{re.escape(word)}: asks for several processes"):
            find_launch(Distribution(), env)
        assert all(map(LAUNCHER_VARIABLES.fullmatch, env))  # worlds of `verify` do not have it
        if "WORLD_SIZE" not in word and "PMI_SIZE" not in word:  # Accelerate reads these
            assert find_launch(Distribution(), env, trains=False) == Launch()
    for word in ALONE.split():
        assert find_launch(Distribution(), dict([word.split("=", 1)])) == Launch()


def test_what_does_not_train_is_alone_in_the_shell_of_a_job_and_together_under_srun() -> None:
    shell = {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}
    assert find_launch(Distribution(), shell, trains=False) == Launch()
    task = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[0-1]"}
    assert find_launch(Distribution(), shell | task, trains=False).world_size == 4


def test_first_slurm_host() -> None:
    nodes = "a[003-005,9],b1 n1 n1,n2 x-[1-2]-y x-[01,3]-y,z n[7] rack[1-2]node[03-04] 10.0.0.1,a"
    first = "a003 n1 n1 x-1-y x-01-y n7 rack1node03 10.0.0.1"
    assert [first_slurm_host(each) for each in nodes.split()] == first.split()


# --- A worker ends with its launcher


@pytest.mark.parametrize("verb", ["train", "evaluate run", "doctor"])
def test_fault_02_a_worker_ends_with_its_launcher_while_it_imports(
    verb: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    there = {**TORCHRUN, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    launcher = Started(["-c", LAUNCHER, *verb.split()], tmp_path, there).process
    importing = tmp_path / verb.split()[0]
    wait_until(lambda: importing.exists() and importing.read_text())
    worker = psutil.Process(int(importing.read_text()))
    launcher.kill()
    try:
        assert seconds_until_gone([worker]) < 5
    finally:
        launcher.communicate()
