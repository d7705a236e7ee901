"""The verb `doctor`: examines as much as this start allows, and gives the verdict.

Started alone, it examines this machine and then processes that it starts itself; started by a
launcher on one or more machines, what they are together.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.config import Distribution
from ddp_mnist.doctor.findings import FAIL, Finding, failed, worst
from ddp_mnist.doctor.group import examine_group
from ddp_mnist.doctor.machine import Options, examine_machine
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.launch import Launch, find_launch
from ddp_mnist.local_world import run_world
from ddp_mnist.versions import cpu_model, package_versions

START_S = 120  # to start processes and examine them once


def default_processes() -> int:
    """One per GPU; two where there is none."""
    return torch.cuda.device_count() or 2


def examine(
    flags: Distribution, launch: Launch, options: Options, minutes: float = 0
) -> Iterator[Finding]:
    """Findings as they come. With a launcher, the same ones on every rank."""
    if launch.world_size > 1:
        yield from examine_group(flags, launch, options, minutes)
        return
    yield from examine_machine(options)
    yield from examine_processes(flags, options, minutes)


def examine_processes(flags: Distribution, options: Options, minutes: float) -> list[Finding]:
    """Of this machine, started here."""
    arguments = (flags, options, minutes)
    timeout_s = START_S + flags.dist_timeout + 60 * minutes
    try:
        return run_world(
            options.processes, as_member, *arguments, folder=Path.cwd(), timeout_s=timeout_s
        )[0]
    except DdpMnistError as error:
        said, _, remedy = str(error).rpartition("; ")
        return [failed("processes", said, remedy)]
    except (OSError, RuntimeError) as error:  # a process that was killed, or came to no end
        said = f"{options.processes} of this machine: {type(error).__name__}: {error}"
        return [failed("processes", said, "see dmesg for what killed it; try --processes 2")]


def as_member(flags: Distribution, options: Options, minutes: float) -> list[Finding]:
    """One process's part of `examine_processes`."""
    return examine_group(flags, find_launch(flags), options, minutes, machines_too=False)


def describe(findings: Sequence[Finding], processes: int) -> dict[str, Any]:
    """What --json prints and --save writes."""
    return {
        "verdict": worst(findings),
        "date": date.today().isoformat(),
        "processes": processes,
        "findings": [asdict(finding) for finding in findings],
        "machine": {
            "host": platform.node(),
            "cpu": cpu_model(),
            "cores": os.cpu_count(),
            "system": platform.platform(),
        },
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
