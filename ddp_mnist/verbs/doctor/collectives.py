"""Every collective with its right result, and the time of an all-reduce by message size.

The payload is whole numbers in float32, below 2**13, so that sums over 2,000 ranks are exact in any
order.
"""

import statistics
import timeit
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 1000  # elements; not a multiple of any likely number of ranks
SMALL = {"1 KB": 2**10, "64 KB": 2**16}  # bytes; what they take is latency
LARGE = {"1 MB": 2**20, "16 MB": 2**24, "256 MB": 2**28}  # the last one over NCCL only
CALLS = 20  # in a median; of large messages a quarter
MAX = dist.ReduceOp.MAX
# A tensor, the call on a copy of it, and the right result; None if this rank receives nothing
Case = tuple[Tensor, Callable[[Tensor], object], Tensor | None]


def payload(ranks: Iterable[int], parts: Iterable[int], device: torch.device) -> Tensor:
    """Return the `parts` that `ranks` contribute: float32 [ranks, parts, LENGTH], all different."""
    by_rank, by_part = (torch.tensor([*each], device=device) for each in (ranks, parts))
    numbers = torch.arange(LENGTH, device=device) + LENGTH * by_part[:, None]
    return ((numbers + 31 * by_rank[:, None, None]) % 2**13).float()


def collectives(rank: int, size: int, device: torch.device) -> dict[str, Case]:
    """Return each collective, by name."""
    everyone = payload(range(size), [0], device)[:, 0]
    mine = everyone[rank]
    nothing = torch.zeros_like(everyone)
    parts = payload([rank], range(size), device)[0]  # one for each rank
    to_this_rank = payload(range(size), [rank], device)[:, 0]

    def at_root(value: Any) -> Any:
        return value if rank == 0 else None

    return {
        "broadcast": (mine, lambda to: dist.broadcast(to, size - 1), everyone[-1]),
        "all-reduce": (mine, lambda to: dist.all_reduce(to), everyone.sum(0)),
        "all-reduce (max)": (mine, lambda to: dist.all_reduce(to, MAX), everyone.amax(0)),
        "reduce": (mine, lambda to: dist.reduce(to, 0), at_root(everyone.sum(0))),
        "all-gather": (nothing, lambda to: dist.all_gather(list(to), mine), everyone),
        "gather": (nothing, lambda to: dist.gather(mine, at_root(list(to))), at_root(everyone)),
        "scatter": (nothing[0], lambda to: dist.scatter(to, at_root(list(everyone))), mine),
        "reduce-scatter": (
            nothing[0],
            lambda to: dist.reduce_scatter(to, list(parts)),
            to_this_rank.sum(0),
        ),
        # over NCCL, sends and receives
        "all-to-all": (nothing, lambda to: dist.all_to_all_single(to, parts), to_this_rank),
    }


def all_reduce_ms(device: torch.device, wait: Callable[[], None]) -> dict[str, float]:
    """Return the milliseconds of an all-reduce by message size, as the best of three medians.

    While another program uses the cores, a median is several times as long. Each call is waited
    for, unlike those of nccl-tests: 1 MB between GPUs takes longer here, 256 MB does not.
    """

    def step(numbers: Tensor) -> None:
        dist.all_reduce(numbers)
        wait()

    best = {}
    for name, size in (SMALL | LARGE).items():
        if name == "256 MB" and dist.get_backend() != "nccl":
            continue
        timed = partial(step, torch.zeros(size // 4, device=device))
        calls = CALLS // 4 if name in LARGE else CALLS
        rounds = [timeit.repeat(timed, number=1, repeat=calls + 1)[1:] for _ in range(3)]
        best[name] = 1e3 * min(map(statistics.median, rounds))
    return best


def busbw(ms: dict[str, float], ranks: int) -> dict[str, float]:
    """Return the bus bandwidth in GB/s by message size, of the large ones.

    As nccl-tests defines it for an all-reduce (its doc/PERFORMANCE.md): 2 (N-1)/N x bytes / s, what
    each rank sends and receives, whatever N is. GB are 10^9 bytes, as there.
    """
    factor = 2 * (ranks - 1) / ranks / 1e6  # of bytes / ms
    return {name: factor * LARGE[name] / each for name, each in ms.items() if name in LARGE}
