"""Each check of the doctor fails by an injected fault; on a healthy machine all pass."""

import contextlib
import dataclasses
import json
import os
import re
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from ddp_mnist import train
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import free_port, run_world
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.data import cache
from ddp_mnist.training.versions import code_digest
from ddp_mnist.verbs.check_result import FAIL, PASS, WARN, CheckResult
from ddp_mnist.verbs.doctor import collectives
from ddp_mnist.verbs.doctor import group_checks as group
from ddp_mnist.verbs.doctor import machine_checks as machine
from ddp_mnist.verbs.doctor import verb as checks
from ddp_mnist.verbs.flags import Doctor
from ddp_mnist.verbs.verify.mistakes import leave_out_last_parameter
from tests.commands import Ended, Typed
from tests.data_sets import flat, write_noise

Patch = pytest.MonkeyPatch
Found = dict[str, list[CheckResult]]

# --- One machine

HERE = Path("here")  # stands for the test's folder, which holds an empty file and a GPU's device
M, H = "ddp_mnist.verbs.doctor.machine_checks", "ddp_mnist.cluster.hardware"
USAGE = namedtuple("USAGE", "total used free")


def wrong_product(
    a: torch.Tensor, b: torch.Tensor, multiply: Any = torch.Tensor.__matmul__
) -> torch.Tensor:
    result = multiply(a, b)
    if a.dtype == torch.float32:
        result[3, 5] += 1
    return result


def always(value: Any) -> Any:
    return lambda *_, **__: value


OLD = {f"{M}.version_of": always("2.13")}
LITTLE = {"psutil.virtual_memory": always(SimpleNamespace(available=1e9))}
ONE_CORE = {"ddp_mnist.system.affinity.cores": always(1)}
NO_SUCH = {"GLOO_SOCKET_IFNAME": "lo,ib9"}
FULL_DISK = {f"{M}.shutil.disk_usage": always(USAGE(10**9, 10**9 - 10**7, 10**7))}
NO_GPUS_SEEN = {f"{H}.DEVICES": HERE, "CUDA_VISIBLE_DEVICES": None}
HIDDEN_GPU = NO_GPUS_SEEN | {"CUDA_VISIBLE_DEVICES": "-1"}
ONE_OF_8 = {f"{H}.gpus": always(1), f"{H}.gpus_shown": always(8), f"{H}.unused_gpus": always(None)}
ONE_OF_8 |= {
    "CUDA_VISIBLE_DEVICES": None,
    f"{M}.run_world": always([[]]),
    "torch.cuda.nccl.version": always((2, 30)),
}
NO_HUB = {"ddp_mnist.data.tables.why_out_of_reach": always("no route to host")}
TAKEN = {f"{M}.why_port_is_taken": always("Address already in use")}
PRODUCT = "torch.Tensor.__matmul__"
BROKEN = Mock(side_effect=RuntimeError("CUDA error: out of memory"))

# What is patched (names without a dot are environment variables), the check, and its result
MACHINE_FAULTS: list[tuple[dict[str, Any], Any, str]] = [
    (OLD, machine.software, "FAIL .* needs torch>=.*, found 2.13 -> .*make venv"),
    (NO_GPUS_SEEN, machine.processors, "FAIL GPUs: 1 in /dev, but torch .* -> update the driver"),
    (HIDDEN_GPU, machine.processors, "PASS GPUs: 1, hidden by CUDA_VISIBLE_DEVICES "),
    (ONE_OF_8, machine.processors, "WARN GPUs: 1 of the 8 in /dev, .* -> see nvidia-smi"),
    ({PRODUCT: wrong_product}, machine.processors, "FAIL cpu: .* 1 wrong numbers .* -> do not tra"),
    ({PRODUCT: BROKEN}, machine.processors, r"FAIL cpu: .* \(CUDA error: .* -> see nvidia-s"),
    (ONE_CORE, machine.capacity, "WARN cores: 1 core, for 2 processes -> start at most 1, or"),
    (LITTLE, machine.capacity, "FAIL memory: 1.0 .* -> free 2.0 GB"),
    (FULL_DISK, machine.capacity, "WARN shared memory: 10 MB free in /dev/shm -> .*--shm-size"),
    (FULL_DISK, machine.folders, "FAIL cache: .* 10 MB free, needs 200 -> .*--cache-dir or DDP_"),
    (FULL_DISK, machine.folders, "FAIL runs: .* 10 MB free, needs 50 -> .*--run-dir"),
    ({}, machine.folders, r"FAIL cache: .* cannot be written \(Not a dir.* -> .*--cache-dir"),
    ({}, machine.folders, r"FAIL runs: .* cannot be written \(Not a dir.* -> .*--run-dir"),
    (
        NO_HUB,
        machine.data_set,
        r"WARN data: .*Hub is out of .* \(no route to .* -> set HF_ENDPOINT",
    ),
    (TAKEN, machine.network, r"WARN main port: 12345 cannot .* \(Add.* -> .*MAIN_PROCESS_PORT"),
    (NO_SUCH, machine.network, "FAIL .* there is no interface ib9 -> unset"),
]


