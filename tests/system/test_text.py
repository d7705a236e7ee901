import errno
import os
import subprocess

import pytest

from ddp_mnist.system.text import causes, quoted, reason


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "No space left on device"),
        (ValueError("one. \ntwo"), "one"),
        (RuntimeError("NCCL error in: a.cpp:1\nLast error:\nsocket closed"), "socket closed"),
        (KeyError(), "KeyError"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_a_reason_is_one_short_line(error: Exception, expected: str) -> None:
    assert reason(error) == expected


def test_the_root_cause_is_what_the_system_said() -> None:
    bottom, alone = OSError("disk"), RuntimeError("alone")
    alone.__context__ = bottom
    assert [*causes(alone)] == [alone, bottom]
    alone.__context__ = ValueError("not the system's: it was being handled")
    assert [*causes(alone)] == [alone]
    alone.__context__, alone.__cause__ = bottom, None  # raised `from None`
    assert [*causes(alone)] == [alone]


def test_a_command_with_any_name_can_be_pasted() -> None:
    names = ["a  b", "it's", "\x1b[31m", "a\nb", "\u202eab", "\udcff", "\\x41'", "寺\u3000", "$x`"]
    words = [quoted(name) for name in names]
    assert all(word.isprintable() for word in words)
    shell = ["bash", "-c", f"printf '%s\\0' {' '.join(words)}"]
    printed = subprocess.run(shell, capture_output=True).stdout
    assert printed.split(b"\0")[:-1] == [os.fsencode(name) for name in names]
