"""Each rank shows that it is alive, so that others wait for a slow rank, and not for a dead one."""

import contextlib
import math
import threading
from collections.abc import Callable

import torch.distributed as dist

# While ranks still meet, two beats tell a process whether another one with its rank is alive.
MEETING_BEAT_S = 2.0
# Later a rank beats once in this time, or in a fifth to a tenth of a shorter --dist-timeout.
LONGEST_BEAT_S = 30.0
beat_key = "beat/{}".format  # of a rank
MARGIN_S = 8.0  # after --dist-timeout until a lost rank is noticed; 2 s are left to end the run


def meeting_beat_s(timeout_s: float) -> float:
    """Return the seconds between two beats until all have come."""
    return min(MEETING_BEAT_S, timeout_s / 4)


class Heartbeat:
    """A thread that increments a key of this rank, and notices whose key no longer changes.

    It beats from when its rank comes to meet the others, so that a second process of that rank sees
    whether the first one is alive; it watches the others once all have come.

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
        """Make the first beat, which must be there before another rank's thread looks.

        `when_silent` is called once, in the thread, with the lost ranks.
        """
        self.silent: list[int] = []  # the ranks that have not beaten for about `timeout_s`
        self.timeout_s, self.rank = timeout_s, rank
        beats = min(10, max(5, math.ceil(timeout_s / MARGIN_S)))  # in the time-out
        self.every_s = min(LONGEST_BEAT_S, timeout_s / beats)
        # A rank is lost from its last beat on; its last miss is noticed at most a beat later. Up
        # to 80 s that is never before the time-out, for longer ones at nine tenths of it.
        latest_s = timeout_s + min(MARGIN_S, timeout_s / 5)
        self.misses = int(latest_s / self.every_s + 1e-9) - 1
        self._watched = [*range(1, world_size)] if rank == 0 else [0]
        # A connection of its own: the main thread may be waiting on the other one.
        self.store = store.clone()
        self._when_silent = when_silent
        self._count = 0
        self._all_came, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._beat()

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def watch(self) -> None:
        """Begin to watch the others, all of which have made their first beat."""
        self._all_came.set()

    def stop(self) -> None:
        """Return once the thread has ended, or after a second: a dead connection may hold it."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _beat(self) -> None:
        self._count += 1
        self.store.set(beat_key(self.rank), str(self._count))

    def _run(self) -> None:
        keys = [beat_key(rank) for rank in self._watched]
        before, missed = list[bytes](), dict.fromkeys(self._watched, 0)
        with contextlib.suppress(RuntimeError):  # the store is gone; the next wait will notice
            while not self._ended.wait(self._pause_s()):
                self._beat()
                if not self._all_came.is_set():
                    continue
                beats = self.store.multi_get(keys)
                for rank, now, then in zip(self._watched, beats, before or beats, strict=True):
                    missed[rank] = missed[rank] + 1 if before and now == then else 0
                before = beats
                self.silent = [rank for rank in missed if missed[rank] >= self.misses]
                if self.silent:
                    self._when_silent(self.silent)
                    return

    def _pause_s(self) -> float:
        return self.every_s if self._all_came.is_set() else meeting_beat_s(self.timeout_s)