def line(result: CheckResult) -> str:
    return f"{result.status} {result.name}: {result.text} -> {result.fix}"


def only(results: Iterable[CheckResult | str]) -> CheckResult:
    [result] = checked(results)
    return result


def checked(results: Iterable[CheckResult | str]) -> list[CheckResult]:
    """Return the results without the lines that are shown between them."""
    return [each for each in results if isinstance(each, CheckResult)]


def test_a_healthy_machine_passes(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "DEFAULT_PORT", free_port())
    monkeypatch.setattr("ddp_mnist.system.affinity.cores", lambda: 2)  # this machine may have one
    cache.load("digits", str(tmp_path))
    options = Doctor(2, dataset="digits", cache_dir=str(tmp_path), run_dir=str(tmp_path))
    results = checked(machine.check_machine(options))
    assert len(results) >= 11
    assert [str(result) for result in results if result.status != PASS] == []
    assert "digits is in the cache" in [result.text for result in results]


@pytest.mark.parametrize(("faults", "check", "expected"), MACHINE_FAULTS)
def test_a_fault_of_the_machine_is_named(
    faults: dict[str, Any], check: Any, expected: str, tmp_path: Path
) -> None:
    for file in ("nvidia0", "nvidiactl", *([] if faults else ["file"])):
        (tmp_path / file).touch()
    options = Doctor(2, cache_dir=str(tmp_path / "file"), run_dir=str(tmp_path / "file"))
    with Patch.context() as monkeypatch:
        for name, value in faults.items():
            if "." in name:
                monkeypatch.setattr(name, tmp_path if value is HERE else value)
            elif value is None:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        assert len([result for result in check(options) if re.match(expected, line(result))]) == 1


def test_a_folder_that_training_refuses_is_a_failure_in_its_words(
    tmp_path: Path, typed: Typed
) -> None:
    own, cached = write_noise(tmp_path / "own", *flat()), tmp_path / "cache"
    options = Doctor(dataset=str(own), cache_dir=str(cached))
    command = ("train", "--dry-run", "--model", "mlp", "--dataset", own, "--cache-dir", cached)
    first, *_ = own.rglob("*.png")
    first.write_bytes(first.read_bytes()[:-60])
    wrong, refused = only(machine.data_set(options)), typed(*command)
    assert (wrong.status, wrong.name) == (FAIL, "data")
    assert refused.err == f"ddp-mnist: error: {wrong.text}; {wrong.fix} (code 3)\n"


# --- Processes that have connected


COLLECTIVES = ["broadcast", "all-reduce", "all-reduce (max)", "reduce", "all-gather", "gather"]
COLLECTIVES += ["scatter", "reduce-scatter", "all-to-all"]


def on_rank_1(fault: Any) -> Any:
    return fault if os.environ["RANK"] == "1" else contextlib.nullcontext()


def damaged(
    ranks: Iterable[int], parts: Any, device: Any, right: Any = collectives.payload
) -> torch.Tensor:
    """Return the payload as if what rank 1 sends were damaged on its way."""
    ranks = [*ranks]
    return right(ranks, parts, device) + (torch.tensor(ranks) == 1)[:, None, None]


def unsynchronised(*arguments: Any, build: Any = train.make_net) -> nn.Module:
    """Return a net whose last parameter DDP does not synchronise."""
    net = build(*arguments)
    leave_out_last_parameter(net)
    return net


