"""What can be found out on one machine alone, before any process group forms."""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.interfaces import interface_towards, is_loopback, why_port_is_taken
from ddp_mnist.cluster.local import run_world
from ddp_mnist.data import cache, sources
from ddp_mnist.run.environment import PACKAGES, package_versions
from ddp_mnist.run.summary import count
from ddp_mnist.verify.results import CheckResult, failed, passed, warned

MB = 1e6
CACHE_MB, RUNS_MB = 200, 50  # a decoded MNIST and its lock; three checkpoints and the rest
PROCESS_MB = 1000  # of a training process, with what torch maps
HANDLES = 1024
DEVICES = Path("/dev")


@dataclass(frozen=True)
class Options:
    """What is to be examined.

    Attributes:
        dataset, cache_dir: as for train.
        run_dir: the folder in which runs would be made.
        processes: how many would train on this machine.
        port: the main port; None if it is in use rightly.
    """

    dataset: str = "mnist"
    cache_dir: str | None = None
    run_dir: str = "runs"
    processes: int = 2
    port: int | None = 12345


def examine_machine(options: Options) -> Iterator[CheckResult]:
    """One or more findings of each kind. An examination that fails is a finding too."""
    for examine in EXAMINATIONS:
        try:
            yield from examine(options)
        except Exception as error:  # whatever it is, the rest is still worth knowing
            name = examine.__name__.replace("_", " ")
            what = f"could not be examined ({type(error).__name__}: {error})"
            yield failed(name, what, "see whether this machine is whole")


# --- Software


def packages(_: Options) -> Iterator[CheckResult]:
    """Each package is there, in a version that the others are made for."""
    there = package_versions()
    broken = [f"{name} is missing" for name, found in there.items() if found == "missing"]
    for package in PACKAGES:
        broken += unmet(package) if there[package] != "missing" else []
    shown = ", ".join(f"{name} {found}" for name, found in there.items())
    if broken:
        fix = "install the versions of constraints.txt: make clean, then make venv"
        yield failed("packages", "; ".join(broken), fix)
    else:
        yield passed("packages", shown)


def unmet(package: str) -> list[str]:
    """What `package` requires and does not find, such as a torchvision made for another torch."""
    broken = []
    for line in importlib.metadata.requires(package) or []:
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found == "none" or not requirement.specifier.contains(found, prereleases=True):
            broken.append(f"{package} needs {requirement.name}{requirement.specifier}, not {found}")
    return broken


def default_config(_: Options) -> Iterator[CheckResult]:
    """accelerate uses a default configuration in silence when no --config_file is given."""
    from accelerate.commands.config import config_args

    path = config_args.default_config_file
    if Path(path).exists():
        yield warned(
            "accelerate",
            f"{path} is used in silence by a launch without --config_file",
            "give --config_file accelerate_configs/..., or remove it",
        )
    else:
        yield passed("accelerate", "no default configuration that would be used in silence")


# --- Processors and memory


def gpus(_: Options) -> Iterator[CheckResult]:
    """Whether torch sees those that are there, and each computes a product right."""
    there, mine = len(list(DEVICES.glob("nvidia[0-9]*"))), hardware.gpus()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not mine:
        if there and hidden is not None:
            by = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden else "--cpu, or CUDA_VISIBLE_DEVICES="
            yield passed("GPUs", f"{there}, hidden by {by}")
        elif there:
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
            fix = "update the driver, or install the torch that fits it"
            what = f"{there} in /dev, but torch (built for {built}) sees none"
            yield failed("GPUs", what, fix)
        else:
            yield passed("GPUs", "none; training runs on the CPU, with gloo")
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    part = f" of {there} in /dev" if there > mine else ""
    yield passed("GPUs", f"{mine}{part}, CUDA {torch.version.cuda}, NCCL {nccl}")
    if not dist.is_initialized():  # else each rank examines its own
        yield from run_world(1, gpu_products, folder=Path.cwd())[0]
    yield from nvidia_smi()


