"""Compare this machine's figures with those that another machine's doctor saved."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ddp_mnist.errors import UsageError, reason
from ddp_mnist.run.folder import read_json
from ddp_mnist.verbs.check_result import FAIL, WARN, CheckResult, check, warned

LOAD = "load"  # the check for other programs
AGAIN = "check it again while nothing else runs there"


class Measured(NamedTuple):
    """Doctor's findings on a machine."""

    processes: int
    results: Sequence[CheckResult]

    @property
    def busy_with(self) -> str:
        """Return a note on other programs that held its cores meanwhile; "" if they held little."""
        return "; ".join(r.text for r in self.results if (r.name, r.status) == (LOAD, WARN))

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures of all results by name."""
        return {name: value for each in self.results for name, value in each.figures.items()}


def against(here: Measured, there: Measured, tolerance: float) -> Iterator[CheckResult]:
    """Yield each figure next to that of another machine of the same type.

    FAIL if it is more than 1 + `tolerance` times as slow, but WARN if one of the machines was busy:
    a machine must not be rejected for what its neighbours do. WARN too if it is not comparable.
    """
    if here.processes != there.processes:
        text = f"{here.processes} processes here, {there.processes} there"
        fix = "check both with the same number of processes"
        yield warned("against", f"{text}: speeds are not comparable", fix)
        return
    too_slow, fix = FAIL, "look for what differs: clocks, throttling, neighbours, cables, versions"
    for who, machine in (("this machine", here), ("the other machine", there)):
        if machine.busy_with:
            too_slow, fix = WARN, AGAIN
            text = f"{who} was measured while it was busy ({machine.busy_with})"
            yield warned("against", text, fix)
    ours, theirs = here.figures, there.figures
    for name in (name for name in ours if ours[name] and theirs.get(name)):
        is_time = name.endswith((" ms", " s"))
        slower = ours[name] / theirs[name] if is_time else theirs[name] / ours[name]
        text = (
            f"{name}: {ours[name]:.4g} here, {theirs[name]:.4g} there; {slower:.2f} times as slow"
        )
        text += f", may be {1 + tolerance:g}"
        yield check("against", slower > 1 + tolerance, text, fix, too_slow)
    if missing := [name for name in theirs if name not in ours]:
        fix = "check both with the same flags and numbers of processes"
        yield warned("against", f"not measured here: {', '.join(missing)}", fix)


def read_saved(file: str) -> Measured:
    """Read a file that --save wrote. Raise UsageError for any other file."""
    try:
        saved = read_json(Path(file))
        found = Measured(saved["processes"], [CheckResult(**each) for each in saved["findings"]])
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = reason(error) if isinstance(error, OSError) else "not from doctor --save"
        fix = "save one first: ddp-mnist doctor --save FILE"
        raise UsageError(f"--against {file}: cannot be read ({why}); {fix}") from error
    return found
