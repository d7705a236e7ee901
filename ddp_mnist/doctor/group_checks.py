"""Checks of processes that have connected, on one machine or on many.

Every rank checks, and gives rank 0 what it found, over the store; rank 0 judges, and tells all, so
all agree on what is wrong. Speeds are each rank's own: rank 0's are printed and saved.
"""

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from ddp_mnist import train
from ddp_mnist.cluster.failures import as_expected, first_cause
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import World
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.config.run import ResolvedConfig, RunFlags
from ddp_mnist.data import cache
from ddp_mnist.doctor import collectives
from ddp_mnist.doctor.compare import LOAD
from ddp_mnist.doctor.machine_checks import check_machine, nvidia_smi, product
from ddp_mnist.errors import CheckFailed, DdpMnistError, PeerError, reason
from ddp_mnist.run.console import count
from ddp_mnist.run.summary import device
from ddp_mnist.run.training_run import TrainingRun
from ddp_mnist.run.versions import code_digest, package_versions
from ddp_mnist.run.weights import digest_of
from ddp_mnist.system import neighbours
from ddp_mnist.verbs.check_result import PASS, WARN, CheckResult, check, failed, passed, warned
from ddp_mnist.verbs.flags import Doctor

NOT_CACHED = "not cached"
LATE_S = 0.2
BUSY = 0.25  # of a machine's cores, that other programs may hold
GPU_S = 2.0  # of matrix products, about
SLOW = 1.5  # times the median rank's seconds
EPOCHS = 5  # of the digits: 75 steps
LEAST_ACCURACY = 0.8  # after them; a net that guesses has 0.1
VERIFY = "do not train here; run ddp-mnist verify on each machine"
BROKEN = "see what the other ranks say; for NCCL, start again with NCCL_DEBUG=INFO"
BAD_MACHINE = "repeat on fewer machines to find the bad one (memory, network card, driver, library)"


class Group:
    """The processes that have connected, and what they tell rank 0."""

    def __init__(self, world: World, options: Doctor) -> None:
        self.world, self.store, self.options = world, world.store, options
        self.rank, self.size = world.store.rank, world.accelerator.num_processes
        self.device = world.accelerator.device
        self.is_first_here = world.store.place.index_here == 0
        self.barriers = 0
        self.busy = ""  # what is added to a speed; see `load`

    def judge(
        self, name: str, mine: Any, judge: Callable[[list[Any]], Iterable[CheckResult]]
    ) -> list[CheckResult]:
        """Return on every rank what rank 0 finds in each rank's value, by rank. JSON's types only.

        A machine that hangs fails here, although it lives.
        """

        def decide(everyone: list[Any]) -> list[dict[str, Any]]:
            return [asdict(result) for result in judge(everyone)]

        within_s = self.store.patience_s
        found = self.store.decide_for_all(f"doctor's {name}", mine, decide, within_s)
        return [CheckResult(**each) for each in found]


def check_group(
    world: World, options: Doctor, machines: bool, met_s: float, now: Callable[[str], object] = bool
) -> Iterator[CheckResult]:
    """Check one after the other, told to `now` first; with `machines` each machine alone first.

    Raise CheckFailed, after a FAIL, if a check ends with an error, here or on another rank: the
    others have to learn of it, since they would wait for this rank in the next check.
    """
    group = Group(world, options)
    who = f"{count(group.size, 'process')} on {count(world.num_machines, 'machine')}"
    text = f"{who} connected within {met_s:.1f} s, backend {world.backend}"
    yield passed("rendezvous", f"{text}, precision {world.precision}")
    checks = [same_everywhere, load, right_results, speeds, slowest, training, load_meanwhile]
    checks = [machines_alone, *checks] if machines else checks
    checks = [*checks, burn_in] if options.minutes else checks
    for function in checks:
        name = function.__name__.replace("_", " ")
        now(f"checking {name} ...")
        try:
            yield from function(group)
        except (RuntimeError, ValueError, DdpMnistError) as error:
            cause = first_cause(group.store, as_expected(group.store, error))
            yield broken_down(group, name, cause)
            raise CheckFailed(reason(cause)) from error


