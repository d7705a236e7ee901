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

from ddp_mnist import hardware
from ddp_mnist.config import Distribution
from ddp_mnist.doctor.findings import FAIL, Finding, failed, from_error, worst
from ddp_mnist.doctor.group import examine_group
from ddp_mnist.doctor.machine import Options, examine_machine
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.launch import Launch, find_launch
from ddp_mnist.local_world import backend_among, run_world
from ddp_mnist.screen import Screen
from ddp_mnist.versions import package_versions

START_S = 120  # to start processes and examine them once


def default_processes() -> int:
    """One per GPU, but at least two."""
    return max(2, hardware.gpus())


def examine(
    flags: Distribution, launch: Launch, options: Options, minutes: float = 0, *, aloud: bool
) -> list[Finding]:
    """The findings; with a launcher, the same ones on every rank. Aloud, as they come."""
    if launch.world_size > 1:
        try:
            return examine_group(flags, launch, options, minutes, aloud=aloud)
        except DdpMnistError as error:
            findings = [from_error("rendezvous", error)]
            Screen(aloud and launch.rank == 0).say(str(findings[0]))
            return findings
    findings = []
    for finding in examine_machine(options):
        findings.append(finding)
        Screen(aloud).say(str(finding))
    return findings + examine_processes(flags, options, minutes, aloud=aloud)


def examine_processes(
    flags: Distribution, options: Options, minutes: float, *, aloud: bool
) -> list[Finding]:
    """Of this machine, started here."""
    if flags.backend == "auto":
        flags = replace(flags, backend=backend_among(options.processes))
    arguments = (flags, options, minutes, aloud)
    timeout_s = START_S + flags.dist_timeout + 60 * minutes
    try:
        return run_world(
            options.processes, as_member, *arguments, folder=Path.cwd(), timeout_s=timeout_s
        )[0]
    except DdpMnistError as error:
        finding = from_error("processes", error)
    except (OSError, RuntimeError, ValueError) as error:  # one was killed, or came to no end
        said = f"{options.processes} of this machine: {type(error).__name__}: {error}"
        finding = failed("processes", said, "see dmesg for what killed it; try --processes 2")
    Screen(aloud).say(str(finding))
    return [finding]


def as_member(flags: Distribution, options: Options, minutes: float, aloud: bool) -> list[Finding]:
    """One process's part of `examine_processes`."""
    launch = find_launch(flags)
    return examine_group(flags, launch, options, minutes, machines_too=False, aloud=aloud)


def describe(findings: Sequence[Finding], processes: int) -> dict[str, Any]:
    """What --json prints and --save writes."""
    return {
        "verdict": worst(findings),
        "date": date.today().isoformat(),
        "processes": processes,
        "findings": [asdict(finding) for finding in findings],
        "machine": {"host": platform.node(), **hardware.describe()},
        "versions": package_versions(),
    }


def complaint(findings: Sequence[Finding]) -> str | None:
    """What is wrong, in one line; None without a FAIL."""
    wrong = [finding.name for finding in findings if finding.level == FAIL]
    if not wrong:
        return None
    return (
        f"doctor: {len(wrong)} of {len(findings)} findings are FAIL ({', '.join(wrong)}); do what"
        " their lines say, then examine again"
    )
