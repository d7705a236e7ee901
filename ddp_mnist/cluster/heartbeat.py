"""Each rank shows that it is alive, so that others wait for a slow rank but not for a dead one."""

import contextlib
import math
import threading
from collections import Counter
from dataclasses import replace

from ddp_mnist.cluster.store import Store

# A rank beats this often, or five times in a shorter --dist-timeout. That is also how long after
# --dist-timeout a lost rank is noticed at the latest; 2 s are left to end the run.
BEAT_S = 8.0


class Heartbeat(threading.Thread):
    """A thread that increments a key of this rank, and reports whose key no longer changes.

    It beats while the main thread decodes, imports or compiles; a C function that keeps Python's
    lock for all of the time-out would stop it, as a kill or SIGSTOP does. Rank 0 watches all the
    others, and they watch rank 0: the number of calls per rank does not depend on how many there
    are. Missed beats count, not time: a cluster that was suspended as a whole has lost no rank.
    """

    def __init__(self, store: Store, silence_s: float) -> None:
        """Make the first beat, which must exist before another rank's thread looks for it.

        A rank without a beat for `silence_s` is lost.
        """
        super().__init__(name="heartbeat", daemon=True)
        # A separate connection: the main thread may be waiting on the other one.
        self.store, self.c10d = store, store.c10d.clone()
        self.silence_s = silence_s
        self.misses = max(5, math.ceil(silence_s / BEAT_S))
        self.every_s = silence_s / self.misses
        self.beat()

    def beat(self) -> None:
        """Show that this rank is alive."""
        self.c10d.add(f"beat/{self.store.rank}", 1)

    def run(self) -> None:
        """Beat and watch the others, until this rank leaves the store or another one is lost."""
        store = self.store
        watched = range(1, store.world_size) if store.rank == 0 else [0]
        seen, missed = dict[int, bytes](), Counter[int]()
        with contextlib.suppress(RuntimeError):  # the store is gone; the next wait will notice
            while not store.left.wait(self.every_s):
                self.beat()
                beats = self.c10d.multi_get([f"beat/{rank}" for rank in watched])
                for rank, beat in zip(watched, beats, strict=True):
                    missed[rank] = missed[rank] + 1 if seen.get(rank) == beat else 0
                    seen[rank] = beat
                if lost := [rank for rank in watched if missed[rank] >= self.misses]:
                    why = f"no sign of life for {self.silence_s:g} s"
                    error = store.lost_contact(lost, why)
                    replace(store, c10d=self.c10d, lost=lost).report_failure(str(error), error.code)
                    return
