"""SIGTERM, SIGUSR1 and SIGINT: noted the moment they come, obeyed once all ranks have agreed.

A scheduler may signal one process of many; the ranks have to stop at the same step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator

from ddp_mnist.errors import FailedElsewhere, Preempted

if TYPE_CHECKING:
    from ddp_mnist.cluster.store import Store


# What a rank adds to the all-reduced sum. In float64 it tells apart the signals of 4,096 ranks.
WEIGHTS: dict[int, float] = {signal.SIGTERM: 1.0, signal.SIGUSR1: 2.0**20, signal.SIGINT: 2.0**40}

CODES: dict[int, int] = {signal.SIGTERM: 143, signal.SIGUSR1: 143, signal.SIGINT: 130}


class StopSignals:
    """The signal that this process got, and what all ranks do about it.

    Attributes:
        weight: what this rank adds to the sum over all ranks; 0 as long as no signal came.
        save: called on every rank, at the same step, before the run ends.
        at_once: called for a second SIGINT, in another thread; then the process is gone.
    """

    def __init__(self) -> None:
        self.weight = 0.0
        self.save: Callable[[], str] = lambda: "stopped"
        self.at_once: Callable[[], None] = lambda: None

    def note(self, number: int) -> None:
        """A second SIGINT does not wait for anybody, and not for a collective that hangs."""
        weight = WEIGHTS.get(number, 0.0)  # other signals with a Python handler come here too
        if number == signal.SIGINT and self.weight == weight:
            try:
                self.at_once()
            finally:
                os._exit(CODES[signal.SIGINT])
        self.weight = max(self.weight, weight)

    def ask(self, accelerator: Accelerator) -> None:
        """`obey` where the ranks have nothing else to add up. All of them have to call it."""
        mine = torch.tensor(self.weight, dtype=torch.float64, device=accelerator.device)
        self.obey(accelerator.reduce(mine).item(), accelerator.is_main_process)

    def obey(self, agreed: float, is_main_process: bool) -> None:
        """Saves and ends the run if a signal came to any rank.

        Args:
            agreed: the sum of all ranks' weights.

        Raises:
            Preempted: on the main process, which tells it.
            FailedElsewhere: on the others, with the same code.
        """
        if not agreed:
            return
        number = max((s for s, w in WEIGHTS.items() if agreed >= w), key=WEIGHTS.__getitem__)
        message = f"{signal.Signals(number).name}: {self.save()}"
        error = Preempted if is_main_process else FailedElsewhere
        raise error(message, CODES[number])


@contextlib.contextmanager
def listen(has_launcher: bool = True, store: Store | None = None) -> Iterator[StopSignals]:
    """From here on the stop signals are noted, also while the main thread waits in a collective.

    A Python handler would run when the collective returns, up to the time-out later; the byte
    that the C handler writes is read by a thread at once.

    Args:
        has_launcher: after an error the signals stay ignored, so that a launcher that ends the
            other workers cannot cut this one's last line short.
        store: is told when a signal came.
    """
    stop = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may change handlers
        return
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while byte := reader.recv(1):
            stop.note(byte[0])
            if store and stop.weight:
                store.signalled = store.signalled or time.monotonic()
        reader.close()

    threading.Thread(target=watch, daemon=True).start()
    wakeup_before = signal.set_wakeup_fd(writer.fileno())
    before = {number: signal.signal(number, lambda *_: None) for number in WEIGHTS}
    in_order = False
    try:
        yield stop
        in_order = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if in_order or not has_launcher else signal.SIG_IGN)
        signal.set_wakeup_fd(wakeup_before)
        writer.close()
