"""What needs a CUDA device: `make gpu-check`."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist.cluster.failures import A_GPU_EACH
from ddp_mnist.run.folder import read_json
from tests.chaos import newest_step, wait_until, workers_of
from tests.commands import ACCELERATE, CONFIGS, TORCHRUN, TRAIN, Started, python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DIGITS = [*TRAIN, "--dataset", "digits", "--run-dir", "run"]


def summary_of(*arguments: str, folder: Path) -> dict[str, Any]:
    ended = python(*arguments, folder=folder)
    assert ended.code == 0, ended.err
    return read_json(folder / "run" / "summary.json")


def test_single_gpu_trains_in_fp16(tmp_path: Path) -> None:
    summary = summary_of(*ACCELERATE, str(CONFIGS / "single_gpu.yaml"), *DIGITS, folder=tmp_path)
    assert (summary["device"], summary["precision"]) == ("cuda:0", "fp16")
    assert summary["test_accuracy"] >= 0.975
    # the loss scaler starts too high and skips a step or two: these are counted
    assert 0 <= summary["skipped_steps"] < 10


@pytest.mark.parametrize(
    ("processes", "flags", "backend"), [("1", [], "nccl"), ("2", ["--backend", "gloo"], "gloo")]
)
def test_torchrun_on_one_gpu(
    processes: str, flags: list[str], backend: str, tmp_path: Path
) -> None:
    arguments = [*TORCHRUN, "--nproc-per-node", processes, *DIGITS, *flags]
    summary = summary_of(*arguments, folder=tmp_path)
    assert (summary["backend"], summary["world_size"]) == (backend, int(processes))
    assert summary["test_accuracy"] >= 0.975


def test_the_doctor_accepts_the_machine(tmp_path: Path) -> None:
    ended = python("-m", "ddp_mnist", "doctor", "--dataset", "digits", folder=tmp_path)
    assert ended.code == 0, ended.out


def test_more_processes_than_gpus_with_nccl_are_refused(tmp_path: Path) -> None:
    processes = str(torch.cuda.device_count() + 1)
    ended = python(*TORCHRUN, "--nproc-per-node", processes, *DIGITS, folder=tmp_path)
    [line] = ended.error_lines
    assert A_GPU_EACH in line


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fault_01_a_worker_killed_over_nccl_ends_the_other_with_code_6(tmp_path: Path) -> None:
    arguments = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *DIGITS, "--epochs", "5000"]
    started = Started([*arguments, "--checkpoint-every", "5"], tmp_path)
    wait_until(lambda: newest_step(tmp_path / "run"))
    workers_of(started)[1].kill()
    began = time.monotonic()
    ended = started.ended()
    assert time.monotonic() - began < 30  # when the launcher would kill the other one
    status = read_json(tmp_path / "run" / "status.json")
    assert (status["state"], status["exit_code"]) == ("failed", 6)
    [line] = ended.error_lines
    assert line.startswith("ddp-mnist: error: lost contact with rank 1 of 2 (")


def test_a_cpu_config_uses_no_gpu(tmp_path: Path) -> None:
    summary = summary_of(*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), *DIGITS, folder=tmp_path)
    assert (summary["device"], summary["backend"], summary["precision"]) == ("cpu", "gloo", "no")
