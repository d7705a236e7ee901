"""Stop signals: until a run has something to save they end it, then all ranks agree and save.

A scheduler may signal one process of many; the ranks have to stop at the same step. A handler runs
once the main thread is back in Python: during a collective that hangs, after its time-out.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ddp_mnist.errors import DdpMnistError, FailedElsewhere, Preempted, Stopped

# The exit code of each signal; if several arrived, the last one in this order counts.
EXIT_CODES: dict[int, int] = {
    signal.SIGTERM: 143,
    signal.SIGUSR1: 143,
    signal.SIGHUP: 129,  # the terminal was closed, or the link to it broke
    signal.SIGINT: 130,
}
# A second Ctrl-C is one that arrives later: a notebook passes each on to its processes, which the
# terminal has signalled already.
SAME_PRESS_S = 0.5


class StopSignals:
    """The stop signals that this process got, and how all ranks act on them."""

    def __init__(self) -> None:
        self.requests = [0.0] * len(EXIT_CODES)  # 1 once the signal arrived, in their order
        self.first_sigint = 0.0  # time.monotonic()
        self.saves_on_stop = False  # whether all ranks learn of a signal, save, and stop together
        self.early_message = "stopped"  # what is said of a signal before that
        self.on_first_sigint: Callable[[], None] = lambda: None
        self.on_second_sigint: Callable[[], None] = lambda: None  # before the process ends

    def hear(self, number: int, _frame: Any = None) -> None:
        """Handle a signal, as Python calls a handler.

        Raise Stopped at the first one, as long as there is nothing to save. Later ones do not hurry
        the end, except for a second SIGINT.
        """
        is_first, slot = not any(self.requests), list(EXIT_CODES).index(number)
        again, self.requests[slot] = self.requests[slot], 1.0
        if number == signal.SIGINT:
            now = time.monotonic()
            self.first_sigint = self.first_sigint or now
            if now > self.first_sigint + SAME_PRESS_S:
                try:
                    self.on_second_sigint()
                finally:
                    os._exit(EXIT_CODES[number])
        if not self.saves_on_stop:
            if is_first:
                name = signal.Signals(number).name
                raise Stopped(f"{name}: {self.early_message}", EXIT_CODES[number])
        elif number == signal.SIGINT and not again:
            self.on_first_sigint()

    def ending(self, requests: Sequence[float], done: str, is_main_process: bool) -> DdpMnistError:
        """Return the error that ends the run, by the sums over all ranks: one is not 0.

        Preempted on the main process, FailedElsewhere with the same code on the others.
        """
        last = [number for number, ranks in zip(EXIT_CODES, requests, strict=True) if ranks][-1]
        error = Preempted if is_main_process else FailedElsewhere
        return error(f"{signal.Signals(last).name}: {done}", EXIT_CODES[last])


def end_at_signals() -> None:
    """Let stop signals end this program from here on, with their codes and a line.

    The system has no default action for the first process of a container: it would run on.
    """
    _handle(StopSignals())


@contextlib.contextmanager
def listen() -> Iterator[StopSignals]:
    """Hear the stop signals in the block, and afterwards give them back to who heard them before.

    That is a notebook, or else `end_at_signals`. After an error they are then ignored until the
    program ends: a scheduler's second signal, or a launcher that ends its workers, must not take
    the last line from it.
    """
    stop = StopSignals()
    stop.early_message = "stopped before there was anything to save"
    before, failed = _handle(stop), True
    try:
        yield stop
        failed = False
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if failed and _is_ours(handler) else handler)


def end_undisturbed() -> None:
    """Ignore the signals that this module handles: what is under way is the end, or an error."""
    for number in EXIT_CODES:
        if _is_ours(signal.getsignal(number)):
            signal.signal(number, signal.SIG_IGN)


def _is_ours(handler: Any) -> bool:
    return isinstance(getattr(handler, "__self__", None), StopSignals)


def _handle(stop: StopSignals) -> dict[int, Any]:
    """Make it handle the signals, except SIGHUP under nohup. Return the handlers before."""
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in EXIT_CODES if not (nohup and number == signal.SIGHUP)]
    return {number: signal.signal(number, stop.hear) for number in heard}
