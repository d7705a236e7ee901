"""An error on one rank ends all ranks: the first error is raised, the others stay silent."""

import contextlib
import gc
import re
import textwrap
import traceback
from collections.abc import Iterator

import torch.distributed as dist

from ddp_mnist.cluster.signals import end_undisturbed
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.waiting import calls_others, frames_in
from ddp_mnist.errors import FailedElsewhere, PeerError, UsageError, exit_code
from ddp_mnist.system.text import reason

# gloo, NCCL and the store raise RuntimeErrors that differ in their texts alone.
LOST = "no sign of life|connection|timed out|timeout|socket|broken pipe|gloo|nccl"
A_GPU_EACH = "give each process its own GPU, or share one with --backend gloo"


def first_cause(store: Store, error: BaseException) -> BaseException:
    """Return `error`, marked as agreed on, if this rank fails first; else a FailedElsewhere."""
    if isinstance(error, FailedElsewhere) or getattr(error, "agreed", False):
        return error
    message = str(error) or type(error).__name__
    failure = store.report_failure(message, exit_code(error))
    if failure and failure["rank"] != store.rank:
        return store.elsewhere(failure)
    if failure:  # this rank's own heartbeat has reported it
        error = PeerError(failure["message"])
    error.agreed = True  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def propagate_first_error(store: Store) -> Iterator[None]:
    """Let the first error that ends a rank end all of them.

    Raise FailedElsewhere instead of this rank's error if another rank failed before, and PeerError,
    which names the lost rank, instead of a broken connection.
    """
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)  # they hold the model, which holds the group
        end_undisturbed()  # a launcher that lost a worker sends SIGTERM meanwhile
        cause = first_cause(store, as_expected(store, error))
        abandon_group()  # over gloo the others' connections break now: they look for the cause
        store.shutdown()  # waits while they read it in the store that this rank may serve
        if cause is error:
            raise
        raise cause from error


def end_group() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        # DDP's reducer has to end before the group, else a gloo thread may abort at exit. The
        # frames that held the model have ended by now, or are cleared.
        gc.collect()
        dist.destroy_process_group()


def abandon_group() -> None:
    """End the process group after a failure.

    NCCL's would wait for the lost rank, so it is left to the end of this process, which can form
    no other; the other ranks wait until then, or until their time is out.
    """
    if dist.is_initialized() and dist.get_backend() != "nccl":
        end_group()


def as_expected(store: Store, error: BaseException) -> BaseException:
    """Return a broken connection as a PeerError that names the lost rank; other errors as they are.

    NCCL's system errors count as broken connections too, even if no rank is lost.
    """
    if store.world_size == 1 or not is_networks(error):
        return error
    text, why = str(error).lower(), re.sub(r"^\[\S*\] ", "", reason(error))  # gloo's source line
    why = store.unreachable or why  # as the heartbeat found it, which then broke the connection
    if "invalid usage" in text:
        return UsageError(f"--backend nccl: {why}; {A_GPU_EACH}; NCCL_DEBUG=WARN shows more")
    abandon_group()  # over gloo this breaks the connections of ranks that wait
    lost, why = store.find_dead_ranks(), textwrap.shorten(why, 120)
    if not lost and not store.unreachable and "nccl" not in text:
        return PeerError(
            f"all {store.world_size} ranks are alive, but a connection between two of them broke"
            f" ({why}; {store.addresses()}); look at the network, then resume the run or start"
            " it again"
        )
    more = " with NCCL_DEBUG=WARN" if "nccl" in text else ""
    return store.lost_contact(lost, why, more)


def is_networks(error: BaseException) -> bool:
    """Return whether a call to other ranks raised the error: one's own code may use such words."""
    is_lost = isinstance(error, RuntimeError) and re.search(LOST, str(error).lower())
    return bool(is_lost) and (isinstance(error, dist.DistError) or calls_others(frames_in(error)))
