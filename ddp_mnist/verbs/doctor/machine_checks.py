"""Checks of one machine by itself, which need no process group: those in CHECKS at the end."""

import os
import shutil
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from packaging.requirements import Requirement

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.interfaces import interfaces_up, why_port_is_taken
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.data import cache, sources, tables
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.system import affinity
from ddp_mnist.system.files import try_to_write
from ddp_mnist.system.text import count, quoted, reason
from ddp_mnist.training.versions import PACKAGES, package_versions, version_of
from ddp_mnist.verbs.check_result import FAIL, WARN, CheckResult, check, failed, passed, warned
from ddp_mnist.verbs.flags import Doctor
from ddp_mnist.verbs.multinode import DEFAULT_PORT

MB = 1e6
CACHE_MB, RUNS_MB = 200, 50  # a decoded MNIST and its lock; three checkpoints and the rest
PROCESS_MB = 1000  # of a training process, including torch's mapped files
SHARED_MEMORY = Path("/dev/shm")  # through which NCCL passes gradients between GPUs
SOME_GPUS_FIX = "see nvidia-smi and dmesg for the others, or hide them with CUDA_VISIBLE_DEVICES"


def check_machine(options: Doctor) -> Iterator[CheckResult | str]:
    """Yield a line on each check, then its results; a check that breaks down is a FAIL too."""
    for checks in CHECKS:
        yield f"checking {checks.__name__.replace('_', ' ')} ..."
        try:
            yield from checks(options)
        except Exception as error:  # whatever happened, the other results are worth having
            text = f"could not be checked ({type(error).__name__}: {error})"
            yield failed(checks.__name__, text, "check whether this machine is damaged")


def software(_: Doctor) -> Iterator[CheckResult]:
    """Check that the packages fit each other."""
    found, broken = package_versions(), list[str]()
    for name in PACKAGES:
        broken += [f"{name} is missing"] if found[name] == "missing" else unmet(name)
    text = "; ".join(broken) or ", ".join(map(" ".join, found.items()))
    fix = "install the versions of constraints.txt: make clean, then make venv"
    yield check("packages", broken, text, fix)


def unmet(package: str) -> Iterator[str]:
    """Yield each unmet requirement of `package`, such as torchvision's for another torch."""
    for needed in map(Requirement, requires(package) or []):
        if needed.marker and not needed.marker.evaluate({"extra": ""}):
            continue
        found = version_of(needed.name)
        if found == "missing" or not needed.specifier.contains(found, prereleases=True):
            yield f"{package} needs {needed.name}{needed.specifier}, found {found}"


def processors(_: Doctor) -> Iterator[CheckResult]:
    """Check that torch sees all GPUs of the machine, and that each processor computes correctly."""
    there, mine, unused = hardware.gpus_shown(), hardware.gpus(), hardware.unused_gpus()
    if mine:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        out_of = f" of the {there} in /dev" if mine < there else ""
        text = f"{mine}{out_of}, CUDA {torch.version.cuda}, NCCL {nccl}"
    elif there and not unused:
        text = f"{there}, hidden by {hardware.HIDE_GPUS} (as --cpu does)"
    else:
        text = unused or "none; training runs on the CPU, with gloo"
    fewer = 0 < mine < there and hardware.HIDE_GPUS not in os.environ
    worst, fix = (WARN, SOME_GPUS_FIX) if fewer else (FAIL, hardware.GPU_FIX)
    yield check("GPUs", unused or fewer, text, fix, worst)
    if mine and not dist.is_initialized():  # else each rank checks its own
        yield from run_world(1, check_gpus, folder=Path.cwd())[0]
    yield product(torch.device("cpu"))


def check_gpus() -> list[CheckResult]:
    """Check each GPU, in a separate process, which would keep it open until it ends."""
    return [product(torch.device("cuda", number)) for number in range(hardware.gpus())]


def product(device: torch.device) -> CheckResult:
    """Check a matrix product of small whole numbers, which is exact in float32 in any order."""
    a, b = torch.randint(-8, 9, (2, 512, 512), generator=torch.Generator().manual_seed(0))
    try:
        is_cpu = device.type == "cpu"
        model = hardware.cpu_model() if is_cpu else torch.cuda.get_device_name(device)
        found = (a.float().to(device) @ b.float().to(device)).cpu()
    except RuntimeError as error:
        fix = "see nvidia-smi; end what holds it, reset or replace it"
        return failed(str(device), f"cannot compute ({reason(error)})", fix)
    wrong = int((found != (a @ b).float()).sum())
    text = f"{wrong} wrong numbers in a matrix product" if wrong else "a matrix product is right"
    fix = "do not train here; look for overheating, overclocking, bad memory"
    return check(str(device), wrong, f"{model}: {text}", fix)


