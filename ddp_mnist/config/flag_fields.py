"""Flags as fields of frozen dataclasses: their help, legal values and policies.

Those of train are in train_config.py, recipe.py and distribution.py, those of other verbs in
verbs/flags.py.
"""

import argparse
import dataclasses
import operator
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal, Self

from ddp_mnist.errors import UsageError
from ddp_mnist.system.text import did_you_mean, printable

OnResume = Literal[
    "must equal",  # kept; a different value is refused
    "may change",  # kept; a different value applies from then on, and is reported
    "not kept",  # applies only to this call
]
BOUNDS = {
    "least": ("at least", operator.ge),
    "above": ("above", operator.gt),
    "most": ("at most", operator.le),
    "below": ("below", operator.lt),
}
# Flags that name a file or a folder of this machine
PLACES = {"run", "run_dir", "resume", "weights", "cache_dir", "out", "show", "save"}
LARGEST = 10**6  # a number's default upper bound
NUMBERS = {int: "a whole number", float: "a number"}


def flag(
    default: Any,  # None: chosen later, and then shown
    help: str,
    *,
    choices: Iterable[str] = (),  # the legal words
    metavar: str = "",
    on_resume: OnResume = "must equal",  # used for RunFlags and Recipe only
    **bounds: float,  # of a number, with the names in BOUNDS
) -> Any:
    """Return a dataclass field that is also a command-line flag."""
    if not bounds.keys() & {"most", "below"}:
        bounds["most"] = LARGEST
    typed = {"help": help, "choices": choices, "metavar": metavar, "bounds": bounds}
    return dataclasses.field(default=default, metadata=typed | {"on_resume": on_resume})


changeable = partial(flag, on_resume="may change")
not_kept = partial(flag, on_resume="not kept")


def argument(metavar: str, help: str) -> Any:
    """Return a dataclass field that is a required argument without a flag."""
    return flag(dataclasses.MISSING, help, metavar=metavar)


