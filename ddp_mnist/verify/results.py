"""One record of a checked thing, for verify, doctor and bench: its line, fix and figures."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ddp_mnist.errors import DdpMnistError

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
COLUMNS, INDENT = 80, " " * 21


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; its fields are an entry of every JSON report.

    Attributes:
        status: PASS, WARN (works, but look at it) or FAIL (do not rely on it).
        name: the name of the check.
        text: what was found.
        fix: what to do; empty for a PASS.
        figures: measured numbers by name; a name that ends with ` ms` or ` s` is better if smaller.
    """

    status: str
    name: str
    text: str
    fix: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return it in 80 columns; the fix begins on a line of its own."""
        head = f"{self.status}  {self.name:<14} "
        lines = textwrap.wrap(self.text, COLUMNS, initial_indent=head, subsequent_indent=INDENT)
        arrow, rest = f"{INDENT}-> ", f"{INDENT}   "
        lines += textwrap.wrap(self.fix, COLUMNS, initial_indent=arrow, subsequent_indent=rest)
        return "\n".join(lines)


def passed(name: str, text: str, figures: dict[str, float] | None = None) -> CheckResult:
    return CheckResult(PASS, name, text, figures=figures or {})


def warned(name: str, text: str, fix: str) -> CheckResult:
    return CheckResult(WARN, name, text, fix)


def failed(name: str, text: str, fix: str) -> CheckResult:
    return CheckResult(FAIL, name, text, fix)


def passed_if(holds: bool, name: str, text: str, fix: str, otherwise: str = FAIL) -> CheckResult:
    """Return a PASS if it holds, else a result with the status `otherwise` and the fix."""
    return passed(name, text) if holds else CheckResult(otherwise, name, text, fix)


def from_error(name: str, error: DdpMnistError) -> CheckResult:
    """Return a FAIL; the fix is what the error says behind its last semicolon."""
    text, semicolon, fix = str(error).rpartition("; ")
    return failed(name, text, fix) if semicolon else failed(name, fix, "")


def worst(results: Iterable[CheckResult]) -> str:
    """Return the worst status among them; PASS if there is none."""
    return max((result.status for result in results), key=(PASS, WARN, FAIL).index, default=PASS)


DO_WHAT_THEY_SAY = "do what their lines say, then check again"


def failure_summary(
    what: str, results: Sequence[CheckResult], fix: str = DO_WHAT_THEY_SAY
) -> str | None:
    """Return one line that names the failed checks, or None if none failed."""
    wrong = [result.name for result in results if result.status == FAIL]
    if not wrong:
        return None
    names = ", ".join(dict.fromkeys(wrong))
    return f"{what}: {len(wrong)} of {len(results)} checks failed ({names}); {fix}"
