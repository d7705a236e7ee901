"""Each rank shows that it is alive, so that others wait for a slow rank, and not for a dead one."""

import contextlib
import math
import threading
from collections.abc import Callable

import torch.distributed as dist

# A rank beats this often, or five times in a shorter --dist-timeout. That is also how long after
# --dist-timeout a lost rank is noticed at the latest; 2 s are left to end the run.
BEAT_S = 8.0
beat_key = "beat/{}".format  # of a rank


class Heartbeat(threading.Thread):
    """A thread that increments a key of this rank, and notices whose key no longer changes.

    It beats while the main thread decodes, imports or compiles; a C function that keeps Python's
    lock for all of `timeout_s` would stop it, as a kill or SIGSTOP does. Rank 0 watches all the
    others, and they watch rank 0: the number of calls per rank does not depend on how many there
    are. Beats missed count, not time: a cluster that was suspended as a whole has lost nobody.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        when_silent: Callable[[list[int]], None],
    ) -> None:
        """Make the first beat, which must be there before another rank's thread looks for it.

        `when_silent` is called once, in the thread, with the ranks that have not beaten for
        `timeout_s`, or up to one beat more.
        """
        super().__init__(name="heartbeat", daemon=True)
        self.rank, self.when_silent = rank, when_silent
        self.misses = max(5, math.ceil(timeout_s / BEAT_S))  # after which a rank is lost
        self.every_s = timeout_s / self.misses
        self.watched = range(1, world_size) if rank == 0 else [0]
        # A connection of its own: the main thread may be waiting on the other one.
        self.store = store.clone()
        self.count, self.ended = 0, threading.Event()
        self.beat()

    def beat(self) -> None:
        """Show that this rank is alive."""
        self.count += 1
        self.store.set(beat_key(self.rank), str(self.count))

    def run(self) -> None:
        """Beat, and watch the others, until this rank stops or another one is lost."""
        before, missed = list[bytes](), dict.fromkeys(self.watched, 0)
        with contextlib.suppress(RuntimeError):  # the store is gone; the next wait will notice
            while not self.ended.wait(self.every_s):
                self.beat()
                beats = self.store.multi_get([beat_key(rank) for rank in self.watched])
                for rank, now, then in zip(self.watched, beats, before or beats, strict=True):
                    missed[rank] = missed[rank] + 1 if before and now == then else 0
                before = beats
                if silent := [rank for rank in missed if missed[rank] >= self.misses]:
                    self.when_silent(silent)
                    return

    def stop(self) -> None:
        """Return once the thread has ended, or after a second: a dead connection may hold it."""
        self.ended.set()
        if self.is_alive() and self is not threading.current_thread():
            self.join(1.0)
