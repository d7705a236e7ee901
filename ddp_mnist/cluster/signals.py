"""Stop signals: noted as they arrive, obeyed once all ranks have agreed.

A scheduler may signal one process of many; the ranks have to stop at the same step.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from accelerate import Accelerator

from ddp_mnist.cluster.hardware import is_forked
from ddp_mnist.errors import FailedElsewhere, Preempted

# The exit code of each signal; if several arrived, the last one in this order counts.
EXIT_CODES: dict[int, int] = {
    signal.SIGTERM: 143,
    signal.SIGUSR1: 143,
    signal.SIGHUP: 129,  # the terminal was closed, or the link to it broke
    signal.SIGINT: 130,
}
SAME_PRESS_S = 0.5


class StopSignals:
    """The stop signals that this process got, and how all ranks act on them."""

    def __init__(self, has_launcher: bool = False) -> None:
        self.has_launcher = has_launcher  # which also signals the processes itself
        self.requests = [0.0] * len(EXIT_CODES)  # 1 once the signal arrived, in their order
        self.first_sigint = 0.0  # time.monotonic()
        self.save: Callable[[], str] = lambda: "stopped"  # on every rank, at the same step
        # In another thread: at the first SIGINT, and at the second.
        self.answer: Callable[[], None] = lambda: None
        self.at_once: Callable[[], None] = lambda: None

    def note(self, number: int) -> None:
        """Fill the signal's slot.

        A second SIGINT does not wait for other ranks, or for a collective.
        """
        if number not in EXIT_CODES:  # other signals with a Python handler arrive here too
            return
        slot = list(EXIT_CODES).index(number)
        if number == signal.SIGINT and self.requests[slot]:
            # A notebook passes Ctrl-C on to forked processes, which the terminal has signalled too.
            if is_forked() and time.monotonic() < self.first_sigint + SAME_PRESS_S:
                return
            try:
                self.at_once()
            finally:
                os._exit(EXIT_CODES[number])
        self.requests[slot] = 1.0
        if number == signal.SIGINT:
            self.first_sigint = time.monotonic()
            # In a thread: the terminal may be stopped (Ctrl-S), and the next signal must not wait.
            threading.Thread(target=self.answer, daemon=True).start()

    def ask(self, accelerator: Accelerator) -> None:
        """Sum all ranks' requests, then `save_and_exit_if`.

        A collective: every rank must call it.
        """
        mine = torch.tensor(self.requests, dtype=torch.float64, device=accelerator.device)
        self.save_and_exit_if(accelerator.reduce(mine).tolist(), accelerator.is_main_process)

    def save_and_exit_if(self, requests: Sequence[float], is_main_process: bool) -> None:
        """Save and end the run if the sums over all ranks of their `requests` show a signal.

        Raise Preempted on the main process, FailedElsewhere with the same code on the others.
        """
        came = [number for number, ranks in zip(EXIT_CODES, requests, strict=True) if ranks]
        if came:
            message = f"{signal.Signals(came[-1]).name}: {self.save()}"
            error = Preempted if is_main_process else FailedElsewhere
            raise error(message, EXIT_CODES[came[-1]])


@contextlib.contextmanager
def listen(has_launcher: bool) -> Iterator[StopSignals]:
    """Note the stop signals from here on, even while the main thread waits in a collective.

    A Python handler would run only when the collective returns, up to the time-out later; so a
    thread reads the byte that the C handler writes, at once. After an error under a launcher,
    signals stay ignored: the launcher may be ending the workers, and this one must finish its last
    line. SIGHUP is left alone under nohup.
    """
    stop = StopSignals(has_launcher)
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while byte := reader.recv(1):
            stop.note(byte[0])
        reader.close()

    threading.Thread(target=watch, daemon=True).start()
    wakeup_before = signal.set_wakeup_fd(writer.fileno())
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    heard = [number for number in EXIT_CODES if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, lambda *_: None) for number in heard}
    in_order = False
    try:
        yield stop
        in_order = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if in_order or not has_launcher else signal.SIG_IGN)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
