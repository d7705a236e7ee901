"""Ranks as threads of this process, with a store that they share."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch.distributed as dist

from ddp_mnist.cluster.store import Store


def stores(size: int) -> list[Store]:
    store = dist.HashStore()
    return [Store(store, rank, size) for rank in range(size)]


def at_once(*tasks: Callable[[], Any]) -> list[Any]:
    """Return what each task returned or raised, run in threads side by side."""
    start = threading.Barrier(len(tasks))

    def outcome(task: Callable[[], Any]) -> Any:
        start.wait()
        try:
            return task()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(outcome, tasks, timeout=60))


def each_of(size: int, do: Callable[[Store], Any]) -> list[Any]:
    return at_once(*[partial(do, store) for store in stores(size)])
