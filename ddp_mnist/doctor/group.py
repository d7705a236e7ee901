"""What can be found out once the processes have met, on one machine or on many.

Every rank examines; what each saw goes to rank 0 over the store, and rank 0 tells.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_mnist import train
from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import World, join_world
from ddp_mnist.config import Distribution, Recipe, ResolvedConfig, Run, resolve_recipe
from ddp_mnist.data import cache
from ddp_mnist.doctor import collectives
from ddp_mnist.doctor.compare import LOAD
from ddp_mnist.doctor.machine import Options, examine_machine, nvidia_smi, product
from ddp_mnist.doctor.network import passed_on
from ddp_mnist.errors import DdpMnistError, reason
from ddp_mnist.run import session
from ddp_mnist.run.console import Console
from ddp_mnist.run.environment import code_digest, package_versions
from ddp_mnist.run.summary import count, device, narrated_elsewhere
from ddp_mnist.verify.results import (
    FAIL,
    PASS,
    CheckResult,
    failed,
    from_error,
    passed,
    warned,
    worst,
)
from ddp_mnist.verify.watch import watching

NOT_CACHED = "not cached"
LATE_S = 0.2
CLOCKS_S = 5.0  # that may lie between two machines' clocks
BUSY = 0.25  # of a machine's cores, that other programs may hold
SLOW = 1.5  # times the median rank's seconds
EPOCHS = 5  # of the digits: 75 steps
LEAST_ACCURACY = 0.8  # after them; a net that guesses has 0.1


class Group:
    """The processes that have met, and what they tell each other."""

    def __init__(self, world: World) -> None:
        self.world, self.store = world, world.store
        self.rank, self.size = world.store.rank, world.accelerator.num_processes
        self.device = world.accelerator.device
        self.questions = 0
        self.busy = ""  # what is text beside a speed; see `load`

    @property
    def is_first_here(self) -> bool:
        """Of the ranks on this machine."""
        return self.store.hosts.index(self.store.hosts[self.rank]) == self.rank

    def everyones(self, mine: Any) -> list[Any]:
        """What each rank gave here, by rank; on every rank. JSON's types only."""
        self.questions += 1
        key = f"doctor/{self.questions}"
        self.store.set(f"{key}/{self.rank}", mine)
        patience = self.store.patience_s
        return [self.store.get(f"{key}/{rank}", patience) for rank in range(self.size)]

    def host(self, rank: int) -> str:
        return self.store.hosts[rank].partition("/")[0]

    def who(self, ranks: list[int]) -> str:
        """E.g. rank 1 (host-b), 3 (host-c); eight at most."""
        shown = ", ".join(f"{rank} ({self.host(rank)})" for rank in ranks[:8])
        return f"rank {shown}" + (" ..." if len(ranks) > 8 else "")


def examine_group(
    flags: Distribution,
    launch: Launch,
    options: Options,
    minutes: float = 0,
    *,
    machines_too: bool = True,
    verbose: bool = False,
) -> list[CheckResult]:
    """The findings, on every rank.

    Args:
        options: for the machines; the number of processes on each is found out.
        minutes: of burn-in.
        machines_too: whether each machine is examined on its own as well.
        verbose: rank 0 prints each finding as it comes.

    Raises:
        DdpMnistError: the processes did not meet; see `runtime.start`.
    """
    clock = time.monotonic()
    findings: list[CheckResult] = []
    console = Console(verbose and launch.rank == 0)
    try:
        with join_world(flags, launch) as world, narrated_elsewhere(world, verbose):
            group = Group(world)
            met = met_within(group, time.monotonic() - clock)
            for finding in (met, *examinations(group, options, minutes, machines_too)):
                findings.append(finding)
                console.print(str(finding))
    except DdpMnistError as error:
        if not findings:
            raise
        if worst(findings) != FAIL:  # of an examination that failed, the finding says more
            findings.append(from_error("the end", error))
            console.print(str(findings[-1]))
    return findings


def met_within(group: Group, seconds: float) -> CheckResult:
    world = group.world
    who = f"{count(group.size, 'process')} on {count(world.num_machines, 'machine')}"
    how = f"backend {world.backend}, precision {world.precision}"
    return passed("rendezvous", f"{who} met within {seconds:.1f} s, {how}")