def gpu_products() -> list[CheckResult]:
    """Of each GPU, in a process of its own: whoever opened one keeps it open until the end.

    In the compute mode EXCLUSIVE_PROCESS that would keep out the processes that are started next.
    """
    numbers = range(hardware.gpus())
    return [product(torch.device("cuda", n), torch.cuda.get_device_name(n)) for n in numbers]


def nvidia_smi() -> Iterator[CheckResult]:
    """What the driver tells of each GPU: memory errors, and clocks that it holds back."""
    fields = "index,driver_version,ecc.errors.uncorrected.volatile.total"
    fields += ",clocks_event_reasons.hw_slowdown,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        fix = "see whether it runs in a shell"
        yield warned("driver", f"nvidia-smi tells nothing ({type(error).__name__})", fix)
        return
    for line in done.stdout.splitlines():
        number, driver, errors, slowdown, celsius = (cell.strip() for cell in line.split(","))
        name = f"GPU {number}"
        if errors.isdecimal() and int(errors):
            yield failed(name, f"{errors} uncorrected memory errors", "reset or replace it")
        elif slowdown == "Active":
            yield warned(name, f"slowed down by its hardware at {celsius} C", "cool or power it")
        else:
            yield passed(name, f"driver {driver}, {celsius} C, no memory errors, full clocks")


def processor(_: Options) -> Iterator[CheckResult]:
    yield product(torch.device("cpu"), hardware.cpu_model())


def product(device: torch.device, name: str) -> CheckResult:
    """A matrix product of small whole numbers, which is exact in float32 in any order."""
    stream = torch.Generator().manual_seed(0)
    a, b = torch.randint(-8, 9, (2, 512, 512), generator=stream)
    wrong = ((a.float().to(device) @ b.float().to(device)).cpu() != (a @ b).float()).sum().item()
    if wrong:
        fix = "do not train here; look for overheating, overclocking, bad memory"
        return failed(str(device), f"{name}: {wrong} wrong numbers in a matrix product", fix)
    return passed(str(device), f"{name}: a matrix product is right")


def cores(options: Options) -> Iterator[CheckResult]:
    """Cores that this process may keep busy, after affinity and a container's quota."""
    mine, quota = hardware.cores(), hardware.cpu_quota()
    limit = "" if math.isinf(quota) else f" (its control group allows {quota:g} at once)"
    what = f"{count(mine, 'core')}{limit}, for {options.processes} processes"
    if mine < options.processes and not hardware.gpus():
        fix = f"start at most {mine}, or give this machine or container more cores"
        yield warned("cores", what, fix)
    else:
        yield passed("cores", what)


def memory(options: Options) -> Iterator[CheckResult]:
    free, needed = hardware.free_memory(), options.processes * PROCESS_MB * MB
    what = f"{free / 1e9:.1f} GB free, for {options.processes} processes"
    if free < needed:
        fix = f"free {needed / 1e9:.1f} GB, or start fewer processes"
        yield failed("memory", what, fix)
    else:
        yield passed("memory", what)


def shared_memory(_: Options) -> Iterator[CheckResult]:
    """NCCL passes gradients between the GPUs of a machine through /dev/shm."""
    if not (DEVICES / "shm").is_dir():
        return
    free = shutil.disk_usage(DEVICES / "shm").free
    needed = 1000 * MB if hardware.gpus() > 1 else 32 * MB
    what = f"{free / MB:,.0f} MB free in /dev/shm"
    if free < needed:
        yield warned("shared memory", what, "for docker: --shm-size 2g, or --ipc host")
    else:
        yield passed("shared memory", what)


def file_handles(_: Options) -> Iterator[CheckResult]:
    if os.name != "posix":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < HANDLES:
        fix = f"ulimit -n {HANDLES if hard < 0 else min(hard, 65536)}"
        yield warned("file handles", f"{soft} per process, which many ranks use up", fix)
    else:
        yield passed("file handles", f"{soft if soft >= 0 else 'any number of'} per process")


# --- Disks and data


def cache_folder(options: Options) -> Iterator[CheckResult]:
    folder = cache.cache_folder(options.cache_dir)
    yield writable("cache", folder, CACHE_MB, "--cache-dir or DDP_MNIST_CACHE")


