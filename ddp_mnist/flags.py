"""A flag is a field of a frozen dataclass: its sentence, its legal values and its policies."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from ddp_mnist.errors import UsageError, did_you_mean

OnResume = Literal[
    "must equal",  # inherited; another value is refused
    "may change",  # inherited; another value counts from then on, and is reported
    "same images",  # inherited; another place is fine where the same images lie
    "inherited",  # inherited; another value counts, the result is the same
    "not inherited",  # given anew each time
]


def flag(
    default: Any,
    help: str,
    *,
    choices: Iterable[str] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    on_resume: OnResume | None = None,
    may_differ: bool = False,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    Args:
        default: the value when the flag is not given; None means "decided later, and then shown".
        help: one sentence.
        choices: the legal words, for a flag that takes a word.
        least, most: closed bounds of a number.
        above, below: open bounds of a number.
        on_resume: what a resumed run does with it, if not as its dataclass says.
        may_differ: whether ranks may be given different values.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "choices": tuple(choices),
            "bounds": bounds,
            "on_resume": on_resume,
            "may_differ": may_differ,
        },
    )


def same_flag(group: type[Flags], name: str) -> Any:
    """Return a field for the same flag in a subclass, where it is required."""
    [field] = [field for field in flag_fields(group) if field.name == name]
    return dataclasses.field(metadata=field.metadata)


def flag_fields(group: Flags | type[Flags], *on_resume: OnResume) -> list[dataclasses.Field[Any]]:
    """Return the fields that are flags: all, or those with one of these policies."""
    return [
        field
        for field in dataclasses.fields(group)  # type: ignore[arg-type]
        if field.metadata
        and (not on_resume or (field.metadata["on_resume"] or group.on_resume) in on_resume)
    ]


def flag_values(group: Flags, *on_resume: OnResume) -> dict[str, Any]:
    """Return these flags' values by field name, e.g. {"batch_size": 144}."""
    return {field.name: getattr(group, field.name) for field in flag_fields(group, *on_resume)}


def flag_name(field: dataclasses.Field[Any] | str) -> str:
    """Return it as typed, e.g. --batch-size."""
    name = field if isinstance(field, str) else field.name
    return "--" + name.replace("_", "-")


def value_type(cls: type, field: dataclasses.Field[Any]) -> type:
    """Return the type that a value of this flag has when it is not None."""
    annotation = typing.get_type_hints(cls)[field.name]
    if isinstance(annotation, types.UnionType):
        return next(t for t in typing.get_args(annotation) if t is not type(None))
    return annotation


def describe_bounds(bounds: dict[str, float | None]) -> str:
    """Return e.g. "at least 1 and at most 1,000,000"."""
    words = {"least": "at least", "most": "at most", "above": "more than", "below": "less than"}
    return " and ".join(f"{words[k]} {v:,.10g}" for k, v in bounds.items() if v is not None)


class Flags:
    """A base of dataclasses that checks each value against its flag's choices and bounds.

    Attributes:
        on_resume: the policy of the flags that name none.

    Raises:
        UsageError: names the flag, the value and the legal values.
    """

    on_resume: ClassVar[OnResume] = "not inherited"

    def __post_init__(self) -> None:
        for field in flag_fields(self):
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
