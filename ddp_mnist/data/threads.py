"""Work in several threads: Pillow and NumPy release Python's lock while they compute."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

AHEAD = 4  # calls under way per thread, so that all have work while one takes long


def in_order(
    function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], threads: int
) -> Iterator[Any]:
    """Yield the function's result for each tuple of arguments, in their order.

    Arguments are taken only as needed, at most AHEAD for each thread in advance.
    """
    if threads == 1:
        yield from itertools.starmap(function, arguments)
        return
    under_way: deque[Future[Any]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for given in arguments:
            under_way.append(pool.submit(function, *given))
            if len(under_way) == AHEAD * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
