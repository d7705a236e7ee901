"""What the doctor finds: a line each, with the remedy, and figures to compare with another box."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddp_mnist.errors import DdpMnistError

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
LOAD = "load"  # the finding that tells what other programs hold
COLUMNS, INDENT = 80, " " * 21


@dataclass(frozen=True)
class Finding:
    """One line of the verdict.

    Attributes:
        level: PASS, WARN (works, but look at it) or FAIL (do not train here).
        name: what was examined.
        said: what was found.
        remedy: what to do; empty for a PASS.
        figures: speeds, by name; a name that ends with a unit of time is better if smaller.
    """

    level: str
    name: str
    said: str
    remedy: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """In 80 columns; the remedy begins on a line of its own."""
        head = f"{self.level}  {self.name:<14} "
        lines = textwrap.wrap(self.said, COLUMNS, initial_indent=head, subsequent_indent=INDENT)
        if self.remedy:
            first = INDENT + "-> "
            rest = INDENT + "   "
            lines += textwrap.wrap(
                self.remedy, COLUMNS, initial_indent=first, subsequent_indent=rest
            )
        return "\n".join(lines)


def passed(name: str, said: str, figures: dict[str, float] | None = None) -> Finding:
    return Finding(PASS, name, said, figures=figures or {})


def warned(name: str, said: str, remedy: str) -> Finding:
    return Finding(WARN, name, said, remedy)


def failed(name: str, said: str, remedy: str) -> Finding:
    return Finding(FAIL, name, said, remedy)


def from_error(name: str, error: DdpMnistError) -> Finding:
    """Its line: what it says, and behind the last semicolon what to do."""
    said, _, remedy = str(error).rpartition("; ")
    return failed(name, said, remedy)


def worst(findings: Iterable[Finding]) -> str:
    levels = [finding.level for finding in findings]
    return FAIL if FAIL in levels else WARN if WARN in levels else PASS


def busy(findings: Iterable[Mapping[str, Any]]) -> str:
    """What other programs held of the machines that were busy; empty if none was."""
    return "; ".join(f["said"] for f in findings if (f.get("name"), f.get("level")) == (LOAD, WARN))


def against(
    findings: Sequence[Finding], saved: dict[str, Any], tolerance: float, processes: int
) -> list[Finding]:
    """Each figure beside that of another box of the same type.

    Args:
        findings: of this box.
        saved: what --save wrote there.
        tolerance: the share by which a figure may be worse.
        processes: that were examined here.
    """
    if saved["processes"] != processes:
        said = f"{processes} processes here, {saved['processes']} there: speeds are not comparable"
        return [warned("against", said, "examine both with the same number of processes")]
    there = {name: value for f in saved["findings"] for name, value in f["figures"].items()}
    here = {name: value for f in findings for name, value in f.figures.items()}
    compared = []
    if busy_there := busy(saved["findings"]):
        said = f"what is compared with was measured on a busy machine ({busy_there})"
        compared.append(warned("against", said, "examine that box again while nothing else runs"))
    busy_here = busy(map(asdict, findings))
    for name in sorted(here.keys() & there.keys()):
        if min(here[name], there[name]) <= 0:
            continue  # nothing to divide by
        smaller_is_better = name.endswith((" ms", " s"))
        worse = here[name] / there[name] if smaller_is_better else there[name] / here[name]
        said = f"{name}: {here[name]:.4g} here, {there[name]:.4g} there"
        if worse <= 1 + tolerance:
            compared.append(passed("against", f"{said} (within {tolerance:.0%})"))
        else:
            said = f"{said}, worse by {worse - 1:.0%}"
            remedy = "look for what differs: clocks, throttling, neighbours, cables, versions"
            if busy_here:
                said = f"{said}, on a busy machine ({busy_here})"
                remedy = f"examine again while nothing else runs; if it stays, {remedy}"
            compared.append(failed("against", said, remedy))
    if missing := sorted(there.keys() - here.keys()):
        remedy = "examine both with the same flags and numbers of processes"
        compared.append(warned("against", f"not measured here: {', '.join(missing)}", remedy))
    return compared
