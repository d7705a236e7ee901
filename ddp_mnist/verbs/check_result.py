"""CheckResult, the outcome of one check in verify, doctor or bench: its line, fix and figures."""

import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from typing import Any

from ddp_mnist.cluster import hardware
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.run.console import coloured, wrapped
from ddp_mnist.run.versions import package_versions

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
INDENT = " " * 21
FIX = "do what their lines say, then check again"


@dataclass(frozen=True)
class CheckResult:
    """The result of one check; its fields are an entry of every JSON report."""

    status: str  # PASS, WARN (works, but look at it) or FAIL (do not rely on it)
    name: str
    text: str
    fix: str = ""  # what to do; empty for a PASS
    # measured numbers by name; a name that ends with ` ms` or ` s` is better if smaller
    figures: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return it in colour and at most 80 columns; the fix begins on a new line."""
        head = f"{self.status}  {self.name:<14} "
        lines = wrapped(self.text, head, INDENT)
        lines += wrapped(self.fix, f"{INDENT}-> ", f"{INDENT}   ")
        return coloured(self.status) + "\n".join(lines).removeprefix(self.status)


passed, warned, failed = (partial(CheckResult, status) for status in (PASS, WARN, FAIL))


def check(
    name: str,
    problem: object,
    text: str,
    fix: str,
    status: str = FAIL,
    figures: dict[str, float] | None = None,
) -> CheckResult:
    """Return a PASS if there is no problem, else a result with `status` and the fix."""
    status, fix = (status, fix) if problem else (PASS, "")
    return CheckResult(status, name, text, fix, figures or {})


def from_error(name: str, error: DdpMnistError) -> CheckResult:
    """Return a FAIL; the fix is what follows the last semicolon of the error."""
    text, semicolon, fix = str(error).rpartition("; ")
    return failed(name, text, fix) if semicolon else failed(name, fix)


def worst(results: Iterable[CheckResult]) -> str:
    """Return the worst status among them; PASS if there is none."""
    return max((result.status for result in results), key=(PASS, WARN, FAIL).index, default=PASS)


def failure_summary(what: str, results: Sequence[CheckResult], fix: str = FIX) -> str | None:
    """Return one line that names the failed checks, or None if none failed."""
    wrong = [result.name for result in results if result.status == FAIL]
    names = ", ".join(dict.fromkeys(wrong))
    summary = f"{what}: {len(wrong)} of {len(results)} checks failed ({names}); {fix}"
    return summary if wrong else None


def describe(results: Iterable[CheckResult], key: str, **head: Any) -> dict[str, Any]:
    """Return for JSON: `head`, the results under `key`, the date, the machine and versions."""
    return {
        **head,
        "date": date.today().isoformat(),
        key: [asdict(result) for result in results],
        "machine": {"host": platform.node(), **hardware.describe(), "gpus": hardware.gpus()},
        "versions": package_versions(),
    }
