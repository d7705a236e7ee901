"""A machine's cores, threads and GPUs: how many are there for this process, and what is said."""

import multiprocessing
import os
import re
from pathlib import Path

import pytest
import torch

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.device import set_threads
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.system import affinity
from tests.commands import Typed

Captured = pytest.CaptureFixture[str]


def threads_of_a_run() -> tuple[bool, int]:
    del os.environ["OMP_NUM_THREADS"]  # a launcher's 1, which counts for several processes only
    set_threads(find_launch(Distribution(cpu=True)), "cpu", 1)
    return hardware.is_forked(), torch.get_num_threads()


def test_a_process_of_a_fork_server_computes_on_all_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of verify and doctor do: their server has used no OpenMP.

    A forked one may not: test_api.py forks some, and here only its signs are set.
    """
    [found] = run_world(1, threads_of_a_run, folder=tmp_path)
    assert found == (False, affinity.cores())
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda: "fork")
    for kind, is_forked in (("Process", True), ("ForkProcess", True), ("SpawnProcess", False)):
        monkeypatch.setattr(multiprocessing, "current_process", type(kind, (), {}))
        assert hardware.is_forked() == is_forked
    monkeypatch.setattr(hardware, "IMPORTED_BY", os.getppid())
    assert hardware.is_forked()


# --- GPUs that torch cannot use


def test_gpus_that_torch_does_not_see_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured, typed: Typed
) -> None:
    """A torch for CPUs, a driver that is too old: the plan of a run and make tell it."""
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    monkeypatch.delenv(hardware.HIDE_GPUS, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for names, cuda, words in (
        ("nvidia0", None, r"1 in .* \(built for CPUs only"),
        ("nvidia1 nvidiactl", "13.2", "2 in /dev, but .*CUDA 13.2"),
    ):
        for name in names.split():
            (tmp_path / name).touch()
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert hardware.gpus_for_make() == 0
        line = rf"GPUs: {words}\) sees none, so this trains on the CPU; update the driver, or .*\n"
        assert re.fullmatch(line, capsys.readouterr().err)
        assert re.search(line, typed("train", "--dataset", "digits", "--dry-run").out)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.unused_gpus() is None


def test_a_divided_gpu_counts_as_often_as_cuda_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the cards of a machine in MIG mode by its driver; CUDA gives a process one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for usable in (1, 8):
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda n=usable: n, raising=False)
        assert hardware.gpus() == usable
