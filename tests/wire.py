"""A worse link between a network namespace and a bridge: a user's program that passes frames on.

    python -m tests.wire NAMESPACE BRIDGE PORT DELAY_MS LOSS_PERCENT

For kernels without netem. It holds one TAP device on each side, keeps each frame for a while, or
drops it; it ends with the test that started it.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
CLONE_NEWNET = 0x40000000  # linux/sched.h
FRAME = 65_536


def tap(name: str) -> int:
    """Return a file descriptor of the TAP device `name`, in this thread's namespace."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def enter(namespace: str) -> None:
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def pass_on(ends: tuple[int, int], delay_s: float, loss: float) -> None:
    """Pass frames from each end to the other, later, and not all of them."""
    chance, count = random.Random(0), 0
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        due = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, [], [], due)[0]:
            frame = os.read(end, FRAME)
            other = ends[1 - ends.index(end)]
            if chance.random() >= loss:
                count += 1
                heapq.heappush(waiting, (time.monotonic() + delay_s, count, other, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(waiting)
            try:
                os.write(end, frame)
            except OSError:  # its queue is full: as on a wire, the frame is lost
                continue


def main() -> None:
    namespace, bridge, port, delay_ms, loss_percent = sys.argv[1:]
    outside = tap(port)
    subprocess.run(["ip", "link", "set", port, "master", bridge, "up"], check=True)
    enter(namespace)
    inside = tap("eth0")
    print("ready", flush=True)
    pass_on((outside, inside), float(delay_ms) / 1000, float(loss_percent) / 100)


if __name__ == "__main__":
    main()