def run_folder(options: Options) -> Iterator[CheckResult]:
    yield writable("runs", Path(options.run_dir), RUNS_MB, "--run-dir")


def writable(name: str, folder: Path, needed_mb: float, flag: str) -> CheckResult:
    """Writes, and measures the room, in `folder` or in the one in which it would be made."""
    there = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        what = f"{folder}: cannot be written ({error.strerror})"
        return failed(name, what, f"mend permissions or free space, or name another with {flag}")
    free = shutil.disk_usage(there).free
    if free < needed_mb * MB:
        what = f"{folder}: {free / MB:,.0f} MB free, needs {needed_mb:,.0f}"
        return failed(name, what, f"free space, or name another with {flag}")
    return passed(name, f"{folder}: writable, {free / 1e9:,.1f} GB free")


def data_set(options: Options) -> Iterator[CheckResult]:
    """In the cache, or to be had; from the Hub or the mirror that HF_ENDPOINT names."""
    source = sources.find_source(options.dataset)
    if cache.cached(options.dataset, options.cache_dir):
        yield passed("data", f"{source.name} is in the cache")
    elif source.kind != "hub":
        yield passed("data", f"{source.name} is on this machine")
    elif reason := sources.why_out_of_reach(source.place):
        yield warned(
            "data",
            f"{source.name} is not in the cache, and the Hub cannot be reached ({reason})",
            "set HF_ENDPOINT to a mirror, or bring the cache from another machine"
            " (ddp-mnist prepare); --dataset digits needs no network",
        )
    else:
        yield passed("data", f"{source.name} can be had from the Hub")


# --- Network


def host_name(_: Options) -> Iterator[CheckResult]:
    """gloo advertises the address that a host's own name has, unless it is told an interface."""
    name = socket.gethostname()
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(name, None)}
    except OSError:
        fix = f"add it to /etc/hosts: 127.0.1.1 {name}"
        yield warned("host name", f"{name} has no address", fix)
        return
    shown = f"{name} is {', '.join(sorted(addresses))}"
    if all(is_loopback(address) for address in addresses):
        chosen = interface_towards("192.0.2.1", 9) or "eth0"  # reserved for examples (RFC 5737)
        yield warned(
            "host name",
            f"{shown}: other machines cannot reach that",
            f"ddp-mnist needs nothing; for other programs set GLOO_SOCKET_IFNAME={chosen}",
        )
    else:
        yield passed("host name", shown)


def interfaces(_: Options) -> Iterator[CheckResult]:
    stats = psutil.net_if_stats()
    up = []
    for name, addresses in psutil.net_if_addrs().items():
        own = [a.address for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        # A labelled address (eth0:vip) is one of its interface.
        state = stats.get(name.partition(":")[0])
        if own and state and state.isup and not all(map(is_loopback, own)):
            up.append(f"{name} ({own[0]})")
    names, told = psutil.net_if_addrs(), os.environ.get("GLOO_SOCKET_IFNAME")
    if told and told not in names:
        fix = f"unset it, or name one of {', '.join(names)}"
        what = f"GLOO_SOCKET_IFNAME={told}: there is no such interface"
        yield failed("interfaces", what, fix)
    else:
        yield passed("interfaces", ", ".join(up) or "none but loopback: this machine is alone")


def main_port(options: Options) -> Iterator[CheckResult]:
    """Whether rank 0 could be met here."""
    if options.port is None:
        return
    if why := why_port_is_taken(options.port):
        what = f"{options.port} cannot be opened ({why})"
        yield warned("main port", what, "end what uses it, or give MAIN_PROCESS_PORT another")
        return
    yield passed("main port", f"{options.port} is free")


EXAMINATIONS: tuple[Callable[[Options], Iterator[CheckResult]], ...] = (
    packages,
    default_config,
    gpus,
    processor,
    cores,
    memory,
    shared_memory,
    file_handles,
    cache_folder,
    run_folder,
    data_set,
    host_name,
    interfaces,
    main_port,
)
