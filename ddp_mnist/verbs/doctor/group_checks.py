"""Checks of processes that have connected, on one machine or many: those in CHECKS at the end.

Every rank takes part in each check, and sends rank 0 its findings, over the store. Rank 0 judges,
and `check_group` tells all ranks its results: what a check returns on other ranks is not used.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ddp_mnist
from ddp_mnist import train
from ddp_mnist.cluster.failures import as_expected, first_cause
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import World
from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.errors import CheckFailed, DdpMnistError
from ddp_mnist.system.text import count, quoted, reason
from ddp_mnist.training.recorded_run import RecordedRun
from ddp_mnist.training.training_run import make_run
from ddp_mnist.training.versions import code_digest, package_versions
from ddp_mnist.verbs.check_result import PASS, WARN, CheckResult, check, failed, passed, warned
from ddp_mnist.verbs.doctor.collectives import Case, all_reduce_ms, busbw, collectives
from ddp_mnist.verbs.doctor.machine_checks import check_machine, product
from ddp_mnist.verbs.flags import Doctor

NOT_CACHED = "not cached"
LATE_S = 0.2
TRY_S, TRIES_S = 0.1, 2.0  # a try covers the 0.1 s in which Linux counts a quota of CPU time
# Times the median rank's time, in each of so many rounds. Over gloo ranks compute on CPUs, which
# other programs use too, or share a GPU; NCCL has a GPU for each.
SLOW, ROUNDS = {"nccl": 1.1, "gloo": 1.5}, 3
EPOCHS = 5  # of the digits: 75 steps
LEAST_ACCURACY = 0.8  # after them; a net that guesses has 0.1
SAME = "make it the same everywhere"
CODE = "the code of ddp_mnist"
VERIFY = "do not train here; run ddp-mnist verify on each machine"
BROKEN = "see what the other ranks say; for NCCL, start again with NCCL_DEBUG=INFO"
LINKS = "look at the links (ethtool, ibstat, nvidia-smi nvlink -s) and their use (NCCL_DEBUG=INFO)"
GLOO_LINKS = "look for programs that use the cores (uptime), then at the link (ethtool)"
SLOW_RANK = "look for throttling, other programs, fewer cores or an older card there"
BAD_MACHINE = "do not train here; use fewer machines to find the bad one (memory, card or driver)"
Rates = dict[str, list[float]]  # of each rank, by what was measured


class Group:
    """The processes that have connected, and their reports to rank 0."""

    def __init__(self, world: World, options: Doctor) -> None:
        self.world, self.store, self.options = world, world.store, options
        self.rank, self.size = world.store.rank, world.store.world_size
        self.device = world.accelerator.device

    def gather(self, mine: Any) -> list[Any]:
        """Return each rank's value, by rank, on rank 0; [] elsewhere. JSON's types only.

        A machine that hangs fails here, even though its heartbeat continues.
        """
        everyone = list[Any]()
        # rank 0 alone decides, and the others need not know
        self.store.decide_for_all("doctor's check", mine, everyone.extend, self.store.patience_s)
        return everyone

    def merge(self, mine: list[CheckResult]) -> list[CheckResult]:
        """Return, on rank 0, all ranks' findings; equal ones are merged, with the ranks' names."""
        ranks = defaultdict[tuple[str, ...], list[int]](list)
        for rank, results in enumerate(self.gather(mine)):
            for status, name, text, fix, _ in results:
                ranks[status, name, text, fix].append(rank)
        return [
            CheckResult(status, name, f"{self.store.who(found)}: {text}", fix)
            for (status, name, text, fix), found in ranks.items()
        ]

    def share(self, name: str, results: list[CheckResult]) -> list[CheckResult]:
        """Return rank 0's results on every rank."""
        found = self.store.broadcast_from_rank0(f"doctor's {name}", lambda: results)
        return [CheckResult(*each) for each in found]


