import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from ddp_mnist.cluster import world
from ddp_mnist.cluster.device import decide, has_native_bf16, set_threads
from ddp_mnist.cluster.failures import A_GPU_EACH, as_expected
from ddp_mnist.cluster.launch import Launch, find_launch
from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import choose_interface, join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import PeerError, UsageError
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.commands import CONFIGS
from tests.training import told_once, with_flags

Patch = pytest.MonkeyPatch

PAIR = Launch("torchrun", 0, 2, 0, 2, 1, "127.0.0.1", 29500, agent_store=True)

# --- Device, precision, backend


@pytest.mark.parametrize("launcher", [None, "", "no", "fp16", "bf16"])
@pytest.mark.parametrize("flag", [None, "auto", "no", "fp16", "bf16", "fp64"])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("native", [True, False])
def test_precision_in_effect(
    launcher: str | None, flag: str | None, device: str, native: bool, monkeypatch: Patch
) -> None:
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    monkeypatch.setattr("ddp_mnist.cluster.device.has_native_bf16", lambda _: native)
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: int(device == "cuda"))
    flags = Distribution(mixed_precision=flag)
    requested = flag or launcher or "auto"  # the flag beats the launcher
    if (requested, device) == ("fp16", "cpu"):
        with pytest.raises(UsageError, match="needs a GPU"):
            decide(flags, Launch())
        assert decide(flags, Launch(), full_precision=True).precision == "no"
        return
    auto = "bf16" if native else "fp16" if device == "cuda" else "no"
    expected = auto if requested == "auto" else requested
    assert decide(flags, Launch()).precision == expected


def test_which_processors_compute_in_bf16(monkeypatch: Patch) -> None:
    for capabilities, native in (
        ([(7, 5)], False),  # T4
        ([(8, 0)], True),  # A100
        ([(9, 0), (7, 0)], False),  # all ranks have to train alike
    ):
        monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda found=capabilities: len(found))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capabilities.__getitem__)
        assert has_native_bf16("cuda") is native
    for has_mkldnn in (True, False):  # torch's wheels for macOS have none
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda it=has_mkldnn: it)
        for names, native in ((["bf16"], has_mkldnn), (["amx_bf16"], has_mkldnn), ([], False)):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda n=names: dict.fromkeys(n, 1))
            assert has_native_bf16("cpu") is native


