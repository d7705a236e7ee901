"""Several hosts with networks of their own: the right interface is found, or the fault is named."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.run.folder import MODEL, read_json
from ddp_mnist.verify.watch import largest_difference, weights_of
from tests.commands import REPOSITORY, Started, python
from tests.hosts import Hosts, require_hosts

PORT = 29444
PROOF = ["--dataset", "digits", "--model", "mlp", "--epochs", "1", "--batch-size", "72"]
PROOF += ["--mixed-precision", "fp64"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process on one host."""
    require_hosts()
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(os.environ)
    run = tmp_path_factory.mktemp("alone") / "run"
    ended = python("-m", "ddp_mnist", "train", *PROOF, "--run-dir", str(run), folder=run.parent)
    assert ended.code == 0, ended.err
    return run


def on_host(hosts: Hosts, index: int, folder: Path, *command: str) -> Started:
    """A command in the host's own folder, which is its home and its disk."""
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
    """One process on each host, started with the tutorials' TCP flags."""
    size = len(hosts.names)
    return [
        on_host(
            hosts,
            rank,
            folder,
            *(sys.executable, "-m", "ddp_mnist", "train", *PROOF, "--run-dir", "run"),
            *("--init-method", hosts.url(0, PORT), "--rank", str(rank)),
            *("--world-size", str(size), *more),
        )
        for rank in range(size)
    ]


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
        for started in train(hosts, tmp_path, "--dist-timeout", "60"):
            ended = started.ended()
            assert ended.code == 0, ended.err
    run = tmp_path / "host0" / "run"
    summary = read_json(run / "summary.json")
    assert (summary["world_size"], summary["num_machines"]) == (count, count)
    assert largest_difference(weights_of(run), weights_of(alone)) < 1e-9


def doctor(hosts: Hosts, folder: Path, *variables: str, main: str = "") -> list[Started]:
    """`make doctor` on each host."""
    return [
        on_host(
            hosts,
            rank,
            folder,
            *("make", "--no-print-directory", "-C", str(REPOSITORY), "doctor"),
            *(f"PYTHON={sys.executable}", "VENV=", f"MACHINE_RANK={rank}"),
            *(f"MAIN_PROCESS_IP={main or hosts.address(0)}", f"MAIN_PROCESS_PORT={PORT}"),
            f"NUM_MACHINES={len(hosts.names)}",
            *variables,
        )
        for rank in range(len(hosts.names))
    ]


def test_the_doctor_finds_a_healthy_cluster_healthy(tmp_path: Path) -> None:
    require_hosts()
    flags = f"--dataset digits --save {tmp_path / 'verdict.json'}"
    with Hosts(2, decoys=True) as hosts:
        first, second = (started.ended() for started in doctor(hosts, tmp_path, f"ARGS={flags}"))
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
    assert found["rendezvous"].startswith("2 processes on 2 machines met")
    examined = [f["text"] for f in verdict["findings"] if f["name"] == "machine"]
    assert [said.split(":")[0] for said in examined] == names
    # 13 of each machine, and name, route, meeting and connections before it
    assert all(said.endswith(": 17 examinations, all well") for said in examined)


def test_the_doctor_names_a_firewall_that_drops_the_data_ports(tmp_path: Path) -> None:
    """Host 1 can be reached at no port but the main one, which it does not serve."""
    require_hosts()
    if not shutil.which("nft"):
        pytest.skip("a firewall needs the nft command")
    with Hosts(2) as hosts:
        hosts.drop_all_but(1, PORT)
        began = time.monotonic()
        first, second = (started.ended() for started in doctor(hosts, tmp_path))
        assert time.monotonic() - began < 30
        address = hosts.address(1)
    assert first.code != 0
    assert second.code != 0
    assert f"machine 0: FAIL  connections    machine 1 cannot be reached at {address}:" in first.out
    assert "-> open all TCP ports between the machines" in first.out
    assert "machine 1: FAIL  connections    machine 0 cannot reach all others" in second.out
    assert first.error_lines == [
        "ddp-mnist: error: machine 0: doctor: 1 of 4 checks failed (connections); do what their"
        " lines say, then examine again (code 1)"
    ]


@pytest.mark.soak
def test_a_firewall_ends_a_training_with_one_line(tmp_path: Path) -> None:
    require_hosts()
    if not shutil.which("nft"):
        pytest.skip("a firewall needs the nft command")
    with Hosts(2) as hosts:
        hosts.drop_all_but(0, PORT)  # gloo's higher rank connects to the lower one
        began = time.monotonic()
        both = [started.ended() for started in train(hosts, tmp_path, "--dist-timeout", "8")]
        assert time.monotonic() - began < 8 + 10 + 10  # time-out, end, and start
    assert [ended.code for ended in both] == [6, 6]
    [line] = [line for ended in both for line in ended.error_lines]
    assert "2 processes met, but within 8 s rank" in line
    assert line.endswith(
        "GLOO_SOCKET_IFNAME to the interface that leads there (it is eth0) (code 6)"
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("main", "said"),
    [
        ("10.77.0.9", "FAIL  main address   10.77.0.9, which is no address of this machine"),
        ("no-such-host", "FAIL  main address   no-such-host has no address"),
        ("192.0.2.9", "FAIL  main address   192.0.2.9, which is no address of this machine"),
    ],
)
def test_the_doctor_names_a_wrong_main_address(main: str, said: str, tmp_path: Path) -> None:
    require_hosts()
    with Hosts(1) as hosts:
        [ended] = (started.ended() for started in doctor(hosts, tmp_path, main=main))
    assert ended.code != 0
    assert f"machine 0: {said}" in ended.out


@pytest.mark.soak
def test_the_doctor_names_a_machine_that_does_not_come(tmp_path: Path) -> None:
    require_hosts()
    with Hosts(2) as hosts:
        started, other = doctor(hosts, tmp_path, "ARGS=--dist-timeout 5")
        hosts.cut(1)
        ended, lost = started.ended(), other.ended()
    assert "machine 0: FAIL  meeting" in ended.out
    assert "1 of 2 machines came within 5 s; missing: machine 1" in " ".join(ended.out.split())
    assert "machine 1: FAIL  meeting" in lost.out


def train_multinode(hosts: Hosts, folder: Path) -> bytes:
    """The weights of `make train-multinode` on two hosts."""
    folder.mkdir()
    started = [
        on_host(
            hosts,
            rank,
            folder,
            *("make", "--no-print-directory", "-C", str(REPOSITORY), "train-multinode"),
            *(f"PYTHON={sys.executable}", "VENV=", f"MACHINE_RANK={rank}"),
            f"MAIN_PROCESS_IP={hosts.address(0)}",
            f"ARGS={' '.join(PROOF)} --run-dir {folder / f'host{rank}' / 'run'}",
        )
        for rank in (0, 1)
    ]
    for each in started:
        ended = each.ended(240)
        assert ended.code == 0, ended.out + ended.err
    return (folder / "host0" / "run" / MODEL).read_bytes()


@pytest.mark.soak
def test_a_slow_and_lossy_network_ends_with_the_weights_of_a_quiet_one(tmp_path: Path) -> None:
    require_hosts()
    with Hosts(2) as quiet:
        expected = train_multinode(quiet, tmp_path / "quiet")
    with Hosts(2, delay_ms=50, loss_percent=1) as bad:
        assert train_multinode(bad, tmp_path / "bad") == expected