def capacity(options: Doctor) -> Iterator[CheckResult]:
    """Check cores (after affinity and a container's quota), memory, and shared memory for NCCL."""
    mine, processes = affinity.cores(), options.processes or 1
    text = f"{count(mine, 'core')}, for {count(processes, 'process')}"
    fix = f"start at most {mine}, or give this machine or container more cores"
    yield check("cores", mine < processes and not hardware.gpus(), text, fix, WARN)
    free, needed = psutil.virtual_memory().available, processes * PROCESS_MB * MB
    text = f"{free / 1e9:.1f} GB free, for {count(processes, 'process')}"
    fix = f"free {needed / 1e9:.1f} GB, or start fewer processes"
    yield check("memory", free < needed, text, fix)
    if SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        too_little = free < (1000 if hardware.gpus() > 1 else 32) * MB
        fix = "for docker: --shm-size 2g, or --ipc host"
        yield check("shared memory", too_little, f"{free / MB:,.0f} MB free in /dev/shm", fix, WARN)


def folders(options: Doctor) -> Iterator[CheckResult]:
    """Check the space and the permissions of each folder, by writing there or above it."""
    cached = cache.cache_folder(options.cache_dir)
    for name, folder, needed_mb, flag in (
        ("cache", cached, CACHE_MB, "--cache-dir or DDP_MNIST_CACHE"),
        ("runs", Path(options.run_dir), RUNS_MB, "--run-dir"),
    ):
        there = next(f for f in (folder, *folder.absolute().parents) if f.exists())
        free = shutil.disk_usage(there).free / MB
        problem = f"{free:,.0f} MB free, needs {needed_mb}" if free < needed_mb else ""
        try:
            try_to_write(there)
        except OSError as error:
            problem = f"cannot be written ({reason(error)})"
        text = f"{folder}: {problem or f'writable, {free / 1e3:,.1f} GB free'}"
        fix = f"fix permissions or free space, or name another with {flag}"
        yield check(name, problem, text, fix)


def data_set(options: Doctor) -> Iterator[CheckResult]:
    """Check that the data is in the cache, or on the Hub or the mirror that HF_ENDPOINT names.

    A folder is decoded into the cache, as for training, which shows whether it can be read; but not
    if several machines are checked, which would not wait that long.
    """
    source = sources.find_source(options.dataset)
    name, place = source.name, (options.dataset, options.cache_dir)
    try:
        if source.kind == "folder" and not dist.is_initialized():
            cache.load(*place)
        if cache.cached(*place):
            yield passed("data", f"{name} is in the cache")
        elif source.kind == "folder":
            fix = f"run ddp-mnist prepare --dataset {quoted(options.dataset)} on each machine"
            yield warned("data", f"{name} is not in the cache, so it was not read", fix)
        elif source.kind != "hub":
            yield passed("data", f"{name} is on this machine")
        elif why := tables.why_out_of_reach(source.place):
            text = f"{options.dataset}: no folder or cache of it here, and the Hub is out of reach"
            yield warned("data", f"{text} ({why})", tables.OFFLINE_FIX)
        else:
            yield passed("data", f"{name} can be fetched from the Hub")
    except DdpMnistError as error:
        yield CheckResult.from_error("data", error)


def network(_: Doctor) -> Iterator[CheckResult]:
    """Check that gloo's interfaces exist, and that rank 0 could listen; list the interfaces."""
    chosen, known = os.environ.get("GLOO_SOCKET_IFNAME", ""), psutil.net_if_addrs()
    unknown = [name for name in chosen.split(",") if name and name not in known]
    up = [f"{name} ({address})" for name, address in interfaces_up().items()]
    text = ", ".join(up) or "none but loopback: this machine is alone"
    if unknown:
        text = f"GLOO_SOCKET_IFNAME={chosen}: there is no interface {', '.join(unknown)}"
    yield check("interfaces", unknown, text, f"unset it, or name one of {', '.join(known)}")
    if not dist.is_initialized():  # else doctor itself uses it
        why = why_port_is_taken(DEFAULT_PORT)
        text = f"{DEFAULT_PORT} cannot be opened ({why})" if why else f"{DEFAULT_PORT} is free"
        fix = "stop the program that uses it, or give MAIN_PROCESS_PORT another"
        yield check("main port", why, text, fix, WARN)


CHECKS = (software, processors, capacity, folders, data_set, network)
