"""Hosts with addresses, names and /etc/hosts of their own: Linux network namespaces. Needs root."""

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SUBNETS = {4: "10.77.0.", 6: "fd77::"}
NUMBERS = itertools.count()


def require_root(what: str, program: str = "unshare") -> None:
    """Skip the test where a namespace of its own cannot be made."""
    if not (sys.platform == "linux" and os.geteuid() == 0 and shutil.which(program)):
        pytest.skip(f"{what} needs Linux, root and {program}")


def require_hosts() -> None:
    require_root("a network namespace", "ip")
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this machine does not allow network namespaces")


def require_flock(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            pytest.skip(f"no flock on the disk of {folder} ({error.strerror})")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class Hosts:
    """`count` hosts on one bridge, 10.77.0.1 and up; each resolves its own name to 127.0.0.1.

    That is what Debian's default /etc/hosts does, and what makes gloo advertise an address that
    only the host itself can reach. It resolves the others' names to their addresses.

    Args:
        slow: all links let 20 Mbit/s through, and drop what comes faster.
        ip: 4 or 6; the hosts have no addresses of the other kind.
        decoys: each host's name is the address of an interface that no other host reaches.
        mute: their name server never answers.
    """

    def __init__(
        self,
        count: int,
        *,
        ip: int = 4,
        slow: bool = False,
        decoys: bool = False,
        mute: bool = False,
    ) -> None:
        self.ip, self.slow, self.decoys, self.mute = ip, slow, decoys, mute
        number = next(NUMBERS)  # a deleted namespace goes once its last process has gone
        self.names = [f"ddpm{os.getpid()}n{number}h{index}" for index in range(count)]
        self.bridge = f"ddpb{os.getpid() % 10**5}n{number}"  # with p0 behind it, at most 15 letters

    def __enter__(self) -> "Hosts":
        try:
            run("ip", "link", "add", self.bridge, "type", "bridge")
            run("ip", "link", "set", self.bridge, "up")
            for index, name in enumerate(self.names):
                outside = f"{self.bridge}p{index}"
                run("ip", "netns", "add", name)
                run("ip", "link", "add", outside, "type", "veth", "peer", "eth0", "netns", name)
                run("ip", "link", "set", outside, "master", self.bridge, "up")
                if self.slow:
                    limits = ("rate", "20mbit", "burst", "5kb", "limit", "20kb")
                    run("tc", "qdisc", "add", "dev", outside, "root", "tbf", *limits)
                inside = ["ip", "-n", name]
                run(*inside, "link", "set", "lo", "up")
                self._give_address(inside, "eth0", self.address(index))
                own = "::1" if self.ip == 6 else "127.0.0.1"
                own = f"10.99.0.{index + 1}" if self.decoys else own
                hosts = Path("/etc/netns") / name / "hosts"
                hosts.parent.mkdir(parents=True)
                known = [("127.0.0.1", "localhost"), ("::1", "localhost"), (own, name)]
                known += [(self.address(at), other) for at, other in enumerate(self.names)]
                hosts.write_text("".join(f"{address} {host}\n" for address, host in known))
                if self.mute:
                    server, nobody = f"{SUBNETS[self.ip]}99", "02:00:00:00:00:99"
                    hosts.with_name("resolv.conf").write_text(f"nameserver {server}\n")
                    run(*inside, "neigh", "add", server, "lladdr", nobody, "dev", "eth0")
                if self.decoys:
                    run(*inside, "link", "add", "eth1", "type", "veth", "peer", "eth2")
                    self._give_address(inside, "eth1", own)
                    run(*inside, "link", "set", "eth2", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _give_address(self, inside: list[str], interface: str, address: str) -> None:
        network = [f"{address}/64", "nodad"] if ":" in address else [f"{address}/24"]
        run(*inside, "addr", "add", *network, "dev", interface)
        run(*inside, "link", "set", interface, "up")

    def __exit__(self, *_error: object) -> None:
        for index, name in enumerate(self.names):
            self.kill(index)
            subprocess.run(["ip", "link", "delete", f"{self.bridge}p{index}"], capture_output=True)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        subprocess.run(["ip", "link", "delete", self.bridge], capture_output=True)

    def address(self, index: int) -> str:
        return f"{SUBNETS[self.ip]}{index + 1}"

    def url(self, index: int, port: int) -> str:
        """Return what --init-method takes."""
        host = f"[{self.address(index)}]" if self.ip == 6 else self.address(index)
        return f"tcp://{host}:{port}"

    def dropped(self, index: int) -> int:
        """Return how many packets the slow link to host `index` has dropped."""
        command = ["tc", "-s", "-j", "qdisc", "show", "dev", f"{self.bridge}p{index}"]
        shown = subprocess.run(command, check=True, capture_output=True).stdout
        return sum(queue["drops"] for queue in json.loads(shown))

    def limit(self, index: int, rate: str) -> None:
        """Let what host `index` receives through at this rate, e.g. 200mbit; nothing is lost."""
        limits = ("rate", rate, "burst", "256kb", "limit", "4mb")
        run("tc", "qdisc", "add", "dev", f"{self.bridge}p{index}", "root", "tbf", *limits)

    def cut(self, index: int) -> None:
        """Take host `index` off the network, as if its cable were pulled."""
        run("ip", "link", "set", f"{self.bridge}p{index}", "down")

    def mend(self, index: int) -> None:
        run("ip", "link", "set", f"{self.bridge}p{index}", "up")

    def drop(self, index: int, packets: str, *hooks: str) -> None:
        """Let a firewall of host `index` drop these packets, in nft's words, and say nothing.

        `hooks` are input, for what arrives, and output.
        """
        drop = f"type filter hook {{0}} priority 0; {packets} drop;"
        chains = (f"chain {hook}s {{ {drop.format(hook)} }};" for hook in hooks)
        inside = ["ip", "netns", "exec", self.names[index]]
        run(*inside, "nft", f"table inet firewall {{ {' '.join(chains)} }}")

    def forget_idle(self, index: int, seconds: int) -> None:
        """Let the firewall of host `index` forget a connection in which nothing is said so long."""
        names = {"tcp_timeout_established": seconds, "tcp_loose": 0}
        values = [f"net.netfilter.nf_conntrack_{name}={value}" for name, value in names.items()]
        run("ip", "netns", "exec", self.names[index], "sysctl", "-qw", *values)
        self.drop(index, "ct state invalid", "input", "output")

    def pids(self, index: int) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.names[index]], capture_output=True)
        return [int(pid) for pid in listed.stdout.split()]

    def kill(self, index: int) -> None:
        """End all that runs on host `index`, as if its power went."""
        while pids := self.pids(index):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def command(self, index: int, *command: str) -> list[str]:
        """Return what runs `command` on host `index`, under that host's name."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[index]]
        return ["ip", "netns", "exec", self.names[index], *named, *command]
