"""Checks of processes that have connected, on one machine or on many.

Every rank checks; what each found goes to all over the store, so all have the same results.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_mnist import train
from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import World, join_world
from ddp_mnist.config import Distribution, Recipe, ResolvedConfig, Run, resolve_recipe
from ddp_mnist.data import cache
from ddp_mnist.doctor import collectives
from ddp_mnist.doctor.compare import LOAD
from ddp_mnist.doctor.machine import Options, check_machine, nvidia_smi, product
from ddp_mnist.doctor.preflight import passed_on
from ddp_mnist.errors import DdpMnistError, reason
from ddp_mnist.run import session
from ddp_mnist.run.console import Console
from ddp_mnist.run.environment import code_digest, package_versions
from ddp_mnist.run.summary import count, device, narrated_elsewhere
from ddp_mnist.verify.results import (
    FAIL,
    PASS,
    WARN,
    CheckResult,
    failed,
    from_error,
    passed,
    passed_if,
    warned,
    worst,
)
from ddp_mnist.verify.watch import digest_of

NOT_CACHED = "not cached"
LATE_S = 0.2
CLOCKS_S = 5.0  # that may lie between two machines' clocks
BUSY = 0.25  # of a machine's cores, that other programs may hold
SLOW = 1.5  # times the median rank's seconds
EPOCHS = 5  # of the digits: 75 steps
LEAST_ACCURACY = 0.8  # after them; a net that guesses has 0.1
VERIFY = "do not train here; run ddp-mnist verify on each machine"


class Group:
    """The processes that have connected, and what they tell each other."""

    def __init__(self, world: World, options: Options) -> None:
        self.world, self.store, self.options = world, world.store, options
        self.rank, self.size = world.store.rank, world.accelerator.num_processes
        self.device = world.accelerator.device
        hosts = self.store.hosts
        self.is_first_here = hosts.index(hosts[self.rank]) == self.rank
        self.exchanges = 0
        self.busy = ""  # what is added to a speed; see `load`

    def gather(self, mine: Any) -> list[Any]:
        """Return what each rank gave here, by rank, on every rank. JSON's types only."""
        self.exchanges += 1
        return self.store.all_gather(f"doctor/{self.exchanges}", mine)

    def gather_results(self, mine: Iterable[CheckResult]) -> list[list[CheckResult]]:
        found = self.gather([asdict(result) for result in mine])
        return [[CheckResult(**each) for each in theirs] for theirs in found]

    def host(self, rank: int) -> str:
        return self.store.hosts[rank].partition("/")[0]

    def who(self, ranks: list[int]) -> str:
        """Return e.g. `rank 1 (host-b), 3 (host-c)`; eight at most."""
        shown = ", ".join(f"{rank} ({self.host(rank)})" for rank in ranks[:8])
        return f"rank {shown}" + (" ..." if len(ranks) > 8 else "")


def check_group(
    flags: Distribution,
    launch: Launch,
    options: Options,
    *,
    machines_too: bool = True,
    verbose: bool = False,
) -> list[CheckResult]:
    """Return the results, on every rank; rank 0 prints each as it comes if `verbose`.

    Raises:
        DdpMnistError: the processes did not meet; see `join_world`.
    """
    clock, results = time.monotonic(), list[CheckResult]()
    console = Console(verbose and launch.rank == 0)
    try:
        with join_world(flags, launch) as world, narrated_elsewhere(world, verbose):
            first = rendezvous(world, time.monotonic() - clock)
            for result in (first, *checks_of(Group(world, options), machines_too)):
                results.append(result)
                console.print(str(result))
    except DdpMnistError as error:
        if not results:
            raise
        if worst(results) != FAIL:  # a check that failed says more
            results.append(from_error("the end", error))
            console.print(str(results[-1]))
    return results


def rendezvous(world: World, seconds: float) -> CheckResult:
    who = f"{count(world.store.world_size, 'process')} on {count(world.num_machines, 'machine')}"
    how = f"backend {world.backend}, precision {world.precision}"
    return passed("rendezvous", f"{who} connected within {seconds:.1f} s, {how}")


def checks_of(group: Group, machines_too: bool) -> Iterator[CheckResult]:
    """Check one after the other; after one that breaks down, the rest could not work either."""
    for name, check, wanted in (
        ("machine", machines_alone, machines_too),
        ("same", same_everywhere, True),
        ("clocks", clocks, True),
        ("load", load, True),
        ("collectives", right_results, True),
        ("speed", speeds, True),
        ("computing", slowest, True),
        ("training", training, True),
        ("burn-in", burn_in, group.options.minutes > 0),
    ):
        try:
            yield from check(group) if wanted else ()
        except (RuntimeError, ValueError, DdpMnistError) as error:
            yield failed(name, reason(error), "see what the other machines say, then the network")
            return