def check_group(world: World, options: Doctor, machines: bool) -> Iterator[CheckResult | str]:
    """Yield a line on each check, then its results; with `machines`, each machine alone first.

    Raise CheckFailed, after a FAIL, if a check ends with an error, here or on another rank: the
    others have to know, since they would wait for this rank in the next check.
    """
    group, store = Group(world, options), world.store
    who = f"{count(group.size, 'process')} on {count(world.num_machines, 'machine')}"
    took_s = time.monotonic() - world.start_time
    text = f"{who} connected within {took_s:.1f} s, backend {world.backend}"
    yield passed("rendezvous", f"{text}, precision {world.precision}")
    checks = [machines_alone, *CHECKS] if machines else [*CHECKS]
    if options.minutes:
        checks.append(burn_in)
    for function in checks:
        name = function.__name__.replace("_", " ")
        yield f"checking {name} ..."
        try:
            yield from group.share(name, function(group))
        except (RuntimeError, ValueError, DdpMnistError) as error:
            why = reason(first_cause(store, as_expected(store, error)))
            failure = store.failure() if group.rank == 0 else None
            text = f"{store.who([failure['rank']])}: {why}" if failure else why
            told = CheckResult.from_error(name, DdpMnistError(text))
            fix = told.fix or "see what the other machines say, then the network"
            yield failed(name, told.text, fix)
            raise CheckFailed(why) from error


def machines_alone(group: Group) -> list[CheckResult]:
    """Check each machine by its first rank: a line for each problem, and one for the others."""
    mine = list[CheckResult]()
    if group.store.rank_info.local_rank == 0:
        options = replace(group.options, processes=group.store.rank_info.local_world_size)
        found = [each for each in check_machine(options) if isinstance(each, CheckResult)]
        mine = [result for result in found if result.status != PASS]
        well = f"{len(found) - len(mine)} of {count(len(found), 'check')} passed"
        mine.append(passed("machine", well))
    return group.merge(mine)