def broken_down(group: Group, name: str, cause: BaseException) -> CheckResult:
    """Return the FAIL of a check that ended with an error; on rank 0 it names who reported it.

    A PeerError of rank 0's own names the rank that it is about.
    """
    failure, names_it = group.store.failure(), group.rank > 0 or isinstance(cause, PeerError)
    who = f"{group.store.who([failure['rank']])}: " if failure and not names_it else ""
    fix = "see what the other machines say, then the network"
    return failed(name, f"{who}{reason(cause)}", fix)


def machines_alone(group: Group) -> Iterator[CheckResult]:
    """Check each machine by its first rank: what is wrong has a line, the rest is counted."""
    mine = list[dict[str, Any]]()
    if group.is_first_here:
        options = replace(group.options, processes=group.store.place.ranks_here)
        mine = [asdict(result) for result in check_machine(options)]

    def judge(everyone: list[Any]) -> Iterator[CheckResult]:
        for rank, theirs in enumerate(everyone):
            results, host = [CheckResult(**each) for each in theirs], group.store.host(rank)
            wrong = [replace(r, text=f"{host}: {r.text}") for r in results if r.status != PASS]
            yield from wrong
            if results:
                well = len(results) - len(wrong)
                yield passed("machine", f"{host}: {well} of {count(len(results), 'check')} passed")

    yield from group.judge("machines", mine, judge)


def same_everywhere(group: Group) -> Iterator[CheckResult]:
    """Check versions, code and data: DDP would train on in silence where they differ."""
    dataset = group.options.dataset
    image_options = ImageOptions(test_size=group.options.test_size)
    images = cache.cached(dataset, group.options.cache_dir, image_options)
    # An interface's name may differ.
    names = [name for name in sorted(os.environ) if name.startswith(("NCCL_", "GLOO_"))]
    given = [f"{n}={os.environ[n]}" for n in names if not n.endswith("_SOCKET_IFNAME")]
    mine = {
        **package_versions(),
        "the code of ddp_mnist": code_digest(),
        f"the data of {dataset}": images.digest[:16] if images else NOT_CACHED,
        "NCCL_ and GLOO_ variables": " ".join(given),
    }
    if group.device.type == "cuda":
        mine["CUDA"] = str(torch.version.cuda)
        mine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        mine["GPU"] = torch.cuda.get_device_name(group.device)
    yield from group.judge("versions", mine, functools.partial(differences, group))


def differences(group: Group, everyone: list[dict[str, str]]) -> list[CheckResult]:
    """Return what differs between the ranks, and who has what; a PASS if nothing does."""
    results = list[CheckResult]()
    for what in everyone[0]:
        values = [theirs.get(what) for theirs in everyone]
        first = next((value for value in values if value != NOT_CACHED), NOT_CACHED)
        odd = [rank for rank, value in enumerate(values) if value not in (first, NOT_CACHED)]
        without = [rank for rank, value in enumerate(values) if NOT_CACHED == value != first]
        if odd:
            text = f"{what}: rank {values.index(first)} has {first}, {group.store.who(odd)}"
            fix = "make versions, variables, code and data the same everywhere"
            results.append(failed("same", f"{text} {values[odd[0]]}", fix))
        elif without:
            text = f"{what}: not cached on {group.store.who(without)}"
            results.append(warned("same data", text, "run ddp-mnist prepare on each machine"))
    equal = f"versions, code and data of {count(group.size, 'process')} are equal"
    return results or [passed("same", equal)]