def machines_alone(group: Group) -> Iterator[CheckResult]:
    """Check each machine by its first rank; a healthy machine is one line."""
    mine: list[CheckResult] = []
    if group.is_first_here:
        processes = group.store.hosts.count(group.store.hosts[group.rank])
        # The main port is in use by now.
        options = replace(group.options, processes=processes, port=None)
        mine = [*passed_on(), *check_machine(options)]
    for rank, results in enumerate(group.gather_results(mine)):
        host = group.host(rank)
        wrong = [replace(r, text=f"{host}: {r.text}") for r in results if r.status != PASS]
        yield from wrong
        if results and not wrong:
            yield passed("machine", f"{host}: {count(len(results), 'check')}, all well")


# --- What has to be equal


def same_everywhere(group: Group) -> Iterator[CheckResult]:
    """Check versions, code and data: DDP would train on in silence where they differ."""
    options = group.options
    images = cache.cached(options.dataset, options.cache_dir)
    mine = {
        **package_versions(),
        "the code of ddp_mnist": code_digest(),
        f"the data of {options.dataset}": images.digest[:16] if images else NOT_CACHED,
        "NCCL_ and GLOO_ variables": variables(),
    }
    if group.device.type == "cuda":
        mine["CUDA"] = str(torch.version.cuda)
        mine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        mine["GPU"] = torch.cuda.get_device_name(group.device)
    everyone = group.gather(mine)
    found = [differing(group, what, [theirs.get(what) for theirs in everyone]) for what in mine]
    equal = f"versions, code and data of {count(group.size, 'process')} are equal"
    yield from [result for result in found if result] or [passed("same", equal)]


def differing(group: Group, what: str, values: list[Any]) -> CheckResult | None:
    """Return what is wrong with the ranks' values, or None."""
    first = next((value for value in values if value != NOT_CACHED), NOT_CACHED)
    odd = [rank for rank, value in enumerate(values) if value not in (first, NOT_CACHED)]
    without = [rank for rank, value in enumerate(values) if value == NOT_CACHED]
    if odd:
        text = f"{what}: rank {values.index(first)} has {first}, {group.who(odd)} {values[odd[0]]}"
        return failed("same", text, "make versions, variables, code and data the same everywhere")
    if without and first != NOT_CACHED:
        text = f"{what}: not cached on {group.who(without)}"
        return warned("same data", text, "run ddp-mnist prepare on each machine")
    return None


def variables() -> str:
    """Return what NCCL and gloo are given, but for the interface, whose name may differ."""
    ours = [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]
    equal = sorted(name for name in ours if not name.endswith("_SOCKET_IFNAME"))
    return " ".join(f"{name}={os.environ[name]}" for name in equal)


def clocks(group: Group) -> Iterator[CheckResult]:
    """Check the clocks, which all ranks read at the same moment, as far as the store allows."""
    group.store.barrier("doctor/clocks", within_s=group.store.patience_s)
    times = group.gather(time.time())
    apart, middle = max(times) - min(times), statistics.median_low(times)
    if apart <= CLOCKS_S:
        yield passed("clocks", f"within {max(apart, 0.1):.1f} s of each other")
    else:
        odd = [rank for rank, now in enumerate(times) if abs(now - middle) > CLOCKS_S / 2]
        fix = "set the clocks by NTP (chrony), or logs and time-outs mislead"
        yield warned("clocks", f"{apart:,.0f} s apart: {group.who(odd)}", fix)


# --- Collectives and speeds


def right_results(group: Group) -> Iterator[CheckResult]:
    """Check every collective's result, on every rank."""
    all_right = True
    for name in (*collectives.COLLECTIVES, "barrier"):
        try:
            right = is_right(group, name)
        except RuntimeError as error:
            fix = "see what the other ranks say; for NCCL, start again with NCCL_DEBUG=INFO"
            yield failed(name, f"fails on {group.who([group.rank])}: {reason(error)}", fix)
            return
        if wrong := [rank for rank, theirs in enumerate(group.gather(right)) if not theirs]:
            all_right = False
            fix = (
                "do not train here; repeat on fewer machines to find the bad one (memory, network"
                " card, driver, library)"
            )
            yield failed(name, f"wrong result on {group.who(wrong)}", fix)
    if all_right:
        names = ", ".join(collectives.COLLECTIVES)
        yield passed("collectives", f"right on every rank: {names}, barrier")


def is_right(group: Group, name: str) -> bool:
    if name == "barrier":
        return barrier_holds(group)
    received, expected = collectives.run(name, group.rank, group.size, group.device)
    group.world.wait_for_gpu()  # a comparison alone would wait for a lost peer for good
    return torch.equal(received, expected)


def barrier_holds(group: Group) -> bool:
    """Return whether nobody passes before the last rank, which comes late, has entered."""
    group.exchanges += 1
    key = f"doctor/entered/{group.exchanges}"
    if group.rank == group.size - 1:
        time.sleep(LATE_S)
        group.store.set(key, True)
    dist.barrier()
    group.world.wait_for_gpu()
    return group.store.exists(key)


