"""deploy/ssh.sh between hosts with a real sshd each, and keys of these tests alone."""

import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_mnist.system.files import read_json
from tests.chaos import newest_step, wait_until
from tests.commands import (
    EXIT_RACE,
    PROOF,
    REPOSITORY,
    SLOW,
    Ended,
    Started,
    python_path,
    require_programs,
)
from tests.hosts import Hosts, require_hosts, run
from tests.run_checks import check_equal, status

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
SSHD = "/usr/sbin/sshd"  # which wants its whole path
SCRIPT = str(REPOSITORY / "deploy" / "ssh.sh")
PATIENCE_S = 280  # for what takes some 10 s on a machine that does nothing else
LONG = "--dataset digits --model slow:Slow --mixed-precision no --dist-timeout 60"
LONG += " --checkpoint-every 5 --epochs 400 --run-dir"


@dataclass
class Cluster:
    """Hosts with a disk and an sshd each: root may log in by a key, on the last by a password."""

    hosts: Hosts
    disks: list[Path]
    daemons: list[subprocess.Popen[bytes]]

    def start(
        self, *on: int, user: str = "", terminal: int | None = None, **variables: str
    ) -> Started:
        """Start ssh.sh on host 0, for parts on these hosts; at a `terminal`, as a person would.

        Whatever is in the person's own ~/.ssh is out of sight.
        """
        there = '[ ! -d ~/.ssh ] || mount -t tmpfs none ~/.ssh; exec bash "$@"'
        names = [f"{user}{self.hosts.address(index)}" for index in on]
        command = self.hosts.command(0, "sh", "-c", there, "sh", SCRIPT, *names)
        own = {"FOLDER": str(REPOSITORY), "ARGS": "", **variables}  # `make test-system` has an ARGS
        return Started(command, self.disks[0], own, program=None, terminal=terminal)

    def trains(self, name: str, **more: Any) -> tuple[Path, Started]:
        """Start a long run on two hosts; return its folder, and it, once it has saved."""
        run = self.disks[0] / name
        started = self.start(0, 1, ARGS=f"{LONG} {run}", **more)
        wait_until(lambda: newest_step(run), PATIENCE_S, every_s=0.1)
        return run, started

    def said(self, ended: Ended, index: int, user: str = "") -> list[str]:
        """Return the lines of the part on a host, whose name is in front of each."""
        label = f"{user}{self.hosts.address(index)}: "
        lines = ended.out.splitlines(keepends=True)
        own = "".join(line.removeprefix(label) for line in lines if line.startswith(label))
        return EXIT_RACE.sub("", own).splitlines()

    def left(self, index: int) -> list[psutil.Process]:
        """Return what runs on a host, but for its sshd."""
        pids = {*self.hosts.pids(index)} - {daemon.pid for daemon in self.daemons}
        return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]

    def empties(self, *indices: int) -> None:
        """Wait until what ran on these hosts has ended."""
        wait_until(lambda: not any(map(self.left, indices)), PATIENCE_S, every_s=0.2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return three hosts, each with an /etc/ssh of its own."""
    require_hosts()
    require_programs("sshd")
    Path("/run/sshd").mkdir(exist_ok=True)  # as the package's service does
    disks = [tmp_path_factory.mktemp(f"host{index}") for index in range(3)]
    with Hosts(3) as hosts:
        folders = [Path("/etc/netns") / name / "ssh" for name in hosts.names]
        write_keys(folders[0], [hosts.address(index) for index in range(3)])
        daemons = []
        for index, (folder, disk) in enumerate(zip(folders, disks, strict=True)):
            if index:
                shutil.copytree(folders[0], folder)
            (folder / "sshd_config").write_text(sshd_config(disk, by_key=index < 2))
            (disk / "slow.py").write_text(SLOW)
            daemons.append(subprocess.Popen(hosts.command(index, SSHD, "-D", "-E", f"{disk}/log")))
        logs = [disk / "log" for disk in disks]
        wait_until(
            lambda: all(log.exists() and "listening" in log.read_text() for log in logs), PATIENCE_S
        )
        yield Cluster(hosts, disks, daemons)
    for daemon in daemons:
        daemon.wait()


def write_keys(folder: Path, addresses: list[str]) -> None:
    """Write the key of all hosts, by which they know each other, and root's key."""
    folder.mkdir()
    for name in ("ssh_host_ed25519_key", "id_ed25519"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True)
    key = (folder / "ssh_host_ed25519_key.pub").read_text()
    (folder / "ssh_known_hosts").write_text(f"{','.join(addresses)} {key}")
    (folder / "ssh_config").write_text("IdentityFile /etc/ssh/id_ed25519\n")


def sshd_config(disk: Path, by_key: bool) -> str:
    """Return the settings of a host whose home is its `disk`."""
    variables = {
        "HOME": str(disk),
        "DDP_MNIST_CACHE": f"{disk}/cache",
        "CUDA_VISIBLE_DEVICES": "",
        "MAKEFLAGS": f"PYTHON={sys.executable} VENV=",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(disk),
    }
    given = " ".join(f'"{name}={value}"' for name, value in variables.items())
    keys = "/etc/ssh/id_ed25519.pub" if by_key else "none"
    return (
        "HostKey /etc/ssh/ssh_host_ed25519_key\nPermitRootLogin yes\nUseDNS no\n"
        f"AuthorizedKeysFile {keys}\nSetEnv {given}\n"
    )


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Return the numbers of a terminal: where a person types, and what a command reads."""
    person, command = pty.openpty()
    yield person, command
    os.close(person)
    os.close(command)


def test_two_hosts_train_as_one_process(cluster: Cluster, alone: Path) -> None:
    """Hosts with their own name at loopback; named with a user, as for ssh."""
    ended = cluster.start(0, 1, user="root@", ARGS=f"{PROOF} {cluster.disks[0]}/run").ended(
        PATIENCE_S
    )
    ended.succeeds()
    run, name = cluster.disks[0] / "run", cluster.hosts.names[0]
    assert cluster.said(ended, 1, "root@")[1:] == [
        f"joined     as rank 1 of 2; rank 0 on {name} reports",
        f"done       the result is on {name}, in {run}",
    ]
    reported = cluster.said(ended, 0, "root@")
    assert f"written to {run}" in reported
    labels = tuple(f"root@{cluster.hosts.address(index)}: " for index in (0, 1))
    assert all(line.startswith(labels) for line in ended.out.splitlines())
    assert re.fullmatch(r"[\n -~]*", ended.out)  # and no bar that is drawn over and over
    check_equal(run, alone, 2, num_machines=2)
    assert not (cluster.disks[1] / "run").exists()  # only rank 0's machine has the run folder
    assert (cluster.disks[1] / "cache").is_dir()
    assert cluster.start(0, 1, ARGS="--lr 0").ended(PATIENCE_S).code == 2  # make's own


def test_ctrl_c_saves_and_ends_all_parts(cluster: Cluster, terminal: tuple[int, int]) -> None:
    person, command = terminal
    run, started = cluster.trains("stopped", terminal=command)
    os.write(person, b"\3")
    ended = started.ended(PATIENCE_S)
    assert (ended.code, ended.err) == (130, ""), ended.out
    assert status(run) == ("preempted", 130)
    step = newest_step(run)
    assert read_json(run / "status.json")["step"] == step
    cluster.empties(0, 1)
    said = "\n".join(cluster.said(ended, 0))
    assert f"SIGINT: stopped after step {step} and saved" in said


def test_one_host_is_refused(tmp_path: Path) -> None:
    ended = Started(["bash", SCRIPT, "host"], tmp_path, program=None).ended()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "ssh.sh: give at least two hosts, the one of rank 0 first\n"


def test_folder_and_flags_arrive_as_typed_and_none_is_run(tmp_path: Path) -> None:
    (folder := tmp_path / "it's $HOME").mkdir()
    show = "import sys; print(sys.argv[1:])"
    (folder / "Makefile").write_text(f"train-multinode:\n\t@{sys.executable} -c '{show}' $(ARGS)\n")
    ssh = tmp_path / "ssh"  # which runs on this machine what it is to run there
    ssh.write_text('#!/bin/sh\nfor last in "$@"; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)

    def start(args: str) -> Ended:
        there = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FOLDER": str(folder), "ARGS": args}
        return Started(["bash", SCRIPT, "a", "b"], tmp_path, there, program=None).ended()

    for args, words in {
        "": [],
        """--dataset '/my photos' "it's" é""": ["--dataset", "/my photos", "it's", "é"],
        "a;touch<x $(id) `id` $HOME": ["a;touch<x", "$(id)", "`id`", "$HOME"],
    }.items():
        assert sorted(start(args).succeeds().splitlines()) == [f"{name}: {words}" for name in "ab"]
    refused = start("it's")
    assert (refused.code, refused.err.splitlines()[-1]) == (2, "ssh.sh: ARGS=it's: close the quote")


@pytest.mark.parametrize("kind", ["down", "asks for a password"])
def test_a_host_that_is_down_or_asks_ends_all_with_a_line(
    kind: str, cluster: Cluster, terminal: tuple[int, int]
) -> None:
    """ssh would ask at the terminal that the person is at, who may be away."""
    if kind == "down":
        cluster.hosts.cut(2)
        # else host 0 still knows where it was, if it has just met it, and ssh waits for an answer
        run("ip", "-n", cluster.hosts.names[0], "neigh", "flush", "all")
    began = time.monotonic()
    ended = cluster.start(0, 2, terminal=terminal[1]).ended(PATIENCE_S)
    took = time.monotonic() - began
    cluster.hosts.mend(2)
    host = cluster.hosts.address(2)
    assert ended.code == 255
    assert ended.err == (
        f"ssh.sh: {host}: ssh ended with code 255; make `ssh {host} true` work without a question"
        " (ssh-copy-id installs a key), then start again\n"
    )
    [line] = cluster.said(ended, 2)
    reasons = {"down": "No route to host", "asks for a password": "Permission denied"}
    assert reasons[kind] in line
    assert took < 60
    cluster.empties(0)
