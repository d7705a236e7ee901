from __future__ import annotations

import dataclasses
from typing import Any

import psutil
import pytest

from ddp_mnist.cluster.interfaces import interface_towards, is_own, own_addresses
from ddp_mnist.cluster.launch import Launch, find_launch, first_slurm_host
from ddp_mnist.config import Distribution
from ddp_mnist.errors import UsageError

# What each launcher was seen to set (accelerate 1.15, torch 2.15), without what says nothing.
TORCHRUN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "OMP_NUM_THREADS": "1",
    "RANK": "1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "2",
}
ONE_OF_TORCHRUN = TORCHRUN | {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
}
SECOND_NODE = TORCHRUN | {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu1",
}
ACCELERATE_SIMPLE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
    "OMP_NUM_THREADS": "2",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345"}
SRUN = {
    "SLURM_JOB_ID": "70007",
    "SLURM_JOB_NODELIST": "gpu[003-005,9],cpu1",
    "SLURM_LOCALID": "1",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4",
}
IN_TORCHRUN = Launch("torchrun", 1, 2, 1, 2, 1, "127.0.0.1", 29500, agent_store=True)
IN_SRUN = Launch("slurm", 3, 4, 1, None, 2, "gpu003", 25007)


def without(variables: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


FOUND: dict[str, tuple[dict[str, str], dict[str, Any], Launch]] = {
    "python": ({}, {}, Launch("python")),
    "python --local-rank 0": ({}, {"local_rank": 0}, Launch("python")),
    "python, stale LOCAL_RANK": ({"LOCAL_RANK": "3"}, {}, Launch("python")),
    "accelerate, one process": (ACCELERATE_SIMPLE, {}, Launch("accelerate")),
    "accelerate, several": (
        TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"},
        {},
        dataclasses.replace(IN_TORCHRUN, launcher="accelerate"),
    ),
    "torchrun": (TORCHRUN, {}, IN_TORCHRUN),
    "torchrun, one process": (
        ONE_OF_TORCHRUN,
        {},
        Launch("torchrun", 0, 1, 0, 1, 1, "127.0.0.1", 29500, agent_store=True),
    ),
    "torchrun, store not shared": (
        TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"},
        {},
        dataclasses.replace(IN_TORCHRUN, agent_store=False),
    ),
    "torchrun, restarted": (
        TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"},
        {},
        dataclasses.replace(IN_TORCHRUN, attempt=2),
    ),
    "torchrun, second node": (
        SECOND_NODE,
        {},
        Launch("torchrun", 3, 4, 1, 2, 2, "gpu1", 29500, agent_store=True),
    ),
    "torchrun env://": (TORCHRUN, {"init_method": "env://"}, IN_TORCHRUN),
    "torch.distributed.launch train --local-rank 1": (TORCHRUN, {"local_rank": 1}, IN_TORCHRUN),
    "torchrun inside a SLURM job": (TORCHRUN | SRUN, {}, IN_TORCHRUN),
    "by hand": (BY_HAND, {}, Launch("environment", 1, 2, None, None, None, "10.0.0.1", 12345)),
    "by hand, with local rank": (
        BY_HAND | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        {},
        Launch("environment", 1, 2, 0, 1, None, "10.0.0.1", 12345),
    ),
    "by hand, one process": (
        {"RANK": "0", "WORLD_SIZE": "1"},
        {},
        Launch("environment", 0, 1),
    ),
    "env:// and flags": (
        {"MASTER_ADDR": "h", "MASTER_PORT": "1"},
        {"init_method": "env://", "rank": 1, "world_size": 3, "local_rank": 0},
        Launch("environment", 1, 3, 0, None, None, "h", 1),
    ),
    "flags that say the same": (
        BY_HAND,
        {"rank": 1, "world_size": 2},
        Launch("environment", 1, 2, None, None, None, "10.0.0.1", 12345),
    ),
    "tcp, IPv4": (
        {},
        {"init_method": "tcp://192.168.1.201:12345", "rank": 0, "world_size": 2},
        Launch("tcp", 0, 2, None, None, None, "192.168.1.201", 12345),
    ),
    "tcp, IPv6": (
        {},
        {"init_method": "tcp://[::1]:65535", "rank": 1, "world_size": 2, "local_rank": 1},
        Launch("tcp", 1, 2, 1, None, None, "::1", 65535),
    ),
    "tcp, name": (
        {},
        {"init_method": "tcp://node-1.cluster:1/", "rank": 2, "world_size": 3},
        Launch("tcp", 2, 3, None, None, None, "node-1.cluster", 1),
    ),
    "tcp under srun": (
        SRUN,
        {"init_method": "tcp://n1:7000", "rank": 3, "world_size": 4},
        Launch("tcp", 3, 4, None, None, None, "n1", 7000),
    ),
    "srun": (SRUN, {}, IN_SRUN),
    "srun, told less": (
        without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_NODES"),
        {},
        Launch("slurm", 3, 6, 1, None, 3, "gpu003", 25007),
    ),
    "srun, MASTER_ADDR and MASTER_PORT": (
        SRUN | {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4711"},
        {},
        dataclasses.replace(IN_SRUN, main_host="10.1.1.1", main_port=4711),
    ),
    "srun of one task in a larger job": (
        SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {},
        Launch("python"),
    ),
    "SLURM job of one task": ({"SLURM_NTASKS": "1", "SLURM_JOB_ID": "5"}, {}, Launch("python")),
    "mpirun of one": ({"OMPI_COMM_WORLD_SIZE": "1"}, {}, Launch("python")),
}


@pytest.mark.parametrize("case", FOUND)
def test_place(case: str) -> None:
    env, flags, expected = FOUND[case]
    assert find_launch(Distribution(**flags), env) == expected


TCP = {"rank": 0, "world_size": 2}
REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "RANK alone": ({"RANK": "0"}, {}, "RANK=0: WORLD_SIZE is not set"),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "2"}, {}, "WORLD_SIZE=2: RANK is not set"),
    "no MASTER_ADDR": (without(BY_HAND, "MASTER_ADDR"), {}, "WORLD_SIZE=2: MASTER_ADDR is not se"),
    "no MASTER_PORT": (without(BY_HAND, "MASTER_PORT"), {}, "WORLD_SIZE=2: MASTER_PORT is not se"),
    "empty MASTER_PORT": (BY_HAND | {"MASTER_PORT": ""}, {}, "WORLD_SIZE=2: MASTER_PORT is not"),
    "rank too high": (BY_HAND | {"RANK": "2"}, {}, "RANK 2: the world size is 2; ranks are 0 to 1"),
    "negative rank": (BY_HAND | {"RANK": "-1"}, {}, "RANK=-1: must be a whole number of at least"),
    "empty rank": (BY_HAND | {"RANK": ""}, {}, "RANK=: must be a whole number of at least 0"),
    "world of 0": (BY_HAND | {"WORLD_SIZE": "0"}, {}, "WORLD_SIZE=0: must be a whole number of at"),
    **{
        f"{name}={value}": (TORCHRUN | {name: value}, {}, f"{name}={value}: must be a whole number")
        for name, value in [
            ("RANK", "one"),
            ("WORLD_SIZE", "2.0"),
            ("LOCAL_RANK", "x"),
            ("LOCAL_WORLD_SIZE", "0"),
            ("GROUP_WORLD_SIZE", "many"),
            ("MASTER_PORT", "http"),
            ("MASTER_PORT", "0"),
            ("MASTER_PORT", "65536"),
            ("TORCHELASTIC_RESTART_COUNT", "-"),
        ]
    },
    **{
        f"{name}={value}": (SRUN | {name: value}, {}, f"{name}={value}: must be a whole number")
        for name, value in [
            ("SLURM_STEP_NUM_TASKS", "abc"),
            ("SLURM_PROCID", "x"),
            ("SLURM_LOCALID", "-1"),
            ("SLURM_JOB_ID", "job"),
            ("SLURM_STEP_NUM_NODES", "two"),
            ("MASTER_PORT", "70000"),
        ]
    },
    "SLURM_NTASKS=abc": ({"SLURM_NTASKS": "abc"}, {}, "SLURM_NTASKS=abc: must be a whole number"),
    "SLURM rank too high": (
        SRUN | {"SLURM_PROCID": "4"},
        {},
        "SLURM_PROCID 4: the world size is 4",
    ),
    "batch script without srun": (
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NODELIST": "n[1-2]"},
        {},
        "SLURM_NTASKS=4: this process was not started by srun and would train alone; put srun",
    ),
    "srun without a list of nodes": (
        without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        {},
        "SLURM_JOB_NODELIST: is not set; set MASTER_ADDR",
    ),
    "mpirun": ({"OMPI_COMM_WORLD_SIZE": "2"}, {}, "OMPI_COMM_WORLD_SIZE=2: mpirun is not support"),
    "mpirun, MPICH": ({"PMI_SIZE": "8"}, {}, "PMI_SIZE=8: mpirun is not supported"),
    "mpirun, MVAPICH": ({"MV2_COMM_WORLD_SIZE": "2"}, {}, "MV2_COMM_WORLD_SIZE=2: mpirun is not s"),
    "mpirun, garbage": ({"OMPI_COMM_WORLD_SIZE": "x"}, {}, "OMPI_COMM_WORLD_SIZE=x: must be a who"),
    "accelerate launch --cpu --num_processes 2": (
        ACCELERATE_SIMPLE | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
        {},
        "MASTER_ADDR=127.0.0.1: is set, but accelerate launch started one process; for several use"
        " --config_file accelerate_configs/multi_cpu.yaml, for one unset MASTER_ADDR",
    ),
    "--backend mpi": ({}, {"backend": "mpi"}, "--backend mpi: PyTorch's wheels are built without"),
    "--rank alone": ({}, {"rank": 0}, "--rank 0: needs --init-method tcp://HOST:PORT beside it"),
    "--world-size alone": ({}, {"world_size": 2}, "--world-size 2: needs --init-method tcp://HOST"),
    "--local-rank alone": ({}, {"local_rank": 1}, "--local-rank 1: the world size is 1; ranks are"),
    "--local-rank too high": (
        {},
        {"init_method": "tcp://h:1", **TCP, "local_rank": 2},
        "--local-rank 2: the world size is 2; ranks are 0 to 1",
    ),
    "env:// without variables": (
        {},
        {"init_method": "env://"},
        "--init-method env://: RANK and WO",
    ),
    "--rank against RANK": (
        BY_HAND,
        {"rank": 0},
        "--rank 0: the environment says RANK=1; leave on",
    ),
    "--world-size against WORLD_SIZE": (
        BY_HAND,
        {"world_size": 3},
        "--world-size 3: the environment says WORLD_SIZE=2",
    ),
    "--local-rank against LOCAL_RANK": (
        TORCHRUN,
        {"local_rank": 0},
        "--local-rank 0: the environment says LOCAL_RANK=1; leave one of them out",
    ),
    "tcp against RANK": (
        BY_HAND,
        {"init_method": "tcp://h:1", **TCP},
        "--rank 0: the environment says RANK=1; leave one of them out",
    ),
    "tcp under a launcher": (
        TORCHRUN,
        {"init_method": "tcp://h:1", **TCP},
        "--init-method tcp://h:1: a launcher started this process and gives rank and address",
    ),
    "tcp without rank": (
        {},
        {"init_method": "tcp://h:1", "world_size": 2},
        "--init-method tcp://h:1: --rank is missing; each process needs --rank R --world-size N",
    ),
    "tcp without world size": (
        {},
        {"init_method": "tcp://h:1", "rank": 0},
        "--init-method tcp://h:1: --world-size is missing",
    ),
    "tcp, rank too high": (
        {},
        {"init_method": "tcp://h:1", "rank": 2, "world_size": 2},
        "--rank 2: the world size is 2; ranks are 0 to 1",
    ),
    **{
        f"--init-method {text!r}": (
            {},
            {"init_method": text, **TCP},
            f"--init-method {text}: must be tcp://HOST:PORT (port 1 to 65535) or env://",
        )
        for text in (
            "tcp",
            "tcp://",
            "tcp://h",
            "tcp://h:",
            "tcp://:1",
            "tcp://h:0",
            "tcp://h:-1",
            "tcp://h:65536",
            "tcp://h:port",
            "tcp://h:1/path",
            "tcp://h:1?rank=0",
            "tcp://[::1",
            "tcp://::1:80",
            "tcp:/h:1",
            "h:1",
            "udp://h:1",
            "file:///tmp/x",
            "env:/",
            "env://h:1",
            "数://机:1",
        )
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    env, flags, message = REFUSED[case]
    with pytest.raises(UsageError) as told:
        find_launch(Distribution(**flags), env)
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("a[003-005,9],b1", "a003"),
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("x-[1-2]-y", "x-1-y"),
        ("x-[01,3]-y,z", "x-01-y"),
        ("n[7]", "n7"),
        ("rack[1-2]node[03-04]", "rack1node03"),
        ("10.0.0.1,10.0.0.2", "10.0.0.1"),
        ("", ""),
    ],
)
def test_first_slurm_host(nodes: str, first: str) -> None:
    assert first_slurm_host(nodes) == first


@pytest.mark.parametrize(
    ("launcher", "child"),
    [("accelerate", True), ("torchrun", True), ("slurm", False), ("tcp", False), ("python", False)],
)
def test_only_a_worker_dies_with_its_launcher(launcher: str, child: bool) -> None:
    assert Launch(launcher).child_of_launcher == child


def test_the_addresses_of_this_machine() -> None:
    own = own_addresses()
    assert not {"127.0.0.1", "::1"} & own
    hosts = ["127.0.0.1", "127.1.2.3", "localhost", "[::1]", "a..b", *own]
    assert [host for host in hosts if not is_own(host)] == []
    assert not is_own("203.0.113.5")


def test_interface_towards_an_address_of_this_machine() -> None:
    assert interface_towards("127.0.0.1", 9) == "lo"
    assert interface_towards("localhost", 9) == "lo"
    addresses = [a.address for a in psutil.net_if_addrs()["lo"]]
    assert interface_towards("::1", 9) == ("lo" if "::1" in addresses else None)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 70, "256.1.1.1.1"])
def test_no_interface_leads_to_an_unknown_host(host: str) -> None:
    assert interface_towards(host, 9) is None
