import errno

import pytest

from ddp_mnist.system.text import causes, reason


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
