"""CheckResult, the outcome of one check of verify or doctor: its line, fix and figures."""

import platform
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import partial
from typing import Any, NamedTuple, Self

from ddp_mnist.cluster import hardware
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.system.console import coloured
from ddp_mnist.system.text import escaped
from ddp_mnist.training.versions import code_digest, git_commit, package_versions

PASS, WARN, FAIL = "PASS", "WARN", "FAIL"
INDENT = " " * 21  # of the text in a line
FIX = "do what their lines say, then check again"


class CheckResult(NamedTuple):
    """The outcome of one check; its fields are an entry of every JSON report."""

    status: str  # PASS, WARN (works, but look at it) or FAIL (do not rely on it)
    name: str
    text: str
    fix: str = ""  # what to do; empty for a PASS
    # measured numbers by name; a name that ends with ` ms` or ` s` is better if smaller
    figures: Mapping[str, float] = {}

    @classmethod
    def from_error(cls, name: str, error: DdpMnistError) -> Self:
        """Return a FAIL; its fix is the error's text after the last semicolon."""
        text, _, fix = str(error).rpartition("; ")
        return cls(FAIL, name, text or fix, fix if text else "")

    def __str__(self) -> str:
        """Return the line, its status in colour; the fix begins another line."""
        fix = f"\n{INDENT}-> {escaped(self.fix)}" if self.fix else ""
        return f"{coloured(self.status)}  {self.name:<14} {escaped(self.text)}{fix}"


passed, warned, failed = (partial(CheckResult, status) for status in (PASS, WARN, FAIL))


def check(
    name: str,
    problem: object,
    text: str,
    fix: str,
    status: str = FAIL,
    figures: Mapping[str, float] = {},
) -> CheckResult:
    """Return a PASS if there is no problem, else a result with `status` and the fix."""
    status, fix = (status, fix) if problem else (PASS, "")
    return CheckResult(status, name, text, fix, figures)


def worst(results: Iterable[CheckResult]) -> str:
    """Return the worst status among the results; PASS if there are none."""
    return max((result.status for result in results), key=(PASS, WARN, FAIL).index, default=PASS)


def failure_summary(what: str, results: Sequence[CheckResult]) -> str | None:
    """Return one line that names the failed checks; None if none failed."""
    if not (wrong := [result.name for result in results if result.status == FAIL]):
        return None
    names = ", ".join(dict.fromkeys(wrong))
    return f"{what}: {len(wrong)} of {len(results)} checks failed ({names}); {FIX}"


def describe(results: Iterable[CheckResult], key: str, **head: Any) -> dict[str, Any]:
    """Return a JSON report: `head`, the date, the results under `key`, machine and software."""
    return {
        **head,
        "date": date.today().isoformat(),
        key: [result._asdict() for result in results],
        "machine": {"host": platform.node(), **hardware.describe(), "gpus": hardware.gpus()},
        "versions": package_versions(),
        "code": code_digest(),
        "git": git_commit(),
    }
