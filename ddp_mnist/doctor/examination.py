"""The verb `doctor`: examines as much as this start allows, and gives the verdict.

Started alone, it examines this machine and then processes that it starts itself; started by a
launcher on one or more machines, what they are together.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.launch import Launch, find_launch
from ddp_mnist.cluster.local import backend_among, preload, run_world
from ddp_mnist.config import Distribution
from ddp_mnist.doctor.group import examine_group
from ddp_mnist.doctor.machine import Options, examine_machine
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.run.console import Console
from ddp_mnist.run.environment import package_versions
from ddp_mnist.verify.results import CheckResult, failed, from_error, worst

preload("ddp_mnist.train", "ddp_mnist.run.metrics")

START_S = 120  # to start processes and examine them once


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
