"""What exchanging gradients will cost on more processes than are here.

A ring all-reduce, which gloo does and NCCL may, passes messages of 1/p of the gradients from each
of p processes to the next: p - 1 rounds that add up, p - 1 that hand out the sums. So it takes

    2 (p - 1) (latency + bytes / (p bandwidth))

(Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, Journal
of Parallel and Distributed Computing 69, 2009). The latency is that of a message in such a ring:
with gloo, which asks the receiver before it sends, twice that of a packet.

These nets' gradients fill a single DDP bucket, so nothing of the exchange hides behind the backward
pass: if each process keeps its local batch, a step takes the time of computing it, plus an
all-reduce. That is the least: waiting for whichever process is slowest comes on top, and grows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_mnist.bench import steps
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config import TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.models import MODELS

# Bytes: latency alone, and bandwidth above all. With less than 4 KB, gloo leaves out messages.
SMALL, LARGE = 4096, 8 * 2**20
CALLS = 20


@dataclass(frozen=True)
class Link:
    """From one process to the next.

    Attributes:
        latency_s: seconds that the smallest message takes.
        bytes_per_s: bandwidth.
    """

    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Round:
    """What rank 0 saw, one right after the other.

    Attributes:
        link: from two sizes of all-reduce.
        compute_s: seconds of forward, backward and update alone.
        step_s: seconds of the same with the exchange of gradients.
        exchange_s: seconds of an all-reduce as large as the gradients, without a step around it.
    """

    link: Link
    compute_s: float
    step_s: float
    exchange_s: float


def all_reduce_seconds(processes: int, size: float, link: Link) -> float:
    """A ring all-reduce of `size` bytes."""
    return 2 * (processes - 1) * (link.latency_s + size / (processes * link.bytes_per_s))


def link_from(processes: int, small_s: float, large_s: float) -> Link:
    """The link over which all-reduces of SMALL and LARGE bytes take as long as they did."""
    rounds = 2 * (processes - 1)
    bytes_per_s = rounds * (LARGE - SMALL) / (processes * (large_s - small_s))
    return Link(small_s / rounds - SMALL / (processes * bytes_per_s), bytes_per_s)


def gradient_bytes(config: TrainConfig, classes: int) -> int:
    """float32, without a --comm-hook."""
    net = MODELS[config.recipe.model](classes)
    return 4 * sum(p.numel() for p in net.parameters())


def time_all_reduce(
    size: int, device: torch.device, wait: Callable[[], None], calls: int = CALLS
) -> float:
    """Median seconds of an all-reduce of `size` bytes of float32 in the group that stands."""
    payload, seconds = torch.zeros(size // 4, device=device), []
    for _ in range(calls + 1):
        clock = time.monotonic()
        dist.all_reduce(payload)
        wait()
        seconds.append(time.monotonic() - clock)
    return statistics.median(seconds[1:])


def measure_link(device: torch.device, wait: Callable[[], None]) -> Link:
    large_s = time_all_reduce(LARGE, device, wait)  # first: it opens TCP's windows
    return link_from(dist.get_world_size(), time_all_reduce(SMALL, device, wait), large_s)


def measure_rounds(config: TrainConfig, step_count: int, repeats: int) -> list[Round]:
    """The first round is thrown away. Runs in every process of a group of at least two."""
    rounds = []
    with join_world(config.distribution, find_launch(config.distribution)) as world:
        accelerator, device = world.accelerator, world.accelerator.device
        images = cache.load(config.run.dataset, config.run.cache_dir)
        config, images = steps.shortened(config, images, step_count, world)
        assert config.recipe.batch_size
        count = len(images.train_labels) // config.recipe.batch_size
        size = gradient_bytes(config, len(images.classes))
        for _ in range(repeats + 1):
            accelerator.wait_for_everyone()
            compute_s = steps.silent_steps(config, images, world) / count
            accelerator.wait_for_everyone()
            step_s = steps.resident_steps(config, images, world) / count
            link = measure_link(device, world.wait_for_gpu)
            exchange_s = time_all_reduce(size, device, world.wait_for_gpu)
            rounds.append(Round(link, compute_s, step_s, exchange_s))
            accelerator.free_memory()
    return rounds[1:]
