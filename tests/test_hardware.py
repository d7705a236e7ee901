"""What a container or its affinity leaves of a machine, from the files that Linux tells it in."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ddp_mnist import hardware

GB = 10**9


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores with 16 GB free, without control groups."""
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(
        hardware.psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GB)
    )
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.mark.usefixtures("groups")
def test_without_control_groups_all_of_the_machine_is_there() -> None:
    assert hardware.cores() == 8
    assert hardware.cpu_quota() == float("inf")
    assert hardware.free_memory() == 16 * GB


def test_groups_without_a_limit_change_nothing(groups: Path) -> None:
    write(groups, own="0::/", cpu__max="max 100000", memory__max="max", memory__current="5")
    assert hardware.cores() == 8
    assert hardware.free_memory() == 16 * GB


@pytest.mark.parametrize(("quota", "cores"), [(350000, 3), (150000, 1), (50000, 1)])
def test_a_container_has_the_cores_of_its_quota(groups: Path, quota: int, cores: int) -> None:
    write(groups, own="0::/", cpu__max=f"{quota} 100000")
    assert hardware.cpu_quota() == quota / 100000
    assert hardware.cores() == cores


@pytest.mark.parametrize(
    ("counted", "available", "found"), [(0, False, 0), (2, True, 2), (2, False, 0)]
)
def test_a_gpu_under_a_driver_that_is_too_old_is_none(
    counted: int, available: bool, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: counted)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert hardware.gpus() == found


def test_files_that_were_read_do_not_take_memory_away(groups: Path) -> None:
    write(groups, own="0::/", memory__max=str(3 * GB), memory__current=str(2 * GB))
    assert hardware.free_memory() == GB
    write(groups, memory__stat=f"file 1\ninactive_file {GB // 2}")
    assert hardware.free_memory() == 1.5 * GB


def test_the_limit_of_a_group_around_ones_own_holds_too(groups: Path) -> None:
    write(groups, own="0::/slice/job")
    write(groups / "slice" / "job", cpu__max="max 100000", memory__max=str(8 * GB))
    write(groups / "slice" / "job", memory__current=str(2 * GB))
    write(groups / "slice", cpu__max="200000 100000", memory__max=str(4 * GB))
    write(groups / "slice", memory__current=str(3 * GB))
    assert hardware.cores() == 2
    assert hardware.free_memory() == GB


def test_version_1_tells_each_controller_in_a_folder_of_its_own(groups: Path) -> None:
    write(groups, own="4:memory:/docker\n2:cpu,cpuacct:/docker")
    cpu, memory = groups / "cpu,cpuacct", groups / "memory"
    write(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")  # no limit
    write(cpu / "docker", cpu__cfs_quota_us="250000", cpu__cfs_period_us="100000")
    write(memory, memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes=str(9 * GB))
    limit, used = str(2 * GB), str(GB)
    write(memory / "docker", memory__limit_in_bytes=limit, memory__usage_in_bytes=used)
    write(memory / "docker", memory__stat=f"inactive_file 1\ntotal_inactive_file {GB // 4}")
    assert hardware.cores() == 2
    assert hardware.free_memory() == 1.25 * GB
