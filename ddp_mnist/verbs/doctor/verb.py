"""The verb `doctor`: check as much as this start allows.

Started alone, it checks this machine and then processes that it starts itself; started by a
launcher, on one or more machines, it checks them together.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import backend_among, run_world
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import CheckFailed, DdpMnistError, FailedElsewhere, StorageError, UsageError
from ddp_mnist.system.console import Console, coloured
from ddp_mnist.system.text import as_json
from ddp_mnist.training.plan import narrated_elsewhere
from ddp_mnist.verbs import check_result
from ddp_mnist.verbs.check_result import FAIL, CheckResult, failed, worst
from ddp_mnist.verbs.doctor.group_checks import check_group
from ddp_mnist.verbs.doctor.machine_checks import check_machine
from ddp_mnist.verbs.flags import Doctor

START_S = 120  # to start processes and check them once


def run(flags: Doctor, distribution: Distribution) -> None:
    """Print each check as it is done, and the verdict, on rank 0, which has the files.

    Raise CheckFailed if any check is a FAIL.
    """
    launch = find_launch(distribution)
    if distribution.cpu:
        hardware.hide_gpus()
    is_rank0, is_alone = launch.rank == 0, launch.world_size == 1
    dataset = "mnist" if flags.dataset == "auto" else flags.dataset
    find_source(dataset)  # refuses an unknown data set before anything else
    if flags.processes == 1:  # one of several machines may have just 1; a lone one may not
        raise UsageError("--processes 1: must be at least 2, to have something to connect")
    processes = flags.processes or max(hardware.gpus(), 2) if is_alone else launch.world_size
    flags = replace(flags, dataset=dataset, processes=processes)
    console = Console(is_rank0 and not flags.json)
    if is_alone:
        with console:
            results = list(print_each(check_machine(flags), console))
        results += check_processes(processes, flags, distribution)
    else:
        results = check_together(flags, distribution, machines=True)
    if is_rank0:
        head = {"verdict": worst(results), "processes": processes}
        Console(flags.json).print(as_json(check_result.describe(results, "findings", **head)))
    console.print(f"verdict: {coloured(worst(results))}", coloured=True)
    if wrong := check_result.failure_summary("doctor", results):
        raise CheckFailed(wrong) if is_rank0 else FailedElsewhere(wrong, CheckFailed.code)


def print_each(checks: Iterable[CheckResult | str], console: Console) -> Iterator[CheckResult]:
    """Yield the results, each printed at once; show the lines between them only for a while."""
    for each in checks:
        if isinstance(each, CheckResult):
            console.print(str(each), coloured=True)
            yield each
        else:
            console.draw(0, each)


def check_processes(size: int, flags: Doctor, distribution: Distribution) -> list[CheckResult]:
    """Start processes on this machine, and return their results."""
    timeout_s = START_S + distribution.dist_timeout + 60 * flags.minutes
    if distribution.backend == "auto":
        distribution = replace(distribution, backend=backend_among(size))
    console = Console(not flags.json)
    try:
        members = (size, check_together, flags, distribution, False)
        with console:
            console.draw(0, f"starting {size} processes ...")
            return run_world(*members, folder=Path.cwd(), timeout_s=timeout_s)[0]
    except (OSError, RuntimeError, ValueError) as error:  # one was killed, or did not end
        text = f"{size} of this machine: {type(error).__name__}: {error}"
        wrong = failed("processes", text, "see dmesg for what killed it, or try --processes 2")
    except DdpMnistError as error:
        wrong = CheckResult.from_error("processes", error)
    return list(print_each([wrong], console))


def check_together(flags: Doctor, distribution: Distribution, machines: bool) -> list[CheckResult]:
    """Return the results of all ranks together; rank 0 prints them. See `check_group`."""
    launch, results = find_launch(distribution), list[CheckResult]()
    console = Console(not flags.json and (launch.rank == 0 or launch.launcher == "tcp"))
    if launch.rank == 0:
        console.draw(0, "waiting for all to connect ...")
    try:
        with console, join_world(distribution, launch) as world:
            console.verbose &= launch.rank == 0
            with narrated_elsewhere(world, not flags.json):
                for result in print_each(check_group(world, flags, machines), console):
                    results.append(result)
    except StorageError:  # of stdout
        raise
    except DdpMnistError as error:
        if worst(results) != FAIL:  # a check that failed says more
            end = CheckResult.from_error("the end" if results else "rendezvous", error)
            results += print_each([end], console)
    return results
