"""What is decided on machines with GPUs, on ones that only seem to have them.

See `gpu_standin.py`: no kernel and no NCCL runs here; `make gpu-check` is for a real GPU.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddp_mnist.cluster.failures import A_GPU_EACH
from ddp_mnist.run.folder import read_json
from tests.commands import MAKE, REPOSITORY, Ended, Started
from tests.conftest import pytest_configure
from tests.gpu_standin import KINDS, machine

pytestmark = pytest.mark.system

NO_GPU = "needs a GPU, and none is visible here; use --config_file accelerate_configs"
GPU, NCCL = ["cuda", "none", "fp16"], ["cuda", "nccl", "fp16"]
CPU, GLOO = ["cpu", "none", "no"], ["cpu", "gloo", "no"]
DDP = "DistributedDataParallel"


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return by kind of machine what one process decides there, and those that meet."""
    command = ["-m", "tests.gpu_standin", str(tmp_path_factory.mktemp("decided"))]
    ended = Started(command, REPOSITORY, machine("one")).ended(250)
    assert ended.code == 0, ended.err
    assert not ended.error_lines
    found: dict[str, Any] = json.loads(ended.out.splitlines()[-1])
    return found


# --- One process


def test_gpus_are_those_that_torch_can_use(decided: dict[str, Any]) -> None:
    assert [decided[kind]["gpus"] for kind in KINDS] == [1, 2, 0]


def test_the_stored_configurations(decided: dict[str, Any]) -> None:
    for config, workers, with_gpu, without in (
        ("single_gpu", 1, GPU, "cpu"),
        ("multi_gpu", 2, NCCL, "multi_cpu"),
        ("multi_node", 2, NCCL, "multi_node_cpu"),
        ("cpu", 1, CPU, None),
        ("multi_cpu", 2, GLOO, None),
        ("multi_node_cpu", 1, GLOO, None),
    ):
        one, two, (number, reported) = (decided[kind]["yaml"][config] for kind in KINDS)
        assert one == two == [workers, with_gpu]
        assert number == workers
        if without:
            assert reported.endswith(f"{NO_GPU}/{without}.yaml, which ddp-mnist configs writes")
        else:
            assert reported == with_gpu


def test_one_process_for_two_is_refused(decided: dict[str, Any]) -> None:
    """That is what `accelerate launch --cpu --num_processes 2` starts, without a configuration."""
    for kind in KINDS:
        [refused] = decided[kind]["accelerate --cpu"]
        assert refused.startswith(
            "MASTER_ADDR=127.0.0.1: is set, but accelerate launch started one"
        )


def test_cpu_beats_the_precision_of_a_gpu_configuration(decided: dict[str, Any]) -> None:
    for kind in KINDS:
        assert decided[kind]["yaml --cpu"] == [1, CPU]
        [_, refused] = decided[kind]["yaml --cpu fp16"]
        assert refused.startswith("--mixed-precision fp16: ")
        assert refused.endswith("use bf16, no or auto")


def test_what_several_machines_the_doctor_and_bench_start(decided: dict[str, Any]) -> None:
    one, two, old = (decided[kind] for kind in KINDS)
    assert [one["node"], two["node"]] == [["multi_node", 1], ["multi_node", 2]]
    assert old["node"] == ["multi_node_cpu", 1]
    assert one["doctor"] == [2, "gloo"]
    assert two["doctor"] == old["doctor"] == [2, "auto"]
    assert two["bench"] == old["bench"] == [2, 2]
    assert one["bench"] == [1, 2]  # `bench loop` needs two, the others compare within a process


def test_the_doctor_checks_gpus_without_keeping_them(decided: dict[str, Any]) -> None:
    two = ["PASS GPUs", "PASS cuda:0", "PASS cuda:1", "PASS GPU 0", "PASS GPU 1", "PASS cpu"]
    assert decided["two"]["doctor finds"] == two
    assert decided["one"]["doctor finds"] == ["PASS GPUs", "PASS cuda:0", "PASS GPU 0", "PASS cpu"]
    own = ["PASS GPUs", "PASS cuda:0", "PASS GPU 1", "PASS cpu"]
    assert decided["two"]["doctor finds of its own"] == own
    assert not decided["one"]["doctor opened one"]
    assert not decided["two"]["doctor opened one"]


# --- Processes that have met


@pytest.mark.parametrize(
    ("kind", "start", "devices", "backend"),
    [
        # the local rank stays what it is, for who prints; DDP gets the number of the GPU
        ("one", "gloo", ("cuda:0", "cuda:0"), "gloo"),
        ("one", "cpu", ("cpu:0", "cpu:0"), "gloo"),
        ("two", "nccl", ("cuda:0", "cuda:1"), "nccl"),
        # processes that are shown a GPU each
        ("two", "a GPU each", ("cuda:0", "cuda:0"), "nccl"),
        ("two", "srun", ("cuda:0", "cuda:0"), "nccl"),
    ],
)
def test_the_places_of_two_processes(
    kind: str, start: str, devices: tuple[str, ...], backend: str, decided: dict[str, Any]
) -> None:
    places = [[device, backend, str(rank), DDP] for rank, device in enumerate(devices)]
    assert decided[kind]["met"][start] == places


