"""The verb `doctor`: check as much as this start allows.

Started alone, it checks this machine and then processes that it starts itself; started by a
launcher on one or more machines, what they are together.
"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch, find_launch
from ddp_mnist.cluster.local import backend_among, run_world
from ddp_mnist.cluster.nodes import Node
from ddp_mnist.config import Distribution
from ddp_mnist.data.sources import find_source
from ddp_mnist.doctor.compare import against, read_saved
from ddp_mnist.doctor.flags import Doctor
from ddp_mnist.doctor.group import PASSED_ON, check_group
from ddp_mnist.doctor.machine import check_machine
from ddp_mnist.doctor.preflight import check_node
from ddp_mnist.errors import CheckFailed, DdpMnistError, FailedElsewhere, PeerError, UsageError
from ddp_mnist.run.console import Console, tell
from ddp_mnist.run.folder import check_place, save_json
from ddp_mnist.run.results import FAIL, CheckResult, failure_summary, from_error, worst
from ddp_mnist.run.results import describe as results_as_json

START_S = 120  # to start processes and check them once


def default_processes() -> int:
    """Return one per GPU, but at least two."""
    return max(2, hardware.gpus())


def run(flags: Doctor, distribution: Distribution) -> None:
    """Print each check as it is done, and the verdict; on rank 0, which has the files.

    Raises:
        CheckFailed: a check says FAIL.
    """
    launch = find_launch(distribution)
    if distribution.cpu:
        hardware.hide_gpus()
    is_rank0, dataset = launch.rank == 0, "mnist" if flags.dataset == "auto" else flags.dataset
    save = check_place(flags.save if is_rank0 else None, "--save")
    compared_with = read_saved(flags.against) if flags.against and is_rank0 else None
    find_source(dataset)  # refuses a name that is none before anything else
    if flags.processes == 1:  # which a machine of several may have; not one alone
        raise UsageError("--processes 1: must be at least 2, to have something to connect")
    flags = replace(flags, dataset=dataset, processes=flags.processes or default_processes())
    results = run_checks(flags, distribution, launch)
    console = Console(is_rank0 and not flags.json)
    processes = launch.world_size if launch.world_size > 1 else flags.processes or 0
    if compared_with:
        for result in list(against(results, compared_with, flags.tolerance, processes)):
            results.append(result)
            console.print(str(result))
    verdict = results_as_json(results, "findings", verdict=worst(results), processes=processes)
    if save:
        save_json(save, verdict)
    Console(is_rank0 and flags.json).print(json.dumps(verdict))
    console.print(f"verdict: {verdict['verdict']}")
    if wrong := failure_summary("doctor", results):
        raise CheckFailed(wrong) if is_rank0 else FailedElsewhere(wrong, CheckFailed.code)


def run_preflight(node: Node, timeout_s: float, flags: Doctor) -> None:
    """Connect to the other machines, and print how far it goes; the processes get the results.

    Raises:
        CheckFailed: a check says FAIL.
    """
    say, results = tell if flags.json else Console(True).print, []
    for result in check_node(node, timeout_s):
        say(f"machine {node.machine_rank}: {result}")
        results.append(result)
    if wrong := failure_summary("doctor", results):
        verdict = results_as_json(results, "findings", verdict=FAIL, processes=0)
        if flags.save:
            save_json(Path(flags.save), verdict)
        Console(flags.json).print(json.dumps(verdict))
        raise CheckFailed(f"machine {node.machine_rank}: {wrong}")
    os.environ[PASSED_ON] = json.dumps([asdict(result) for result in results])


def run_checks(flags: Doctor, distribution: Distribution, launch: Launch) -> list[CheckResult]:
    """Return the results; with a launcher, the same ones on every rank. Print each as it comes."""
    results, alone = list[CheckResult](), launch.world_size == 1
    console = Console(launch.rank == 0 and not flags.json)
    for result in check_machine(flags) if alone else ():
        results.append(result)
        console.print(str(result))
    try:
        if alone:
            return results + check_processes(flags, distribution)
        return check_group(flags, distribution)
    except DdpMnistError as error:
        results.append(from_error("processes" if alone else "rendezvous", error))
        console.print(str(results[-1]))
        return results


def check_processes(flags: Doctor, distribution: Distribution) -> list[CheckResult]:
    """Start processes on this machine, and return what they find."""
    size = flags.processes or default_processes()
    timeout_s = START_S + distribution.dist_timeout + 60 * flags.minutes
    if distribution.backend == "auto":
        distribution = replace(distribution, backend=backend_among(size))
    members = (size, check_group, flags, distribution, False)
    try:
        return run_world(*members, folder=Path.cwd(), timeout_s=timeout_s)[0]
    except (OSError, RuntimeError, ValueError) as error:  # one was killed, or came to no end
        text = f"{size} of this machine: {type(error).__name__}: {error}"
        raise PeerError(f"{text}; see dmesg for what killed it, or try --processes 2") from error
