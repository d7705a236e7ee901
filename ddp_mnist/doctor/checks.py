"""The verb `doctor`: check as much as this start allows.

Started alone, it checks this machine and then processes that it starts itself; started by a
launcher on one or more machines, what they are together.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch, find_launch
from ddp_mnist.cluster.local import backend_among, run_world
from ddp_mnist.cluster.nodes import Node
from ddp_mnist.config import Distribution
from ddp_mnist.data.sources import find_source
from ddp_mnist.doctor.compare import against, read_saved
from ddp_mnist.doctor.flags import Doctor
from ddp_mnist.doctor.group import check_group
from ddp_mnist.doctor.machine import Options, check_machine
from ddp_mnist.doctor.preflight import check_node, pass_on
from ddp_mnist.errors import CheckFailed, DdpMnistError, FailedElsewhere
from ddp_mnist.run.console import Console, tell
from ddp_mnist.run.folder import check_place, save_json
from ddp_mnist.verify.results import CheckResult, failed, failure_summary, from_error, worst
from ddp_mnist.verify.results import describe as results_as_json

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
    is_rank0 = launch.rank == 0
    save = check_place(flags.save if is_rank0 else None, "--save")
    compared_with = read_saved(flags.against if is_rank0 else None)
    dataset = "mnist" if flags.dataset == "auto" else flags.dataset
    find_source(dataset)  # refuses a name that is none before anything else
    processes = flags.processes or default_processes()
    options = Options(dataset, flags.cache_dir, flags.run_dir, processes, minutes=flags.minutes)
    results = run_checks(distribution, launch, options, verbose=not flags.json)
    console = Console(is_rank0 and not flags.json)
    processes = launch.world_size if launch.world_size > 1 else processes
    if compared_with:
        compared = against(results, compared_with, flags.tolerance, processes)
        results += compared
        for result in compared:
            console.print(str(result))
    verdict = describe(results, processes)
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
        verdict = describe(results, processes=0)
        if flags.save:
            save_json(Path(flags.save), verdict)
        Console(flags.json).print(json.dumps(verdict))
        raise CheckFailed(f"machine {node.machine_rank}: {wrong}")
    pass_on(results)


def run_checks(
    flags: Distribution, launch: Launch, options: Options, *, verbose: bool
) -> list[CheckResult]:
    """Return the results; with a launcher, the same ones on every rank. Print each as it comes."""
    if launch.world_size > 1:
        try:
            return check_group(flags, launch, options, verbose=verbose)
        except DdpMnistError as error:
            result = from_error("rendezvous", error)
            Console(verbose and launch.rank == 0).print(str(result))
            return [result]
    results = []
    for result in check_machine(options):
        results.append(result)
        Console(verbose).print(str(result))
    return results + check_processes(flags, options, verbose=verbose)


def check_processes(flags: Distribution, options: Options, *, verbose: bool) -> list[CheckResult]:
    """Start processes on this machine, and return what they find."""
    size, timeout_s = options.processes, START_S + flags.dist_timeout + 60 * options.minutes
    if flags.backend == "auto":
        flags = replace(flags, backend=backend_among(size))
    try:
        arguments = (flags, options, verbose)
        return run_world(size, as_member, *arguments, folder=Path.cwd(), timeout_s=timeout_s)[0]
    except DdpMnistError as error:
        result = from_error("processes", error)
    except (OSError, RuntimeError, ValueError) as error:  # one was killed, or came to no end
        text = f"{size} of this machine: {type(error).__name__}: {error}"
        result = failed("processes", text, "see dmesg for what killed it; try --processes 2")
    Console(verbose).print(str(result))
    return [result]


def as_member(flags: Distribution, options: Options, verbose: bool) -> list[CheckResult]:
    """Do one process's part of `check_processes`."""
    return check_group(flags, find_launch(flags), options, machines_too=False, verbose=verbose)


def describe(results: Sequence[CheckResult], processes: int) -> dict[str, Any]:
    """Return what --json prints and --save writes."""
    found = {"verdict": worst(results), "processes": processes}
    return {**found, **results_as_json(results, "findings")}
