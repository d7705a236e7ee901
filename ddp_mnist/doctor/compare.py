"""Compare this machine's figures with those that another machine's doctor saved."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_mnist.errors import UsageError, reason
from ddp_mnist.run.folder import read_json
from ddp_mnist.verbs.check_result import FAIL, WARN, CheckResult, check, warned

LOAD = "load"  # the check of what other programs hold
AGAIN = "check it again while nothing else runs there"


def against(
    results: Sequence[CheckResult], saved: dict[str, Any], tolerance: float, processes: int
) -> Iterator[CheckResult]:
    """Yield each figure beside that of another machine of the same type, in what --save wrote.

    FAIL if it is more than 1 + `tolerance` times as slow; WARN if it is not comparable, or if a
    busy machine may have made it so: one must not be rejected for what its neighbours do.
    """
    if saved["processes"] != processes:
        text = f"{processes} processes here, {saved['processes']} there: speeds are not comparable"
        yield warned("against", text, "check both with the same number of processes")
        return
    found = {"this machine": list(map(asdict, results)), "the other machine": saved["findings"]}
    too_slow, fix = FAIL, "look for what differs: clocks, throttling, neighbours, cables, versions"
    for who, entries in found.items():
        if busy := busy_with(entries):
            too_slow, fix = WARN, AGAIN
            yield warned("against", f"{who} was measured while it was busy ({busy})", fix)
    here, there = map(figures_of, found.values())
    for name, ours in here.items():
        theirs = there.get(name, 0)
        if min(ours, theirs) <= 0:  # not measured there, or there is nothing to divide by
            continue
        worse = ours / theirs if name.endswith((" ms", " s")) else theirs / ours
        text = f"{name}: {ours:.4g} here, {theirs:.4g} there"
        text += f"; {worse:.2f} times as slow, may be {1 + tolerance:g}"
        yield check("against", worse > 1 + tolerance, text, fix, too_slow)
    if missing := [name for name in there if name not in here]:
        fix = "check both with the same flags and numbers of processes"
        yield warned("against", f"not measured here: {', '.join(missing)}", fix)


def busy_with(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return what other programs held while these were measured; "" if it was little."""
    loads = (entry for entry in entries if entry.get("name") == LOAD)
    return "; ".join(entry["text"] for entry in loads if entry["status"] == WARN)


def figures_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the figures of all entries by name."""
    return {name: value for each in entries for name, value in each["figures"].items()}


def read_saved(file: str) -> dict[str, Any]:
    """Return what --save wrote there. Raise UsageError if it did not write this file."""
    try:
        saved = read_json(Path(file))
        list(map(float, [saved["processes"], *figures_of(saved["findings"]).values()]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = reason(error) if isinstance(error, OSError) else "not from doctor --save"
        fix = "save one first: ddp-mnist doctor --save FILE"
        raise UsageError(f"--against {file}: cannot be read ({why}); {fix}") from error
    return saved
