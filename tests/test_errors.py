import errno
import time

import pytest

from ddp_mnist.errors import reason, root_reason
from ddp_mnist.system.deadline import with_deadline


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "No space left on device"),
        (ValueError("one. \ntwo"), "one"),
        (
            RuntimeError("NCCL error in: a.cpp:1, remote\nLast error:\nsocket closed"),
            "socket closed",
        ),
        (KeyError(), "KeyError"),
        (ValueError("x" * 300), "x" * 200),
    ],
)
def test_a_reason_is_one_short_line(error: Exception, expected: str) -> None:
    assert reason(error) == expected


def test_the_root_cause_is_what_the_system_said() -> None:
    bottom, wrapped, alone = OSError("disk"), RuntimeError("wrapped"), RuntimeError("alone")
    wrapped.__cause__ = bottom
    assert root_reason(wrapped) == "disk"
    alone.__context__ = bottom
    assert root_reason(alone) == "disk"
    alone.__cause__ = None  # raised `from None`
    assert root_reason(alone) == "alone"


def test_a_deadline_ends_the_wait_and_not_the_call() -> None:
    assert with_deadline(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        with_deadline(lambda: 1 / 0, 5)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^no answer within 0\.1 s$"):
        with_deadline(lambda: time.sleep(1), 0.1)
    assert time.monotonic() - began < 0.9
