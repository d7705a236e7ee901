"""How an error on one rank ends them all: the first one is raised, the others are silent."""

from __future__ import annotations

import contextlib
import gc
import re
import signal
import textwrap
import threading
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from ddp_mnist.cluster import nccl
from ddp_mnist.cluster.store import Store
from ddp_mnist.errors import DdpMnistError, FailedElsewhere, PeerError, UsageError, reason

# gloo, NCCL and the store raise RuntimeErrors that differ in their texts alone.
LOST_CONNECTION = ("connection", "timed out", "timeout", "socket", "broken pipe")


def first_cause(store: Store, error: BaseException) -> BaseException:
    """Return `error`, marked as agreed, if this rank fails first; else a silent stand-in."""
    if isinstance(error, FailedElsewhere) or getattr(error, "agreed", False):
        return error
    if isinstance(error, KeyboardInterrupt):  # it reached every rank, and local rank 0 prints it
        store.report_failure("interrupted", 130)
        return error
    code = getattr(error, "code", 1)
    failure = store.report_failure(str(error) or type(error).__name__, code)
    if failure is not None:
        return FailedElsewhere(failure["message"], failure["code"])
    if isinstance(error, DdpMnistError):
        error.agreed = True
    return error


@contextlib.contextmanager
def propagate_first_error(store: Store) -> Iterator[None]:
    """Let the first error that ends a rank end all of them.

    Raises:
        FailedElsewhere: instead of this rank's error, because another rank failed before.
        PeerError: instead of a broken connection; it names the rank that was lost.
    """
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the model, and it the group
        with signals_ignored():
            cause = first_cause(store, as_expected(store, error))
            end_group()  # the others' connections break now, and they look for the cause
            store.shutdown(store.world_size - 1, patience_s=2)  # while they read it in its store
        if cause is error:
            raise
        raise cause from error


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore the SIGTERM of a launcher that lost a worker while this rank finds out why."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, signal.SIG_IGN) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def end_group(*, in_order: bool = False) -> None:
    """End the process group, but DDP's reducer before it: else a gloo thread may abort at exit.

    The frames that held the model have ended by now, or are cleared.

    Args:
        in_order: all ranks have come to their end; else NCCL's collectives may wait for a lost one.
    """
    if not dist.is_initialized() or dist.group.WORLD in nccl.aborted:
        return
    gc.collect()
    if dist.get_backend() == "nccl" and not in_order:
        nccl.abort()
    else:
        dist.destroy_process_group()


def as_expected(store: Store, error: BaseException) -> BaseException:
    """Return a broken connection as a PeerError that names the lost rank; other errors as they are.

    NCCL calls many things a "system error": it is a lost peer only if a rank is dead, or if its
    reason says so.
    """
    text, why = str(error).lower(), re.sub(r"^\[\S*\] ", "", reason(error))  # gloo's source line
    from_nccl = "nccl error" in text
    lost_connection = any(sign in text for sign in (*LOST_CONNECTION, "gloo", "nccl"))
    if store.world_size == 1 or not isinstance(error, RuntimeError) or not lost_connection:
        return error
    if "invalid usage" in text:
        return UsageError(
            f"--backend nccl: {why}; give each process a GPU of its own, or share one with"
            " --backend gloo; NCCL_DEBUG=WARN shows more"
        )
    store.request_liveness()  # before the end, which may take seconds over NCCL
    end_group()  # closes this rank's connections too: who waits for this one would look lost
    lost = store.find_dead_ranks()
    all_there = not lost and not store.unreachable
    if from_nccl and all_there and not any(sign in why.lower() for sign in LOST_CONNECTION):
        return UsageError(
            f"--backend nccl: {why}; see what NCCL_DEBUG=WARN shows, or use --backend gloo"
        )
    who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
    if store.unreachable and store.served_by_launcher:
        who = "the launcher and a rank"
    return PeerError(
        f"lost contact with {who} of {store.world_size} ({textwrap.shorten(why, 120)});"
        " see what that process says, then start the run again"
    )
