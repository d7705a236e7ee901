"""Checks of one machine alone, before any process group forms."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.interfaces import (
    addresses_of,
    interface_towards,
    interfaces_up,
    is_loopback,
    why_port_is_taken,
)
from ddp_mnist.cluster.local import run_world
from ddp_mnist.data import cache, sources
from ddp_mnist.errors import reason
from ddp_mnist.run.environment import PACKAGES, package_versions
from ddp_mnist.run.summary import count
from ddp_mnist.verify.results import WARN, CheckResult, failed, passed, passed_if, warned

MB = 1e6
CACHE_MB, RUNS_MB = 200, 50  # a decoded MNIST and its lock; three checkpoints and the rest
PROCESS_MB = 1000  # of a training process, with what torch maps
HANDLES = 1024
DEVICES = Path("/dev")
SMI_FIELDS = (
    "index,driver_version,ecc.errors.uncorrected.volatile.total"
    ",clocks_event_reasons.hw_slowdown,temperature.gpu"
)


@dataclass(frozen=True)
class Options:
    """Say what to check; `port` is None once it is in use rightly, `minutes` are of burn-in."""

    dataset: str = "mnist"
    cache_dir: str | None = None
    run_dir: str = "runs"
    processes: int = 2
    port: int | None = 12345
    minutes: float = 0


def check_machine(options: Options) -> Iterator[CheckResult]:
    """Yield the results of each check; one that breaks down is a FAIL too."""
    for check in CHECKS:
        try:
            yield from check(options)
        except Exception as error:  # whatever it is, the rest is still worth knowing
            name = check.__name__.replace("_", " ")
            text = f"could not be checked ({type(error).__name__}: {error})"
            yield failed(name, text, "see whether this machine is whole")


# --- Software


def packages(_: Options) -> Iterator[CheckResult]:
    """Check that each package is there, in a version that the others are made for."""
    found = package_versions()
    broken = [f"{name} is missing" for name, version in found.items() if version == "missing"]
    for name in PACKAGES:
        broken += unmet(name) if found[name] != "missing" else ()
    text = "; ".join(broken) or ", ".join(f"{name} {version}" for name, version in found.items())
    fix = "install the versions of constraints.txt: make clean, then make venv"
    yield passed_if(not broken, "packages", text, fix)


def unmet(package: str) -> Iterator[str]:
    """Yield what `package` requires and does not find, such as torchvision another torch."""
    for line in importlib.metadata.requires(package) or []:
        needed = Requirement(line)
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            found = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            found = "none"
        if found == "none" or not needed.specifier.contains(found, prereleases=True):
            yield f"{package} needs {needed.name}{needed.specifier}, not {found}"


def default_config(_: Options) -> Iterator[CheckResult]:
    """Check that no default configuration is used in silence where --config_file is not given."""
    from accelerate.commands.config import config_args

    path = Path(config_args.default_config_file)
    text = f"{path} is used in silence by a launch without --config_file"
    if not path.exists():
        text = "no default configuration that would be used in silence"
    fix = "give --config_file accelerate_configs/..., or remove it"
    yield passed_if(not path.exists(), "accelerate", text, fix, WARN)


# --- Processors and memory


def gpus(_: Options) -> Iterator[CheckResult]:
    """Check that torch sees the GPUs that are there, and that each computes a product right."""
    there, mine = len(list(DEVICES.glob("nvidia[0-9]*"))), hardware.gpus()
    if not mine:
        yield no_gpus(there)
        return
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    part = f" of {there} in /dev" if there > mine else ""
    yield passed("GPUs", f"{mine}{part}, CUDA {torch.version.cuda}, NCCL {nccl}")
    if not dist.is_initialized():  # else each rank checks its own
        yield from run_world(1, gpu_products, folder=Path.cwd())[0]
    yield from nvidia_smi()


def no_gpus(there: int) -> CheckResult:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if there and hidden is None:
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs only"
        text = f"{there} in /dev, but torch (built for {built}) sees none"
        return failed("GPUs", text, "update the driver, or install the torch that fits it")
    by = f"CUDA_VISIBLE_DEVICES={hidden}" if hidden else "--cpu, or CUDA_VISIBLE_DEVICES="
    text = f"{there}, hidden by {by}" if there else "none; training runs on the CPU, with gloo"
    return passed("GPUs", text)


def gpu_products() -> list[CheckResult]:
    """Check each GPU, in a process of its own: whoever opened one keeps it open until the end.

    In the compute mode EXCLUSIVE_PROCESS that would keep out the processes that are started next.
    """
    return [product(torch.device("cuda", number)) for number in range(hardware.gpus())]


def product(device: torch.device) -> CheckResult:
    """Check a matrix product of small whole numbers, which is exact in float32 in any order."""
    a, b = torch.randint(-8, 9, (2, 512, 512), generator=torch.Generator().manual_seed(0))
    try:
        on_gpu = device.type == "cuda"
        model = torch.cuda.get_device_name(device) if on_gpu else hardware.cpu_model()
        found = (a.float().to(device) @ b.float().to(device)).cpu()
    except RuntimeError as error:
        fix = "see nvidia-smi; end what holds it, reset or replace it"
        return failed(str(device), f"cannot compute ({reason(error)})", fix)
    wrong = int((found != (a @ b).float()).sum())
    text = f"{wrong} wrong numbers in a matrix product" if wrong else "a matrix product is right"
    fix = "do not train here; look for overheating, overclocking, bad memory"
    return passed_if(not wrong, str(device), f"{model}: {text}", fix)


def nvidia_smi() -> Iterator[CheckResult]:
    """Check what the driver reports of each GPU: memory errors, and clocks that it holds back."""
    command = ["nvidia-smi", f"--query-gpu={SMI_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        text = f"nvidia-smi reports nothing ({type(error).__name__})"
        yield warned("driver", text, "see whether it runs in a shell")
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
    yield product(torch.device("cpu"))


def cores(options: Options) -> Iterator[CheckResult]:
    """Check how many cores this process may keep busy, by affinity and a container's quota."""
    mine, quota = hardware.cores(), hardware.cpu_quota()
    limit = "" if math.isinf(quota) else f" (its control group allows {quota:g} at once)"
    text = f"{count(mine, 'core')}{limit}, for {options.processes} processes"
    fix = f"start at most {mine}, or give this machine or container more cores"
    enough = mine >= options.processes or hardware.gpus() > 0
    yield passed_if(enough, "cores", text, fix, WARN)


