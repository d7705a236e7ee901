import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from ddp_mnist.cluster.failures import propagate_first_error
from ddp_mnist.cluster.heartbeat import beat_in
from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.cluster.rendezvous import check_same, join_store
from ddp_mnist.cluster.store import Beat
from ddp_mnist.errors import FailedElsewhere, PeerError
from tests.cluster.test_rendezvous import place

PATIENCE_S = 1.2  # --dist-timeout; a rank is named up to half of it later


NO_SIGN = "lost contact with rank {} of 3 (no sign of life for 1.2 s); see what that process says"


def lose(who: int, stopped: bool, by_launcher: bool) -> tuple[str, float]:
    """Meet, wait for a rank that works, and then for one that is dead or stopped.

    Return this rank's error, and the seconds that it came after the loss.
    """
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = join_store(replace(place(rank, 3, port), agent_store=by_launcher), PATIENCE_S)
    try:
        with propagate_first_error(store):
            time.sleep(1.5 * PATIENCE_S if rank == who else 0)  # it decodes
            store.barrier()
            if rank == who:
                Path("lost").write_text(str(time.monotonic()))  # one clock for all processes
                os.kill(os.getpid(), signal.SIGSTOP if stopped else signal.SIGKILL)
            time.sleep(2 * PATIENCE_S if (rank, who) == (0, 1) else 0)  # the other finds it
            check_same(store, {"--seed": 0})
    except (PeerError, FailedElsewhere) as error:
        return str(error), time.monotonic() - float(Path("lost").read_text())
    return "", 0.0


@pytest.mark.parametrize(("who", "stopped", "by_launcher"), [(1, True, False), (0, False, True)])
def test_fault_36_a_rank_that_works_is_waited_for_and_one_that_dies_is_named(
    who: int, stopped: bool, by_launcher: bool, tmp_path: Path
) -> None:
    variables = {}
    if by_launcher:
        agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        variables = {"MASTER_PORT": str(agent.port)}
    world = LocalWorld(3, lose, who, stopped, by_launcher, folder=tmp_path, variables=variables)
    left = [rank for rank in range(3) if rank != who]
    try:
        came = [world.pipes[rank].recv() if world.pipes[rank].poll(30) else None for rank in left]
    finally:
        for process in world.processes:
            process.kill()
            process.join()
    for rank, told in zip(left, came, strict=True):
        assert told, f"rank {rank} waits"
        error, seconds = told
        assert error.startswith(NO_SIGN.format(who))
        works_s = 2 * PATIENCE_S if (rank, who) == (0, 1) else PATIENCE_S
        # its last beat was up to a fifth of the time-out before its loss
        assert works_s - PATIENCE_S / 5 < seconds < works_s + 3


@pytest.mark.parametrize("found", [b"", b"x", b"{}", b"[1]", b'[[], "x", 0]', b"[1e999, 0, 0]"])
def test_a_beat_that_no_rank_wrote_is_none(found: bytes) -> None:
    assert beat_in(found) == Beat()
    assert beat_in(b'[7, 2, "fit.py:96"]') == Beat(7, 2, "fit.py:96")