def is_argument(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING


def flag_fields(group: "Flags | type[Flags]", *on_resume: OnResume) -> list[dataclasses.Field[Any]]:
    """Return the fields that are flags: all, or those with one of these policies."""
    fields = [field for field in dataclasses.fields(group) if field.metadata]  # type: ignore[arg-type]
    return [f for f in fields if not on_resume or f.metadata["on_resume"] in on_resume]


def flag_values(group: "Flags", *on_resume: OnResume) -> dict[str, Any]:
    """Return these flags' values by field name, e.g. {"batch_size": 144}."""
    return {field.name: getattr(group, field.name) for field in flag_fields(group, *on_resume)}


def flag_name(field: dataclasses.Field[Any] | str) -> str:
    """Return the flag as it is typed, e.g. --batch-size."""
    name = field if isinstance(field, str) else field.name
    return "--" + name.replace("_", "-")


def typed_flag(name: str, value: Any) -> str:
    """Return a flag with its value as it is typed, e.g. --epochs 3 or --no-augment."""
    if isinstance(value, bool):
        return flag_name(name if value else f"no_{name}")
    return f"{flag_name(name)} {','.join(value) if isinstance(value, tuple) else value}"


def kind_of(field: dataclasses.Field[Any]) -> type:
    """Return the value's type, e.g. `int` for `int | None` and `tuple` for `tuple[str, ...]`."""
    kind: Any = field.type
    if isinstance(kind, types.UnionType):
        kind = typing.get_args(kind)[0]
    return typing.get_origin(kind) or kind


class Flags:
    """A base of dataclasses that checks each value against its flag's choices and bounds.

    Its UsageError names the flag, the value and the legal values.
    """

    @classmethod
    def from_flags(cls, typed: Mapping[str, Any]) -> Self:
        """Return an instance from those values that are its fields, read as if typed."""
        fields = [field for field in flag_fields(cls) if field.name in typed]
        return cls(**{field.name: _read(field, typed[field.name]) for field in fields})

    def __post_init__(self) -> None:
        for field in flag_fields(self):
            value = getattr(self, field.name)
            for each in value if isinstance(value, tuple) else (value,):
                if each is not None:
                    _check(field, each)


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    """Parse a flag's value from text or Python.

    Text that is not a number is returned unchanged, and `_check` refuses it.
    """
    kind = kind_of(field)
    if value is None and field.default is None:
        return None
    if kind is bool:
        if not isinstance(value, bool):
            raise UsageError(f"{flag_name(field)} {value!r}: must be True or False")
        return value
    if kind is tuple:
        if isinstance(value, str):
            value = dict.fromkeys(value.replace(" ", "").split(","))
        try:
            several = [*value]
        except TypeError:  # an array of no dimension calls itself iterable
            several = [value]
        return tuple(_as_typed(field, each) for each in several)
    text = _as_typed(field, value)
    try:
        return kind(text)
    except ValueError:
        return text


def _as_typed(field: dataclasses.Field[Any], value: Any) -> str:
    """Return a Python value as it would be typed: MODULE:NAME for a class or a function.

    `~` becomes the home folder: no text but a path begins so.
    """
    if isinstance(value, type | types.FunctionType):
        if value.__module__ == "__main__":
            raise UsageError(
                f"{flag_name(field)} {value.__name__}: exists only in this session; define it in"
                " a file and import it"
            )
        return f"{value.__module__}:{value.__qualname__}"
    if not isinstance(value, str | os.PathLike):
        return printable(str(value))[:60]
    # a shell leaves --run-dir=~/runs as it is, and so do YAML and containers
    return os.path.expanduser(str(value)) if str(value).startswith("~") else str(value)  # noqa: PTH111


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    """Raise UsageError if the flag does not accept this value."""
    number = NUMBERS.get(kind_of(field))
    choices, bounds = field.metadata["choices"], field.metadata["bounds"]
    if choices and value not in choices:
        problem = f"choose from {', '.join(choices)}{did_you_mean(str(value), choices)}"
    elif number and (
        isinstance(value, str)
        or not all(BOUNDS[bound][1](value, limit) for bound, limit in bounds.items())
    ):
        legal = " and ".join(f"{BOUNDS[bound][0]} {limit:,.10g}" for bound, limit in bounds.items())
        problem = f"must be {f'{number}, ' if isinstance(value, str) else ''}{legal}"
    elif value == "":
        problem = "is empty; give a value or leave it out"
    elif "\0" in str(value):  # as no shell types it, but Python may
        problem = "holds a NUL, which no name has; check it"
    else:
        if field.name in PLACES:
            refuse_address("" if is_argument(field) else flag_name(field), value)
        return
    typed = "" if is_argument(field) else f"{flag_name(field)} "
    raise UsageError(f"{typed}{str(value)[:60] or repr('')}: {problem}")


def refuse_address(typed: str, place: str) -> None:
    """Raise UsageError for s3://bucket and the like, which would become a folder of that name."""
    if re.match(r"[A-Za-z][\w+.-]+:/", place):  # pathlib makes // to /
        fix = "give a path on this machine, of a disk that is mounted"
        raise UsageError(f"{typed} {place}: is an address; {fix}")


def add_flags(
    section: argparse._ActionsContainer,
    fields: Iterable[dataclasses.Field[Any]],
    defaults: Mapping[str, Any],
) -> None:
    """Add an argument for each field. Those not typed are not in the namespace."""
    for field in fields:
        default: Any = defaults.get(field.name, field.default)
        kind, about = kind_of(field), field.metadata
        words = "{" + ",".join(about["choices"]) + "}" if about["choices"] else ""
        words = about["metavar"] or words or {int: "N", float: "X"}.get(kind, "TEXT")
        options = {"help": about["help"], "default": argparse.SUPPRESS}
        if is_argument(field):
            count = "+" if kind is tuple else None
            section.add_argument(field.name, metavar=words, nargs=count, **options)
            continue
        if kind is bool:  # without a default, --no-FLAG exists too
            options["action"] = "store_true" if default is False else argparse.BooleanOptionalAction
        else:
            options["metavar"] = words
            if default not in (None, ()):
                shown = ",".join(default) if kind is tuple else default
                options["help"] += f" [{shown:g}]" if kind is float else f" [{shown}]"
        section.add_argument(flag_name(field), **options)
