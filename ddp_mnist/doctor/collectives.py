"""Run every collective, check its result, and time an all-reduce by message size.

The payload is whole numbers in float32, below 2**13, so that sums over 2,000 ranks are exact in any
order.
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 1000  # elements; no multiple of a likely number of ranks
SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}  # bytes
COLLECTIVES = (
    *("broadcast", "all-reduce", "all-reduce (max)", "reduce", "all-gather", "gather", "scatter"),
    *("reduce-scatter", "all-to-all"),  # NCCL's all-to-all sends and receives
)


def payload(rank: int, device: torch.device, parts: int = 1, first: int = 0) -> Tensor:
    """Return what `rank` contributes: float32 [parts, LENGTH], different on each rank.

    The `first` part may be another than 0: all parts would be 4 MB for each of 1,000 ranks.
    """
    numbers = torch.arange(first * LENGTH, (first + parts) * LENGTH, device=device)
    return ((numbers.view(parts, LENGTH) + 31 * rank) % 2**13).float()


def run(name: str, rank: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Run a collective. Return what this rank received, and what it should have."""
    mine, parts = payload(rank, device), payload(rank, device, size)
    everyone = torch.cat([payload(other, device) for other in range(size)])
    rows = list(torch.zeros(size, 1, LENGTH, device=device))
    match name:
        case "broadcast":
            dist.broadcast(mine, src=size - 1)
            return mine[0], everyone[-1]
        case "all-reduce":
            dist.all_reduce(mine)
            return mine[0], everyone.sum(0)
        case "all-reduce (max)":
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            return mine[0], everyone.amax(0)
        case "reduce":
            dist.reduce(mine, dst=0)
            return mine[0], everyone.sum(0) if rank == 0 else mine[0]
        case "all-gather":
            dist.all_gather(rows, mine)
            return torch.cat(rows), everyone
        case "gather":
            dist.gather(mine, rows if rank == 0 else None, dst=0)
            return torch.cat(rows), everyone if rank == 0 else torch.cat(rows)
        case "scatter":
            dist.scatter(rows[0], list(everyone.split(1)) if rank == 0 else None, src=0)
            return rows[0][0], everyone[rank]
    to_this_rank = [payload(other, device, 1, rank)[0] for other in range(size)]
    if name == "all-to-all":
        received = torch.zeros_like(parts)
        dist.all_to_all_single(received, parts)
        return received, torch.stack(to_this_rank)
    dist.reduce_scatter_tensor(rows[0], parts)
    return rows[0][0], torch.stack(to_this_rank).sum(0)


def all_reduce_ms(
    device: torch.device, wait: Callable[[], None], calls: int = 20
) -> dict[str, float]:
    """Return the milliseconds of an all-reduce, by message size: the best of three medians.

    Another program's share of the cores makes a median several times as long, for a while.
    """
    best = {}
    for name, size in SIZES.items():
        numbers, medians = torch.zeros(size // 4, device=device), []
        for _ in range(3):
            seconds = []
            for _ in range(calls + 1):
                clock = time.monotonic()
                dist.all_reduce(numbers)
                wait()
                seconds.append(time.monotonic() - clock)
            medians.append(statistics.median(seconds[1:]))
        best[name] = 1e3 * min(medians)
    return best
