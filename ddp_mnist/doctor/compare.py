"""Compare this machine's figures with those that another machine's doctor saved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_mnist.errors import UsageError, reason
from ddp_mnist.verify.results import WARN, CheckResult, failed, passed, warned

LOAD = "load"  # the check of what other programs hold


def busy(results: Iterable[Mapping[str, Any]]) -> str:
    """Return what other programs held of the machines that were busy; "" if none was."""
    return "; ".join(
        each["text"] for each in results if (each.get("name"), each.get("status")) == (LOAD, WARN)
    )


def against(
    results: Sequence[CheckResult], saved: dict[str, Any], tolerance: float, processes: int
) -> list[CheckResult]:
    """Return each figure beside that of another machine of the same type.

    Args:
        results: of this machine.
        saved: what --save wrote there: `processes`, and in `findings` each result's `figures`.
        tolerance: the share by which a figure may be worse.
        processes: how many were checked here.
    """
    if saved["processes"] != processes:
        text = f"{processes} processes here, {saved['processes']} there: speeds are not comparable"
        return [warned("against", text, "check both with the same number of processes")]
    there = {name: value for each in saved["findings"] for name, value in each["figures"].items()}
    here = {name: value for each in results for name, value in each.figures.items()}
    compared = []
    if busy_there := busy(saved["findings"]):
        text = f"the other machine was measured while it was busy ({busy_there})"
        compared.append(warned("against", text, "check it again while nothing else runs there"))
    busy_here = busy(map(asdict, results))
    for name in sorted(here.keys() & there.keys()):
        if min(here[name], there[name]) > 0:  # else there is nothing to divide by
            compared.append(compare(name, here[name], there[name], tolerance, busy_here))
    if missing := sorted(there.keys() - here.keys()):
        fix = "check both with the same flags and numbers of processes"
        compared.append(warned("against", f"not measured here: {', '.join(missing)}", fix))
    return compared


def compare(name: str, here: float, there: float, tolerance: float, busy_here: str) -> CheckResult:
    """Return a FAIL if `here` is worse than `there` by more than `tolerance`."""
    worse = here / there if name.endswith((" ms", " s")) else there / here
    text = f"{name}: {here:.4g} here, {there:.4g} there"
    if worse <= 1 + tolerance:
        return passed("against", f"{text} (within {tolerance:.0%})")
    text = f"{text}, worse by {worse - 1:.0%}"
    fix = "look for what differs: clocks, throttling, neighbours, cables, versions"
    if busy_here:
        text = f"{text}, on a busy machine ({busy_here})"
        fix = f"check again while nothing else runs; if it stays, {fix}"
    return failed("against", text, fix)


def read_saved(file: str | None) -> dict[str, Any] | None:
    """Return what --save wrote there.

    Raises:
        UsageError: it did not write this file.
    """
    if file is None:
        return None
    try:
        saved = json.loads(Path(file).read_text(encoding="utf-8"))
        for finding in saved["findings"]:
            {name: float(value) for name, value in finding["figures"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = reason(error) if isinstance(error, OSError) else "not from doctor --save"
        raise UsageError(f"--against {file}: cannot be read ({why}); name another") from error
    return saved