def right_results(group: Group) -> Iterator[CheckResult]:
    """Check every collective's result, on every rank; stop at the first that fails on one."""
    all_right = True
    for name in (*collectives.COLLECTIVES, "barrier"):
        try:
            mine = [is_right(group, name), ""]
        except RuntimeError as error:
            mine = [False, reason(error)]
        wrong = group.judge(name, mine, functools.partial(wrong_results, group, name))
        yield from wrong
        if any(result.fix == BROKEN for result in wrong):
            return
        all_right = all_right and not wrong
    if all_right:
        names = ", ".join(collectives.COLLECTIVES)
        yield passed("collectives", f"right on every rank: {names}, barrier")


def wrong_results(group: Group, name: str, everyone: list[Any]) -> Iterator[CheckResult]:
    """Yield on which ranks a collective fails, or else gives a wrong result."""
    broken = [rank for rank, (_, why) in enumerate(everyone) if why]
    wrong = [rank for rank, (right, _) in enumerate(everyone) if not right]
    if broken:
        why = everyone[broken[0]][1]
        yield failed(name, f"fails on {group.store.who(broken)}: {why}", BROKEN)
    elif wrong:
        text = f"wrong result on {group.store.who(wrong)}"
        yield failed(name, text, f"do not train here; {BAD_MACHINE}")


def is_right(group: Group, name: str) -> bool:
    """Return whether this rank's result is right; nobody leaves a barrier before the late rank."""
    if name != "barrier":
        received, expected = collectives.run(name, group.rank, group.size, group.device)
        group.world.wait_for_gpu()  # a comparison alone would wait for a lost peer for good
        return torch.equal(received, expected)
    group.barriers += 1
    key = f"doctor/entered/{group.barriers}"
    if group.rank == group.size - 1:
        time.sleep(LATE_S)
        group.store.set(key, True)
    dist.barrier()
    group.world.wait_for_gpu()
    return group.store.exists(key)


def load(group: Group) -> Iterator[CheckResult]:
    """Check what other programs hold of each machine, while all ranks wait: speeds come later."""

    def judge(loads: list[Any]) -> Iterator[CheckResult]:
        measured = {rank: each for rank, each in enumerate(loads) if each}
        for rank, (held, cores, programs) in measured.items():
            if held > BUSY * cores:
                names = f" ({', '.join(programs)})" if programs else ""
                text = f"other programs hold {held:.1f} of {count(cores, 'core')}{names}"
                fix = "end them, or wait, and check again: the speeds are too low beside them"
                yield warned(LOAD, f"{group.store.host(rank)}: {text}", fix)
        most = max(held / cores for held, cores, _ in measured.values())
        if most <= BUSY:
            yield passed(LOAD, f"other programs hold {most:.0%} of the cores")

    results = group.judge("load", neighbours.cores_held() if group.is_first_here else None, judge)
    if any(result.status != PASS for result in results):
        group.busy = ", on a busy machine"
    yield from results


def load_meanwhile(group: Group) -> Iterator[CheckResult]:
    """Look again: a program that began after the first look has slowed what was measured since."""
    if not group.busy:
        yield from (result for result in load(group) if result.status != PASS)


def speeds(group: Group) -> Iterator[CheckResult]:
    """Time all-reduces, by message size."""
    ms = collectives.all_reduce_ms(group.device, group.world.wait_for_gpu)
    shown = ", ".join(f"{size} {each:.3g} ms" for size, each in ms.items())
    mb_per_s = collectives.SIZES["16 MB"] / 1e3 / ms["16 MB"]
    text = f"all-reduce of {shown} ({mb_per_s:,.0f} MB/s){group.busy}"
    figures = {f"all-reduce of {size}, ms": each for size, each in ms.items()}
    yield passed("speed", text, figures=figures)


