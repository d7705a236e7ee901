"""."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any

from ddp_mnist.errors import UsageError, did_you_mean


def flag(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field that is also a command-line flag.

    Args:
        default: the value when the flag is not given; None means "decided later, and then shown".
        help: one sentence.
        choices: the legal words, for a flag that takes a word.
        least, most: closed bounds of a number.
        above, below: open bounds of a number.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    return dataclasses.field(
        default=default, metadata={"help": help, "choices": choices, "bounds": bounds}
    )


def flag_name(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.replace("_", "-")


def value_type(cls: type, field: dataclasses.Field[Any]) -> type:
    """The type that a value of this flag has when it is not None."""
    annotation = typing.get_type_hints(cls)[field.name]
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not type(None))
    return annotation


def describe_bounds(bounds: dict[str, float | None]) -> str:
    """E.g. at least 1 and at most 1,000,000."""
    words = {"least": "at least", "most": "at most", "above": "more than", "below": "less than"}
    return " and ".join(f"{words[k]} {v:,.10g}" for k, v in bounds.items() if v is not None)


class Flags:
    """Checks each value against its flag's choices and bounds.

    Raises:
        UsageError: names the flag, the value and the legal values.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value is not None:
                self._check(field, value)

    def _check(self, field: dataclasses.Field[Any], value: Any) -> None:
        shown = f"{flag_name(field)} {str(value)[:60]}"
        choices, bounds = field.metadata["choices"], field.metadata["bounds"]
        if value == "":
            raise UsageError(f"{flag_name(field)}: the value is empty; give one or leave it out")
        if choices and value not in choices:
            raise UsageError(
                f"{shown}: choose from {', '.join(choices)}{did_you_mean(value, choices)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{shown}: must be a finite number {describe_bounds(bounds)}")
        too_small = (bounds["least"] is not None and value < bounds["least"]) or (
            bounds["above"] is not None and value <= bounds["above"]
        )
        too_big = (bounds["most"] is not None and value > bounds["most"]) or (
            bounds["below"] is not None and value >= bounds["below"]
        )
        if too_small or too_big:
            raise UsageError(f"{shown}: must be {describe_bounds(bounds)}")
