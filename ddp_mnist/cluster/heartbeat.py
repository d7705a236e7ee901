"""Each rank shows that it is alive, so that others wait for a slow rank but not for a dead one.

Nothing else judges that: once the group is formed, gloo's clock is out of use (world.py).
"""

import contextlib
import json
import math
import os
import threading
import time
from collections import Counter, defaultdict
from dataclasses import replace

from ddp_mnist.cluster.connections import shut_down
from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.store import CANCEL_S, FAILURE, Beat, Store, beat_key, listed, wake_key
from ddp_mnist.cluster.waiting import calls_others, frames_of, place
from ddp_mnist.errors import DdpMnistError, FailedElsewhere, PeerError, exit_code, one_line
from ddp_mnist.system.console import tell

# A rank beats this often, or five times in a shorter --dist-timeout. That is also how long after
# --dist-timeout a lost rank is noticed at the latest; 2 s are left to end the run.
BEAT_S = 8.0
TELL_S = 60.0  # of waiting for a rank that lives, or --dist-timeout if that is shorter
STUCK_S = 5.0  # for the main thread to notice that its connections are broken
IDLE = 0.1  # of the time on the CPU: a thread that computes does not wait


class Heartbeat(threading.Thread):
    """A thread that shows what this rank does, and reports those that no longer do.

    It beats while the rank's own thread decodes, imports, saves or compiles; a C function that
    keeps Python's lock for all of the time-out would stop it, as a kill or SIGSTOP does. Rank 0
    watches all the others, and they watch rank 0: the number of calls per rank does not depend on
    how many there are. Missed beats count, not time: a cluster that was suspended as a whole has
    lost no rank. Ranks that beat are waited for, unless all of them wait: that never ends.
    """

    def __init__(self, store: Store, silence_s: float) -> None:
        """Make the first beat, which must exist before another rank's thread looks for it.

        `store` is of the thread that calls this, whose place is shown. A rank without a beat for
        `silence_s` is lost.
        """
        super().__init__(name="heartbeat", daemon=True)
        self.mains, self.thread = store, threading.get_ident()
        # A separate connection: the main thread may be waiting on the other one.
        own = store.c10d.clone()
        self.store = replace(store, c10d=own, patience_s=silence_s, reconnects=True)
        self.silence_s = silence_s
        self.misses = max(5, math.ceil(silence_s / BEAT_S))
        self.every_s = silence_s / self.misses
        self.tell_after = math.ceil(min(TELL_S, silence_s) / self.every_s)  # beats
        self.last, self.did, self.cpu_s = Beat(), (0, 0), 0.0
        self.seen, self.missed, self.told = dict[int, int](), Counter[int](), False
        self.beat()

    def run(self) -> None:
        """Beat and watch the others, until this rank leaves the store or another one fails.

        Then the connections on which the main thread may be waiting are broken.
        """
        wake, longest_s = wake_key(self.store.rank), self.silence_s + self.every_s - CANCEL_S
        heard = time.monotonic()
        try:
            while True:
                # Another rank writes this key when it fails, or looks for dead ranks.
                woken = self.store.wait(wake, self.every_s, answer_s=longest_s)
                heard = time.monotonic()
                if self.mains.left.is_set():
                    return
                if woken:
                    self.store.call("delete_key", wake)
                self.beat(periodic=not woken)
                if self.store.exists(FAILURE) if woken else self.reports():
                    break
        except RuntimeError:  # the store is gone, and rank 0 or the launcher with it
            self.mains.unreachable = self.store.unreachable
            if self.store.served_by_launcher:  # its workers get SIGTERM, and save
                self.mains.left.wait(max(0.0, heard + self.silence_s - time.monotonic()))
        if not self.mains.left.is_set():
            shut_down(self.mains.connections)
            if self.mains.connections and not self.mains.left.wait(STUCK_S):
                self.end_if_stuck()

    def end_if_stuck(self) -> None:
        """End this process if its main thread still waits for others.

        gloo does not wake a thread whose data did not fit into the buffer of a broken connection.
        """
        if calls_others(frames_of(self.thread)):
            why = self.mains.unreachable or "it does not take what is sent"
            error = first_cause(self.store, self.store.lost_contact(self.store.lost or [0], why))
            self.mains.record_end(error)
            if isinstance(error, DdpMnistError) and not isinstance(error, FailedElsewhere):
                tell(one_line(error))
            os._exit(exit_code(error))

    def beat(self, periodic: bool = False) -> None:
        """Show that this rank is alive, where it is, and for how many beats it has waited there."""
        number, waited, before = self.last
        frames, cpu_s = frames_of(self.thread), time.process_time()
        at = place(frames)
        if periodic:
            done = self.mains.steps, self.mains.sync_points
            is_same = done == self.did and (at == before or not waited)
            is_idle = is_same and cpu_s - self.cpu_s < IDLE * self.every_s
            waited = waited + 1 if is_idle and calls_others(frames) else 0
            self.did, self.cpu_s = done, cpu_s
        self.last = Beat(number + 1, waited, at)
        self.store.set(beat_key(self.store.rank), self.last)

    def reports(self) -> bool:
        """Look at the beats of those whom this rank watches. Return whether it reports a failure.

        Say, once in a long wait, which rank is waited for.
        """
        store, rank = self.store, self.store.rank
        watched = range(1, store.world_size) if rank == 0 else range(1)
        found = store.call("multi_get", [beat_key(each) for each in watched])
        beats = {each: beat_in(beat) for each, beat in zip(watched, found, strict=True)}
        for each, beat in beats.items():
            is_missed = self.seen.get(each) == beat.number
            self.missed[each] = self.missed[each] + 1 if is_missed else 0
            self.seen[each] = beat.number
        beats[rank] = self.last
        if lost := [each for each in watched if self.missed[each] >= self.misses]:
            error = store.lost_contact(lost, f"no sign of life for {self.silence_s:g} s")
        elif rank == 0 and all(beat.waited >= self.misses for beat in beats.values()):
            error = self.no_end(beats)
        else:
            self.say_who_is_waited_for(beats)
            return False
        store.lost = lost
        store.report_failure(str(error), error.code)
        return True

    def say_who_is_waited_for(self, beats: dict[int, Beat]) -> None:
        """Rank 0 tells of the others, and rank 1 of rank 0, whose terminal may be stopped."""
        waited = max(beat.waited for beat in beats.values())
        works = [each for each, beat in beats.items() if not (beat.waited or self.missed[each] > 1)]
        if waited < self.tell_after or self.store.rank > 1 or self.store.rank in works:
            self.told = self.told and waited > 0
        elif works and not self.told:
            self.told = True
            at = f", at {beats[works[0]].place}" if beats[works[0]].place else ""
            line = f"waiting    for rank {listed(works)}, which is alive{at}"
            # In a thread: a terminal that takes nothing must not stop this one.
            threading.Thread(target=tell, args=(line,), daemon=True).start()

    def no_end(self, beats: dict[int, Beat]) -> PeerError:
        """Return the error of ranks that are all alive and all wait."""
        ranks = defaultdict[str, list[int]](list)
        for rank, beat in sorted(beats.items()):
            ranks[beat.place].append(rank)
        where = ", ".join(f"rank {listed(ranks[at])} at {at}" for at in ranks)
        fix = "let every rank take part in each collective"
        if other := self.mains.rank_info.other_address:
            fix += f", and the network pass large packets (does `ping -M do -s 1472 {other}` work?)"
        return PeerError(
            f"all {self.store.world_size} ranks are alive, but have waited for each other for"
            f" {self.silence_s:g} s ({where}); {fix}"
        )


def beat_in(found: bytes) -> Beat:
    """Return the beat that a rank has shown; the first one, if others wrote to the store."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        number, waited, at = json.loads(found)
        return Beat(int(number), int(waited), str(at))
    return Beat()
