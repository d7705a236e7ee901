"""A flag is a field of a frozen dataclass: its sentence, its legal values and its policies."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, ClassVar, Literal, Self

from ddp_mnist.errors import UsageError, did_you_mean

OnResume = Literal[
    "must equal",  # inherited; another value is refused
    "may change",  # inherited; another value counts from then on, and is reported
    "same images",  # inherited; another place is fine where the same images lie
    "inherited",  # inherited; another value counts, the result is the same
    "not inherited",  # given anew each time
]


WORDS = {"least": "at least", "above": "more than", "most": "at most", "below": "less than"}
COMPARE = {"least": operator.ge, "above": operator.gt, "most": operator.le, "below": operator.lt}


def flag(
    default: Any,
    help: str,
    *,
    choices: Iterable[str] = (),
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    metavar: str = "",
    typed_as: str = "",
    negatable: bool = False,
    on_resume: OnResume | None = None,
    may_differ: bool = False,
) -> Any:
    """Return a dataclass field that is also a command-line flag.

    Args:
        default: the value when the flag is not given; None means "decided later, and then shown".
        help: one sentence.
        choices: the legal words, for a flag that takes a word or several; with a sentence for
            each, these stand at the end of the help.
        least, most: closed bounds of a number.
        above, below: open bounds of a number.
        metavar: what stands for the value in the help.
        typed_as: what a person typed before the value, if not the flag and a space.
        negatable: whether a bool has --no-FLAG too.
        on_resume: what a resumed run does with it, if not as its dataclass says.
        may_differ: whether ranks may be given different values.
    """
    bounds = {"least": least, "above": above, "most": most, "below": below}
    return dataclasses.field(
        default=default,
        metadata={
            "help": help,
            "choices": choices,
            "bounds": bounds,
            "metavar": metavar,
            "typed_as": typed_as,
            "negatable": negatable,
            "on_resume": on_resume,
            "may_differ": may_differ,
        },
    )


def argument(metavar: str, help: str, choices: Iterable[str] = ()) -> Any:
    """Return a dataclass field that is a required argument without a flag."""
    field = flag(None, help, choices=choices, metavar=metavar)
    return dataclasses.field(metadata={**field.metadata, "positional": True})


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


def typed_before(field: dataclasses.Field[Any]) -> str:
    """Return what a person typed before the value, e.g. "--batch-size "."""
    if field.metadata.get("positional"):
        return ""
    return field.metadata["typed_as"] or f"{flag_name(field)} "


def value_type(cls: type, field: dataclasses.Field[Any]) -> type:
    """Return the type that a value of this flag has when it is not None; tuple for several."""
    annotation = typing.get_type_hints(cls)[field.name]
    if isinstance(annotation, types.UnionType):
        annotation = next(t for t in typing.get_args(annotation) if t is not type(None))
    return typing.get_origin(annotation) or annotation


def describe_bounds(bounds: dict[str, float | None]) -> str:
    """Return e.g. "at least 1 and at most 1,000,000"."""
    return " and ".join(f"{WORDS[k]} {v:,.10g}" for k, v in bounds.items() if v is not None)


class Flags:
    """A base of dataclasses that checks each value against its flag's choices and bounds.

    Attributes:
        on_resume: the policy of the flags that name none.

    Raises:
        UsageError: names the flag, the value and the legal values.
    """

    on_resume: ClassVar[OnResume] = "not inherited"

    @classmethod
    def of(cls, typed: Mapping[str, Any]) -> Self:
        """Return an instance with those of the values that are its own."""
        own = {f.name: typed[f.name] for f in flag_fields(cls) if f.name in typed}
        return cls(**{n: tuple(v) if isinstance(v, list) else v for n, v in own.items()})

    def __post_init__(self) -> None:
        for field in flag_fields(self):
            value = getattr(self, field.name)
            for each in value if isinstance(value, tuple) else (value,):
                if each is not None:
                    self._check(field, each)

    def _check(self, field: dataclasses.Field[Any], value: Any) -> None:
        before = typed_before(field)
        shown = f"{before}{str(value)[:60]}"
        choices, bounds = field.metadata["choices"], field.metadata["bounds"]
        if value == "":
            name = before.rstrip(" =") or field.metadata["metavar"]
            raise UsageError(f"{name}: the value is empty; give one or leave it out")
        if choices and value not in choices:
            raise UsageError(
                f"{shown}: choose from {', '.join(choices)}{did_you_mean(value, choices)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{shown}: must be a finite number {describe_bounds(bounds)}")
        if any(
            limit is not None and not COMPARE[bound](value, limit)
            for bound, limit in bounds.items()
        ):
            raise UsageError(f"{shown}: must be {describe_bounds(bounds)}")


# --- On the command line


def add_flags(
    section: argparse._ActionsContainer, group: type[Flags], without: Collection[str] = ()
) -> None:
    """Add an argument for each field. What is not typed is not in the namespace."""
    for field in flag_fields(group):
        if field.name in without:
            continue
        kind, default = value_type(group, field), field.default
        several = kind is tuple
        if several and default is not dataclasses.MISSING:
            default = ",".join(default)
        sentence = field.metadata["help"].replace("%", "%%")
        options: dict[str, Any] = {"help": sentence}
        if field.metadata.get("positional"):
            options |= {"metavar": metavar(field, kind)} | ({"nargs": "+"} if several else {})
            section.add_argument(field.name, **options)
            continue
        options["default"] = argparse.SUPPRESS
        if kind is bool:
            negatable = field.metadata["negatable"]
            options["action"] = argparse.BooleanOptionalAction if negatable else "store_true"
        else:
            options |= {"metavar": metavar(field, kind), "type": parser_of(field, kind)}
            options["help"] += "" if default is None else f" [{default}]"
        section.add_argument(flag_name(field), **options)


def metavar(field: dataclasses.Field[Any], kind: type) -> str:
    choices = field.metadata["choices"]
    words = "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X"}.get(kind, "TEXT")
    return field.metadata["metavar"] or words


def parser_of(field: dataclasses.Field[Any], kind: type) -> Callable[[str], Any]:
    """Return a function of the typed text that returns the value, or raises UsageError."""

    def words(typed: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(word.strip() for word in typed.split(",")))

    def number(typed: str) -> float:
        with contextlib.suppress(ValueError, OverflowError):
            if math.isfinite(value := kind(typed)):
                return value
        what = "whole" if kind is int else "finite"
        legal = describe_bounds(field.metadata["bounds"])
        shown = f"{typed_before(field)}{typed[:60] or repr(typed)}"
        raise UsageError(f"{shown}: must be a {what} number {legal}")

    return str if kind is str else words if kind is tuple else number
