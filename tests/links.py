"""All-reduces timed on this host, one process of a group over TCP; rank 0 prints JSON.

python -m tests.links tcp://HOST:PORT RANK WORLD_SIZE BYTES
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from ddp_mnist.bench.forecast import measure_link, time_all_reduce
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config import Distribution


def main() -> None:
    address, rank, world_size, size = sys.argv[1:]
    flags = Distribution(init_method=address, rank=int(rank), world_size=int(world_size), cpu=True)
    with join_world(flags, find_launch(flags)) as world:
        device, wait = world.accelerator.device, world.wait_for_gpu
        link, seconds = measure_link(device, wait), time_all_reduce(int(size), device, wait)
        if world.accelerator.is_main_process:
            print(json.dumps({**asdict(link), "seconds": seconds}))


if __name__ == "__main__":
    main()
