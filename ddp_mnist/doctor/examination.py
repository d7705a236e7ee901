"""The verb `doctor`: examines as much as this start allows, and gives the verdict.

Started alone, it examines this machine and then processes that it starts itself; started by a
launcher on one or more machines, what they are together.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch, find_launch
from ddp_mnist.cluster.local import backend_among, preload, run_world
from ddp_mnist.cluster.nodes import Node
from ddp_mnist.config import Distribution
from ddp_mnist.data.sources import find_source
from ddp_mnist.doctor.compare import against, read_saved
from ddp_mnist.doctor.flags import Doctor
from ddp_mnist.doctor.group import examine_group
from ddp_mnist.doctor.machine import Options, examine_machine
from ddp_mnist.doctor.network import examine_way, pass_on
from ddp_mnist.errors import CheckFailed, DdpMnistError, FailedElsewhere
from ddp_mnist.run.console import Console, tell
from ddp_mnist.run.environment import package_versions
from ddp_mnist.run.outputs import check_place, save_json
from ddp_mnist.verify.results import CheckResult, failed, failure_summary, from_error, worst

preload("ddp_mnist.train", "ddp_mnist.run.metrics")

START_S = 120  # to start processes and examine them once


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
    options = Options(dataset, flags.cache_dir, flags.run_dir, processes)
    verbose = not flags.json
    findings = examine(distribution, launch, options, flags.minutes, verbose=verbose)
    console = Console(is_rank0 and verbose)
    processes = launch.world_size if launch.world_size > 1 else processes
    if compared_with:
        compared = against(findings, compared_with, flags.tolerance, processes)
        findings += compared
        for finding in compared:
            console.print(str(finding))
    verdict = describe(findings, processes)
    if save:
        save_json(save, verdict)
    Console(is_rank0 and flags.json).print(json.dumps(verdict))
    console.print(f"verdict: {verdict['verdict']}")
    if wrong := failure_summary("doctor", findings):
        raise CheckFailed(wrong) if is_rank0 else FailedElsewhere(wrong, CheckFailed.code)


def check_way(node: Node, timeout_s: float, flags: Doctor) -> None:
    """Meet the other machines, and print how far it goes; the processes hear of it too.

    Raises:
        CheckFailed: a check says FAIL.
    """
    say, findings = tell if flags.json else Console(True).print, []
    for finding in examine_way(node, timeout_s):
        say(f"machine {node.machine_rank}: {finding}")
        findings.append(finding)
    if wrong := failure_summary("doctor", findings):
        verdict = describe(findings, processes=0)
        if flags.save:
            save_json(Path(flags.save), verdict)
        Console(flags.json).print(json.dumps(verdict))
        raise CheckFailed(f"machine {node.machine_rank}: {wrong}")
    pass_on(findings)


def default_processes() -> int:
    """One per GPU, but at least two."""
    return max(2, hardware.gpus())


def examine(
    flags: Distribution, launch: Launch, options: Options, minutes: float = 0, *, verbose: bool
) -> list[CheckResult]:
    """The findings; with a launcher, the same ones on every rank. Aloud, as they come."""
    if launch.world_size > 1:
        try:
            return examine_group(flags, launch, options, minutes, verbose=verbose)
        except DdpMnistError as error:
            findings = [from_error("rendezvous", error)]
            Console(verbose and launch.rank == 0).print(str(findings[0]))
            return findings
    findings = []
    for finding in examine_machine(options):
        findings.append(finding)
        Console(verbose).print(str(finding))
    return findings + examine_processes(flags, options, minutes, verbose=verbose)


def examine_processes(
    flags: Distribution, options: Options, minutes: float, *, verbose: bool
) -> list[CheckResult]:
    """Of this machine, started here."""
    if flags.backend == "auto":
        flags = replace(flags, backend=backend_among(options.processes))
    arguments = (flags, options, minutes, verbose)
    timeout_s = START_S + flags.dist_timeout + 60 * minutes
    try:
        return run_world(
            options.processes, as_member, *arguments, folder=Path.cwd(), timeout_s=timeout_s
        )[0]
    except DdpMnistError as error:
        finding = from_error("processes", error)
    except (OSError, RuntimeError, ValueError) as error:  # one was killed, or came to no end
        text = f"{options.processes} of this machine: {type(error).__name__}: {error}"
        finding = failed("processes", text, "see dmesg for what killed it; try --processes 2")
    Console(verbose).print(str(finding))
    return [finding]


def as_member(
    flags: Distribution, options: Options, minutes: float, verbose: bool
) -> list[CheckResult]:
    """One process's part of `examine_processes`."""
    launch = find_launch(flags)
    return examine_group(flags, launch, options, minutes, machines_too=False, verbose=verbose)


def describe(findings: Sequence[CheckResult], processes: int) -> dict[str, Any]:
    """What --json prints and --save writes."""
    return {
        "verdict": worst(findings),
        "date": date.today().isoformat(),
        "processes": processes,
        "findings": [asdict(finding) for finding in findings],
        "machine": {"host": platform.node(), **hardware.describe()},
        "versions": package_versions(),
    }
