"""Each finding of the doctor is provoked by an injected fault; a healthy machine provokes none."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import re
import signal
import socket
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ddp_mnist import cli
from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local import free_port, run_world
from ddp_mnist.cluster.nodes import Node
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config import Distribution
from ddp_mnist.data import cache
from ddp_mnist.doctor import collectives, examination, group, machine, network
from ddp_mnist.doctor.compare import against
from ddp_mnist.doctor.machine import Options
from ddp_mnist.errors import PeerError
from ddp_mnist.verify.results import (
    FAIL,
    PASS,
    WARN,
    CheckResult,
    failed,
    passed,
    warned,
    worst,
)
from ddp_mnist.verify.watch import watching

Patch = pytest.MonkeyPatch


def only(findings: Iterator[CheckResult]) -> CheckResult:
    [finding] = findings
    return finding


# --- One machine


def test_a_healthy_machine_is_found_healthy(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("192.0.2.7", 0))])
    options = Options(dataset="digits", cache_dir=str(tmp_path), run_dir=str(tmp_path), port=None)
    findings = list(machine.examine_machine(options))
    assert len(findings) == 13
    assert [str(finding) for finding in findings if finding.status != PASS] == []


def faulty_version(patch: Patch, _folder: Path) -> None:
    """torchvision requires one torch exactly; this is another one."""
    real = machine.importlib.metadata.version
    patch.setattr(
        machine.importlib.metadata,
        "version",
        lambda name: "2.13.0" if name == "torch" else real(name),
    )


def missing_package(patch: Patch, _folder: Path) -> None:
    patch.setattr(machine, "package_versions", lambda: {"python": "3", "accelerate": "missing"})
    patch.setattr(machine, "PACKAGES", ("accelerate",))


def default_config(patch: Patch, folder: Path) -> None:
    from accelerate.commands.config import config_args

    (folder / "default_config.yaml").write_text("mixed_precision: fp16\n")
    patch.setattr(config_args, "default_config_file", str(folder / "default_config.yaml"))


def gpu_without_driver(patch: Patch, folder: Path) -> None:
    (folder / "nvidia0").touch()
    (folder / "nvidiactl").touch()
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    patch.setattr(machine, "DEVICES", folder)


def wrong_product(patch: Patch, _folder: Path) -> None:
    real = torch.Tensor.__matmul__

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        result = real(a, b)
        if a.dtype == torch.float32:
            result[3, 5] += 1
        return result

    patch.setattr(torch.Tensor, "__matmul__", multiply)


def container_quota(patch: Patch, _folder: Path) -> None:
    patch.setattr("ddp_mnist.cluster.hardware.cpu_quota", lambda: 1.5)
    patch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def labelled_address(patch: Patch, _folder: Path) -> None:
    address = SimpleNamespace(family=socket.AF_INET, address="192.0.2.8")
    up = SimpleNamespace(isup=True)
    patch.setattr(machine.psutil, "net_if_addrs", lambda: {"eth9:vip": [address]})
    patch.setattr(machine.psutil, "net_if_stats", lambda: {"eth9": up})


def hidden_gpu(patch: Patch, folder: Path) -> None:
    gpu_without_driver(patch, folder)
    patch.setenv("CUDA_VISIBLE_DEVICES", "-1")


def one_core(patch: Patch, _folder: Path) -> None:
    patch.setattr(os, "sched_getaffinity", lambda _: {0})


def little_memory(patch: Patch, _folder: Path) -> None:
    patch.setattr("ddp_mnist.cluster.hardware.free_memory", lambda: 1e9)


def full_disk(patch: Patch, _folder: Path) -> None:
    usage = namedtuple("usage", "total used free")
    patch.setattr(machine.shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 10**7, 10**7))


def few_handles(patch: Patch, _folder: Path) -> None:
    import resource

    patch.setattr(resource, "getrlimit", lambda _: (256, 4096))


def folders_are_files(_patch: Patch, folder: Path) -> None:
    (folder / "file").touch()


def no_hub(patch: Patch, _folder: Path) -> None:
    patch.setattr("ddp_mnist.data.sources.why_out_of_reach", lambda _: "no route to host")


def loopback_name(patch: Patch, _folder: Path) -> None:
    patch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    patch.setattr(machine, "interface_towards", lambda *_: "eth7")


def nameless(patch: Patch, _folder: Path) -> None:
    def unknown(*_: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    patch.setattr(socket, "getaddrinfo", unknown)


def no_such_interface(patch: Patch, _folder: Path) -> None:
    patch.setenv("GLOO_SOCKET_IFNAME", "ib9")


def nothing(_patch: Patch, _folder: Path) -> None:
    pass


MACHINE_FAULTS: list[tuple[Callable[[Patch, Path], None], Any, str, str, str]] = [
    (faulty_version, machine.packages, FAIL, "torchvision needs torch>=", "make venv"),
    (missing_package, machine.packages, FAIL, "accelerate is missing", "make venv"),
    (default_config, machine.default_config, WARN, "used in silence", "--config_file"),
    (gpu_without_driver, machine.gpus, FAIL, "1 in /dev, but torch", "update the driver"),
    (wrong_product, machine.processor, FAIL, "1 wrong numbers in a matrix", "do not train here"),
    (container_quota, machine.cores, WARN, "1 core (its control group allows 1.5", "at most 1"),
    (labelled_address, machine.interfaces, PASS, "eth9:vip (192.0.2.8)", ""),
    (hidden_gpu, machine.gpus, PASS, "hidden by CUDA_VISIBLE_DEVICES=-1", ""),
    (one_core, machine.cores, WARN, "1 core, for 2 processes", "start at most 1"),
    (little_memory, machine.memory, FAIL, "1.0 GB free, for 2", "free 2.0 GB"),
    (full_disk, machine.shared_memory, WARN, "10 MB free in /dev/shm", "--shm-size"),
    (few_handles, machine.file_handles, WARN, "256 per process", "ulimit -n 4096"),
    (full_disk, machine.cache_folder, FAIL, "10 MB free, needs 200", "--cache-dir or DDP_MNI"),
    (full_disk, machine.run_folder, FAIL, "10 MB free, needs 50", "--run-dir"),
    (folders_are_files, machine.cache_folder, FAIL, "cannot be written (Not a dir", "--cache-dir"),
    (folders_are_files, machine.run_folder, FAIL, "cannot be written (Not a dir", "--run-dir"),
    (no_hub, machine.data_set, WARN, "Hub cannot be reached (no route to", "HF_ENDPOINT"),
    (loopback_name, machine.host_name, WARN, "is 127.0.1.1: other ma", "GLOO_SOCKET_IFNAME=eth7"),
    (nameless, machine.host_name, WARN, "has no address", "/etc/hosts"),
    (no_such_interface, machine.interfaces, FAIL, "GLOO_SOCKET_IFNAME=ib9", "unset it, or name"),
]


@pytest.mark.parametrize(
    ("inject", "examine", "status", "text", "fix"),
    MACHINE_FAULTS,
    ids=[f"{inject.__name__}-{examine.__name__}" for inject, examine, *_ in MACHINE_FAULTS],
)
def test_a_fault_of_the_machine_is_named(
    inject: Callable[[Patch, Path], None],
    examine: Callable[[Options], Iterator[CheckResult]],
    status: str,
    text: str,
    fix: str,
    monkeypatch: Patch,
    tmp_path: Path,
) -> None:
    options = Options(cache_dir=str(tmp_path / "file"), run_dir=str(tmp_path / "file"))
    inject(monkeypatch, tmp_path)
    finding = only(examine(options))
    monkeypatch.undo()
    assert finding.status == status
    assert text in finding.text
    assert fix in finding.fix


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = only(machine.main_port(Options(port=port)))
    assert (finding.status, finding.text) == (
        WARN,
        f"{port} cannot be opened (Address already in use)",
    )
    assert "MAIN_PROCESS_PORT" in finding.fix
    assert only(machine.main_port(Options(port=port))).status == PASS


@pytest.mark.parametrize(
    ("line", "status", "text"),
    [
        ("0, 580.10, 0, Not Active, 35", PASS, "driver 580.10, 35 C, no memory errors, full"),
        ("1, 580.10, 3, Not Active, 35", FAIL, "3 uncorrected memory errors"),
        ("2, 580.10, [N/A], Active, 91", WARN, "slowed down by its hardware at 91 C"),
    ],
)
def test_what_the_driver_tells_of_a_gpu(
    line: str, status: str, text: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{line}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    finding = only(machine.nvidia_smi())
    assert (finding.name, finding.status) == (f"GPU {line[0]}", status)
    assert text in finding.text


def test_data_in_the_cache_needs_no_hub(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("ddp_mnist.data.sources.why_out_of_reach", lambda _: "no route to host")
    cache.load("digits", str(tmp_path))
    finding = only(machine.data_set(Options(dataset="digits", cache_dir=str(tmp_path))))
    assert (finding.status, finding.text) == (PASS, "digits is in the cache")


def test_an_examination_that_fails_is_a_finding(monkeypatch: Patch) -> None:
    def broken(_options: Options) -> Iterator[CheckResult]:
        raise ValueError("no idea")
        yield

    monkeypatch.setattr(machine, "EXAMINATIONS", (broken, machine.file_handles))
    first, second = machine.examine_machine(Options())
    assert (first.status, first.name) == (FAIL, "broken")
    assert first.text == "could not be examined (ValueError: no idea)"
    assert second.status == PASS


# --- Processes that have met


def on_rank_1(*patches: Any) -> Any:
    """The patches, on rank 1 only."""
    stack = contextlib.ExitStack()
    for each in patches if os.environ["RANK"] == "1" else ():
        stack.enter_context(each)
    return stack


def spoilt(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Its result on this rank is off by one in one number."""

    def spoil(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = collective(tensor, *args, **kwargs)
        tensor.view(-1)[-1] += 1
        return result

    return spoil


def sent_wrong(payload: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """As if what this rank sends were damaged on its way."""
    return lambda *args: payload(*args) + (args[0] == 1)


def no_gather(*_: Any) -> Any:
    raise RuntimeError("this backend does not support gather")


def gather_and_deny(*args: Any) -> Any:
    """The other ranks' part of it works."""
    collectives.gather(*args)
    return no_gather()


def unsupported(*_: Any) -> Any:
    raise RuntimeError("NCCL error, unhandled\nLast error: Cuda failure 'operation not supported'")


def wrong_there(device: torch.device, name: str) -> CheckResult:
    with pytest.MonkeyPatch.context() as monkeypatch:
        wrong_product(monkeypatch, Path())
        return machine.product(device, name)


def other_data(*_: Any) -> Any:
    return dataclasses.replace(cache.load("digits"), digest="0" * 64)


def examine_with_faults() -> dict[str, list[CheckResult]]:
    """In one world, each examination with a fault; on rank 1 where nothing else is text."""
    flags, options = Distribution(cpu=True, dist_timeout=20), Options(dataset="digits")
    found: dict[str, list[CheckResult]] = {}
    with join_world(flags, find_launch(flags)) as world:
        here = group.Group(world)

        def examine(name: str, faults: Any, findings: Iterator[CheckResult]) -> None:
            with faults:
                found[name] = list(findings)

        same = group.same_everywhere
        versions, now = group.package_versions(), time.time
        older = {**versions, "torch": "2.14.0"}
        examine("healthy", on_rank_1(), same(here, options))
        examine(
            "version",
            on_rank_1(patch.object(group, "package_versions", lambda: older)),
            same(here, options),
        )
        examine(
            "code", on_rank_1(patch.object(group, "code_digest", lambda: "0")), same(here, options)
        )
        told = patch.dict(os.environ, NCCL_ALGO="Ring", GLOO_SOCKET_IFNAME="ib0")
        examine("variable", on_rank_1(told), same(here, options))
        examine(
            "data", on_rank_1(patch.object(group.cache, "cached", other_data)), same(here, options)
        )
        examine(
            "no data",
            on_rank_1(patch.object(group.cache, "cached", lambda *_: None)),
            same(here, options),
        )
        ahead = patch.object(time, "time", lambda: now() + 3600)
        examine("clock", on_rank_1(ahead), group.clocks(here))
        examine("right results", on_rank_1(), group.right_results(here))
        examine(
            "wrong sum",
            on_rank_1(patch.object(dist, "all_reduce", spoilt(dist.all_reduce))),
            group.right_results(here),
        )
        examine(
            "damaged",
            on_rank_1(patch.object(collectives, "payload", sent_wrong(collectives.payload))),
            group.right_results(here),
        )
        gather_is_absent = patch.dict(collectives.COLLECTIVES, gather=no_gather)
        examine("absent", gather_is_absent, group.right_results(here))
        lone_absence = patch.dict(collectives.COLLECTIVES, gather=gather_and_deny)
        examine("lacking", on_rank_1(lone_absence), group.right_results(here))
        broken = patch.dict(collectives.COLLECTIVES, {"all-reduce": unsupported})
        examine("broken", broken, group.right_results(here))
        impatient = patch.object(dist, "barrier", lambda: None)
        examine("barrier", impatient, group.right_results(here))
        dist.barrier()
        measured = group.compute_s(here.device)
        examine(
            "slow",
            on_rank_1(patch.object(group, "compute_s", lambda _: 3 * measured)),
            group.slowest(here),
        )
        too_hot = patch.object(group, "product", wrong_there)
        examine("hot", on_rank_1(too_hot), group.unwell_devices(here))
        lone = patch.object(group, "watching", lambda: watching("parameter"))
        short = patch.object(group, "EPOCHS", 1)
        with short:
            examine("parameter", lone, group.training(here, options))
            high = patch.object(group, "LEAST_ACCURACY", 1.1)
            examine("accuracy", high, group.training(here, options))
            easy = patch.object(group, "LEAST_ACCURACY", 0.0)
            with easy:
                examine("burn-in", on_rank_1(), group.burn_in(here, options, 0.01))
                examine("bad burn-in", lone, group.burn_in(here, options, 0.01))
        examine("speeds", on_rank_1(), group.speeds(here))
        idle = hardware.Load(0.3, 2, ["python"])
        examine("idle", patch.object(hardware, "load", lambda: idle), group.load(here))
        assert here.busy == ""
        busy = hardware.Load(1.6, 2, ["python", "cc1plus"])
        examine("busy", patch.object(hardware, "load", lambda: busy), group.load(here))
        examine("busy speeds", on_rank_1(), group.speeds(here))
        examine("busy computing", on_rank_1(), group.slowest(here))
        examine("busy training", short, group.training(here, options))
        here.busy = ""
        few = patch.object(machine, "EXAMINATIONS", (machine.cores, machine.main_port))
        with few:
            examine("machine", on_rank_1(), group.machines_alone(here, options))
            narrow = patch.object(os, "sched_getaffinity", lambda _: {0})
            examine("narrow machine", narrow, group.machines_alone(here, options))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[CheckResult]]:
    """What both ranks found alike."""
    folder = tmp_path_factory.mktemp("doctor")
    cache.load("digits")
    first, second = run_world(2, examine_with_faults, folder=folder)
    for name in first:
        assert [(f.status, f.name) for f in first[name]] == [
            (f.status, f.name) for f in second[name]
        ], name
    return first


@pytest.mark.parametrize(
    ("fault", "status", "name", "text", "fix"),
    [
        ("version", FAIL, "same", "torch: rank 0 has 2.1", "the same everywhere"),
        ("version", FAIL, "same", "2.14.0", "everywhere"),
        ("variable", FAIL, "same", "NCCL_ALGO=Ring", "everywhere"),
        ("code", FAIL, "same", "the code of ddp_mnist: rank 0 has", "the same everywhere"),
        ("data", FAIL, "same", "the data of digits: rank 0 has", "the same everywhere"),
        ("no data", WARN, "same data", "not cached", "ddp-mnist prepare on each machine"),
        ("clock", WARN, "clocks", "3,600 s apart: rank", "NTP"),
        ("wrong sum", FAIL, "all-reduce", "wrong result on rank 1 (", "do not train here"),
        ("lacking", FAIL, "gather", "rank 1 (", "same versions everywhere"),
        ("broken", FAIL, "all-reduce", "Cuda failure 'operation not supported'", "NCCL_DEBUG"),
        ("barrier", FAIL, "barrier", "wrong result on rank 0 (", "do not train here"),
        (
            "busy",
            WARN,
            "load",
            ": other programs hold 1.6 of 2 cores (python, cc1plus)",
            "end them",
        ),
        ("slow", WARN, "slow rank", "rank 1 (", "throttling"),
        ("parameter", FAIL, "training", "other weights than rank 0's on rank 1 (", "verify"),
        ("accuracy", FAIL, "training", "which is below 1.1", "verify"),
        ("narrow machine", WARN, "cores", ": 1 core, for 2 processes", "start at most 1"),
        ("hot", FAIL, "cpu", "rank 1 (", "overheating"),
        ("bad burn-in", FAIL, "burn-in", "first of 1 faults: training, other weights", "verify"),
    ],
)
def test_a_fault_of_the_group_is_named(
    fault: str, status: str, name: str, text: str, fix: str, found: dict[str, list[CheckResult]]
) -> None:
    finding = next(each for each in found[fault] if each.status != PASS)
    assert (finding.status, finding.name) == (status, name)
    assert text in finding.text
    assert fix in finding.fix


def test_a_damaged_transfer_shows_in_every_collective(found: dict[str, list[CheckResult]]) -> None:
    wrong = [each.name for each in found["damaged"] if each.status == FAIL]
    assert wrong == list(collectives.COLLECTIVES)  # but for the barrier, which carries nothing


def test_a_collective_that_the_backend_lacks_is_no_fault(
    found: dict[str, list[CheckResult]],
) -> None:
    [finding] = found["absent"]
    assert finding.status == PASS
    assert finding.text.endswith("; gloo has no gather")


def test_a_healthy_group_is_found_healthy(found: dict[str, list[CheckResult]]) -> None:
    for name in ("healthy", "right results", "burn-in", "speeds", "machine"):
        [finding] = found[name]
        assert finding.status == PASS, str(finding)
    assert found["right results"][0].text == (
        f"right on every rank: {', '.join(collectives.COLLECTIVES)}, barrier"
    )
    assert found["machine"][0].text.endswith(": 1 examination, all well")  # for both ranks
    assert re.match(r"\d rounds in 0.01 minutes, all right, ", found["burn-in"][0].text)
    assert list(found["speeds"][0].figures) == [
        f"all-reduce of {size}, ms" for size in ("1 KB", "64 KB", "1 MB", "16 MB")
    ]


@pytest.mark.parametrize(("flags", "shown"), [([], "0"), (["--cpu"], "")])
def test_on_the_cpu_the_doctor_shows_nobody_a_gpu(
    flags: list[str], shown: str, monkeypatch: Patch
) -> None:
    """One that is broken, or somebody else's alone, would fail each process's first step."""
    seen: list[str] = []

    def look() -> int:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("ddp_mnist.cluster.hardware.gpus", look)
    monkeypatch.setattr(examination, "examine", lambda *_, **__: [])
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", "--dataset", "digits", *flags])
    assert (ended.value.code, seen) == (0, [shown])


def test_gloo_sends_from_main_memory(monkeypatch: Patch) -> None:
    """Its send and recv know no tensor of a GPU; NCCL's know nothing else."""
    moved: list[str] = []
    for name in ("send", "recv"):
        monkeypatch.setattr(dist, name, lambda tensor, _: moved.append(tensor.device.type))
    for backend, device in (("gloo", "cpu"), ("nccl", "meta")):
        monkeypatch.setattr(dist, "get_backend", lambda named=backend: named)
        with contextlib.suppress(NotImplementedError):  # nothing to compare on a meta device
            collectives.send_recv(0, 2, torch.device("meta"))
        assert set(moved) == {device}
        moved.clear()


def test_speeds_of_a_busy_machine_say_so(found: dict[str, list[CheckResult]]) -> None:
    [idle] = found["idle"]
    assert (idle.status, idle.text) == (PASS, "other programs hold 15% of the cores")
    for name in ("speeds", "computing", "training"):
        finding = found[f"busy {name}"][0]
        assert ", on a busy machine" in finding.text, str(finding)
    for name in ("speeds", "slow", "parameter", "accuracy", "burn-in"):
        assert "busy machine" not in found[name][0].text


def kill_rank_1(*_: Any) -> list[CheckResult]:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return []


def fail_on_rank_1(*_: Any) -> list[CheckResult]:
    if os.environ["RANK"] == "1":
        raise PeerError("lost contact with rank 0; start the run again")
    return []


def break_down(*_: Any) -> collectives.Pair:
    if os.environ["RANK"] == "1":
        raise RuntimeError("no route to host")
    return torch.zeros(1), torch.zeros(1)


def examine_until_it_breaks_down(dataset: str) -> list[CheckResult]:
    with patch.dict(collectives.COLLECTIVES, scatter=break_down):
        flags = Distribution(cpu=True, dist_timeout=5)
        options = Options(dataset=dataset)
        return group.examine_group(flags, find_launch(flags), options, machines_too=False)


def test_what_was_found_before_a_break_down_is_kept(tmp_path: Path) -> None:
    for findings in run_world(2, examine_until_it_breaks_down, "digits", folder=tmp_path):
        names = [finding.name for finding in findings]
        assert names[:4] == ["rendezvous", "same", "clocks", "load"]
        assert worst(findings) == FAIL
    assert findings[4].name == "scatter"
    assert findings[4].text.startswith("fails on rank 1 (")
    assert findings[4].text.endswith("no route to host")


def two_on_gloo(flags: Distribution, *_: Any) -> list[CheckResult]:
    return [passed("backend", flags.backend)]


def test_one_gpu_is_shared_by_two_processes(monkeypatch: Patch) -> None:
    monkeypatch.setattr("ddp_mnist.cluster.hardware.gpus", lambda: 1)
    monkeypatch.setattr("ddp_mnist.cluster.local.gpus", lambda: 1)
    monkeypatch.setattr(examination, "as_member", two_on_gloo)
    options = Options(processes=examination.default_processes())
    assert options.processes == 2
    [finding] = examination.examine_processes(Distribution(), options, minutes=0, verbose=False)
    assert finding.text == "gloo"


@pytest.mark.parametrize(
    ("member", "text", "fix"),
    [
        (kill_rank_1, "2 of this machine: ConnectionError: was killed", "dmesg"),
        (fail_on_rank_1, "lost contact with rank 0", "start the run again"),
    ],
)
def test_processes_that_end_early_are_a_finding(
    member: Callable[..., Any], text: str, fix: str, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(examination, "as_member", member)
    [finding] = examination.examine_processes(Distribution(), Options(), minutes=0, verbose=False)
    assert (finding.status, finding.name, finding.text) == (FAIL, "processes", text)
    assert fix in finding.fix


# --- The way between machines


def node(host: str, machine_rank: int = 0, port: int = 12345) -> Node:
    return Node(machine_rank, host, port, 2, 1, "multi_node_cpu", "doctor")


@pytest.mark.parametrize(
    ("host", "machine_rank", "status", "text", "fix"),
    [
        ("203.0.113.5", 0, FAIL, "203.0.113.5, which is no address of this machine", "own: 192"),
        ("no-such-host.invalid", 1, FAIL, "no-such-host.invalid has no address (", "/etc/hosts"),
        ("127.0.0.1", 0, WARN, "127.0.0.1, which only this machine can reach", "one of 192.0.2"),
        ("192.0.2.7", 1, WARN, "192.0.2.7, which is this machine's own", "address of machine 0"),
        ("192.0.2.7", 0, PASS, "192.0.2.7", ""),
        ("203.0.113.5", 1, PASS, "203.0.113.5", ""),
    ],
)
def test_the_main_address(
    host: str, machine_rank: int, status: str, text: str, fix: str, monkeypatch: Patch
) -> None:
    for module in ("doctor.network", "cluster.interfaces"):
        monkeypatch.setattr(f"ddp_mnist.{module}.own_addresses", lambda: {"192.0.2.7"})
    finding = network.main_address(node(host, machine_rank))
    assert (finding.status, finding.name) == (status, "main address")
    assert text in finding.text
    assert fix in finding.fix


def test_no_route_is_named(monkeypatch: Patch) -> None:
    assert network.route(node("127.0.0.1")).text == "to 127.0.0.1 over lo, from 127.0.0.1"
    monkeypatch.setattr(network, "address_towards", lambda *_: None)
    finding = network.route(node("203.0.113.5", 1))
    assert (finding.status, finding.text) == (FAIL, "none from this machine to 203.0.113.5")


def test_a_machine_that_does_not_come_is_named() -> None:
    port = free_port()
    *way, last = network.examine_way(node("127.0.0.1", port=port), timeout_s=1)
    assert [finding.name for finding in way] == ["main address", "route"]
    assert (last.status, last.name) == (FAIL, "meeting")
    assert "1 of 2 machines came within 1 s; missing: machine 1" in last.text
    port = free_port()
    *_, last = network.examine_way(node("127.0.0.1", 1, port), timeout_s=1)
    assert last.status == FAIL
    assert f"127.0.0.1:{port}: machine 1 of 2 reached nobody there within 1 s" in last.text


def meet_in_threads(second: Node, port: int) -> list[list[CheckResult]]:
    """What machine 0 and the second one find."""
    ways = (node("127.0.0.1", port=port), second)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda each: list(network.examine_way(each, timeout_s=10)), ways))


