"""Every collective, checked for its result on every rank, and timed by message size.

The payload is whole numbers in float32, below 2**13, so that sums over 2,000 ranks are exact in any
order. Each function returns what this rank got and what it should have got.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 1000  # elements; no multiple of a likely number of ranks
# Training needs none of these, and a backend may lack them.
OPTIONAL = ("reduce", "gather", "scatter", "reduce-scatter", "all-to-all", "all-reduce (max)")
Pair = tuple[Tensor, Tensor]
SIZES = {"1 KB": 2**10, "64 KB": 2**16, "1 MB": 2**20, "16 MB": 2**24}  # bytes


def payload(rank: int, device: torch.device, parts: int = 1, part: int | None = None) -> Tensor:
    """What `rank` contributes: float32 [parts x LENGTH], different on each rank; or one part."""
    first, last = (0, parts) if part is None else (part, part + 1)
    numbers = torch.arange(first * LENGTH, last * LENGTH, device=device)
    return ((numbers + 31 * rank) % 2**13).float()


def payloads(world_size: int, device: torch.device) -> Tensor:
    """float32 [world_size, LENGTH]."""
    return torch.stack([payload(rank, device) for rank in range(world_size)])


def broadcast(rank: int, world_size: int, device: torch.device) -> Pair:
    got = payload(rank, device)
    dist.broadcast(got, src=world_size - 1)
    return got, payload(world_size - 1, device)


def all_reduce(rank: int, world_size: int, device: torch.device) -> Pair:
    got = payload(rank, device)
    dist.all_reduce(got)
    return got, payloads(world_size, device).sum(0)


def all_reduce_max(rank: int, world_size: int, device: torch.device) -> Pair:
    got = payload(rank, device)
    dist.all_reduce(got, dist.ReduceOp.MAX)
    return got, payloads(world_size, device).amax(0)


def reduce(rank: int, world_size: int, device: torch.device) -> Pair:
    got = payload(rank, device)
    dist.reduce(got, dst=0)
    return got, payloads(world_size, device).sum(0) if rank == 0 else got


def all_gather(rank: int, world_size: int, device: torch.device) -> Pair:
    got = [torch.zeros(LENGTH, device=device) for _ in range(world_size)]
    dist.all_gather(got, payload(rank, device))
    return torch.stack(got), payloads(world_size, device)


def gather(rank: int, world_size: int, device: torch.device) -> Pair:
    got = [torch.zeros(LENGTH, device=device) for _ in range(world_size)]
    dist.gather(payload(rank, device), got if rank == 0 else None, dst=0)
    stacked = torch.stack(got)
    return stacked, payloads(world_size, device) if rank == 0 else stacked


def scatter(rank: int, world_size: int, device: torch.device) -> Pair:
    got = torch.zeros(LENGTH, device=device)
    sent = list(payloads(world_size, device)) if rank == 0 else None
    dist.scatter(got, sent, src=0)
    return got, payload(rank, device)


def reduce_scatter(rank: int, world_size: int, device: torch.device) -> Pair:
    """Part r of the sum goes to rank r."""
    got = torch.zeros(LENGTH, device=device)
    dist.reduce_scatter_tensor(got, payload(rank, device, world_size))
    parts = [payload(other, device, world_size, rank) for other in range(world_size)]
    return got, torch.stack(parts).sum(0)


def all_to_all(rank: int, world_size: int, device: torch.device) -> Pair:
    """Part r of each rank's payload goes to rank r."""
    got = torch.zeros(LENGTH * world_size, device=device)
    dist.all_to_all_single(got, payload(rank, device, world_size))
    parts = [payload(other, device, world_size, rank) for other in range(world_size)]
    return got, torch.cat(parts)


def send_recv(rank: int, world_size: int, device: torch.device) -> Pair:
    """Around the ring: to the next rank, from the one before.

    Of all that gloo does, this alone it cannot do on a GPU: it hands the tensor's address to a
    socket. There numbers in main memory go around.
    """
    if dist.get_backend() == "gloo":
        device = torch.device("cpu")
    got = torch.zeros(LENGTH, device=device)
    before, after = (rank - 1) % world_size, (rank + 1) % world_size
    if rank % 2 == 0:
        dist.send(payload(rank, device), after)
        dist.recv(got, before)
    else:
        dist.recv(got, before)
        dist.send(payload(rank, device), after)
    return got, payload(before, device)


COLLECTIVES: dict[str, Callable[[int, int, torch.device], Pair]] = {
    "broadcast": broadcast,
    "all-reduce": all_reduce,
    "all-reduce (max)": all_reduce_max,
    "reduce": reduce,
    "all-gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "reduce-scatter": reduce_scatter,
    "all-to-all": all_to_all,
    "send/recv": send_recv,
}


def outcome(
    name: str,
    rank: int,
    world_size: int,
    device: torch.device,
    wait: Callable[[], None] = lambda: None,
) -> str:
    """Returns right, wrong, or absent where the backend says that it has no such collective.

    `wait` returns once the device is done; a comparison alone would wait for a lost peer for good.
    """
    try:
        got, expected = COLLECTIVES[name](rank, world_size, device)
        wait()
        return "right" if torch.equal(got, expected) else "wrong"
    except (RuntimeError, NotImplementedError) as error:
        if name in OPTIONAL and "does not support" in str(error):
            return "absent"
        raise


def time_all_reduce(
    size: int, device: torch.device, wait: Callable[[], None], calls: int = 20
) -> float:
    """Return the median seconds of an all-reduce of `size` bytes of float32 in this group."""
    payload, seconds = torch.zeros(size // 4, device=device), []
    for _ in range(calls + 1):
        clock = time.monotonic()
        dist.all_reduce(payload)
        wait()
        seconds.append(time.monotonic() - clock)
    return statistics.median(seconds[1:])


def all_reduce_speeds(device: torch.device, wait: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of an all-reduce, by message size: the best of three medians.

    Another program's share of the cores makes a median several times as long, for a while.
    """
    return {
        f"all-reduce of {size}, ms": 1e3
        * min(time_all_reduce(count, device, wait) for _ in range(3))
        for size, count in SIZES.items()
    }
