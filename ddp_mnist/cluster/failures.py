"""."""

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


def first_cause(store: Store, error: BaseException) -> BaseException:
    """`error`, marked to be told, if this rank is the first to fail; else a silent stand-in."""
    if isinstance(error, FailedElsewhere) or getattr(error, "agreed", False):
        return error
    if isinstance(error, KeyboardInterrupt):  # it reached every rank: local rank 0 tells it
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
    """Of the errors that end the ranks, the first is raised, where it came up; the rest is silent.

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
            store.shutdown(store.world_size - 1, patience_s=2)  # which they read from its store
        if cause is error:
            raise
        raise cause from error


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """A launcher that sees one worker end sends the others SIGTERM while they find out why."""
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
    """Drops DDP's reducer before the group: the other way round a gloo thread may abort at exit.

    The frames that held the model are gone by now, or cleared.

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
    """A broken connection as a PeerError that names the lost rank; any other error as it is.

    gloo, NCCL and the store raise RuntimeErrors that only their texts tell apart.
    """
    signs = ("connection", "timed out", "timeout", "gloo", "nccl", "socket", "broken pipe")
    text = str(error).lower()
    if store.world_size == 1 or not isinstance(error, RuntimeError):
        return error
    if not any(sign in text for sign in signs):
        return error
    if "invalid usage" in text:
        return UsageError(
            f"--backend nccl: {textwrap.shorten(reason(error), 200)}; give each process a GPU of"
            " its own, or share one with --backend gloo; NCCL_DEBUG=WARN tells more"
        )
    store.request_liveness()  # before the end, which may take seconds over NCCL
    end_group()  # closes this rank's connections too: who waits for this one would look lost
    lost = store.find_dead_ranks()
    who = f"rank {', '.join(map(str, lost))}" if lost else "another rank"
    if store.unreachable and store.served_by_launcher:
        who = "the launcher and a rank"
    why = re.sub(r"^\[\S*\] ", "", reason(error))  # gloo's own source line
    peer_error = PeerError(
        f"lost contact with {who} of {store.world_size} ({textwrap.shorten(why, 120)});"
        " see what that process says, then start the run again"
    )
    peer_error.__cause__ = error
    return peer_error
