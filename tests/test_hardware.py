"""The share of a machine that a container or its affinity leaves, by the files of Linux."""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_mnist import api
from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.device import choose_device, set_threads
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.run import TrainConfig
from ddp_mnist.doctor.machine_checks import capacity, product
from ddp_mnist.errors import UsageError
from ddp_mnist.system import limits, neighbours
from ddp_mnist.verbs.flags import Doctor
from tests.commands import python
from tests.training import what_it_says

GB = 10**9


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores with 16 GB free, without control groups."""
    monkeypatch.setattr("ddp_mnist.system.limits.CGROUP", tmp_path)
    monkeypatch.setattr("ddp_mnist.system.limits.OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GB))
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_groups_without_a_limit_change_nothing(groups: Path) -> None:
    for _ in range(2):  # none, and then one without a limit
        assert limits.cores() == 8
        assert limits.cpu_quota() == float("inf")
        assert limits.free_memory() == 16 * GB
        write(groups, own="0::/", cpu__max="max 100000", memory__max="max", memory__current="5")
        write(groups, memory__stat="inactive_file 0")


def test_a_container_has_the_cores_of_its_quota(groups: Path) -> None:
    for quota, cores in ((350000, 3), (150000, 1), (50000, 1)):
        write(groups, own="0::/", cpu__max=f"{quota} 100000")
        assert limits.cpu_quota() == quota / 100000
        assert limits.cores() == cores


def test_files_that_were_read_do_not_take_memory_away(groups: Path) -> None:
    write(groups, own="0::/", memory__max=str(3 * GB), memory__current=str(2 * GB))
    for inactive, free in ((0, GB), (GB // 2, 1.5 * GB)):
        write(groups, memory__stat=f"file 1\ninactive_file {inactive}")
        assert limits.free_memory() == free


def test_the_limit_of_a_group_around_ones_own_holds_too(groups: Path) -> None:
    write(groups, own="0::/slice/job")
    write(groups / "slice" / "job", cpu__max="max 100000", memory__max=str(8 * GB))
    for group in (groups / "slice" / "job", groups / "slice"):
        write(group, memory__current=str(2 * GB), memory__stat="inactive_file 0")
    write(groups / "slice", cpu__max="200000 100000", memory__max=str(4 * GB))
    assert limits.cores() == 2
    assert limits.free_memory() == 2 * GB


V1 = "3:memory:/docker/5e\n2:cpu,cpuacct:/docker/5e\n1:name=systemd:/docker/5e\n0::/docker/5e"
NO_LIMIT = str(2**63 - 4096)  # what the kernel shows


def test_an_older_hosts_groups_count_too(groups: Path) -> None:
    """In cgroup v1, with a hierarchy for each controller, beside an empty one of v2."""
    write(groups, own=V1)
    outer, inner = (groups / "cpu", groups / "cpu" / "docker" / "5e")
    write(outer, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    for quota, cores in (("-1", 8), ("350000", 3), ("50000", 1)):
        write(inner, cpu__cfs_quota_us=quota, cpu__cfs_period_us="100000")
        assert limits.cpu_quota() == (float("inf") if quota == "-1" else int(quota) / 100000)
        assert limits.cores() == cores
    # a container may see its own group as the outermost, under the name that the host gave it
    shutil.rmtree(outer / "docker")
    write(outer, cpu__cfs_quota_us="150000")
    assert limits.cpu_quota() == 1.5

    memory = groups / "memory" / "docker"
    statistics = f"inactive_file 0\ntotal_inactive_file {GB // 2}"
    for group, limit in ((memory, NO_LIMIT), (memory / "5e", str(3 * GB))):
        write(group, memory__limit_in_bytes=limit, memory__usage_in_bytes=str(2 * GB))
        write(group, memory__stat=statistics)
    assert limits.free_memory() == 1.5 * GB
    write(memory / "5e", memory__limit_in_bytes=NO_LIMIT)
    assert limits.free_memory() == 16 * GB


LIMITS = {
    "v1": [("cpu", "cpu.cfs_quota_us", "50000"), ("memory", "memory.limit_in_bytes", str(GB // 2))],
    "v2": [("", "cpu.max", "50000 100000"), ("", "memory.max", str(GB // 2))],
}


@pytest.fixture(params=LIMITS)
def real_groups(request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """Return real groups without a limit, in others with half a core and 0.5 GB. Needs root."""
    name, given = f"ddp_mnist-{os.getpid()}", LIMITS[request.param]
    groups = {limits.CGROUP / controller / name for controller, *_ in given}
    try:
        for group in groups:
            group.mkdir()
            (group / "inner").mkdir()
        for controller, file, limit in given:
            with (limits.CGROUP / controller / name / file).open("r+") as opened:
                opened.write(limit)
        yield [group / "inner" for group in groups]
    except OSError as error:
        pytest.skip(f"no control groups of {request.param} to write: {error}")
    finally:
        for group in groups:
            with contextlib.suppress(OSError):
                (group / "inner").rmdir()
                group.rmdir()


IN_REAL_GROUPS = """
import os, sys
for group in sys.argv[1:]:
    with open(f"{group}/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
from ddp_mnist.system import limits
from ddp_mnist.cluster import hardware
free = limits.free_memory()
held = b"x" * 10**8
print(limits.cpu_quota(), limits.cores(), round(free / 1e9, 1), held[0])
print(round((free - limits.free_memory()) / 1e8, 1))
"""


def test_real_groups_with_half_a_core_and_half_a_gigabyte(
    real_groups: list[Path], tmp_path: Path
) -> None:
    ended = python("-c", IN_REAL_GROUPS, *map(str, real_groups), folder=tmp_path)
    assert (ended.err, ended.out.split()) == ("", ["0.5", "1", "0.5", "120", "1.0"])


def test_doctor_warns_of_less_than_a_core(groups: Path) -> None:
    write(groups, own="0::/", cpu__max="50000 100000")
    cores, memory, *_ = capacity(Doctor(processes=1))
    assert cores.status == "WARN"
    assert cores.text == "1 core (its control group allows 0.5 at once), for 1 process"
    assert memory.text == "16.0 GB free, for 1 process"
    assert cores.fix == "give this machine or container more cores"  # it cannot start fewer


def running(monkeypatch: pytest.MonkeyPatch, percent: list[float], **programs: float) -> None:
    """Let each core be busy to its `percent`, and each program run twice, with its percent each."""
    looks = iter((0, 1))

    def process_iter(_: list[str]) -> Iterator[Any]:
        second = next(looks)
        for pid, (name, used) in enumerate([*programs.items()] * 2):
            yield SimpleNamespace(pid=pid, info={"name": name, "cpu_percent": used * second})
        yield SimpleNamespace(pid=os.getpid(), info={"name": "me", "cpu_percent": 900.0 * second})
        yield SimpleNamespace(pid=99, info={"name": "another user's", "cpu_percent": None})

    monkeypatch.setattr(neighbours.psutil, "process_iter", process_iter)
    monkeypatch.setattr(neighbours.psutil, "cpu_percent", lambda *_, **__: percent)


def test_what_other_programs_hold_is_named(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eight = [100.0, 100.0, 50.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    running(monkeypatch, eight, cc1plus=25, make=1, python=90, firefox=10)
    assert neighbours.cores_held() == (2.5, 8, ["python", "cc1plus"])
    running(monkeypatch, eight, make=1)
    assert neighbours.cores_held() == (2.5, 8, [])  # they came and went, or are not shown
    # of the cores that are its own
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3})
    running(monkeypatch, eight)
    assert neighbours.cores_held() == (0.5, 2, [])
    # a quota of 4 of 8: six are free, then two
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(groups, own="0::/", cpu__max="400000 100000")
    running(monkeypatch, [100.0, 100.0] + [0.0] * 6)
    assert neighbours.cores_held() == (0, 4, [])
    running(monkeypatch, [100.0] * 6 + [0.0] * 2)
    assert neighbours.cores_held() == (2, 4, [])


FORKS = """
import multiprocessing, os
from ddp_mnist.cluster import hardware

def say_if_forked():
    print(hardware.is_forked(), flush=True)

def say_so_once_imported_here():
    hardware.IMPORTED_BY = os.getpid()
    say_if_forked()

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    for kind in (multiprocessing, *map(multiprocessing.get_context, ("fork", "spawn"))):
        process = kind.Process(target=say_so_once_imported_here)
        process.start()
        process.join()
    if os.fork():
        os.wait()
    say_if_forked()  # the copy, and then the process that it was copied from
"""


def test_a_forked_process_is_known_whoever_forked_it(tmp_path: Path) -> None:
    """By multiprocessing, whose default on Linux it is, its contexts, and os.fork."""
    (tmp_path / "forks.py").write_text(FORKS)
    ended = python("forks.py", folder=tmp_path)
    assert (ended.err, ended.out.split()) == ("", ["True", "True", "False", "True", "False"])


def threads_of_a_run() -> tuple[bool, int]:
    del os.environ["OMP_NUM_THREADS"]  # a launcher's 1, which counts for several processes only
    return hardware.is_forked(), set_threads(find_launch(Distribution(cpu=True)), "cpu", 1)


def test_a_process_of_a_fork_server_computes_on_all_cores(tmp_path: Path) -> None:
    """As those of verify, doctor and bench do: their server has used no OpenMP."""
    [found] = run_world(1, threads_of_a_run, folder=tmp_path)
    assert found == (False, limits.cores())


# --- GPUs that torch cannot use


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty /dev, and nothing that hides GPUs."""
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    for name in hardware.HIDE_GPUS:
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "cuda", "rocm", "words"),
    [
        (
            ["nvidia0", "nvidia1", "nvidiactl"],
            "13.2",
            None,
            "2 in /dev, but torch .*CUDA 13.2\\) sees none",
        ),
        (["nvidia0"], None, None, "1 in .* \\(built for CPUs only\\) sees none"),
        (["kfd"], "13.2", None, "1 in .* \\(built for CUDA 13.2\\) sees none"),
        (["kfd"], None, "7.1", "1 in .* \\(built for ROCm 7.1\\) sees none"),
        (["dxg"], "13.2", None, "1 in .* sees none"),
    ],
)
def test_gpus_that_torch_does_not_see_are_told(
    names: list[str],
    cuda: str | None,
    rocm: str | None,
    words: str,
    devices: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A driver that is too old, a torch for CPUs, one for the GPUs of another maker."""
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", rocm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.unused_gpus() == ""
    assert (hardware.gpus_for_make(), capsys.readouterr().err) == (0, "")
    for name in names:
        (devices / name).touch()
    monkeypatch.setattr(hardware, "WSL_CUDA", devices / "libcuda.so.1")
    if "dxg" in names:
        assert hardware.unused_gpus() == ""  # Windows has a GPU, and no driver for CUDA
        (devices / "libcuda.so.1").touch()
    assert re.match(words, hardware.unused_gpus())
    assert hardware.gpus_for_make() == 0
    assert re.match(f"GPUs: {words}, so this trains on the CPU; ", capsys.readouterr().err)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.unused_gpus() == ""


def test_the_plan_tells_it_too(devices: Path, tmp_path: Path) -> None:
    (devices / "nvidia0").touch()
    [said] = run_world(1, said_beside, str(devices), folder=tmp_path)
    assert "GPUs: 1 in /dev, but torch (built for " in said
    assert f"sees none, so this trains on the CPU; {hardware.GPU_FIX}\n" in said


def said_beside(devices: str) -> str:
    """Return what a dry run prints beside GPUs that torch does not see."""
    hardware.DEVICES = Path(devices)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return what_it_says(TrainConfig.of({"dataset": "digits", "dry_run": True}))


def gpu_after_cpu(devices: str) -> list[Any]:
    """Return what two calls of a notebook come to, the first with cpu=True, or what one says."""
    hardware.DEVICES = Path(devices)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    found = list[Any]()
    for flags in ({"cpu": True}, {}, {"cpu": True}):
        try:
            found.append(api.train(dataset="digits", dry_run=True, quiet=True, **flags) or "ran")
        except UsageError as error:
            found.append(str(error))
    return found


def test_a_gpu_that_was_hidden_in_this_process_is_not_passed_over(
    devices: Path, tmp_path: Path
) -> None:
    assert run_world(1, gpu_after_cpu, str(devices), folder=tmp_path) == [["ran", "ran", "ran"]]
    (devices / "nvidia0").touch()
    [[_, refused, advised]] = run_world(1, gpu_after_cpu, str(devices), folder=tmp_path)
    assert re.match("GPU: an earlier run with cpu=True hid it .*; restart the kernel, or", refused)
    assert advised == "ran"


def test_a_divided_gpu_counts_as_often_as_cuda_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the cards of a machine in MIG mode by its driver; CUDA gives a process one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    for usable in (1, 8):
        monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda n=usable: n, raising=False)
        assert hardware.gpus() == usable


@pytest.mark.parametrize(
    ("name", "capability", "needs"),
    [
        ("Tesla V100", (7, 0), "7.0, and torch .* needs 7.5"),
        ("GTX 1080", (6, 1), "6.1, and torch .* needs 7.5"),
        ("Tesla T4", (7, 5), None),
        ("B200", (10, 0), None),
        ("newer", (13, 0), None),
    ],
)
def test_a_gpu_older_than_torchs_kernels_is_one_line(
    name: str, capability: tuple[int, int], needs: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90", "sm_120"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr("ddp_mnist.cluster.device.gpus", lambda: 1)
    if needs is None:
        assert hardware.too_old(0) == ""
        assert choose_device(Distribution()) == "cuda"
        return
    line = rf"^cuda:0: {name} has compute capability {needs}; install .*, or add --cpu$"
    with pytest.raises(UsageError, match=line):
        choose_device(Distribution())
    found = product(torch.device("cuda", 0))
    assert (found.status, found.name) == ("FAIL", "cuda:0")
    assert re.match(f"{name} has .*{needs}", found.text)
    assert found.fix.startswith(hardware.TOO_OLD_FIX)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["gfx90a"])  # ROCm's
    assert hardware.too_old(0) == ""


@pytest.mark.parametrize(
    ("own", "idle", "ranks", "fit"),
    [
        (0.95, 0.02, 1, 1),  # of two cores, as measured beside a program that takes one
        (1.95, 0.05, 1, 0),  # alone
        (1.1, 0.9, 1, 0),  # its own threads wait, and leave the cores idle
        (1.6, 0.0, 1, 0),  # a program that takes what is left
        (0.05, 0.0, 1, 1),  # never none
        (0.9, 2.2, 2, 0),  # two processes share what is idle
    ],
)
def test_threads_for_which_other_programs_leave_no_room_are_found_after_ten_seconds(
    own: float, idle: float, ranks: int, fit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def cores(**_: bool) -> list[Any]:
        mine = SimpleNamespace(idle=now * idle / 2, iowait=0.0)
        return [mine, mine, SimpleNamespace(idle=7 * now, iowait=0.0)]

    monkeypatch.setattr(neighbours, "affinity", lambda: {0, 1})
    monkeypatch.setattr(neighbours.psutil, "cpu_times", cores)
    monkeypatch.setattr(neighbours.time, "monotonic", lambda: now)
    monkeypatch.setattr(neighbours.time, "process_time", lambda: now * own)
    found = neighbours.Neighbours(2, ranks)
    now = 9.9
    assert found.judge() == 0
    now = 10.1
    assert found.judge() == fit
    assert found.judge() == 0  # each time over ten seconds more