def examinations(
    group: Group, options: Options, minutes: float, machines_too: bool
) -> Iterator[CheckResult]:
    """One after the other; where one breaks down, what comes after it could not work either."""
    steps: dict[str, Callable[[], Iterator[CheckResult]]] = {
        "machine": lambda: machines_alone(group, options) if machines_too else iter(()),
        "same": lambda: same_everywhere(group, options),
        "clocks": lambda: clocks(group),
        "load": lambda: load(group),
        "collectives": lambda: right_results(group),
        "speed": lambda: speeds(group),
        "computing": lambda: slowest(group),
        "training": lambda: training(group, options),
        "burn-in": lambda: burn_in(group, options, minutes) if minutes else iter(()),
    }
    for name, examine in steps.items():
        try:
            yield from examine()
        except (RuntimeError, ValueError, DdpMnistError) as error:
            yield failed(
                name, reason(error)[:300], "see what the other machines say, then the network"
            )
            return


def machines_alone(group: Group, options: Options) -> Iterator[CheckResult]:
    """What the first rank of each machine finds there; of a healthy machine one line."""
    hosts = group.store.hosts
    here = hosts[group.rank]
    # The main port is in use by now.
    options = replace(options, processes=hosts.count(here), port=None)
    alone = (*passed_on(), *examine_machine(options)) if group.is_first_here else ()
    mine = [asdict(finding) for finding in alone]
    for rank, found in enumerate(group.everyones(mine)):
        findings = [CheckResult(**each) for each in found]
        unwell = [finding for finding in findings if finding.status != PASS]
        yield from (replace(each, text=f"{group.host(rank)}: {each.text}") for each in unwell)
        if findings and not unwell:
            text = f"{group.host(rank)}: {count(len(findings), 'examination')}, all well"
            yield passed("machine", text)


def same_everywhere(group: Group, options: Options) -> Iterator[CheckResult]:
    """Versions, code and data: DDP would train on without a word where they differ."""
    images = cache.cached(options.dataset, options.cache_dir)
    mine = {
        **package_versions(),
        "the code of ddp_mnist": code_digest(),
        f"the data of {options.dataset}": images.digest[:16] if images else NOT_CACHED,
        **variables(),
    }
    if group.device.type == "cuda":
        mine["CUDA"] = str(torch.version.cuda)
        mine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        mine["GPU"] = torch.cuda.get_device_name(group.device)
    everyones = group.everyones(mine)
    differ = False
    for what in mine:
        values = [theirs.get(what) for theirs in everyones]
        there = [value for value in values if value != NOT_CACHED]
        first = there[0] if there else NOT_CACHED
        odd = [rank for rank, value in enumerate(values) if value not in (first, NOT_CACHED)]
        without = [rank for rank, value in enumerate(values) if value == NOT_CACHED]
        differ |= bool(odd or (there and without))
        if odd:
            text = f"{what}: rank {values.index(first)} has {first}, {group.who(odd)}"
            text += f" {values[odd[0]]}"
            yield failed(
                "same", text, "make versions, variables, code and data the same everywhere"
            )
        elif there and without:
            text = f"{what}: not cached on {group.who(without)}"
            yield warned("same data", text, "run ddp-mnist prepare on each machine")
    if not differ:
        yield passed("same", f"versions, code and data of {count(group.size, 'process')} are equal")


def variables() -> dict[str, str]:
    """What NCCL and gloo are told, but for the interface, whose name may differ."""
    names = [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]
    told = {name: os.environ[name] for name in names if not name.endswith("_SOCKET_IFNAME")}
    return {"NCCL_ and GLOO_ variables": " ".join(f"{n}={v}" for n, v in sorted(told.items()))}


def clocks(group: Group) -> Iterator[CheckResult]:
    """All ranks read theirs at the same moment, as far as the store tells."""
    group.store.barrier("doctor/clocks", within_s=group.store.patience_s)
    times = group.everyones(time.time())
    apart = max(times) - min(times)
    if apart > CLOCKS_S:
        middle = statistics.median_low(times)
        odd = [rank for rank, now in enumerate(times) if abs(now - middle) > CLOCKS_S / 2]
        fix = "set the clocks by NTP (chrony), or logs and time-outs mislead"
        yield warned("clocks", f"{apart:,.0f} s apart: {group.who(odd)}", fix)
    else:
        yield passed("clocks", f"within {max(apart, 0.1):.1f} s of each other")


