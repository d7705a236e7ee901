"""Each rank shows that it lives, so that others wait for one that works, and not for a dead one."""

import contextlib
import json
import math
import threading

import torch.distributed as dist

# A lost rank is to be named within 10 s of --dist-timeout. That takes up to three beats, and ending
# the run 2 s more. So a rank makes a call a second, where one that waits makes 40.
LONGEST_BEAT_S = 2.0
SILENT = "silent"  # the key under which rank 0 says which ranks have stopped beating


def beat_every_s(timeout_s: float) -> float:
    """Return the seconds between two beats of a rank that is lost after `timeout_s` without one."""
    return timeout_s / max(4, math.ceil(timeout_s / LONGEST_BEAT_S))


class Heartbeat:
    """A thread that counts up a key of this rank, and sees whose key stands still.

    It beats from when its rank comes to meet the others, so that a second process of that rank sees
    whether the first one lives; it looks after the others once all have come.

    It beats while the main thread decodes, imports or compiles; a C function that keeps Python's
    lock for all of `timeout_s` would stop it, as a kill or SIGSTOP does. Rank 0 looks after all the
    others, and they after rank 0: the number of calls per rank does not depend on how many there
    are. What counts is beats missed, not time: a machine that slept as a whole lost nobody.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
        """Make the first beat, which must be there before another rank's thread starts."""
        self.silent: list[int] = []  # the ranks that have not beaten for `timeout_s`, by now
        self.timeout_s, self.rank = timeout_s, rank
        self.every_s = beat_every_s(timeout_s)
        self.misses_allowed = round(timeout_s / self.every_s)
        self._watched = [*range(1, world_size)] if rank == 0 else [0]
        # A connection of its own: a call over a dead link would hold up the main thread's calls.
        self._store = store.clone()
        self._count = 0
        self._all_came, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._beat()
        if rank == 0:
            self._store.set(SILENT, "[]")

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def watch(self) -> None:
        """Begin to look after the others, all of which have made their first beat."""
        self._all_came.set()

    def stop(self) -> None:
        """Return once the thread has ended; a connection that is dead may hold it a second."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(f"beat/{self.rank}", str(self._count))

    def _run(self) -> None:
        keys = [f"beat/{rank}" for rank in self._watched]
        before, missed = list[bytes](), dict.fromkeys(self._watched, 0)
        with contextlib.suppress(RuntimeError):  # the store is gone, as the next wait will notice
            while not self._ended.wait(self.every_s):
                self._beat()
                if not self._all_came.is_set():
                    continue
                *beats, known = self._store.multi_get([*keys, SILENT])
                for rank, now, then in zip(self._watched, beats, before or beats, strict=True):
                    missed[rank] = missed[rank] + 1 if now == then else 0
                before = beats
                silent = [rank for rank in missed if missed[rank] > self.misses_allowed]
                if self.rank == 0:
                    self._store.set(SILENT, json.dumps(silent))
                else:
                    silent += [rank for rank in json.loads(known) if rank != self.rank]
                self.silent = silent