def test_two_machines_that_reach_each_other() -> None:
    port = free_port()
    for findings in meet_in_threads(node("127.0.0.1", 1, port), port):
        assert [finding.name for finding in findings][2:] == ["meeting", "connections"]
        assert worst(findings) == WARN  # both are this machine


def test_machines_that_were_told_different_numbers() -> None:
    port = free_port()
    two_each = dataclasses.replace(node("127.0.0.1", 1, port), nproc_per_node=2)
    text = [findings[-1].text for findings in meet_in_threads(two_each, port)]
    assert text[0].startswith("NPROC_PER_NODE: rank 0 has 1, rank 1 has 2")


def test_ports_that_a_firewall_drops_are_named(monkeypatch: Patch) -> None:
    """Machine 0 cannot reach machine 1, which can reach it."""
    monkeypatch.setattr(network, "CONNECT_S", 0.2)
    real = network.refusal
    asked = itertools.count()

    def refusal(address: str, port: int) -> str:
        return "timed out" if next(asked) == 0 else real(address, port)

    monkeypatch.setattr(network, "refusal", refusal)
    port = free_port()
    found = meet_in_threads(node("127.0.0.1", 1, port), port)
    assert all(findings[-1].status == FAIL for findings in found)
    text = " / ".join(findings[-1].text for findings in found)
    assert text.count("cannot be reached at 127.0.0.1:") == 1
    assert text.count("cannot reach all others") == 1