def same_everywhere(group: Group) -> list[CheckResult]:
    """Check that versions, code and data agree: if they differed, DDP would train on silently."""
    dataset = group.options.dataset
    images = cache.cached(dataset, group.options.cache_dir)
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if must_equal(name)]
    mine = {
        **package_versions(),
        CODE: code_digest(),
        f"the data of {dataset}": images.digest[:16] if images else NOT_CACHED,
        "NCCL_ and GLOO_ variables": " ".join(given) or "none",
    }
    if group.device.type == "cuda":
        mine["CUDA"] = str(torch.version.cuda)
        mine["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        mine["GPU"] = torch.cuda.get_device_name(group.device)
    everyone, different = group.gather(mine), list[CheckResult]()
    for what in mine:
        ranks = defaultdict[str | None, list[int]](list)  # the ranks that have each value
        for rank, theirs in enumerate(everyone):
            ranks[theirs.get(what)].append(rank)
        text = "; ".join(f"{group.store.who(ranks[has])} has {has}" for has in ranks)
        if len(ranks.keys() - {NOT_CACHED}) > 1:
            fix = f"{SAME}: copy {Path(ddp_mnist.__file__).parent}" if what == CODE else SAME
            different.append(failed("same", f"{what}: {text}", fix))
        elif len(ranks) > 1:
            fix = f"run ddp-mnist prepare --dataset {quoted(dataset)} on each machine"
            different.append(warned("same data", f"{what}: {text}", fix))
    equal = f"versions, code and data of {count(group.size, 'process')} are equal"
    return different or [passed("same", equal)]


def must_equal(variable: str) -> bool:
    """Return whether an environment variable of NCCL or gloo must have one value everywhere.

    An interface's name may differ, and so may what NCCL logs.
    """
    may_differ = variable.endswith("_SOCKET_IFNAME") or variable.startswith("NCCL_DEBUG")
    return variable.startswith(("NCCL_", "GLOO_")) and not may_differ


def right_results(group: Group) -> list[CheckResult]:
    """Check every collective's result; a rank stops at the first that ends with an error."""
    cases, wrong = collectives(group.rank, group.size, group.device), list[CheckResult]()
    for name in (names := [*cases, "barrier"]):
        try:
            is_right = waits_for_all(group) if name == "barrier" else receives(group, cases[name])
        except RuntimeError as error:
            wrong.append(failed(name, reason(error), BROKEN))
            break
        if not is_right:
            wrong.append(failed(name, "wrong result", BAD_MACHINE))
    right = passed("collectives", f"right on every rank: {', '.join(names)}")
    return group.merge(wrong) or [right]


def receives(group: Group, case: Case) -> bool:
    """Return whether a collective gives this rank the right result."""
    mine, call, expected = case
    call(received := mine.clone())
    group.world.wait_for_gpu()
    return expected is None or torch.equal(received, expected)


def waits_for_all(group: Group) -> bool:
    """Return whether this rank leaves a barrier only after the last rank, made late, entered it."""
    key = f"doctor/entered/{group.store.sync_points}"  # a number that is equal on all ranks
    if group.rank == group.size - 1:
        time.sleep(LATE_S)
        group.store.set(key, True)
    dist.barrier()
    group.world.wait_for_gpu()
    return group.store.exists(key)


def speeds(group: Group) -> list[CheckResult]:
    """Time all-reduces, by message size."""
    everyone = group.gather(all_reduce_ms(group.device, group.world.wait_for_gpu))
    if not everyone:
        return []
    ms = {size: max(each[size] for each in everyone) for size in everyone[0]}
    text = f"all-reduce of {', '.join(f'{size} {each:.3g} ms' for size, each in ms.items())}"
    by_rank = [busbw(each, group.size) for each in everyone]
    fix = LINKS if group.world.backend == "nccl" else GLOO_LINKS
    gb_per_s = {f"all-reduce of {size}": [each[size] for each in by_rank] for size in by_rank[0]}
    return [
        passed("speed", text, figures={f"all-reduce of {k}, ms": v for k, v in ms.items()}),
        rated(group, "busbw", "GB/s", gb_per_s, group.options.expect_busbw, fix),
    ]


def rated(
    group: Group, name: str, unit: str, rates: Rates, expected: float | None, fix: str
) -> CheckResult:
    """Return each rate's spread over the ranks; a FAIL if a rank's last one is below `expected`."""
    text, figures = list[str](), dict[str, float]()
    for what, by_rank in rates.items():
        least, most = min(by_rank), max(by_rank)
        text.append(f"{what} {least:.3g} to {most:.3g} {unit}")
        figures |= {f"{what}, slowest rank, {unit}": least, f"{what}, fastest rank, {unit}": most}
    *_, last = rates.values()
    text.append(f"expected {expected:g} {unit}" if expected else f"not judged: no --expect-{name}")
    if expected:
        figures[f"expected, {unit}"] = expected
    if below := [rank for rank, rate in enumerate(last) if rate < (expected or 0)]:
        text.append(f"less on {group.store.who(below)}")
    return check(name, below, ", ".join(text), fix, figures=figures)


def slowest(group: Group) -> list[CheckResult]:
    """Check that every rank computes about as fast: DDP is as fast as the slowest.

    Another program slows a rank down for a while; whatever is slow by itself is so in each round.
    """
    best, slower, expected = 0.0, SLOW[group.world.backend], group.options.expect_tflops
    for _ in range(ROUNDS):
        group.world.accelerator.wait_for_everyone()
        best = max(best, tflops(group))
        rates = group.gather(best)
        middle = statistics.median_high(rates or [0])
        slow = [rank for rank, rate in enumerate(rates) if rate * slower < middle]
        again = bool(slow) or min(rates, default=0) < (expected or 0)
        if not group.store.broadcast_from_rank0("slow ranks", partial(bool, again)):
            break
    if not rates:
        return []
    who = group.store.who(slow or [rates.index(min(rates))])
    text = f"{who}: {middle / min(rates):.2f} times the median rank's time"
    what = "products in float16" if group.device.type == "cuda" else "products in float32"
    return [
        check("computing", slow, text, SLOW_RANK, WARN),
        rated(group, "tflops", "TFLOP/s", {what: rates}, expected, SLOW_RANK),
    ]


def tflops(group: Group) -> float:
    """Return the most TFLOP/s of about 20 tries: other programs can only make them fewer.

    Matrix products of 2 n^3 operations: [512, 512] in float32 on a CPU; on a GPU [8192, 8192] in
    float16, as small ones would not keep it busy, and training uses its 16-bit units. The numbers
    are random, since a GPU is faster on equal ones.
    """
    on_gpu = group.device.type == "cuda"
    size, dtype = (8192, torch.float16) if on_gpu else (512, torch.float32)
    a, b = torch.randn(2, size, size, device=group.device, dtype=dtype)
    rates, until = list[float](), time.monotonic() + TRIES_S
    while len(rates) < 3 or time.monotonic() < until:
        done, began, took_s = 0, time.monotonic(), 0.0
        while took_s < TRY_S:
            a @ b
            group.world.wait_for_gpu()
            done, took_s = done + 1, time.monotonic() - began
        rates.append(done * 2 * size**3 / took_s / 1e12)
    return max(rates[1:])  # the first one warms up


def faulty_devices(group: Group) -> list[CheckResult]:
    """Return the ranks whose device computes wrongly, right after it worked."""
    mine = product(torch.device(group.world.device_name))
    return group.merge([mine] if mine.status != PASS else [])


def training(group: Group) -> list[CheckResult]:
    """Train on the digits: weights must be equal on all ranks, and accurate."""
    images = cache.load("digits", group.options.cache_dir)
    given, rows = Recipe(epochs=EPOCHS), len(images.rows["train"])
    flags, recipe = resolve_recipe(given, rows, group.size)
    config = TrainConfig(run=RunFlags(dataset="digits", quiet=True), recipe=flags)
    run = make_run(config, recipe, group.world, images.hold_out(given.val_size_of(rows)))
    with listen() as stop:
        summary = train.fit_recorded(RecordedRun(run, stop))
    group.world.accelerator.free_memory()
    digests = group.gather(summary["model_sha256"])
    accuracy, speed = summary["test_accuracy"], summary["images_per_second"]
    problem = f"which is below {LEAST_ACCURACY}" if accuracy < LEAST_ACCURACY else ""
    if odd := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        problem = f"other weights than rank 0's on {group.store.who(odd)}"
    text = (
        f"{summary['steps']} steps on the digits, accuracy {accuracy:.2f},"
        f" {speed:,.0f} images/s, {problem or 'equal weights on every rank'}"
    )
    return [check("training", problem, text, VERIFY, figures={"images/s": speed})]


def burn_in(group: Group) -> list[CheckResult]:
    """Work and train again and again: overheating and loose contacts show only after a while."""
    results = list[CheckResult]()
    until = time.monotonic() + 60 * group.options.minutes
    while group.store.broadcast_from_rank0("doctor's burn-in", lambda: time.monotonic() < until):
        results += [*right_results(group), *training(group)]
        tflops(group)
        results += faulty_devices(group)
    speed = [result.figures["images/s"] for result in results if result.name == "training"]
    early, late = statistics.median(speed[:3]), statistics.median(speed[-3:])
    text = f"{count(len(speed), 'round')} in {group.options.minutes:g} min, {early:,.0f}"
    text += f" images/s at first and {late:,.0f} at last"
    if wrong := [result for result in results if result.status != PASS]:
        text += f"; first of {len(wrong)} faults: {wrong[0].name}, {wrong[0].text}"
        return [wrong[0]._replace(name="burn-in", text=text)]
    fix = "look for throttling (nvidia-smi -q -d PERFORMANCE)"
    # a step on the digits is the CPU's work, on a GPU too
    return [check("burn-in", late < early / SLOW["gloo"], text, fix, WARN)]


CHECKS = (same_everywhere, right_results, speeds, slowest, faulty_devices, training)