def hot(device: torch.device) -> CheckResult:
    with patch.object(torch.Tensor, "__matmul__", wrong_product):
        return machine.product(device)


def faults_of_the_group(here: group.Group) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, fault and check: on rank 1 if the name does not say more."""
    digits = dataclasses.replace(cache.load("digits"), digest="0" * 64)
    older = {**group.package_versions(), "torch": "2.14.0"}
    variables = {"NCCL_ALGO": "Ring", "GLOO_SOCKET_IFNAME": "ib0"}
    none = contextlib.nullcontext()
    same, right = group.same_everywhere, group.right_results
    for name, fault, check in (
        ("same", none, same),
        ("version", patch.object(group, "package_versions", lambda: older), same),
        ("code", patch.object(group, "code_digest", lambda: "0"), same),
        ("variable", patch.dict(os.environ, variables), same),
        ("data", patch.object(group.cache, "cached", always(digits)), same),
        ("no data", patch.object(group.cache, "cached", always(None)), same),
        ("collectives", none, right),
        ("damaged", patch("ddp_mnist.verbs.doctor.collectives.payload", damaged), right),
        ("hot", patch.object(group, "product", hot), group.faulty_devices),
    ):
        yield name, on_rank_1(fault), check
    yield "broken", patch.object(dist, "all_reduce", Mock(side_effect=NOT_SUPPORTED)), right
    yield "barrier", patch.object(dist, "barrier", lambda: None), right
    dist.barrier()
    with patch.object(group, "LEAST_ACCURACY", 0.0):
        here.options = dataclasses.replace(here.options, minutes=0.001)
        yield "burn-in", none, group.burn_in
        yield "bad burn-in", patch.object(train, "make_net", unsynchronised), group.burn_in
    for name, busbw, rate in ((" unasked", None, None), ("", 0.01, 0.25), (" missed", 1e5, 0.35)):
        options = dataclasses.replace(here.options, expect_busbw=busbw, expect_tflops=rate)
        with patch.object(here, "options", options):
            yield f"speeds{name}", patch.object(collectives, "CALLS", 4), group.speeds
            for backend in ("gloo", "nccl"):
                with patch.object(here, "world", dataclasses.replace(here.world, backend=backend)):
                    rates = patch.object(group, "tflops", always(0.36 - 0.06 * here.rank))
                    yield f"{backend}{name}", rates, group.slowest
    yield "slow", patch.object(group, "tflops", always(0.3 - 0.2 * here.rank)), group.slowest
    yield "accuracy", patch.object(group, "LEAST_ACCURACY", 1.1), group.training
    with patch.object(machine, "CHECKS", (machine.capacity,)):
        for name, cpus in (("machine", {0, 1}), ("narrow machine", {0})):
            yield name, patch.object(os, "sched_getaffinity", always(cpus)), group.machines_alone


def check_with_faults() -> Found:
    """Check one group again and again, each time with another fault."""
    flags, found = Distribution(cpu=True, dist_timeout=20), Found()
    with patch.object(group, "EPOCHS", 1), join_world(flags, find_launch(flags)) as world:
        here = group.Group(world, Doctor(dataset="digits"))
        for name, fault, check in faults_of_the_group(here):
            with fault:
                found[name] = list(check(here))
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Return what rank 0 found."""
    cache.load("digits")
    return run_world(2, check_with_faults, folder=tmp_path_factory.mktemp("doctor"))[0]


