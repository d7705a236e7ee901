"""A worse link between a network namespace and a bridge: a user's program that passes frames on.

    python -m tests.wire NAMESPACE BRIDGE PORT DELAY_MS LOSS_PERCENT

For kernels without netem. It holds one TAP device on each side, keeps each frame for a while, or
drops it; it ends with the test that started it.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
FRAME = 65_536


def tap(name: str) -> int:
    """Return a file descriptor of the new TAP device `name`."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def pass_on(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """Pass frames from each end to the other, later, and not all of them."""
    chance = random.Random(0)
    waiting = deque[tuple[float, int, bytes]]()
    while True:
        due = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], due)[0]:
            frame = os.read(end, FRAME)
            other = ends[1 - ends.index(end)]
            if chance.random() >= loss:
                waiting.append((time.monotonic() + delay_s, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            try:
                os.write(end, frame)
            except OSError:  # its queue is full: as on a wire, the frame is lost
                continue


def main() -> None:
    namespace, bridge, port, delay_ms, loss_percent = sys.argv[1:]
    outside, inside = tap(port), tap(f"{port}i")
    subprocess.run(["ip", "link", "set", port, "master", bridge, "up"], check=True)
    move = ["ip", "link", "set", f"{port}i", "netns", namespace, "name", "eth0"]
    subprocess.run(move, check=True)
    print("ready", flush=True)
    pass_on((outside, inside), float(delay_ms) / 1000, float(loss_percent) / 100)


if __name__ == "__main__":
    main()