def load(group: Group) -> Iterator[CheckResult]:
    """Check what other programs hold of each machine, while all ranks wait: speeds come later."""
    found = group.gather(asdict(hardware.load()) if group.is_first_here else None)
    loads = {rank: hardware.Load(**each) for rank, each in enumerate(found) if each}
    for rank, each in loads.items():
        if each.held > BUSY * each.cores:
            group.busy = ", on a busy machine"
            names = f" ({', '.join(each.programs)})" if each.programs else ""
            held = f"{each.held:.1f} of {count(each.cores, 'core')}{names}"
            fix = "end them, or wait, and check again: what follows is slower beside them"
            yield warned(LOAD, f"{group.host(rank)}: other programs hold {held}", fix)
    if not group.busy:
        most = max(each.held / each.cores for each in loads.values())
        yield passed(LOAD, f"other programs hold {most:.0%} of the cores")


def speeds(group: Group) -> Iterator[CheckResult]:
    """Time all-reduces, by message size."""
    ms = collectives.all_reduce_ms(group.device, group.world.wait_for_gpu)
    shown = ", ".join(f"{size} {each:.3g} ms" for size, each in ms.items())
    mb_per_s = collectives.SIZES["16 MB"] / 1e3 / ms["16 MB"]
    figures = {f"all-reduce of {size}, ms": each for size, each in ms.items()}
    yield passed("speed", f"all-reduce of {shown} ({mb_per_s:,.0f} MB/s){group.busy}", figures)


def slowest(group: Group) -> Iterator[CheckResult]:
    """Check that every rank computes right, and about as fast: DDP is as fast as the slowest."""
    group.world.accelerator.wait_for_everyone()
    times = group.gather(compute_s(group.device))
    middle = statistics.median_low(times)
    figures, times_median = {"computing, ms": 1e3 * max(times)}, max(times) / middle
    if slow := [rank for rank, seconds in enumerate(times) if seconds > SLOW * middle]:
        text = f"{group.who(slow)}: {times_median:.1f} times the median rank's time"
        fix = "look for throttling, other programs, fewer cores or an older card there"
        yield CheckResult(WARN, "slow rank", text + group.busy, fix, figures)
    else:
        text = f"slowest rank takes {times_median:.2f} times the median's time"
        yield passed("computing", text + group.busy, figures)
    yield from faulty_devices(group)


def faulty_devices(group: Group) -> Iterator[CheckResult]:
    """Yield what is wrong with a rank's device, or its machine's GPUs, right after they worked."""
    mine = [product(torch.device(device(group.world)))]
    if group.device.type == "cuda" and group.is_first_here:
        mine += nvidia_smi()
    wrong = [result for result in mine if result.status != PASS]
    for rank, results in enumerate(group.gather_results(wrong)):
        yield from (replace(r, text=f"{group.who([rank])}: {r.text}") for r in results)


def compute_s(device: torch.device, tries: int = 15) -> float:
    """Return the least seconds of ten matrix products: what others take of a machine adds.

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


# --- Training


def training(group: Group) -> Iterator[CheckResult]:
    """Check that the real trainer on the digits ends with equal weights that work."""
    images = cache.load("digits", group.options.cache_dir)
    recipe = resolve_recipe(Recipe(epochs=EPOCHS), len(images.train_labels), group.size)
    config = ResolvedConfig(run=Run(dataset="digits", quiet=True), recipe=recipe)
    nets: list[nn.Module] = []

    def build(*arguments: Any) -> nn.Module:
        nets.append(train.build_model(*arguments))
        return nets[0]

    with listen(has_launcher=False) as stop:
        summary = train.fit(session.Run(config, group.world, images, stop), build)
    group.world.accelerator.free_memory()
    digests = group.gather(digest_of(nets[0]))
    if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        yield failed("training", f"other weights than rank 0's on {group.who(odd)}", VERIFY)
        return
    accuracy, speed = summary["test_accuracy"], summary["images_per_second"]
    text = f"{summary['steps']} steps on the digits, accuracy {accuracy:.2f}, {speed:,.0f} images/s"
    text += group.busy
    if accuracy < LEAST_ACCURACY:
        yield failed("training", f"{text}, which is below {LEAST_ACCURACY}", VERIFY)
    else:
        yield passed("training", f"{text}, equal weights on every rank", {"images/s": speed})


def burn_in(group: Group) -> Iterator[CheckResult]:
    """Work and train again and again: what heats up or comes loose shows after a while."""
    minutes, rounds, results = group.options.minutes, 0, list[CheckResult]()
    started = time.monotonic()
    while group.store.broadcast_from_rank0(
        f"doctor/burn-in/{rounds}", lambda: time.monotonic() - started < 60 * minutes
    ):
        results += right_results(group)
        results += training(group)
        compute_s(group.device)
        results += faulty_devices(group)
        rounds += 1
    text = f"{rounds} rounds in {minutes:g} minutes"
    if wrong := [result for result in results if result.status != PASS]:
        text += f", first of {len(wrong)} faults: {wrong[0].name}, {wrong[0].text}"
        yield replace(wrong[0], name="burn-in", text=text)
        return
    speed = [r.figures["images/s"] for r in results if "images/s" in r.figures]
    early, late = statistics.median(speed[:3]), statistics.median(speed[-3:])
    text += f", all right, {early:,.0f} images/s at first and {late:,.0f} at last"
    fix = "look for throttling (nvidia-smi -q -d PERFORMANCE)"
    yield passed_if(late >= early / SLOW, "burn-in", text, fix, WARN)
