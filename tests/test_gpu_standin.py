"""What is decided on machines with GPUs, on ones that only seem to have them.

See `gpu_standin.py`: no kernel and no NCCL runs here; `make gpu-check` is for a real GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_mnist.run.folder import read_json
from tests.commands import REPOSITORY, Ended
from tests.conftest import pytest_configure
from tests.gpu_standin import machine

pytestmark = pytest.mark.system

KINDS: dict[str, dict[str, Any]] = {
    "one": {"gpus": 1},
    "two": {"gpus": 2},
    "old driver": {"gpus": 1, "works": False},
}
NO_GPU = "needs a GPU, and this machine shows none; use --config_file accelerate_configs"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nvml")


@pytest.fixture(scope="module")
def decided(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return by kind of machine what one process decides there, and those that meet."""

    def ask(kind: str) -> Any:
        meeting = ["--meet", str(KINDS[kind]["gpus"])] if KINDS[kind].get("works", True) else []
        ended = subprocess.run(
            [sys.executable, "-m", "tests.gpu_standin", folder, *meeting],
            env=machine(library, **KINDS[kind]),
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout.splitlines()[-1])

    folder = str(tmp_path_factory.mktemp("decided"))
    machine(library, 1)  # compiled once
    with ThreadPoolExecutor() as pool:
        return dict(zip(KINDS, pool.map(ask, KINDS), strict=True))