NOT_SUPPORTED = RuntimeError("NCCL error\nLast error: Cuda failure 'operation not supported'")
FOUND = {
    "version": r"FAIL same: torch: rank 0 .* has 2.1.*; rank 1 \(.* 2.14.0 -> .* same everywhere",
    "variable": "FAIL same: NCCL_.* has none; rank 1 .* has NCCL_ALGO=Ring -> .* everywhere",
    "code": "FAIL same: the code of ddp_mnist: rank 0 .* has .*; rank 1 .* has 0 -> .* everywhere",
    "data": "FAIL same: the data of digits: rank 0 .* has .*; rank 1 .* has 0+ -> .* everywhere",
    "no data": r"WARN same data: .* rank 1 \(.* not cached -> run .* prepare --dataset .* on each",
    "damaged": r"FAIL broadcast: rank 0 \([^,]*\): wrong result -> do not train here",
    "broken": r"FAIL all-reduce: rank 0 .*, 1 \(.*\): Cuda failure 'operation not .*NCCL_DEBUG",
    "barrier": r"FAIL barrier: rank 0 \([^,]*\): wrong result -> do not train here",
    "slow": r"WARN computing: rank 1 \(.* 3.00 times .* time -> .*throttling",
    "accuracy": "FAIL training: .*, which is below 1.1 -> .*ddp-mnist verify",
    "narrow machine": "WARN cores: [^:]+: 1 core, for 2 processes -> start at most 1",
    "hot": r"FAIL cpu: rank 1 \(.* 1 wrong numbers .* -> .*overheating",
    "bad burn-in": r"FAIL burn-in: .*; first of 1 faults: training, .* on rank 1 \(.* -> .*verify",
    "machine": "PASS machine: [^:]+: 3 of 3 checks passed -> $",  # one line for both ranks
    "burn-in": "PASS burn-in: 1 round in 0.001 min, .* images/s at first and .* at last -> $",
    "same": "PASS same: versions, code and data of 2 processes are equal -> $",
    "collectives": "PASS collectives: right on every rank: broadcast, all-reduce, .*, barrier -> $",
}


@pytest.mark.parametrize(("fault", "expected"), FOUND.items())
def test_what_is_found_in_the_group(fault: str, expected: str, found: Found) -> None:
    results = found[fault]
    is_right = expected.startswith(PASS)
    result = only(results) if is_right else next(r for r in results if r.status != PASS)
    assert re.match(expected, line(result))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "speeds unasked",
            "PASS PASS .* 16 MB [0-9.]+ to [0-9.]+ GB/s, not judged: no --expect-busbw -> $",
        ),
        ("speeds", "PASS PASS .* GB/s, expected 0.01 GB/s -> $"),
        ("speeds missed", r"PASS FAIL .*, expected 100000 GB/s, less on rank 0 .*, 1 .* -> .*link"),
        (
            "gloo unasked",
            r"PASS PASS .* 0.3 to 0.36 TFLOP/s, not judged: no --expect-tflops -> $",
        ),
        ("gloo", r"PASS PASS .*, expected 0.25 TFLOP/s -> $"),
        ("gloo missed", r"PASS FAIL .*, expected 0.35 TFLOP/s, less on rank 1 [^,]* -> .*thrott"),
        ("nccl", r"WARN PASS .*, expected 0.25 TFLOP/s -> $"),  # 1.2 times the median
    ],
)
def test_a_vendors_figure_is_a_verdict_if_it_is_given(
    name: str, expected: str, found: Found
) -> None:
    first, second = found[name]
    told = f"{first.status} {second.status} {second.text} -> {second.fix}"
    assert re.match(expected, told)
    asked = "expected, GB/s" in second.figures or "expected, TFLOP/s" in second.figures
    assert asked == ("unasked" not in name)


def test_the_largest_message_and_the_best_round_are_judged() -> None:
    told: Any = SimpleNamespace(store=SimpleNamespace(who=str))
    for last, status in (([2.5, 3.0], "PASS"), ([1.0, 3.0], "FAIL")):
        rates = {"1 MB": [4.0 - each for each in last], "16 MB": last}
        assert group.rated(told, "busbw", "GB/s", rates, 2.0, "").status == status
    alone: Any = SimpleNamespace(
        world=SimpleNamespace(backend="gloo", accelerator=Mock()),
        store=SimpleNamespace(who=str, broadcast_from_rank0=lambda _, decide: decide()),
        options=SimpleNamespace(expect_tflops=0.3),
        device=torch.device("cpu"),
        gather=lambda mine: [mine],
    )
    with patch.object(group, "tflops", Mock(side_effect=[0.2, 0.4])):
        assert [result.status for result in group.slowest(alone)] == ["PASS", "PASS"]


