"""Hosts with addresses, names and /etc/hosts of their own: Linux network namespaces. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUBNET = "10.77.0"


def require_hosts() -> None:
    if not (sys.platform == "linux" and os.geteuid() == 0 and shutil.which("ip")):
        pytest.skip("network namespaces need Linux, root and the ip command")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow network namespaces")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    """`count` hosts on one bridge, 10.77.0.1 and up; each resolves its own name to 127.0.0.1.

    That is what Debian's default /etc/hosts does, and what makes gloo advertise an address that
    only the host itself can reach.
    """

    def __init__(self, count: int) -> None:
        self.names = [f"ddpm{os.getpid()}h{index}" for index in range(count)]
        self.bridge = f"ddpmb{os.getpid() % 10000}"

    def __enter__(self) -> Hosts:
        try:
            run("ip", "link", "add", self.bridge, "type", "bridge")
            run("ip", "link", "set", self.bridge, "up")
            for index, name in enumerate(self.names):
                outside = f"{self.bridge}p{index}"
                run("ip", "netns", "add", name)
                run("ip", "link", "add", outside, "type", "veth", "peer", "eth0", "netns", name)
                run("ip", "link", "set", outside, "master", self.bridge, "up")
                inside = ["ip", "-n", name]
                run(*inside, "link", "set", "lo", "up")
                run(*inside, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
                run(*inside, "link", "set", "eth0", "up")
                hosts = Path("/etc/netns") / name / "hosts"
                hosts.parent.mkdir(parents=True)
                hosts.write_text(f"127.0.0.1 localhost {name}\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True)

    def address(self, index: int) -> str:
        return f"{SUBNET}.{index + 1}"

    def cut(self, index: int) -> None:
        """Host `index` is off the network, as if its cable were pulled."""
        run("ip", "link", "set", f"{self.bridge}p{index}", "down")

    def mend(self, index: int) -> None:
        run("ip", "link", "set", f"{self.bridge}p{index}", "up")

    def shape(self, index: int, link: str) -> None:
        """What host `index` sends goes over a worse link, e.g. `delay 20ms` or `loss 2%`."""
        name = self.names[index]
        tc = ["tc", "qdisc", "add", "dev", "eth0", "root", "netem", *link.split()]
        run("ip", "netns", "exec", name, *tc)

    def command(self, index: int, *command: str) -> list[str]:
        """`command` on host `index`, under that host's name."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[index]]
        return ["ip", "netns", "exec", self.names[index], *named, *command]