def right_results(group: Group) -> Iterator[CheckResult]:
    """Every collective's result, on every rank."""
    absent, right = [], []
    for name in (*collectives.COLLECTIVES, "barrier"):
        try:
            outcome = (
                ("right" if barrier_holds(group) else "wrong")
                if name == "barrier"
                else collectives.outcome(
                    name, group.rank, group.size, group.device, group.world.wait_for_gpu
                )
            )
        except RuntimeError as error:
            fix = "see what the other ranks say; for NCCL, start again with NCCL_DEBUG=INFO"
            yield failed(name, f"fails on {group.who([group.rank])}: {reason(error)[:300]}", fix)
            return
        outcomes = group.everyones(outcome)
        if wrong := [rank for rank, each in enumerate(outcomes) if each == "wrong"]:
            yield failed(
                name,
                f"wrong result on {group.who(wrong)}",
                "do not train here; repeat on fewer machines to find the bad one (memory, network"
                " card, driver, library)",
            )
        elif set(outcomes) == {"absent"}:
            absent.append(name)
        elif "absent" in outcomes:
            lacking = [rank for rank, each in enumerate(outcomes) if each == "absent"]
            fix = "install the same versions everywhere"
            yield failed(name, f"{group.who(lacking)} has no such collective", fix)
        else:
            right.append(name)
    lacks = f"; {group.world.backend} has no {', '.join(absent)}" if absent else ""
    yield passed("collectives", f"right on every rank: {', '.join(right)}{lacks}")


def barrier_holds(group: Group) -> bool:
    """The last rank comes late, and posts that before it enters; nobody may pass before."""
    group.questions += 1
    key = f"doctor/entered/{group.questions}"
    if group.rank == group.size - 1:
        time.sleep(LATE_S)
        group.store.set(key, True)
    dist.barrier()
    group.world.wait_for_gpu()
    return group.store.exists(key)


def load(group: Group) -> Iterator[CheckResult]:
    """What other programs hold of each machine, while all ranks wait: speeds come later."""
    loads = group.everyones(asdict(hardware.load()) if group.is_first_here else None)
    most = 0.0
    for rank, each in enumerate(loads):
        if each is None:
            continue
        held, cores = each["held"], each["cores"]
        most = max(most, held / cores)
        if held > BUSY * cores:
            group.busy = ", on a busy machine"
            names = f" ({', '.join(each['programs'])})" if each["programs"] else ""
            text = f"{group.host(rank)}: other programs hold {held:.1f} of {count(cores, 'core')}"
            fix = "end them, or wait, and examine again: what follows is slower beside them"
            yield warned(LOAD, text + names, fix)
    if not group.busy:
        yield passed(LOAD, f"other programs hold {most:.0%} of the cores")


def speeds(group: Group) -> Iterator[CheckResult]:
    """Of all-reduces, by message size."""
    figures = collectives.all_reduce_speeds(group.device, group.world.wait_for_gpu)
    shown = ", ".join(
        f"{size} {figures[f'all-reduce of {size}, ms']:.3g} ms" for size in collectives.SIZES
    )
    megabytes = collectives.SIZES["16 MB"] / 1e6
    rate = megabytes / figures["all-reduce of 16 MB, ms"] * 1e3
    yield passed("speed", f"all-reduce of {shown} ({rate:,.0f} MB/s){group.busy}", figures)


def slowest(group: Group) -> Iterator[CheckResult]:
    """Every rank computes the same at the same time, and right; DDP is as fast as the slowest."""
    group.world.accelerator.wait_for_everyone()
    times = group.everyones(compute_s(group.device))
    middle = statistics.median_low(times)
    slow = [rank for rank, seconds in enumerate(times) if seconds > SLOW * middle]
    figures = {"computing, ms": 1e3 * max(times)}
    if slow:
        factor = max(times) / middle
        fix = "look for throttling, other programs, fewer cores or an older card there"
        text = f"{group.who(slow)}: {factor:.1f} times the median rank's time{group.busy}"
        yield replace(warned("slow rank", text, fix), figures=figures)
    else:
        text = f"slowest rank takes {max(times) / middle:.2f} times the median's time{group.busy}"
        yield passed("computing", text, figures)
    yield from unwell_devices(group)