def slowest(group: Group) -> Iterator[CheckResult]:
    """Check that every rank computes right, and about as fast: DDP is as fast as the slowest."""
    group.world.accelerator.wait_for_everyone()

    def judge(times: list[float]) -> Iterator[CheckResult]:
        middle = statistics.median_low(times)
        slow = [rank for rank, seconds in enumerate(times) if seconds > SLOW * middle]
        who = f"{group.store.who(slow)}: " if slow else "slowest rank takes "
        text = f"{who}{max(times) / middle:.2f} times the median rank's time{group.busy}"
        fix = "look for throttling, other programs, fewer cores or an older card there"
        figures = {"computing, ms": 1e3 * max(times)}
        yield check("computing", slow, text, fix, WARN, figures)

    yield from group.judge("computing", compute_s(group.device), judge)
    yield from faulty_devices(group)


def faulty_devices(group: Group) -> Iterator[CheckResult]:
    """Yield what is wrong with a rank's device, or its machine's GPUs, right after they worked."""
    mine = [product(torch.device(device(group.world)))]
    if group.device.type == "cuda" and group.is_first_here:
        mine += nvidia_smi()

    def judge(everyone: list[Any]) -> Iterator[CheckResult]:
        for rank, results in enumerate(everyone):
            for result in (CheckResult(**each) for each in results):
                yield replace(result, text=f"{group.store.who([rank])}: {result.text}")

    wrong = [asdict(result) for result in mine if result.status != PASS]
    yield from group.judge("devices", wrong, judge)


def compute_s(device: torch.device, tries: int = 15) -> float:
    """Return the least seconds of ten matrix products: others can only make it longer.

    [512, 512] in float32 on a CPU; on a GPU [8192, 8192] in float16: small ones would not occupy
    it, and training uses its units for 16 bits. A slow GPU tries less often, for about 2 s.
    """
    on_gpu, began = device.type == "cuda", time.monotonic()
    size, dtype = (8192, torch.float16) if on_gpu else (512, torch.float32)
    square, least = torch.ones(size, size, device=device, dtype=dtype), float("inf")
    for tried in range(tries):
        if on_gpu and tried >= 3 and time.monotonic() - began > GPU_S:
            break
        clock = time.monotonic()
        for _ in range(10):
            square = square @ square / size
        if on_gpu:
            torch.cuda.synchronize()
        least = min(least, time.monotonic() - clock)
    return least


def training(group: Group) -> Iterator[CheckResult]:
    """Check that the real trainer on the digits ends with equal weights that work."""
    images = cache.load("digits", group.options.cache_dir)
    recipe = resolve_recipe(Recipe(epochs=EPOCHS), len(images.train_labels), group.size)
    images = images.hold_out(recipe.val_size)
    config = ResolvedConfig(run=RunFlags(dataset="digits", quiet=True), recipe=recipe)
    with listen(has_launcher=False) as stop:
        run = TrainingRun(config, group.world, images, stop)
        summary = train.fit(run)
    group.world.accelerator.free_memory()

    def judge(digests: list[str]) -> Iterator[CheckResult]:
        if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            text = f"other weights than rank 0's on {group.store.who(odd)}"
            yield failed("training", text, VERIFY)
            return
        accuracy, speed = summary["test_accuracy"], summary["images_per_second"]
        low = accuracy < LEAST_ACCURACY
        end = f"which is below {LEAST_ACCURACY}" if low else "equal weights on every rank"
        text = (
            f"{summary['steps']} steps on the digits, accuracy {accuracy:.2f},"
            f" {speed:,.0f} images/s{group.busy}, {end}"
        )
        yield check("training", low, text, VERIFY, figures={"images/s": speed})

    yield from group.judge("training", digest_of(run.state.net), judge)


def burn_in(group: Group) -> Iterator[CheckResult]:
    """Work and train again and again: what heats up or comes loose shows after a while."""
    minutes, rounds, results = group.options.minutes, 0, list[CheckResult]()
    started = time.monotonic()
    while group.store.broadcast_from_rank0(
        "doctor's burn-in", lambda: time.monotonic() - started < 60 * minutes
    ):
        results += [*right_results(group), *training(group)]
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
    yield check("burn-in", late < early / SLOW, text, fix, WARN)
