"""What needs a CUDA device: `make gpu-check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist import run_folder
from tests.commands import ACCELERATE, CONFIGS, TORCHRUN, TRAIN, python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
DIGITS = [*TRAIN, "--dataset", "digits", "--run-dir", "run"]


def summary_of(*arguments: str, folder: Path) -> dict[str, Any]:
    ended = python(*arguments, folder=folder)
    assert ended.code == 0, ended.err
    return run_folder.read_json(folder / "run" / "summary.json")


def test_single_gpu_trains_in_fp16(tmp_path: Path) -> None:
    summary = summary_of(*ACCELERATE, str(CONFIGS / "single_gpu.yaml"), *DIGITS, folder=tmp_path)
    assert (summary["device"], summary["precision"]) == ("cuda:0", "fp16")
    assert summary["test_accuracy"] >= 0.975
    # the loss scaler starts too high and skips a step or two: these are counted
    assert 0 <= summary["skipped_steps"] < 10


def test_nccl_with_one_process(tmp_path: Path) -> None:
    summary = summary_of(*TORCHRUN, "--nproc-per-node", "1", *DIGITS, folder=tmp_path)
    assert (summary["backend"], summary["world_size"]) == ("nccl", 1)
    assert summary["test_accuracy"] >= 0.975


def test_gloo_with_two_processes_on_one_gpu(tmp_path: Path) -> None:
    arguments = [*TORCHRUN, "--nproc-per-node", "2", *DIGITS, "--backend", "gloo"]
    summary = summary_of(*arguments, folder=tmp_path)
    assert (summary["backend"], summary["world_size"]) == ("gloo", 2)
    assert summary["test_accuracy"] >= 0.975


def test_more_processes_than_gpus_with_nccl_are_refused(tmp_path: Path) -> None:
    processes = str(torch.cuda.device_count() + 1)
    ended = python(*TORCHRUN, "--nproc-per-node", processes, *DIGITS, folder=tmp_path)
    [line] = ended.error_lines
    assert "share a GPU with --backend gloo" in line


def test_a_cpu_config_uses_no_gpu(tmp_path: Path) -> None:
    summary = summary_of(*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), *DIGITS, folder=tmp_path)
    assert (summary["device"], summary["backend"], summary["precision"]) == ("cpu", "gloo", "no")