def test_two_processes_on_one_gpu_are_refused_with_nccl(decided: dict[str, Any]) -> None:
    for kind, start in (("one", "nccl"), ("two", "the same GPU")):
        reported, codes = decided[kind]["met"][start]
        refused = "--backend nccl: Failed to initialize NCCL communicator: invalid usage (run with"
        assert reported.startswith(refused)
        assert f"; {A_GPU_EACH};" in reported
        assert codes == [2]


def test_a_proof_opens_no_gpu_and_the_plain_loop_its_own(decided: dict[str, Any]) -> None:
    assert decided["one"]["met"]["verify"] == [False]
    assert decided["two"]["met"]["plain_ddp.py"] == [[0, "nccl"], [1, "nccl"]]
    assert decided["one"]["met"]["plain_ddp.py"] == [[0, "gloo"], [0, "gloo"]]  # they share it


# --- Commands


def test_the_textbooks_loop_uses_no_gpu_that_torch_cannot_use() -> None:
    # the least that it needs
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    variables = machine("old driver") | alone
    ended = Started(["docs/textbook_ddp.py"], REPOSITORY, variables).ended()
    assert ended.code == 0, ended.err
    assert "test, each row once     : " in ended.out


@pytest.mark.parametrize(
    ("kind", "starts"),
    [
        ("two", "multi_gpu.yaml --num_processes 2"),
        ("old driver", "multi_cpu.yaml --num_processes 2"),
    ],
)
def test_make_train_takes_the_best_set_up(
    kind: str, starts: str, decided: dict[str, Any], tmp_path: Path
) -> None:
    """It asks hardware.gpus(), whose answer there `decided` has."""
    python = tmp_path / "python"
    answer = f"echo {decided[kind]['gpus']}"
    python.write_text(f'#!/bin/sh\ncase "$*" in -c*gpus*) {answer} ;; *) echo "$@" ;; esac\n')
    python.chmod(0o755)
    ended = make_train(kind, "--lr 1", python)
    assert ended.code == 0, ended.err
    trains = "-m ddp_mnist train --dataset auto --mixed-precision auto --lr 1"
    assert ended.out.endswith(f"--config_file accelerate_configs/{starts} {trains}\n")


def test_make_train_on_one_gpu(tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = f"--dataset digits --model mlp --epochs 2 --run-dir {run}"
    make_train("one", flags, Path(sys.executable)).succeeds()
    summary = read_json(run / "summary.json")
    found = (summary["device"], summary["backend"], summary["precision"])
    assert found == ("cuda:0", "none", "bf16")
    assert summary["test_accuracy"] > 0.9


def make_train(kind: str, flags: str, python: Path) -> Ended:
    command = [*MAKE, "train", f"PYTHON={python}", f"ARGS={flags}"]  # the last PYTHON counts
    return Started(command, REPOSITORY, machine(kind), program=None).ended()


def test_the_doctor_accepts_one_gpu(decided: dict[str, Any]) -> None:
    found = decided["one"]["doctor prints"]
    assert found["verdict"] in ("PASS", "WARN")
    said = {finding["name"]: finding["text"] for finding in found["findings"]}
    assert "2 processes on 1 machine connected within" in said["rendezvous"]
    assert said["rendezvous"].endswith("backend gloo, precision bf16")
    assert "all-to-all" in said["collectives"]
    assert "equal weights on every rank" in said["training"]


def test_verify_compares_the_gpu_with_the_cpu(decided: dict[str, Any]) -> None:
    *_, one, two, last = decided["one"]["verify prints"].splitlines()
    assert one == "PASS  GPU            1 process: weights on cuda:0, 45 steps, off by 0.0e+00"
    assert two.startswith("PASS  GPU            2 processes: weights on cuda:0, 45 steps, off")
    assert last.startswith("all 12 checks passed; ")


def test_bench_on_one_gpu(decided: dict[str, Any]) -> None:
    printed = decided["one"]["bench prints"]
    assert printed.startswith("2 processes share the GPUs of this machine (1) over gloo: ")
    assert "train.py over plain_ddp.py" in printed


def test_the_tests_show_no_gpu_unless_they_are_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for expression, shown in (("", ""), ("not soak and not gpu", ""), ("gpu", "0")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        pytest_configure(Mock(**{"option.markexpr": expression}))
        assert os.environ["CUDA_VISIBLE_DEVICES"] == shown
