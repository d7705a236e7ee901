"""Several hosts with networks of their own: the right interface is found, or the fault is named."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.run.folder import read_json
from tests.commands import MAKE, REPOSITORY, Ended, Started, proof
from tests.hosts import Hosts, require_hosts
from tests.training import check_equal

pytestmark = pytest.mark.system
PORT = 29444


@pytest.fixture(autouse=True)
def network() -> None:
    require_hosts()
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(os.environ)


def on_host(hosts: Hosts, index: int, folder: Path, *command: str) -> Started:
    """Start a command in the host's own folder, which is its home and its disk."""
    disk = folder / f"host{index}"
    disk.mkdir(exist_ok=True)
    own = {
        "HOME": str(disk),
        "DDP_MNIST_CACHE": str(disk / "cache"),
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }
    return Started(hosts.command(index, *command), disk, own, program=None)


def train(hosts: Hosts, folder: Path, *more: str) -> list[Started]:
    """Train in one process on each host, started with the tutorials' TCP flags."""
    size = len(hosts.names)
    world = ["--init-method", hosts.url(0, PORT), "--world-size", str(size), *more]
    ranks = [proof(Path("run"), *world, "--rank", str(rank)) for rank in range(size)]
    return [on_host(hosts, rank, folder, sys.executable, *ranks[rank]) for rank in range(size)]


def make(target: str, hosts: Hosts, folder: Path, *variables: str) -> list[Started]:
    """Start `make train-multinode` or `make doctor` on each host, with one process there."""
    return [
        on_host(
            hosts,
            rank,
            folder,
            *(*MAKE, "-C", str(REPOSITORY), target, f"MACHINE_RANK={rank}"),
            *(f"MAIN_PROCESS_IP={hosts.address(0)}", f"MAIN_PROCESS_PORT={PORT}"),
            f"NUM_MACHINES={len(hosts.names)}",
            *(each.replace("HOST", str(folder / f"host{rank}")) for each in variables),
        )
        for rank in range(len(hosts.names))
    ]


def ends_of(started: list[Started]) -> list[Ended]:
    return [each.ended(240) for each in started]


NETWORKS = [
    pytest.param(2, {"ip": 6}, id="two hosts with IPv6 only"),
    pytest.param(3, {"decoys": True}, id="three hosts, names on interfaces that lead nowhere"),
    pytest.param(2, {"decoys": True}, id="two hosts with decoys", marks=pytest.mark.soak),
    pytest.param(3, {"ip": 6}, id="three hosts with IPv6 only", marks=pytest.mark.soak),
    pytest.param(3, {}, id="three hosts", marks=pytest.mark.soak),
    pytest.param(
        2, {"delay_ms": 50, "loss_percent": 1}, id="a slow and lossy link", marks=pytest.mark.soak
    ),
]


@pytest.mark.parametrize(("count", "network"), NETWORKS)
def test_the_interface_that_leads_to_the_others_is_found(
    count: int, network: dict[str, Any], alone: Path, tmp_path: Path
) -> None:
    with Hosts(count, **network) as hosts:
        for ended in ends_of(train(hosts, tmp_path, "--dist-timeout", "60")):
            assert ended.code == 0, ended.err
    check_equal(tmp_path / "host0" / "run", alone, count, num_machines=count)


def test_two_hosts_whose_own_name_is_loopback(alone: Path, tmp_path: Path) -> None:
    """Separate networks, names, disks and caches, and no GLOO_SOCKET_IFNAME."""
    flags = " ".join(proof(Path("HOST/run"))[3:])
    with Hosts(2) as hosts:
        first, second = ends_of(make("train-multinode", hosts, tmp_path, f"ARGS={flags}"))
    assert (first.code, second.code) == (0, 0), (first, second)
    run = tmp_path / "host0" / "run"
    assert second.out.splitlines()[1:] == [
        f"joined     as rank 1 of 2; rank 0 on {hosts.names[0]} reports",
        f"done       the result is on {hosts.names[0]}, in {run}",
    ]
    check_equal(run, alone, 2, num_machines=2)
    assert not (tmp_path / "host1" / "run").exists()  # only rank 0's machine has the run folder
    assert (tmp_path / "host1" / "cache").is_dir()


# --- The doctor


def require_firewall() -> None:
    if not shutil.which("nft"):
        pytest.skip("a firewall needs the nft command")


def test_the_doctor_finds_a_healthy_cluster_healthy(tmp_path: Path) -> None:
    flags = f"--dataset digits --save {tmp_path / 'verdict.json'}"
    with Hosts(2, decoys=True) as hosts:
        first, second = ends_of(make("doctor", hosts, tmp_path, f"ARGS={flags}"))
        names = hosts.names
    assert first.code == 0, first.out + first.err
    assert second.code == 0, second.out + second.err
    for rank, out in enumerate((first.out, second.out)):
        for name in ("main address", "route", "meeting", "connections"):
            assert f"machine {rank}: PASS  {name}" in out
    assert first.out.splitlines()[-1].startswith("verdict: ")
    assert "verdict" not in second.out  # rank 0 tells it
    assert second.out.splitlines()[-2:] == [
        f"joined     as rank 1 of 2; rank 0 on {names[0]} reports",
        f"done       the result is on {names[0]}",
    ]
    verdict = read_json(tmp_path / "verdict.json")
    unwell = {finding["name"] for finding in verdict["findings"] if finding["status"] != "PASS"}
    assert unwell <= {"load", "slow rank"}  # other tests share the cores
    found = {finding["name"]: finding["text"] for finding in verdict["findings"]}
    assert found["rendezvous"].startswith("2 processes on 2 machines connected")
    examined = [f["text"] for f in verdict["findings"] if f["name"] == "machine"]
    assert [said.split(":")[0] for said in examined] == names
    # 13 of each machine, and name, route, meeting and connections before it
    assert all(said.endswith(": 17 checks, all well") for said in examined)


def test_the_doctor_names_a_firewall_that_drops_the_data_ports(tmp_path: Path) -> None:
    """Host 1 can be reached at no port but the main one, which it does not serve."""
    require_firewall()
    with Hosts(2) as hosts:
        hosts.drop_all_but(1, PORT)
        began = time.monotonic()
        first, second = ends_of(make("doctor", hosts, tmp_path))
        assert time.monotonic() - began < 30
        address = hosts.address(1)
    assert first.code != 0
    assert second.code != 0
    assert f"machine 0: FAIL  connections    machine 1 cannot be reached at {address}:" in first.out
    assert "-> open all TCP ports between the machines" in first.out
    assert "machine 1: FAIL  connections    machine 0 cannot reach all others" in second.out
    assert first.error_lines == [
        "ddp-mnist: error: machine 0: doctor: 1 of 4 checks failed (connections); do what their"
        " lines say, then check again (code 1)"
    ]


@pytest.mark.soak
def test_a_firewall_ends_a_training_with_one_line(tmp_path: Path) -> None:
    require_firewall()
    with Hosts(2) as hosts:
        hosts.drop_all_but(0, PORT)  # gloo's higher rank connects to the lower one
        began = time.monotonic()
        both = ends_of(train(hosts, tmp_path, "--dist-timeout", "8"))
        assert time.monotonic() - began < 8 + 10 + 10  # time-out, end, and start
    assert [ended.code for ended in both] == [6, 6]
    [line] = [line for ended in both for line in ended.error_lines]
    assert "2 processes met, but within 8 s rank" in line
    assert line.endswith(
        "GLOO_SOCKET_IFNAME to the interface that leads there (it is eth0) (code 6)"
    )