def unwell_devices(group: Group) -> Iterator[CheckResult]:
    """What is wrong with the rank's own device, or its machine's GPUs, right after they worked."""
    own = device(group.world)
    mine = [product(torch.device(own), own)]
    if group.device.type == "cuda" and group.is_first_here:
        mine += nvidia_smi()
    unwell = [asdict(finding) for finding in mine if finding.status != PASS]
    for rank, found in enumerate(group.everyones(unwell)):
        for each in found:
            finding = CheckResult(**each)
            yield replace(finding, text=f"{group.who([rank])}: {finding.text}")


def compute_s(device: torch.device, tries: int = 15) -> float:
    """Least seconds of ten matrix products: what others take of a machine adds.

    [512, 512] on a CPU, [8192, 8192] on a GPU, which small ones would not occupy.
    """
    size = 8192 if device.type == "cuda" else 512
    square, least = torch.ones(size, size, device=device), float("inf")
    for _ in range(tries):
        clock = time.monotonic()
        for _ in range(10):
            square = square @ square / size
        if device.type == "cuda":
            torch.cuda.synchronize()
        least = min(least, time.monotonic() - clock)
    return least


def training(group: Group, options: Options) -> Iterator[CheckResult]:
    """The real trainer on the digits, which need no network: ends with equal weights that work."""
    images = cache.load("digits", options.cache_dir)
    recipe = resolve_recipe(Recipe(epochs=EPOCHS), len(images.train_labels), group.size)
    config = ResolvedConfig(Run(dataset="digits", quiet=True), recipe=recipe)
    with watching() as seen, listen(has_launcher=False) as stop:
        outcome = train.fit(session.Run(config, group.world, images, stop))
    group.world.accelerator.free_memory()
    digests = group.everyones(seen.weights)
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    accuracy, speed = outcome["test_accuracy"], outcome["images_per_second"]
    text = f"{outcome['steps']} steps on the digits, accuracy {accuracy:.2f}, {speed:,.0f} images/s"
    text += group.busy
    if odd:
        fix = "do not train here; run ddp-mnist verify on each machine"
        yield failed("training", f"other weights than rank 0's on {group.who(odd)}", fix)
    elif accuracy < LEAST_ACCURACY:
        fix = "do not train here; run ddp-mnist verify on each machine"
        yield failed("training", f"{text}, which is below {LEAST_ACCURACY}", fix)
    else:
        yield passed("training", f"{text}, equal weights on every rank", {"images/s": speed})


def burn_in(group: Group, options: Options, minutes: float) -> Iterator[CheckResult]:
    """Work and training again and again: what heats up or comes loose shows after a while."""
    started, rounds, found = time.monotonic(), 0, list[CheckResult]()
    while group.store.broadcast_from_rank0(
        f"doctor/burn-in/{rounds}", lambda: time.monotonic() - started < 60 * minutes
    ):
        found += right_results(group)
        found += training(group, options)
        compute_s(group.device)
        found += unwell_devices(group)
        rounds += 1
    wrong = [finding for finding in found if finding.status != PASS]
    speed = [f.figures["images/s"] for f in found if "images/s" in f.figures]
    text = f"{rounds} rounds in {minutes:g} minutes"
    if wrong:
        text += f", first of {len(wrong)} faults: {wrong[0].name}, {wrong[0].text}"
        yield replace(wrong[0], name="burn-in", text=text)
    else:
        early, late = statistics.median(speed[:3]), statistics.median(speed[-3:])
        text += f", all right, {early:,.0f} images/s at first and {late:,.0f} at last"
        if late < early / SLOW:
            yield warned("burn-in", text, "look for throttling (nvidia-smi -q -d PERFORMANCE)")
        else:
            yield passed("burn-in", text)