def test_a_closed_port_is_refused() -> None:
    assert network.refusal("127.0.0.1", free_port()) == "Connection refused"
    assert network.refusal(None, 1) == "it has no address"


# --- The verdict

HERE = [
    passed("speed", "fast", {"all-reduce, ms": 2.0, "images/s": 900.0}),
    warned("clocks", "apart", "set them"),
]


def saved(**figures: float) -> dict[str, Any]:
    return {"findings": [{"figures": figures}], "processes": 2}


def test_speeds_are_compared_with_those_of_another_box() -> None:
    there = saved(**{"all-reduce, ms": 1.4, "images/s": 1000.0})
    findings = against(HERE, there, tolerance=0.5, processes=2)
    assert [finding.status for finding in findings] == [PASS, PASS]
    assert findings[0].text == "all-reduce, ms: 2 here, 1.4 there (within 50%)"
    there = saved(**{"all-reduce, ms": 1.3, "images/s": 1400.0})
    slow, low = against(HERE, there, tolerance=0.5, processes=2)
    assert (slow.status, slow.text) == (FAIL, "all-reduce, ms: 2 here, 1.3 there, worse by 54%")
    assert (low.status, low.text) == (FAIL, "images/s: 900 here, 1400 there, worse by 56%")
    [other] = against(HERE, saved(**{"all-gather, ms": 1.0}), tolerance=0.5, processes=2)
    assert (other.status, other.text) == (WARN, "not measured here: all-gather, ms")
    assert against(HERE, saved(**{"images/s": 0.0}), tolerance=0.5, processes=2) == []
    [other] = against(HERE, there, tolerance=0.5, processes=8)
    assert (other.status, other.text[:33]) == (WARN, "8 processes here, 2 there: speeds")


