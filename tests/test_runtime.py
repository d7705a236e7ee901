from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import accelerate.optimizer
import pytest
import torch
import torch.distributed as dist

from ddp_mnist.cluster import world
from ddp_mnist.cluster.device import (
    Place,
    check_gpus_differ,
    choose_backend,
    choose_device,
    gpu_of,
    place_on_machine,
    precision_in_effect,
    set_threads,
)
from ddp_mnist.cluster.failures import as_expected
from ddp_mnist.cluster.launch import Launch, find_launch
from ddp_mnist.cluster.local import LocalWorld, free_port, launcher_variables, run_world
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import (
    CRASHES_IN_DETAIL,
    check_world_size,
    choose_interface,
    die_with_parent,
    join_world,
    make_accelerator,
)
from ddp_mnist.config import Distribution, TrainConfig
from ddp_mnist.errors import FailedElsewhere, PeerError, UsageError
from ddp_mnist.run.folder import read_json
from ddp_mnist.verify.watch import just_train, proof_config

# What is promised, and more where others use the machine at the same time.
SECONDS = 5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
PAIR = Launch("torchrun", 0, 2, 0, 2, 1, "127.0.0.1", 29500, agent_store=True)

# --- Device, precision, backend


@pytest.mark.parametrize("launcher", [None, "", "no", "fp16", "bf16"])
@pytest.mark.parametrize("flag", [None, "auto", "no", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize(("device", "native"), [("cuda", False), ("cpu", True), ("cpu", False)])
def test_precision_in_effect(
    launcher: str | None,
    flag: str | None,
    device: str,
    native: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr("ddp_mnist.cluster.device.has_native_bf16", lambda: native)
    flags = Distribution(mixed_precision=flag)
    asked = flag or launcher or "auto"  # the flag beats the launcher
    if (asked, device) == ("fp16", "cpu"):
        with pytest.raises(UsageError, match="needs a GPU"):
            precision_in_effect(flags, Launch(), device)
        return
    auto = "fp16" if device == "cuda" else "bf16" if native else "no"
    expected = auto if asked == "auto" else asked
    assert precision_in_effect(flags, Launch(), device) == expected


def test_a_launchers_precision_that_we_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UsageError, match=r"^--mixed_precision fp8: choose from no, fp16, bf16$"):
        precision_in_effect(Distribution(), Launch(), "cpu")


@pytest.mark.parametrize(
    ("launch", "config"),
    [
        (Launch("accelerate"), "cpu"),
        (PAIR, "multi_cpu"),
        (dataclasses.replace(PAIR, num_machines=2), "multi_node_cpu"),
        (dataclasses.replace(PAIR, num_machines=None), "multi_cpu"),
    ],
)
def test_fault_25_fp16_on_a_cpu_names_the_config_to_use(
    launch: Launch, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError) as told:
        precision_in_effect(Distribution(mixed_precision="fp16"), launch, "cpu")
    assert str(told.value) == ("--mixed-precision fp16: needs a GPU; on a CPU use bf16, no or auto")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(UsageError) as told:
        precision_in_effect(Distribution(), launch, "cpu")
    assert str(told.value).startswith("accelerate launch: its config asks for fp16, which needs a")
    assert str(told.value).endswith(f"; use --config_file accelerate_configs/{config}.yaml")
    assert (Path(__file__).parent.parent / "accelerate_configs" / f"{config}.yaml").is_file()


@pytest.mark.parametrize(
    ("flag", "variable", "has_gpu", "device"),
    [
        (False, None, True, "cuda"),
        (False, None, False, "cpu"),
        (True, None, True, "cpu"),
        (False, "True", True, "cpu"),
        (False, "1", True, "cpu"),
        (False, "False", True, "cuda"),
        (False, "", True, "cuda"),
    ],
)
def test_choose_device(
    flag: bool, variable: str | None, has_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable is not None:
        monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: int(has_gpu))
    assert choose_device(Distribution(cpu=flag)) == device
    # who wants the CPU hides the GPUs, before torch is asked for them
    wants_cpu = flag or variable in ("True", "1")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if wants_cpu else "0")


@pytest.mark.parametrize(
    ("flag", "launch", "device", "backend"),
    [
        ("auto", Launch(), "cpu", "none"),
        ("gloo", Launch(), "cpu", "none"),
        ("auto", PAIR, "cpu", "gloo"),
        ("auto", PAIR, "cuda", "nccl"),
        ("gloo", PAIR, "cuda", "gloo"),
        ("gloo", PAIR, "cpu", "gloo"),
        ("nccl", PAIR, "cuda", "nccl"),
        # a launcher that serves a store has formed a world, if only of one
        ("auto", dataclasses.replace(PAIR, world_size=1), "cpu", "gloo"),
    ],
)
def test_choose_backend(flag: str, launch: Launch, device: str, backend: str) -> None:
    assert choose_backend(Distribution(backend=flag), launch, device) == backend


@pytest.mark.parametrize("launch", [PAIR, Launch()])
def test_nccl_on_a_cpu_is_refused(launch: Launch) -> None:
    with pytest.raises(UsageError, match=r"^--backend nccl: needs a GPU and this machine shows n"):
        choose_backend(Distribution(backend="nccl"), launch, "cpu")


# --- The machine


@pytest.mark.parametrize(
    ("variable", "launcher", "device", "processes_here", "threads"),
    [
        (None, "python", "cpu", 1, 8),
        (None, "tcp", "cpu", 2, 4),
        (None, "tcp", "cpu", 3, 2),
        (None, "tcp", "cpu", 100, 1),
        (None, "python", "cuda", 1, 1),
        ("", "python", "cpu", 2, 4),
        ("0", "python", "cpu", 2, 4),
        ("1", "torchrun", "cpu", 2, 4),  # set by the launcher, of its own accord
        ("1", "accelerate", "cpu", 4, 2),
        ("1", "torchrun", "cuda", 2, 1),
        ("1", "tcp", "cpu", 2, 1),  # set by a person
        ("3", "torchrun", "cpu", 2, 3),
        ("16", "python", "cpu", 1, 16),
        ("2", "python", "cuda", 1, 2),
    ],
)
def test_set_threads(
    variable: str | None,
    launcher: str,
    device: str,
    processes_here: int,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "before")
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert set_threads(Launch(launcher), device, processes_here) == threads
    assert set_to == [threads]
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


@pytest.mark.parametrize(
    ("launch", "of_task", "threads"),
    [
        (Launch("slurm"), "4", 4),  # a task for each process
        (Launch("slurm"), "16", 8),  # more than it may use
        (Launch("torchrun", local_world_size=2), "4", 2),  # a task for the launcher
        (Launch("accelerate", local_world_size=4), "8", 2),
        (Launch("torchrun", local_world_size=2), "16", 4),
        (Launch("torchrun", local_world_size=4), "2", 1),
        (Launch("torchrun", local_world_size=4), "many", 4),
    ],
)
def test_a_launchers_processes_share_what_slurm_gave_it(
    launch: Launch, of_task: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1" if launch.child_of_launcher else "")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", of_task)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("ddp_mnist.cluster.device.cores", lambda: 8)
    assert set_threads(launch, "cpu", processes_here=2) == threads
    assert set_threads(Launch("slurm"), "cuda", processes_here=2) == int(
        os.environ["OMP_NUM_THREADS"]
    )


@pytest.mark.parametrize("variable", ["4,2", "many"])
def test_threads_that_are_no_number(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    if variable == "4,2":  # OpenMP's form for nested regions
        assert set_threads(Launch(), "cpu", 1) == 4
    else:
        with pytest.raises(UsageError, match=r"^OMP_NUM_THREADS=many: "):
            set_threads(Launch(), "cpu", 1)


@pytest.mark.parametrize(
    ("launch", "hosts", "place"),
    [
        (Launch(), [], (0, 1, 1)),
        (Launch("tcp", 0, 3), ["a", "b", "a"], (0, 2, 2)),
        (Launch("tcp", 1, 3), ["a", "b", "a"], (0, 1, 1)),
        (Launch("tcp", 2, 3), ["a", "b", "a"], (1, 2, 2)),
        (Launch("tcp", 2, 3, local_rank=0), ["a", "b", "a"], (0, 2, 2)),
        # two nodes that are rehearsed on one host share its cores
        (Launch("torchrun", 3, 4, 1, 2, 2), ["a"] * 4, (1, 2, 4)),
    ],
)
def test_place_on_machine(launch: Launch, hosts: list[str], place: tuple[int, int, int]) -> None:
    store = Store(dist.HashStore(), launch.rank, launch.world_size)
    store.hosts = hosts
    assert dataclasses.astuple(place_on_machine(launch, store)) == place


@pytest.mark.parametrize(
    ("hosts", "taken", "told"),
    [
        ("aa", "GPU-1 GPU-2", None),
        ("ab", "GPU-1 GPU-1", None),  # of another machine, whatever it is called
        ("aab", "GPU-1 GPU-2 GPU-1", None),
        ("aa", "GPU-1 GPU-1", "2 processes on a, but 1 GPU: NCCL needs one each; "),
        ("aaa", "GPU-1 GPU-2 GPU-1", "3 processes on a, but 2 GPUs: NCCL needs one"),
    ],
)
def test_ranks_of_a_machine_that_would_take_the_same_gpu_are_refused(
    hosts: str, taken: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(dist.HashStore(), 0, len(hosts))
    store.hosts = list(hosts)
    uuids = taken.split()
    for rank, uuid in enumerate(uuids[1:], 1):
        store.set(f"gpu/{rank}", uuid)
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: 8)
    properties = SimpleNamespace(uuid=uuids[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    with pytest.raises(UsageError, match=f"^{told}") if told else contextlib.nullcontext():
        check_gpus_differ(store, Place(0, len(hosts), len(hosts)))


@pytest.mark.parametrize(
    ("local_rank", "gpus", "taken"), [(0, 1, 0), (1, 1, 0), (1, 2, 1), (3, 2, 1), (3, 8, 3)]
)
def test_the_gpu_of_a_rank(
    local_rank: int, gpus: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: gpus)
    assert gpu_of(Place(local_rank, 2, 2)) == taken


DUPLICATE = """NCCL error in: /src/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000"""
UNHANDLED = """NCCL error in: /src/NCCLUtils.cpp:94, unhandled system error, NCCL version 2
ncclSystemError: System call (e.g. socket, malloc) or external library call failed.
Last error:
Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"""


def test_what_nccl_means_stands_last() -> None:
    store = Store(dist.HashStore(), 0, 2)
    misused = as_expected(store, RuntimeError(DUPLICATE))
    assert isinstance(misused, UsageError)  # nobody was lost
    assert str(misused).startswith("--backend nccl: Duplicate GPU detected : rank 1 and rank 0 bo")
    store.patience_s = 0.1
    failed = as_expected(store, RuntimeError(UNHANDLED))
    assert isinstance(failed, PeerError)
    assert "(Error while creating shared memory segment /dev/shm/nccl-x (size" in str(failed)


def two_hosts(first: str | None, second: str | None) -> Store:
    store = Store(dist.HashStore(), 0, 2)
    store.hosts, store.addresses = ["a", "b"], [first, second]
    return store


@pytest.mark.parametrize(
    ("host", "before", "after"),
    [
        ("127.0.0.1", {}, {"GLOO_SOCKET_IFNAME": "lo"}),
        ("127.0.0.1", {"GLOO_SOCKET_IFNAME": "eth7"}, {"GLOO_SOCKET_IFNAME": "eth7"}),
        ("no.such.host.invalid", {}, {}),
        (None, {}, {}),
    ],
)
def test_choose_interface(
    host: str | None,
    before: dict[str, str],
    after: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    launch = Launch("tcp", 0, 2, main_host=host, main_port=9)
    choose_interface(launch, two_hosts("127.0.0.1", None))
    assert {name: os.environ[name] for name in names if name in os.environ} == after


def test_both_libraries_learn_of_a_real_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_mnist.cluster.world.interface_towards", lambda *_: "eth1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    launch = Launch("tcp", 0, 2, main_host="h", main_port=9)
    choose_interface(launch, two_hosts("10.0.0.1", "10.0.0.2"))
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth1"


def test_rank_0_whose_name_is_loopback_takes_the_way_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(
        "ddp_mnist.cluster.world.interface_towards", lambda host, _: asked.append(host)
    )
    launch = Launch("slurm", 0, 2, main_host="node0", main_port=9)
    choose_interface(launch, two_hosts("127.0.1.1", "10.0.0.2"))
    choose_interface(launch, two_hosts("10.0.0.1", "10.0.0.2"))
    assert asked == ["10.0.0.2", "node0"]


def leave_a_child(folder: str) -> None:
    """Starts a process that waits as a worker does, and is killed itself."""
    if os.fork() == 0:
        die_with_parent()
        Path(folder, "child").write_text(str(os.getpid()))
        time.sleep(60)
        os._exit(0)
    while not Path(folder, "child").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PR_SET_PDEATHSIG is Linux's")
def test_fault_02_a_worker_dies_with_its_launcher(tmp_path: Path) -> None:
    LocalWorld(1, leave_a_child, str(tmp_path), folder=tmp_path).outcomes()
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- The world as it stands


def what_stands() -> dict[str, Any]:
    flags = Distribution(cpu=True, mixed_precision="no", dist_timeout=20)
    with join_world(flags, find_launch(flags)) as world:
        accelerator = world.accelerator
        total = accelerator.reduce(torch.tensor(accelerator.process_index + 1)).item()
        found = {
            "backend": world.backend,
            "precision": world.precision,
            "num_machines": world.num_machines,
            "threads": (world.threads, torch.get_num_threads()),
            "processes": accelerator.num_processes,
            "rank": accelerator.process_index,
            "main": accelerator.is_main_process,
            "device": accelerator.device.type,
            "sum over ranks": total,
        }
    return found | {"group afterwards": dist.is_initialized()}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_world_is_what_was_started(size: int, tmp_path: Path) -> None:
    expected = {
        "backend": "gloo" if size > 1 else "none",
        "precision": "no",
        "num_machines": 1,
        "threads": (1, 1),
        "processes": size,
        "device": "cpu",
        "sum over ranks": size * (size + 1) // 2,
        "group afterwards": False,
    }
    found = run_world(size, what_stands, folder=tmp_path)
    assert found == [expected | {"rank": rank, "main": rank == 0} for rank in range(size)]


# --- Loners: faults row 23


def train_beside_a_group_of_one() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return just_train(proof_config())


def train_where_accelerate_sees_one_process() -> Any:
    """As under a launcher that it does not understand."""
    world.Accelerator = lambda **_: SimpleNamespace(num_processes=1)
    return just_train(proof_config())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (
            train_beside_a_group_of_one,
            "WORLD_SIZE=2: a process group of 1 exists already in this process;",
        ),
        (
            train_where_accelerate_sees_one_process,
            "WORLD_SIZE=2: but Accelerate formed a group of 1, so each process would train alone;",
        ),
    ],
)
def test_fault_23_processes_that_would_each_train_alone(
    train: Any, message: str, tmp_path: Path
) -> None:
    outcomes = LocalWorld(2, train, folder=tmp_path).outcomes()
    assert [error.code for error in outcomes] == [2, 2]
    [told] = [error for error in outcomes if error.agreed]
    assert isinstance(told, UsageError)
    assert str(told).startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_fault_23_one_that_was_promised_another_does_not_train_alone(tmp_path: Path) -> None:
    variables = launcher_variables(0, 2, free_port())
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ddp_mnist", "train", "--dataset", "digits", "--dist-timeout", "1"],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert time.monotonic() - started < 20  # importing torch takes most of it
    assert (done.returncode, done.stdout.split()[-2:]) == (6, ["2", "processes"])
    assert re.fullmatch(
        r"ddp-mnist: error: 127\.0\.0\.1:\d+: 1 of 2 processes came within 1 s; missing: rank 1;"
        r" start them, or check that they use this address \(code 6\)\n",
        done.stderr,
    )
    assert list(tmp_path.iterdir()) == []


def test_accelerate_has_to_know_of_all() -> None:
    accelerator: Any = SimpleNamespace(num_processes=2)
    check_world_size(PAIR, accelerator)
    accelerator.num_processes = 1
    with pytest.raises(UsageError, match=r"^WORLD_SIZE=2: .*use a config from accelerate_configs$"):
        check_world_size(PAIR, accelerator)


# --- Ranks that are not alike: faults row 22


def train_otherwise(what: str) -> Any:
    from ddp_mnist.data import cache
    from ddp_mnist.run import summary

    if os.environ["RANK"] == "1":
        versions, load = summary.package_versions(), cache.load
        if what == "torch":
            summary.package_versions = lambda: versions | {"torch": "2.0.0"}
        elif what == "the code's digest":
            summary.code_digest = lambda: "0123"
        else:
            cache.load = lambda *args, **more: dataclasses.replace(
                load(*args, **more), digest="4567"
            )
    return just_train(proof_config())


@pytest.mark.parametrize(
    ("what", "value"),
    [("torch", "2.0.0"), ("the code's digest", "0123"), ("the data's digest", "4567")],
)
def test_fault_22_ranks_with_other_packages_code_or_data_are_refused(
    what: str, value: str, tmp_path: Path
) -> None:
    outcomes = LocalWorld(2, train_otherwise, what, folder=tmp_path).outcomes()
    assert [error.code for error in outcomes] == [2, 2]
    [told] = [error for error in outcomes if error.agreed]
    assert re.match(rf"{what}: rank 0 has \S+, rank 1 has {value}; start every ", str(told))
    assert not (tmp_path / "run").exists()


# --- Ranks that are lost: faults rows 1 and 21


def train_and_fail(who: int, how: str) -> Any:
    """Trains; at step 5 rank `who` fails. Other ranks: their error and the seconds to it."""
    from ddp_mnist import train

    rate_of, reached = train.learning_rate, [0.0]

    def failing_rate(step: int, total_steps: int, peak: float, warmup: float) -> float:
        if step == 5:
            reached[0] = time.monotonic()
            if os.environ["RANK"] == str(who):
                fail(how)
        return rate_of(step, total_steps, peak, warmup)

    train.learning_rate = failing_rate
    try:
        just_train(proof_config())
    except Exception as error:
        return error, time.monotonic() - reached[0]


def fail(how: str) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exits 0":
        os._exit(0)
    elif how == "interrupted":
        raise KeyboardInterrupt
    raise ZeroDivisionError("a bug")


@pytest.fixture(scope="module", params=[(2, 0, "killed"), (3, 1, "killed"), (3, 2, "exits 0")])
def lost(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, int, list[Any], Path]:
    """World size, the rank that was lost, what became of the others, and the run folder."""
    size, who, how = request.param
    folder = tmp_path_factory.mktemp("lost")
    outcomes = LocalWorld(size, train_and_fail, who, how, folder=folder).outcomes()
    del outcomes[who]
    return size, who, outcomes, folder / "run"


def test_fault_01_a_lost_rank_ends_the_others_and_is_named(
    lost: tuple[int, int, list[Any], Path],
) -> None:
    size, who, outcomes, _ = lost
    assert [error.code for error, _ in outcomes] == [6] * (size - 1)
    assert max(seconds for _, seconds in outcomes) < SECONDS
    [told] = [error for error, _ in outcomes if error.agreed]
    assert isinstance(told, PeerError)
    assert str(told).startswith(f"lost contact with rank {who} of {size} (")
    assert str(told).endswith("; see what that process says, then start the run again")
    # whoever else is there has the first one's error
    assert all(str(error) == str(told) for error, _ in outcomes)


def test_fault_01_status_of_a_run_that_lost_a_rank(lost: tuple[int, int, list[Any], Path]) -> None:
    _, who, [[error, _], *_], run = lost
    status = read_json(run / "status.json")
    if who == 0:  # nobody is left who writes it
        assert status["state"] == "running"
    else:
        assert (status["state"], status["exit_code"]) == ("failed", 6)
        assert status["error"] == str(error)


@pytest.mark.parametrize("who", [0, 1], ids=["on rank 0", "on rank 1"])
def test_fault_21_a_bug_on_one_rank_ends_the_other_which_is_silent(
    who: int, tmp_path: Path
) -> None:
    outcomes = LocalWorld(2, train_and_fail, who, "raises", folder=tmp_path).outcomes()
    bug, _ = outcomes[who]
    assert isinstance(bug, ZeroDivisionError)
    other, seconds = outcomes[1 - who]
    assert seconds < SECONDS
    assert isinstance(other, FailedElsewhere)
    assert (str(other), other.code, other.agreed) == ("a bug", 1, False)


def test_an_interrupt_on_one_rank_ends_the_other(tmp_path: Path) -> None:
    [interrupted, [other, seconds]] = LocalWorld(
        2, train_and_fail, 0, "interrupted", folder=tmp_path
    ).outcomes()
    assert isinstance(interrupted, KeyboardInterrupt)
    assert isinstance(other, FailedElsewhere)
    assert other.code == 130
    assert seconds < SECONDS


def test_the_optimizer_does_not_look_for_a_package_in_each_step() -> None:
    store = Store(dist.HashStore(), 0, 1)
    make_accelerator(Distribution(), "cpu", "none", "no", store)
    accelerate.optimizer.is_lomo_available()
    with patch("importlib.util.find_spec") as look:
        assert not accelerate.optimizer.is_lomo_available()
    look.assert_not_called()


# --- Debugging aids of torch and Accelerate


def short_run() -> TrainConfig:
    told = proof_config("debugged", model="mlp")
    return dataclasses.replace(told, recipe=dataclasses.replace(told.recipe, epochs=1))


def test_a_debug_level_with_which_torch_crashes_is_refused(tmp_path: Path) -> None:
    detail = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    outcomes = LocalWorld(2, just_train, short_run(), folder=tmp_path, variables=detail).outcomes()
    version = torch.__version__
    if not version.startswith(CRASHES_IN_DETAIL):
        pytest.skip(f"torch {version} is not known to crash")
    assert [outcome.code for outcome in outcomes] == [2, 2]
    line = f"TORCH_DISTRIBUTED_DEBUG=DETAIL: makes torch {version} crash in DDP; use INFO"
    assert line in [str(outcome) for outcome in outcomes]
    assert list(tmp_path.iterdir()) == []
    [alone] = run_world(1, just_train, short_run(), folder=tmp_path, variables=detail)
    assert alone["steps"] == 15


def test_accelerate_may_check_the_shapes_of_what_the_ranks_send(tmp_path: Path) -> None:
    """What `accelerate launch --debug` sets. The net has no buffers, of which nothing is sent."""
    told, variables = short_run(), {"ACCELERATE_DEBUG_MODE": "true"}
    summary, _ = run_world(2, just_train, told, folder=tmp_path, variables=variables)
    assert summary["steps"] == 15
    assert (tmp_path / "debugged" / "model.safetensors").exists()