def memory(options: Options) -> Iterator[CheckResult]:
    free, needed = hardware.free_memory(), options.processes * PROCESS_MB * MB
    text = f"{free / 1e9:.1f} GB free, for {options.processes} processes"
    fix = f"free {needed / 1e9:.1f} GB, or start fewer processes"
    yield passed_if(free >= needed, "memory", text, fix)


def shared_memory(_: Options) -> Iterator[CheckResult]:
    """Check /dev/shm, through which NCCL passes gradients between the GPUs of a machine."""
    if (DEVICES / "shm").is_dir():
        free = shutil.disk_usage(DEVICES / "shm").free
        needed = 1000 * MB if hardware.gpus() > 1 else 32 * MB
        text = f"{free / MB:,.0f} MB free in /dev/shm"
        fix = "for docker: --shm-size 2g, or --ipc host"
        yield passed_if(free >= needed, "shared memory", text, fix, WARN)


def file_handles(_: Options) -> Iterator[CheckResult]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # -1: no limit
    text = f"{soft if soft >= 0 else 'any number of'} per process"
    fix = f"many ranks use them up: ulimit -n {HANDLES if hard < 0 else min(hard, 65536)}"
    yield passed_if(soft < 0 or soft >= HANDLES, "file handles", text, fix, WARN)


# --- Disks and data


def cache_folder(options: Options) -> Iterator[CheckResult]:
    folder = cache.cache_folder(options.cache_dir)
    yield writable("cache", folder, CACHE_MB, "--cache-dir or DDP_MNIST_CACHE")


