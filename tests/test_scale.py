"""What meeting, agreeing and ending cost a rank does not depend on how many there are."""

import functools
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.cluster.rendezvous import LOOK_S, check_same, meet
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.training import with_flags

METHODS = (
    *("set", "get", "add", "check", "wait", "compare_set", "multi_get", "multi_set", "append"),
    *("delete_key", "num_keys", "queue_push", "queue_pop", "queue_len", "clone"),
)


def counted() -> Counter[str]:
    """Return what from now on counts this process's calls of torch's stores, by method."""
    calls, lock = Counter[str](), threading.Lock()

    def count(name: str, method: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any, **options: Any) -> Any:
            with lock:
                calls[name] += 1
            return method(*args, **options)

        return call

    for name in METHODS:
        if hasattr(dist.PrefixStore, name):
            setattr(dist.PrefixStore, name, count(name, getattr(dist.PrefixStore, name)))
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
    few, many = (
        run_world(size, calls_of_runs, tmp_path / str(size), folder=tmp_path, timeout_s=500)
        for size in (2, 8)
    )
    for of_few, of_many in zip(zip(*few, strict=True), zip(*many, strict=True), strict=True):
        assert max(of_many[1:]) <= 1.25 * max(of_few[1:])
        assert max(of_many) <= 60  # rank 0's too


# --- Many


@dataclass(frozen=True)
class Member:
    """What one of many ranks found."""

    calls: int
    descriptors: int
    met_s: float


def meet_and_agree() -> Member:
    """Meet, agree on facts, come together and leave."""
    calls, began = counted(), time.monotonic()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    store = meet(Launch("tcp", rank, size, main_host="127.0.0.1", main_port=port), 300)
    met_s = time.monotonic() - began
    store.barrier()
    check_same(store, {"--seed": 0, "packages": "x" * 1000})
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    store.close()
    return Member(calls.total(), descriptors, met_s)


@pytest.mark.soak
@pytest.mark.parametrize("size", [64, 256])
def test_many_ranks_meet_agree_and_end(size: int, tmp_path: Path) -> None:
    found = run_world(size, meet_and_agree, folder=tmp_path, timeout_s=400)
    looks = max(each.met_s for each in found) / LOOK_S
    assert max(each.calls for each in found) <= 40 + 2 * looks
    assert max(each.descriptors for each in found[1:]) < 40  # without the group's own
    assert found[0].descriptors < 2 * size + 60
    print(found[0], max(each.met_s for each in found))