def make(target: str, env: dict[str, str], *flags: str, python: str = sys.executable) -> Ended:
    command = ["make", "--no-print-directory", target, f"PYTHON={python}", "VENV="]
    done = subprocess.run(
        [*command, f"ARGS={' '.join(flags)}"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        timeout=250,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


# --- One process


def test_gpus_are_those_that_torch_can_use(decided: dict[str, Any]) -> None:
    assert [decided[kind]["gpus"] for kind in ("one", "two", "old driver")] == [1, 2, 0]


@pytest.mark.parametrize(
    ("way", "with_gpu", "without"),
    [
        ("plain", ["cuda", "none", "fp16"], ["cpu", "none", "no"]),
        ("plain --cpu", ["cpu", "none", "no"], ["cpu", "none", "no"]),
        ("torchrun", ["cuda", "nccl", "fp16"], ["cpu", "gloo", "no"]),
        ("torchrun gloo", ["cuda", "gloo", "fp16"], ["cpu", "gloo", "no"]),
        ("srun", ["cuda", "nccl", "fp16"], ["cpu", "gloo", "no"]),
        ("tcp", ["cuda", "nccl", "fp16"], ["cpu", "gloo", "no"]),
    ],
)
def test_device_backend_and_precision(
    way: str, with_gpu: list[str], without: list[str], decided: dict[str, Any]
) -> None:
    assert [decided[kind][way] for kind in KINDS] == [with_gpu, with_gpu, without]


@pytest.mark.parametrize(
    ("config", "workers", "with_gpu", "without"),
    [
        ("single_gpu", 1, ["cuda", "none", "fp16"], "cpu"),
        ("multi_gpu", 2, ["cuda", "nccl", "fp16"], "multi_cpu"),
        ("multi_node", 2, ["cuda", "nccl", "fp16"], "multi_node_cpu"),
        ("cpu", 1, ["cpu", "none", "no"], None),
        ("multi_cpu", 2, ["cpu", "gloo", "no"], None),
        ("multi_node_cpu", 1, ["cpu", "gloo", "no"], None),
    ],
)
def test_the_stored_configurations(
    config: str,
    workers: int,
    with_gpu: list[str],
    without: str | None,
    decided: dict[str, Any],
) -> None:
    one, two, (number, reported) = (decided[kind]["yaml"][config] for kind in KINDS)
    assert one == two == [workers, with_gpu]
    assert number == workers
    if without:
        assert reported.endswith(f"{NO_GPU}/{without}.yaml")
    else:
        assert reported == with_gpu


def test_cpu_beats_the_precision_of_a_gpu_configuration(decided: dict[str, Any]) -> None:
    for kind in KINDS:
        assert decided[kind]["yaml --cpu"] == [1, ["cpu", "none", "no"]]
        [_, refused] = decided[kind]["yaml --cpu fp16"]
        assert refused.startswith("--mixed-precision fp16: ")
        assert refused.endswith("use bf16, no or auto")


def test_what_several_machines_and_the_doctor_start(decided: dict[str, Any]) -> None:
    one, two, old = (decided[kind] for kind in KINDS)
    assert one["node"] == ["multi_node", 1]
    assert two["node"] == ["multi_node", 2]
    assert old["node"] == ["multi_node_cpu", 1]
    assert one["doctor"] == [2, "gloo"]
    assert two["doctor"] == old["doctor"] == [2, "auto"]


def test_the_doctor_checks_gpus_without_keeping_them(decided: dict[str, Any]) -> None:
    two = ["PASS GPUs", "PASS cuda:0", "PASS cuda:1", "PASS GPU 0", "PASS GPU 1", "PASS cpu"]
    assert decided["two"]["doctor finds"] == two
    assert decided["one"]["doctor finds"] == ["PASS GPUs", "PASS cuda:0", "PASS GPU 0", "PASS cpu"]
    assert not decided["one"]["doctor opened one"]
    assert not decided["two"]["doctor opened one"]


def test_what_bench_starts(decided: dict[str, Any]) -> None:
    assert set(decided["two"]["bench"].values()) == {2}
    assert set(decided["old driver"]["bench"].values()) == {2}
    several = {what for what, processes in decided["one"]["bench"].items() if processes == 2}
    assert several == {"loop", "strategies"}  # the others compare within a process
    [note] = decided["one"]["bench says"]
    assert note.startswith("2 processes share the GPUs of this machine (1) over gloo: ")
    assert decided["two"]["bench says"] == decided["old driver"]["bench says"] == []
    one, refused = decided["one"]["bench launches"]
    assert one == "single_gpu"
    assert refused.startswith("--processes 2: a launched process needs a GPU of its own, and this")
    assert decided["two"]["bench launches"] == ["single_gpu", "multi_gpu"]
    assert decided["old driver"]["bench launches"] == ["multi_cpu", "multi_cpu"]


# --- Processes that have met


def places(met: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    assert {rank["DDP"] for rank in met} == {"DistributedDataParallel"}
    return [(rank["device"], rank["backend"], rank["local rank"]) for rank in met]


def test_two_processes_share_one_gpu_over_gloo(decided: dict[str, Any]) -> None:
    """The local rank stays what it is, for who verbose; DDP gets the number of the GPU."""
    met = decided["one"]["met"]["gloo"]
    assert places(met) == [("cuda:0", "gloo", "0"), ("cuda:0", "gloo", "1")]


@pytest.mark.parametrize(
    ("kind", "start"),
    [("one", "nccl"), ("one", "srun torchrun"), ("two", "the same GPU")],
)
def test_two_processes_on_one_gpu_are_refused_with_nccl(
    kind: str, start: str, decided: dict[str, Any]
) -> None:
    reported, codes = decided[kind]["met"][start]
    assert reported.startswith("--backend nccl: Duplicate GPU detected : rank ")
    assert "; give each process a GPU of its own, or share one with --backend gloo;" in reported
    assert codes == [2]


def test_two_gpus_are_taken_by_local_rank(decided: dict[str, Any]) -> None:
    met = decided["two"]["met"]["nccl"]
    assert places(met) == [("cuda:0", "nccl", "0"), ("cuda:1", "nccl", "1")]


@pytest.mark.parametrize("start", ["a GPU each", "srun"])
def test_processes_that_are_shown_a_gpu_each(start: str, decided: dict[str, Any]) -> None:
    met = decided["two"]["met"][start]
    assert places(met) == [("cuda:0", "nccl", "0"), ("cuda:0", "nccl", "1")]


def test_a_run_on_the_cpu_opens_no_gpu(decided: dict[str, Any]) -> None:
    met = decided["one"]["met"]["cpu"]
    assert places(met) == [("cpu:0", "gloo", "0"), ("cpu:0", "gloo", "1")]
    assert decided["one"]["met"]["verify"] == [False]


def test_the_plain_loop_works_on_its_own_gpu(decided: dict[str, Any]) -> None:
    assert decided["two"]["met"]["plain_ddp.py"] == [0, 1]


# --- Commands


@pytest.mark.parametrize(
    ("kind", "starts"),
    [
        ("two", "multi_gpu.yaml --num_processes 2 -m ddp_mnist train --dataset auto --lr 1"),
        (
            "old driver",
            "multi_cpu.yaml --num_processes 2 -m ddp_mnist train --dataset auto"
            " --mixed-precision auto --lr 1",
        ),
    ],
)
def test_make_train_takes_the_best_set_up(
    kind: str, starts: str, library: Path, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\ncase "$1" in -c) exec {sys.executable} "$@" ;; esac\necho "$@"\n'
    )
    python.chmod(0o755)
    env = machine(library, **KINDS[kind], computes=False)
    ended = make("train", env, "--lr", "1", python=str(python))
    assert ended.code == 0, ended.err
    assert ended.out.endswith(f"--config_file accelerate_configs/{starts}\n")


@pytest.mark.parametrize(
    ("computes", "flags", "found"),
    [
        (True, ["--epochs", "2"], ("cuda:0", "none", "fp16")),
        (False, ["--epochs", "2", "--cpu"], ("cpu", "none", "no")),
    ],
    ids=["one GPU", "one that is broken, --cpu"],
)
def test_make_train_on_one_gpu(
    computes: bool, flags: list[str], found: tuple[str, ...], library: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    flags = ["--dataset", "digits", "--model", "mlp", "--run-dir", str(run), *flags]
    ended = make("train", machine(library, 1, computes=computes), *flags)
    assert (ended.code, ended.err) == (0, "")
    summary = read_json(run / "summary.json")
    precision = "no" if summary["precision"] == "bf16" and not computes else summary["precision"]
    assert (summary["device"], summary["backend"], precision) == found
    assert summary["test_accuracy"] > 0.9


def test_make_doctor_accepts_one_gpu(library: Path) -> None:
    ended = make("doctor", machine(library, 1), "--dataset", "digits", "--json")
    assert ended.code == 0, ended.out + ended.err
    found = json.loads(ended.out)
    assert found["verdict"] in ("PASS", "WARN")
    said = {finding["name"]: finding["text"] for finding in found["findings"]}
    assert "2 processes on 1 machine connected within" in said["rendezvous"]
    assert said["rendezvous"].endswith("backend gloo, precision fp16")
    assert "send/recv" in said["collectives"]
    assert "equal weights on every rank" in said["training"]


def test_make_bench_on_one_gpu(library: Path) -> None:
    ended = make("bench", machine(library, 1), "--dataset", "digits", "--repeats", "5")
    assert (ended.code, ended.error_lines) == (0, []), ended.err
    assert ended.out.startswith("2 processes share the GPUs of this machine (1) over gloo: ")
    assert "train.py over plain_ddp.py" in ended.out


@pytest.mark.parametrize(
    ("expression", "shown"),
    [("", ""), ("not soak and not gpu", ""), ("system and not gpu", ""), ("gpu", "0")],
)
def test_the_tests_show_no_gpu_unless_they_are_for_one(
    expression: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    pytest_configure(config)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