def test_bus_bandwidth_is_that_of_nccl_tests(found: Found) -> None:
    times = {"1 KB": 1.0, "1 MB": 0.5, "256 MB": 2.0}
    assert collectives.busbw(times, 8) == pytest.approx({"1 MB": 3.670016, "256 MB": 234.881024})
    ms, gb_per_s = (result.figures for result in found["speeds"])
    slowest = gb_per_s["all-reduce of 16 MB, slowest rank, GB/s"]
    assert slowest == pytest.approx(2**24 / 1e6 / ms["all-reduce of 16 MB, ms"])
    assert slowest <= gb_per_s["all-reduce of 16 MB, fastest rank, GB/s"]
    assert gb_per_s["expected, GB/s"] == 0.01
    assert [*ms] == [f"all-reduce of {size}, ms" for size in ("1 KB", "64 KB", "1 MB", "16 MB")]


def test_a_damaged_transfer_shows_in_each_collective_that_carries_something(found: Found) -> None:
    assert sorted(result.name for result in found["damaged"]) == sorted(COLLECTIVES)


def check_with_an_error() -> tuple[list[CheckResult], float]:
    """Return what is found if a check ends with an error on rank 1."""
    error = Mock(side_effect=RuntimeError("no route to host"))
    flags, started = Distribution(cpu=True, dist_timeout=90), time.monotonic()
    with (
        on_rank_1(patch.object(group, "tflops", error)),
        patch.object(group, "CHECKS", (group.same_everywhere, group.slowest)),
    ):
        results = checks.check_together(Doctor(dataset="digits", json=True), flags, machines=False)
        return results, time.monotonic() - started


def test_an_error_on_one_rank_is_told_to_all_after_what_was_found_before(tmp_path: Path) -> None:
    both = run_world(2, check_with_an_error, folder=tmp_path)
    for results, seconds in both:
        assert seconds < 90  # --dist-timeout
        assert [result.name for result in results][:2] == ["rendezvous", "same"]
        assert FAIL in [result.status for result in results]
    [found] = [result for result in both[0][0] if result.status == FAIL]
    told = r"FAIL slowest: rank 1 \(.*\): no route to host -> see what the other"
    assert re.match(told, line(found))


# --- The verdict

RESULTS = [
    CheckResult(PASS, "speed", "fast", figures={"all-reduce, ms": 2.0}),
    CheckResult(WARN, "clocks", "apart", "set them"),
]


@pytest.fixture
def doctor(typed: Typed, monkeypatch: Patch) -> Callable[..., Ended]:
    """Return a function that runs the verb, of which the checks are given."""

    def run(results: list[CheckResult], *flags: object) -> Ended:
        monkeypatch.setattr(checks, "check_machine", always(results))
        monkeypatch.setattr(checks, "check_processes", always([]))
        return typed("doctor", *flags)

    return run


def test_the_verb(doctor: Callable[..., Ended]) -> None:
    shown = ["PASS  speed          fast", "WARN  clocks         apart", f"{' ' * 21}-> set them"]
    ended = doctor(RESULTS)
    assert (ended.code, ended.out.splitlines(), ended.err) == (0, [*shown, "verdict: WARN"], "")
    ended = doctor([*RESULTS, CheckResult(FAIL, "disk", "full", "free it")], "--json")
    assert ended.code == 1
    assert ended.err.startswith("ddp-mnist: error: doctor: 1 of 3 checks failed (disk); do what")
    verdict = json.loads(ended.out)
    assert (verdict["verdict"], verdict["processes"]) == ("FAIL", 2)
    assert [entry["name"] for entry in verdict["findings"]] == ["speed", "clocks", "disk"]
    assert verdict["findings"][0]["figures"] == {"all-reduce, ms": 2.0}
    assert verdict["code"] == code_digest()  # by which two machines' reports are compared


def test_on_the_cpu_the_doctor_shows_nobody_a_gpu(
    doctor: Callable[..., Ended], monkeypatch: Patch
) -> None:
    """One that is broken, or somebody else's alone, would fail each process's first step."""
    seen: list[str] = []

    def look() -> int:
        seen.append(os.environ["CUDA_VISIBLE_DEVICES"])
        return 0

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr("ddp_mnist.cluster.hardware.gpus", look)
    assert (doctor([], "--dataset", "digits").code, set(seen)) == (0, {"0"})
    seen.clear()
    assert (doctor([], "--dataset", "digits", "--cpu").code, set(seen)) == (0, {""})
