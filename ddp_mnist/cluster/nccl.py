"""End a wait for the GPU when a rank is lost, so that NCCL runs fail like gloo runs.

gloo's collectives return when they are done, or raise. NCCL's only enqueue work on the GPU: the
host waits in CUDA when it next reads a result. If a rank is lost, no Python error ends that wait:
torch's watchdog ends the process. So the host waits here first, in Python. "nccl" is torch 2.15's
ProcessGroupNCCL2. No GPU has run this yet: the tests replace CUDA's event and the group.
"""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ddp_mnist.cluster.store import LIVENESS, Store

LOOK_EVERY_S = 0.5

# A launcher that lost a worker sends the others SIGTERM, and SIGKILL 30 s later. A wait that still
# lasts this long after SIGTERM is assumed to be for the lost worker. That leaves time, before
# SIGKILL, to notice (0.5 s), abort (10 s), find out who was lost and tell the others (3.5 s).
AFTER_SIGNAL_S = 10.0

# The watchdog's time-out is this much longer than ours, so that ours expires first: the watchdog's
# starts when a collective is enqueued, up to a second before the wait. The watchdog ends the few
# waits that do not pass through this module.
WATCHDOG_MARGIN_S = 30.0

# After an error the watchdog sleeps, and then ends the process: after 15 s by default, too few for
# our own end, as an abort joins its thread. With TORCH_NCCL_ASYNC_ERROR_HANDLING=2 it would abort
# the communicator instead of the process, and the step would continue with half a sum.
WATCHDOG_ENDS, WATCHDOG_ENDS_MS = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "60000"


class NcclAccelerator(Accelerator):
    """An Accelerator that waits for its GPU whenever the host is about to read a result.

    The host reads what `reduce` and `gather` return; a loss scaler reads whether the gradients that
    `backward` exchanged overflowed. A wait may take `timeout_s`.
    """

    new_event: Callable[[], Any] = torch.cuda.Event

    def __init__(self, store: Store, timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self.store, self.timeout_s = store, timeout_s

    def reduce(self, *args: Any, **options: Any) -> Any:
        reduced = super().reduce(*args, **options)
        self.wait_for_gpu()
        return reduced

    def gather(self, *args: Any, **options: Any) -> Any:
        gathered = super().gather(*args, **options)
        self.wait_for_gpu()
        return gathered

    def backward(self, *args: Any, **options: Any) -> None:
        super().backward(*args, **options)
        if self.scaler is not None and self.sync_gradients:
            self.wait_for_gpu()

    def wait_for_gpu(self) -> None:
        """Return once the GPU has done its work so far, up to 1 ms later than a wait in CUDA would.

        Raise FailedElsewhere if another rank reported its failure, and DistBackendError, worded
        like gloo's RuntimeErrors, if a rank is lost or silent.
        """
        event = self.new_event()
        event.record()
        began = looked = time.monotonic()
        while not event.query():
            now = time.monotonic()
            if now - looked > LOOK_EVERY_S:
                self.store.raise_if_failed()
                self._end_for(self._reason_to_end(began))
                looked = time.monotonic()
            waited = now - began
            time.sleep(0 if waited < 0.002 else 50e-6 if waited < 0.1 else 0.001)
        self._end_for(broken_connection())  # an abort ends what the GPU waits for, too

    def _end_for(self, reason: str | None) -> None:
        """Raise DistBackendError if the wait has to stop."""
        if reason:
            self.store.request_liveness()
            raise dist.DistBackendError(reason)

    def _reason_to_end(self, began: float) -> str | None:
        """Return the reason to stop waiting, if any.

        `failures` recognises the words for a lost peer.
        """
        if broken := broken_connection():
            return broken
        with contextlib.suppress(RuntimeError):
            if self.store.exists(LIVENESS):
                return "another rank lost a connection"
        if self.store.unreachable:
            return "the connection to the main address is gone"
        now, signalled = time.monotonic(), self.store.signalled
        if signalled is not None and now - max(began, signalled) > AFTER_SIGNAL_S:
            return f"timed out: {AFTER_SIGNAL_S:g} s after a stop signal"
        if now - began > self.timeout_s:
            return f"timed out: no answer within {self.timeout_s:g} s"
        return None


def broken_connection() -> str | None:
    """Return a sentence if torch's watchdog has seen an error."""
    error = error_of_the_group()
    return None if error == "SUCCESS" else f"NCCL's connection is broken: {error}"


def error_of_the_group() -> str:
    """Return the state that torch's watchdog last saw: SUCCESS, COMM_ERROR or TIMEOUT.

    The watchdog looks once a second. A backend that is wrapped for debugging does not know its
    state.
    """
    assert dist.group.WORLD
    with contextlib.suppress(RuntimeError):
        return dist.group.WORLD._get_backend(torch.device("cuda")).get_error().name
    return "SUCCESS"