def test_a_speed_that_is_worse_on_a_busy_machine_says_so() -> None:
    busy = warned("load", "box0: other programs hold 1.6 of 2 cores (cc1)", "end them")
    there = saved(**{"all-reduce, ms": 1.9, "images/s": 1400.0})
    same, low = against([*HERE, busy], there, tolerance=0.5, processes=2)
    assert (same.status, same.text) == (PASS, "all-reduce, ms: 2 here, 1.9 there (within 50%)")
    assert (low.status, low.text) == (
        FAIL,
        "images/s: 900 here, 1400 there, worse by 56%, on a busy machine"
        " (box0: other programs hold 1.6 of 2 cores (cc1))",
    )
    assert low.fix.startswith("check again while nothing else runs; if it stays, look for")
    there["findings"].append(dataclasses.asdict(busy))
    first, *rest = against(HERE, there, tolerance=0.5, processes=2)
    assert (first.status, first.name) == (WARN, "against")
    assert "measured while it was busy (box0: other programs hold 1.6 of 2 cores" in first.text
    assert "busy" not in " ".join(finding.text for finding in rest)


def test_the_worst_finding_is_the_verdict() -> None:
    assert worst([]) == PASS
    assert worst(HERE) == WARN
    assert worst([*HERE, failed("disk", "full", "free it")]) == FAIL