def run_folder(options: Options) -> Iterator[CheckResult]:
    yield writable("runs", Path(options.run_dir), RUNS_MB, "--run-dir")


def writable(name: str, folder: Path, needed_mb: float, flag: str) -> CheckResult:
    """Check by writing in `folder`, or in the one in which it would be made, and its free space."""
    there = next(f for f in (folder, *folder.absolute().parents) if f.exists())
    fix = f"mend permissions or free space, or name another with {flag}"
    try:
        with tempfile.TemporaryFile(dir=there, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return failed(name, f"{folder}: cannot be written ({reason(error)})", fix)
    free = shutil.disk_usage(there).free / MB
    if free < needed_mb:
        return failed(name, f"{folder}: {free:,.0f} MB free, needs {needed_mb:,.0f}", fix)
    return passed(name, f"{folder}: writable, {free / 1e3:,.1f} GB free")


def data_set(options: Options) -> Iterator[CheckResult]:
    """Check that the data is in the cache, or on the Hub or the mirror that HF_ENDPOINT names."""
    source, why = sources.find_source(options.dataset), ""
    if cache.cached(options.dataset, options.cache_dir):
        text = f"{source.name} is in the cache"
    elif source.kind != "hub":
        text = f"{source.name} is on this machine"
    elif why := sources.why_out_of_reach(source.place):
        text = f"{source.name} is not in the cache, and the Hub cannot be reached ({why})"
    else:
        text = f"{source.name} can be had from the Hub"
    fix = (
        "set HF_ENDPOINT to a mirror, or bring the cache from another machine (ddp-mnist prepare);"
        " --dataset digits needs no network"
    )
    yield passed_if(not why, "data", text, fix, WARN)


# --- Network


def host_name(_: Options) -> Iterator[CheckResult]:
    """Check the host's name: gloo advertises its address, unless it is given an interface."""
    name = platform.node()
    try:
        addresses = addresses_of(name)
    except OSError:
        fix = f"add it to /etc/hosts: 127.0.1.1 {name}"
        yield warned("host name", f"{name} has no address", fix)
        return
    text, useless = f"{name} is {', '.join(addresses)}", all(map(is_loopback, addresses))
    interface = interface_towards("192.0.2.1", 9) or "eth0"  # reserved for examples (RFC 5737)
    fix = (
        "other machines cannot reach that: ddp-mnist needs nothing; for other programs set"
        f" GLOO_SOCKET_IFNAME={interface}"
    )
    yield passed_if(not useless, "host name", text, fix, WARN)


def interfaces(_: Options) -> Iterator[CheckResult]:
    """Check that gloo's interface exists, and list those that lead to other machines."""
    chosen, known = os.environ.get("GLOO_SOCKET_IFNAME"), psutil.net_if_addrs()
    if chosen and chosen not in known:
        text = f"GLOO_SOCKET_IFNAME={chosen}: there is no such interface"
        yield failed("interfaces", text, f"unset it, or name one of {', '.join(known)}")
    else:
        up = ", ".join(f"{name} ({address})" for name, address in interfaces_up().items())
        yield passed("interfaces", up or "none but loopback: this machine is alone")


def main_port(options: Options) -> Iterator[CheckResult]:
    """Check that rank 0 could listen here."""
    if options.port is not None:
        why = why_port_is_taken(options.port)
        text = f"{options.port} cannot be opened ({why})" if why else f"{options.port} is free"
        fix = "end what uses it, or give MAIN_PROCESS_PORT another"
        yield passed_if(not why, "main port", text, fix, WARN)


SOFTWARE = (packages, default_config)
HARDWARE = (gpus, processor, cores, memory, shared_memory, file_handles)
PLACES = (cache_folder, run_folder, data_set)
NETWORK = (host_name, interfaces, main_port)
CHECKS = (*SOFTWARE, *HARDWARE, *PLACES, *NETWORK)