@pytest.mark.parametrize(
    ("launch", "config"),
    [
        (Launch("accelerate"), "cpu"),
        (PAIR, "multi_cpu"),
        (replace(PAIR, num_machines=2), "multi_node_cpu"),
    ],
)
def test_fault_25_fp16_on_a_cpu_names_the_config_to_use(
    launch: Launch, config: str, monkeypatch: Patch
) -> None:
    with pytest.raises(UsageError, match=r"^--mixed-precision fp16: needs a GPU; on a CPU use "):
        decide(Distribution(mixed_precision="fp16"), launch)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(
        UsageError, match=rf"^accelerate launch: .* --config_file .*/{config}\.yaml"
    ):
        decide(Distribution(), launch)
    assert decide(Distribution(cpu=True), launch).precision != "fp16"  # it overrides the YAML
    assert (CONFIGS / f"{config}.yaml").is_file()


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize(
    ("flag", "variable", "wants_cpu"),
    [(False, "no", False), (True, "no", True), (False, "True", True), (False, "1", True)],
)
def test_the_device(
    flag: bool, variable: str, wants_cpu: bool, has_gpu: bool, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", variable)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: int(has_gpu))
    expected = "cuda" if has_gpu and not wants_cpu else "cpu"
    monkeypatch.setattr("ddp_mnist.cluster.device.has_native_bf16", lambda _: True)
    assert decide(Distribution(cpu=flag), Launch()).device == expected
    # a request for the CPU hides the GPUs, before torch looks for them
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("" if wants_cpu else "0")


@pytest.mark.parametrize(
    ("flag", "launch", "device", "backend"),
    [
        ("auto", Launch(), "cpu", "none"),
        ("auto", PAIR, "cpu", "gloo"),
        ("auto", PAIR, "cuda", "nccl"),
        ("gloo", PAIR, "cuda", "gloo"),
        # a launcher that serves a store has formed a world, if only of one
        ("auto", replace(PAIR, world_size=1), "cpu", "gloo"),
    ],
)
def test_the_backend(
    flag: str, launch: Launch, device: str, backend: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("ddp_mnist.cluster.device.has_native_bf16", lambda _: True)
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: int(device == "cuda"))
    assert decide(Distribution(backend=flag), launch).backend == backend


def test_what_is_unknown_or_not_here_is_refused(monkeypatch: Patch) -> None:
    for launch in (PAIR, Launch()):
        with pytest.raises(UsageError, match=r"^--backend nccl: needs a GPU, and none is visible"):
            decide(Distribution(backend="nccl"), launch)
    with pytest.raises(UsageError, match=r"^--sync-bn: needs GPUs; on a CPU use --model cnn"):
        decide(Distribution(sync_bn=True), Launch())
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr("ddp_mnist.cluster.device.gpus", lambda: 1)
        on_a_gpu.setattr("ddp_mnist.cluster.device.has_native_bf16", lambda _: False)
        for precision in ("fp16", None):
            with pytest.raises(UsageError, match=r"^--comm-hook powersgd: .*; add --mixed-precisi"):
                decide(Distribution(comm_hook="powersgd", mixed_precision=precision), Launch())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    with pytest.raises(UsageError, match=r"^ACCELERATE_USE_CPU: ValueError: "):
        decide(Distribution(cpu=True), Launch())
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with pytest.raises(UsageError, match=r"^--mixed_precision fp8: choose from no, fp16, bf16$"):
        decide(Distribution(), Launch())
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(UsageError, match=r"^OMP_NUM_THREADS=many: ValueError: "):
        set_threads(Launch(), "cpu", 1)


# --- The machine


BY_TORCHRUN = Launch("torchrun", local_world_size=2)


@pytest.mark.parametrize(
    ("variable", "launch", "device", "here", "threads"),
    [
        ("", Launch(), "cpu", 1, 8),
        ("", Launch("tcp"), "cpu", 2, 4),
        ("", Launch("tcp"), "cpu", 100, 1),
        ("", Launch(), "cuda", 1, 1),
        ("1", Launch("torchrun"), "cpu", 2, 4),  # set by the launcher, of its own accord
        ("1", Launch("tcp"), "cpu", 2, 1),  # set by a person
        ("3", Launch("torchrun"), "cpu", 2, 3),
        ("4,2", Launch(), "cpu", 1, 4),  # OpenMP's form for nested regions
        # after the / what SLURM gave to the task: to each process ...
        ("/4", Launch("slurm"), "cpu", 2, 4),
        ("/16", Launch("slurm"), "cpu", 2, 8),  # more than it may use
        # ... or to the launcher
        ("1/4", BY_TORCHRUN, "cpu", 2, 2),
    ],
)
def test_set_threads(
    variable: str, launch: Launch, device: str, here: int, threads: int, monkeypatch: Patch
) -> None:
    given, _, of_task = variable.partition("/")
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", of_task)
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr("ddp_mnist.cluster.device.cores", lambda: 8)
    assert set_threads(launch, device, here) == threads
    assert set_to == [threads]
    assert os.environ["OMP_NUM_THREADS"] == str(threads)


SHARED_GPU = (
    "Failed to initialize NCCL communicator: invalid usage (run with NCCL_DEBUG=WARN for details)"
)
UNHANDLED = (
    "NCCL AllReduce failed: unhandled system error (run with NCCL_DEBUG=INFO for details) \n"
    "NCCL Last Error: socketPollConnect poll() timed out"
)


@pytest.mark.parametrize(
    ("text", "lost", "kind", "message"),
    [
        (SHARED_GPU, [], UsageError, f"--backend nccl: {SHARED_GPU}; {A_GPU_EACH}; "),
        (UNHANDLED, [1], PeerError, "lost contact with rank 1 of 2 (socketPoll"),
        # all ranks are there
        (UNHANDLED, [], PeerError, "lost contact with another rank of 2 (socketPoll"),
    ],
)
def test_nccls_own_reason_is_given(
    text: str, lost: list[int], kind: type[Exception], message: str, monkeypatch: Patch
) -> None:
    store = Store(dist.HashStore(), 0, 2)
    monkeypatch.setattr(store, "find_dead_ranks", lambda: lost)
    error = as_expected(store, RuntimeError(text))
    assert type(error) is kind
    assert str(error).startswith(message)
    assert "NCCL_DEBUG=WARN" in str(error)


GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("host", "towards", "before", "after"),
    [
        ("127.0.0.1", "lo", {}, {GLOO: "lo"}),
        ("unknown", None, {}, {}),
        ("h", "eth1", {GLOO: "mine"}, {GLOO: "mine", NCCL: "=eth1"}),
    ],
)
def test_choose_interface(
    host: str, towards: str | None, before: dict[str, str], after: dict[str, str]
) -> None:
    launch = Launch("tcp", 0, 2, main_host=host, main_port=9)
    with (
        patch.object(world, "interface_towards", lambda *_: towards),
        patch.dict(os.environ, before),
    ):
        for name in {GLOO, NCCL} - {*before}:
            os.environ.pop(name, None)
        choose_interface(launch, Store(dist.HashStore(), 0, 2))
        assert {name: os.environ[name] for name in (GLOO, NCCL) if name in os.environ} == after


