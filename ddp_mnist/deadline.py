"""A time limit for calls that nothing can interrupt: a name server, a store behind a dead link."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def with_deadline(function: Callable[[], T], seconds: float) -> T:
    """Return what `function` returns within `seconds`, or raise what it raises.

    It runs in a thread, which is left behind if it does not end; starting one costs some 50 us.

    Raises:
        TimeoutError: it has not ended within `seconds`.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            returned.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return returned[0]