def test_a_finding_is_told_in_eighty_columns() -> None:
    told = str(failed("main address", "host-a has no address " * 8, "give another one " * 9))
    lines = told.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("FAIL  main address   host-a has")
    assert [line for line in lines if "->" in line] == [line for line in lines if "-> give" in line]
    assert "\n".join(lines).count("->") == 1


def doctor(
    capsys: pytest.CaptureFixture[str], monkeypatch: Patch, findings: list[CheckResult], *argv: str
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the verb, whose examination finds these."""
    monkeypatch.setattr(examination, "examine", lambda *_, **__: list(findings))
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *argv])
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


def test_the_verb(capsys: pytest.CaptureFixture[str], monkeypatch: Patch, tmp_path: Path) -> None:
    file = str(tmp_path / "here.json")
    code, out, err = doctor(capsys, monkeypatch, HERE, "--save", file)
    assert (code, err) == (0, "")
    assert out == "verdict: WARN\n"
    bad = [*HERE, failed("disk", "full", "free it")]
    code, out, err = doctor(capsys, monkeypatch, bad, "--json", "--against", file)
    assert code == 1
    assert err.startswith("ddp-mnist: error: doctor: 1 of 5 checks failed (disk); do what")
    told = json.loads(out)
    assert (told["verdict"], told["processes"]) == ("FAIL", 2)
    assert [finding["name"] for finding in told["findings"]] == [
        "speed",
        "clocks",
        "disk",
        "against",
        "against",
    ]


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["--processes", "1"], "--processes 1: must be at least 2"),
        (["--minutes", "-1"], "--minutes -1: must be at least 0"),
        (["--tolerance", "nan"], "--tolerance nan: must be a finite number of at least 0"),
        (["--save", "no/d.json"], "--save no/d.json: must be a file in a folder that is there"),
        (["--against", "no.json"], "--against no.json: cannot be read (No such file or director"),
        (["--against", "pyproject.toml"], "--against pyproject.toml: cannot be read (not from do"),
    ],
)
def test_a_wrong_flag_is_one_line(
    argv: list[str], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", *argv])
    assert ended.value.code == 2
    assert begins in capsys.readouterr().err
