"""Words for people, from names, numbers and errors; and JSON that prints and reads everywhere."""

import json
import math
import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any


def printable(text: str) -> str:
    """Return one line without terminal control characters, which file names may contain."""
    words = " ".join(text.split())
    return "".join(character if character.isprintable() else "?" for character in words)


def escaped(text: object, but: str = "") -> str:
    """Return the text with what is not printable as Python writes it, e.g. \\x1b, except `but`."""
    return "".join(c if c.isprintable() or c in but else ascii(c)[1:-1] for c in str(text))


def shown_name(name: str) -> str:
    """Return a class's name as it is printed: in quotes if it would not be seen whole."""
    return name if name and printable(name) == name else repr(name)


def quoted(path: object) -> str:
    """Return a path or a name as a shell takes it, for a command that is printed."""
    text = str(path)
    if printable(text) == text:
        return shlex.quote(text)
    # bash, zsh and ksh take any byte so; no file's name has other surrogates
    raw = re.sub("[\ud800-\udc7f\udd00-\udfff]", "?", text).encode(errors="surrogateescape")
    return "$'" + re.sub(rb"[^!-&(-\[\]-~]", lambda m: b"\\x%02x" % ord(m[0]), raw).decode() + "'"


def joined(names: Iterable[str], columns: int) -> str:
    """Return the names with commas between them, cut to so many columns by a final `...`."""
    return textwrap.shorten(", ".join(names), columns, placeholder=" ...")


def first_of(names: Sequence[str], most: int) -> list[str]:
    """Return at most so many of the names, and then `...` if there are more."""
    return [*names[:most], "..."] if len(names) > most else [*names]


def count(number: int, noun: str) -> str:
    """Return e.g. 1 process, 2 processes."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{ending}"


def named_lines(lines: dict[str, str]) -> str:
    """Return a line for each name that has a text, as the plan of a run has them."""
    return "\n".join(f"{name:<10} {escaped(text)}" for name, text in lines.items() if text)


def did_you_mean(typed: str, legal: Iterable[str]) -> str:
    """Return e.g. `; did you mean cnn?`, to end an error with; "" if no legal word is similar."""
    import difflib  # needed only for a wrong word

    near = difflib.get_close_matches(typed.lower(), legal, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def reason(error: BaseException) -> str:
    """Return, in one short line, why something failed, as the system or a library puts it.

    NCCL's errors begin with their place in the source; their reason, if any, follows `Last error:`
    or `NCCL Last Error:`.
    """
    text = getattr(error, "strerror", None) or str(error)
    parts = re.split(r"(?:nccl )?last error:", text, flags=re.IGNORECASE)
    text = next((part.strip() for part in parts[::-1] if part.strip()), type(error).__name__)
    first, *more = text.splitlines()
    if first.endswith(":"):  # a heading
        first = " ".join([first, *more[:1]])
    return " ".join(first.split())[:200].rstrip("/. ")


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then what it was raised from, and so on down to the first cause.

    An error of the system that was being handled is a cause too.
    """
    yield error
    context = None if error.__suppress_context__ else error.__context__
    cause = error.__cause__ or (context if isinstance(context, OSError) else None)
    if cause is not None:
        yield from causes(cause)


def as_json(content: Any, indent: int | None = None) -> str:
    """Return JSON with readable letters of any script, unless stdout cannot show them all.

    What is not printable is escaped.
    """
    in_ascii = "utf" not in (sys.stdout.encoding or "utf").lower()
    text = json.dumps(finite(content), indent=indent, ensure_ascii=in_ascii)
    return re.sub(
        r"[^\n -~]", lambda m: m[0] if m[0].isprintable() else json.dumps(m[0])[1:-1], text
    )


def finite(content: Any) -> Any:
    """Return what JSON can hold: None for NaN and infinity, which Python would write as such."""
    match content:
        case dict():
            return {key: finite(value) for key, value in content.items()}
        case list() | tuple():
            return [finite(value) for value in content]
        case float() if not math.isfinite(content):
            return None
    return content
