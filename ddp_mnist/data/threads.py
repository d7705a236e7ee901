"""Work in several threads: Pillow and NumPy compute without the lock of the interpreter."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

AHEAD = 4  # results under way for each thread, so that all work while one takes long


def in_order(
    function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]], threads: int
) -> Iterator[Any]:
    """Yield what the function returns for each of the arguments, computed by so many threads.

    Only a few are taken from `arguments` before they are needed.
    """
    if threads == 1:
        yield from itertools.starmap(function, arguments)
        return
    under_way: deque[Future[Any]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        for each in arguments:
            under_way.append(pool.submit(function, *each))
            if len(under_way) == AHEAD * threads:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