# --- Loners: faults row 23


def train_beside_a_group_of_one() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return just_train(proof_config())


def train_where_accelerate_sees_one_process() -> Any:
    """Train as under a launcher that Accelerate does not understand."""
    world.Accelerator = lambda **_: SimpleNamespace(num_processes=1)
    return just_train(proof_config())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (train_beside_a_group_of_one, "a process group of 1 exists already in this process; start"),
        (train_where_accelerate_sees_one_process, "but Accelerate formed a group of 1, so each p"),
    ],
)
def test_fault_23_processes_that_would_each_train_alone(
    train: Any, message: str, tmp_path: Path
) -> None:
    outcomes = LocalWorld(2, train, folder=tmp_path).outcomes()
    reported = told_once(outcomes, 2)
    assert isinstance(reported, UsageError)
    assert str(reported).startswith(f"WORLD_SIZE=2: {message}")
    assert list(tmp_path.iterdir()) == []


# --- Ranks that are not alike: faults row 22


def train_otherwise(what: str) -> Any:
    from ddp_mnist.data import cache
    from ddp_mnist.training import saved_config

    config = proof_config()
    if os.environ["RANK"] == "1":
        versions, load = saved_config.package_versions(), cache.load
        if what == "--seed":
            config = with_flags(config, seed=5)
        elif what == "torch":
            saved_config.package_versions = lambda: versions | {"torch": "2.0.0"}
        elif what == "the code's digest":
            saved_config.code_digest = lambda: "0123"
        else:
            cache.load = lambda *args, **more: replace(load(*args, **more), digest="4567")
    return just_train(config)


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("--seed", "5"),
        ("torch", "2.0.0"),
        ("the code's digest", "0123"),
        ("the data's digest", "4567"),
    ],
)
def test_fault_22_ranks_with_other_flags_packages_code_or_data_are_refused(
    what: str, value: str, tmp_path: Path
) -> None:
    outcomes = LocalWorld(2, train_otherwise, what, folder=tmp_path).outcomes()
    reported = told_once(outcomes, 2)
    assert re.match(rf"{what}: rank 0 has \S+, rank 1 has {value}; start every ", str(reported))
    assert not (tmp_path / "run").exists()


def join_twice_beside_another_accelerator() -> list[str]:
    """Return the precision of a notebook's own Accelerator, of two worlds, and of its own again."""
    own = Accelerator(cpu=True, mixed_precision="bf16")
    found = [own.mixed_precision]
    for precision in ("no", "bf16"):
        flags = Distribution(cpu=True, mixed_precision=precision)
        with join_world(flags, find_launch(flags)) as here:
            found.append(here.accelerator.mixed_precision)
    with pytest.raises(UsageError, match=r"^no$"), join_world(flags, find_launch(flags)):
        raise UsageError("no")
    return [*found, own.mixed_precision, AcceleratorState().mixed_precision]


def test_a_world_leaves_the_accelerate_of_its_process_as_it_was(tmp_path: Path) -> None:
    """Else the next command of a notebook would be refused, or compute in this one's precision."""
    [found] = run_world(1, join_twice_beside_another_accelerator, folder=tmp_path)
    assert found == ["bf16", "no", "bf16", "bf16", "bf16"]
