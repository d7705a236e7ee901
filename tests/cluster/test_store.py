"""What joining, agreeing and ending cost a rank does not depend on how many there are."""

import math
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from ddp_mnist.cluster.failures import first_cause
from ddp_mnist.cluster.heartbeat import Heartbeat
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.cluster.rendezvous import LOOK_S, check_same, join_store
from ddp_mnist.cluster.store import LEAVING_S, Store
from ddp_mnist.errors import FailedElsewhere, PeerError, UsageError
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.ranks import at_once, each_of, stores
from tests.run_checks import with_flags


def counted() -> Counter[str]:
    """Return what from now on counts this process's calls of torch's stores, by method."""
    calls = Counter[str]()

    def count(name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return method(*args, **options)

        return call

    for name in dir(dist.PrefixStore):
        method = getattr(dist.PrefixStore, name)
        if not name.startswith("_") and callable(method):
            setattr(dist.PrefixStore, name, count(name, method))
    return calls


def calls_of_runs(folder: Path) -> list[int]:
    """Return this rank's number of calls from the beginning of a run to its end.

    First of one that only shows its plan, then of 18 steps.
    """
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    calls, totals = counted(), list[int]()
    for flags in ({"dry_run": True}, {}):
        calls.clear()
        just_train(with_flags(proof_config(model="mlp", epochs=1, batch_size=64), **flags))
        totals.append(calls.total())
    return totals


def test_calls_to_the_store_are_as_many_on_8_ranks_as_on_2(tmp_path: Path) -> None:
    slow: dict[str, Any] = {"folder": tmp_path, "timeout_s": 500}
    few, many = (run_world(size, calls_of_runs, tmp_path / str(size), **slow) for size in (2, 8))
    for of_few, of_many in zip(zip(*few, strict=True), zip(*many, strict=True), strict=True):
        assert max(of_many[1:]) <= 1.25 * max(of_few[1:])
        assert max(of_many) <= 60  # rank 0's too


# --- Many


def meet_and_agree() -> tuple[int, int, float]:
    """Meet, agree on facts, come together and leave.

    Return the calls of the store, the open descriptors, and the seconds until all had met.
    """
    calls, began = counted(), time.monotonic()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = join_store(Launch("tcp", rank, size, main_host="127.0.0.1", main_port=port), 300)
    met_s = time.monotonic() - began
    store.barrier()
    check_same(store, {"--seed": 0, "packages": "x" * 1000})
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    store.close()
    return calls.total(), descriptors, met_s


@pytest.mark.soak
@pytest.mark.parametrize("size", [64, 256])
def test_many_ranks_meet_agree_and_end(size: int, tmp_path: Path) -> None:
    found = run_world(size, meet_and_agree, folder=tmp_path, timeout_s=400)
    calls, descriptors, met_s = zip(*found, strict=True)
    assert max(calls) <= 40 + 2 * max(met_s) / LOOK_S
    assert max(descriptors[1:]) < 40  # without the group's own
    assert descriptors[0] < 2 * size + 60
    print(found[0], max(met_s))


def test_what_ranks_agree_on_again_and_again_does_not_fill_the_store() -> None:
    """A burn-in of an hour does so some 10,000 times; rank 0's memory, or the agent's, holds it."""
    eight = stores(8)

    def agree(store: Store) -> list[Any]:
        return [store.decide_for_all("x", [store.rank, n], list) for n in range(20)]

    expected = [[[rank, n] for rank in range(8)] for n in range(20)]
    assert at_once(*[partial(agree, store) for store in eight]) == [expected] * 8
    assert eight[0].c10d.num_keys() <= 3 * 20 + 8 + 1


def test_who_does_not_come_in_time_is_missed() -> None:
    """Also if it came the last time."""
    three = stores(3)
    three[0].hosts = [f"node{rank}/boot/0" for rank in range(3)]

    def agree(store: Store) -> None:
        try:
            store.decide_for_all("key", 1, len, within_s=0.5)
        except PeerError as error:
            raise first_cause(store, error) from error

    assert at_once(*[partial(agree, store) for store in three]) == [None] * 3
    zero, one = at_once(*[partial(agree, store) for store in three[:2]])
    assert str(zero).startswith("no word of key from rank 2 (node2) within 0.5 s; see what it says")
    assert (type(one), str(one)) == (FailedElsewhere, str(zero))


def test_dead_are_the_ranks_that_do_not_answer_however_slow_the_others_are() -> None:
    """Many that share a few cores answer one after the other; the first to ask tells all."""

    class Slow(Heartbeat):
        def beat(self, periodic: bool = False) -> None:
            time.sleep(0.3 * self.store.rank if self.is_alive() else 0)
            super().beat(periodic)

    def look(store: Store) -> list[int]:
        lost = store.find_dead_ranks(0.8)
        store.report_failure("lost contact", 6)
        return lost

    five = stores(5)
    hearts = [Slow(store, 300) for store in five]
    for heart in hearts[:4]:
        heart.start()
    assert at_once(*[partial(look, store) for store in five[:4]]) == [[4]] * 4
    for heart in hearts[:4]:
        heart.join(5)
        assert not heart.is_alive()


def test_a_rank_is_not_taken_for_another_whose_number_has_its_digits() -> None:
    zero, *_, eleven = stores(12)
    for store in (zero, eleven):
        store.add_rank("key")
    assert zero.missing_ranks("key") == [*range(1, 11)]


def test_a_beat_makes_up_for_those_that_were_missed() -> None:
    zero, one = (Heartbeat(store, 300) for store in stores(2))
    for _ in range(3):
        one.beat()
        assert not any(zero.reports() for _ in range(zero.misses))
    assert zero.reports()


def test_a_rank_that_trains_is_not_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In an all-reduce at each beat, as on a GPU, it seems idle but for its steps."""
    monkeypatch.setattr("ddp_mnist.cluster.heartbeat.calls_others", lambda _: True)
    monkeypatch.setattr("ddp_mnist.cluster.heartbeat.IDLE", math.inf)
    heart = Heartbeat(stores(1)[0], 300)
    waited = []
    for steps in (0, 0, 1, 1, 2):
        heart.mains.steps = steps
        heart.beat(periodic=True)
        waited.append(heart.last.waited)
    assert waited == [1, 2, 0, 1, 0]


def test_a_wait_at_another_place_is_another_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the test, and right after it for rank 0, which writes the model."""
    monkeypatch.setattr("ddp_mnist.cluster.heartbeat.calls_others", lambda _: True)
    monkeypatch.setattr("ddp_mnist.cluster.heartbeat.IDLE", math.inf)
    heart, places = Heartbeat(stores(1)[0], 300), iter(["a", "a", "b", "b", "b"])
    monkeypatch.setattr("ddp_mnist.cluster.heartbeat.place", lambda _: next(places))
    waited = []
    for _ in range(5):
        heart.beat(periodic=True)
        waited.append(heart.last.waited)
    assert waited == [1, 2, 0, 1, 2]


def test_a_call_whose_answer_was_lost_counts_once() -> None:
    """The connection breaks after the server did what it was asked for."""

    class Flaky(dist.HashStore):
        is_broken = False

        def clone(self) -> dist.HashStore:
            return self

        def compare_set(self, *args: str) -> bytes:
            found = super().compare_set(*args)
            self.is_broken = not self.is_broken
            if self.is_broken:
                raise RuntimeError("Connection reset by peer")
            return found

        def append(self, *args: str) -> None:
            super().append(*args)  # type: ignore[misc]
            self.is_broken = not self.is_broken
            if self.is_broken:
                raise RuntimeError("Connection reset by peer")

    store = Store(Flaky(), 0, 2, reconnects=True)
    store.add_rank("left")
    assert store.missing_ranks("left") == [1]
    assert store.is_first_here("cache")
    assert store.is_first_here("cache")  # as this rank was


def test_rank_0_does_not_wait_for_lost_ranks_to_leave() -> None:
    zero, _ = stores(2)
    zero.lost = [1]
    began = time.monotonic()
    zero.shutdown()
    assert time.monotonic() - began < LEAVING_S / 2


class Breaks:
    """A store whose connections end after their first call, or never answer."""

    def __init__(self, never_answers: bool = False) -> None:
        self.calls, self.clones, self.never_answers = 0, 0, never_answers

    def clone(self) -> "Breaks":
        self.calls, self.clones = 0, self.clones + 1
        return self

    def check(self, keys: list[str]) -> bool:
        self.calls += 1
        time.sleep(1.0 if self.never_answers else 0)
        if self.calls > 1:
            raise RuntimeError("Connection reset by peer")
        return keys == ["key"]


def test_a_connection_that_is_cut_is_made_anew_and_a_silent_one_is_not() -> None:
    """An answer that comes late would be taken for that to the next question."""
    cut, silent = Breaks(), Breaks(never_answers=True)
    store = Store(cast(dist.Store, cut), 0, 2, reconnects=True)
    assert [store.exists("key") for _ in range(5)] == [True] * 5
    assert (cut.clones, store.unreachable) == (4, "")

    store = Store(cast(dist.Store, silent), 0, 2, patience_s=0.1, reconnects=True)
    with pytest.raises(RuntimeError, match=r"no sign of life for 0\.1 s"):
        store.exists("key")
    assert (silent.clones, store.unreachable) == (0, "no sign of life for 0.1 s")


def test_the_first_fact_that_differs_is_named_with_its_ranks() -> None:
    def facts(rank: int) -> dict[str, Any]:
        return {"--seed": 0, "torch": "2.15" if rank in (0, 2) else "2.14", "python": rank}

    results = each_of(4, lambda store: check_same(store, facts(store.rank)))
    advice = "start every process with the same flags, data, code and packages"
    expected = f"torch: rank 0 has 2.15, rank 1, 3 has 2.14; {advice}"
    assert [(type(error), str(error)) for error in results] == [(UsageError, expected)] * 4


def test_a_search_that_no_rank_began_names_rank_0_to_whom_the_store_belongs() -> None:
    _, one = stores(2)
    one.c10d.set("search", "x")
    assert one.find_dead_ranks() == [0]
