"""Several hosts with networks of their own: the right interface is found, or the fault is named."""

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.device import choose_device
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.config.distribution import Distribution
from tests.chaos import newest_step, wait_until
from tests.commands import MAKE, REPOSITORY, Ended, Started, proof, require_programs
from tests.hosts import Hosts, require_hosts, run
from tests.run_checks import check_equal, status

pytestmark = pytest.mark.system
PORT = 29444


@pytest.fixture(autouse=True)
def network() -> None:
    require_hosts()
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & set(os.environ)


SLOW_DISK = """
import os, time

fsync = os.fsync

def slow(file):
    if "step-00000015" in os.readlink(f"/proc/self/fd/{file}"):
        time.sleep(45)
    fsync(file)

os.fsync = slow
"""


def on_host(hosts: Hosts, index: int, folder: Path, *command: str) -> Started:
    """Start a command in the host's own folder, which is its home and its disk."""
    disk = folder / f"host{index}"
    disk.mkdir(exist_ok=True)
    own = {"HOME": str(disk), "DDP_MNIST_CACHE": str(disk / "cache"), "OMP_NUM_THREADS": "1"}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(disk), os.environ.get("PYTHONPATH")]))
    return Started(hosts.command(index, *command), disk, own, program=None)


def train(hosts: Hosts, folder: Path, *more: str, late_s: float = 0) -> list[Started]:
    """Train in one process on each host, with the tutorials' TCP flags; rank 0 may come late."""
    size = len(hosts.names)
    world = ["--init-method", hosts.url(0, PORT), "--world-size", str(size), *more]
    started = []
    for rank in reversed(range(size)):
        time.sleep(0 if rank else late_s)
        command = [sys.executable, *proof(Path("run"), *world, "--rank", str(rank))]
        started.append(on_host(hosts, rank, folder, *command))
    return started[::-1]


def ends_of(started: list[Started]) -> list[Ended]:
    return [each.ended(240) for each in started]


@pytest.mark.parametrize(
    "network",
    [
        pytest.param({"ip": 6, "mute": True}, id="fault_50 IPv6 only, mute name server"),
        pytest.param({"slow": True}, id="fault_19 slow, lossy", marks=pytest.mark.soak),
    ],
)
def test_two_hosts_train_as_one_process(
    network: dict[str, Any], alone: Path, tmp_path: Path
) -> None:
    with Hosts(2, **network) as hosts:
        for ended in ends_of(train(hosts, tmp_path, "--dist-timeout", "60")):
            assert ended.code == 0, ended.err
        assert "slow" not in network or hosts.dropped(0) > 50 < hosts.dropped(1)
    check_equal(tmp_path / "host0" / "run", alone, 2, num_machines=2)


def test_fault_51_addresses_that_do_not_meet_are_named(tmp_path: Path) -> None:
    """They meet by IPv6, but gloo takes an interface's first address, here IPv4 of two networks."""
    with Hosts(2, ip=6) as hosts:
        for index, name in enumerate(hosts.names):
            run("ip", "-n", name, "addr", "add", f"10.8{index}.0.1/24", "dev", "eth0")
        _, second = ends_of(train(hosts, tmp_path, "--start-timeout", "60", "--dist-timeout", "5"))
    assert second.code == 6
    offers = "(rank 0 is at 10.80.0.1 (eth0), rank 1 is at 10.81.0.1 (eth0)); open all TCP ports"
    assert offers in second.err


def test_fault_60_large_packets_that_vanish_are_told_from_a_lost_rank(tmp_path: Path) -> None:
    require_programs("nft")
    with Hosts(2) as hosts:
        hosts.drop(1, "meta length > 1300", "input")
        address = hosts.address(1)
        both = ends_of(train(hosts, tmp_path, "--start-timeout", "60", "--dist-timeout", "6"))
    assert [ended.code for ended in both] == [6, 6], [e.err + e.out for e in both]
    lines = [line for ended in both for line in ended.err.splitlines() if "error" in line]
    [line] = lines
    assert "all 2 ranks are alive, but have waited for each other for 6 s (rank 0" in line
    assert f"and the network pass large packets (does `ping -M do -s 1472 {address}` work?)" in line
    assert status(tmp_path / "host0" / "run") == ("failed", 6)


# --- The doctor


def test_the_doctor_finds_a_healthy_cluster_healthy(tmp_path: Path) -> None:
    with Hosts(2, decoys=True) as hosts:
        command = [*MAKE, "-C", str(REPOSITORY), "doctor"]
        command += ["ARGS=--dataset digits --expect-busbw 0.001"]
        command += ["NUM_MACHINES=2", f"MAIN_PROCESS_IP={hosts.address(0)}"]
        command += [f"MAIN_PROCESS_PORT={PORT}"]
        ranks, names = range(2), hosts.names
        own = [[*command, f"MACHINE_RANK={rank}"] for rank in ranks]
        first, second = ends_of([on_host(hosts, rank, tmp_path, *own[rank]) for rank in ranks])
    assert first.code == 0, first.out + first.err
    assert second.code == 0, second.out + second.err
    for rank, err in enumerate((first.err, second.err)):
        assert f"machine {rank} of 2: joining the others at " in err
    assert first.out.splitlines()[-1].startswith("verdict: ")
    assert "verdict" not in second.out  # rank 0 tells it
    assert second.out.splitlines()[-2:] == [
        f"joined     as rank 1 of 2; rank 0 on {names[0]} reports",
        f"done       rank 0 on {names[0]} has reported",
    ]
    findings = re.findall(r"^(PASS|WARN|FAIL)  (.{14}) (.*)$", first.out, re.MULTILINE)
    unwell = {name.strip(): status for status, name, _ in findings if status != "PASS"}
    assert unwell.keys() <= {"load", "config", "computing"}  # other tests share the cores
    assert "FAIL" not in unwell.values()
    found = {name.strip(): text for _, name, text in findings}
    assert found["rendezvous"].startswith("2 processes on 2 machines connected")
    trained_in = choose_device(Distribution(mixed_precision="auto"), Launch()).precision
    assert found["rendezvous"].endswith(f", precision {trained_in}")  # as make train-multinode
    both = f"rank 0 ({names[0]}), 1 ({names[1]})"
    assert found["machine"] == f"{both}: 10 of 10 checks passed"


def test_the_doctor_finds_a_slow_link_by_the_bandwidth_that_was_promised(tmp_path: Path) -> None:
    world = ["--cpu", "--dataset", "digits", "--expect-busbw", "0.05", "--json"]
    with Hosts(2) as hosts:
        hosts.limit(1, "200mbit")  # 0.025 GB/s
        world += ["--init-method", hosts.url(0, PORT), "--world-size", "2", "--rank"]
        command = [sys.executable, "-m", "ddp_mnist", "doctor", *world]
        first, second = ends_of([on_host(hosts, k, tmp_path, *command, f"{k}") for k in range(2)])
        who = f"rank 0 ({hosts.names[0]}), 1 ({hosts.names[1]})"
    assert (first.code, second.code) == (1, 1), first.err + second.err
    [found] = [each for each in json.loads(first.out)["findings"] if each["status"] == "FAIL"]
    assert found["name"] == "busbw"
    assert found["text"].endswith(f"expected 0.05 GB/s, less on {who}")
    assert 0.01 < found["figures"]["all-reduce of 16 MB, slowest rank, GB/s"] < 0.026


# --- Faults


@pytest.mark.soak
@pytest.mark.parametrize("forgets", [True, False])
def test_fault_58_a_firewall_forgets_what_idles_and_a_link_is_dead_for_40_s(
    forgets: bool, alone: Path, tmp_path: Path
) -> None:
    """It forgets after 20 s, and rank 0 saves for 45."""
    require_programs("nft")
    run = tmp_path / "host0" / "run"
    with Hosts(2) as hosts:
        if forgets:
            hosts.forget_idle(1, 20)
            run.parent.mkdir()
            (run.parent / "sitecustomize.py").write_text(SLOW_DISK)
        started = train(hosts, tmp_path, "--checkpoint-every", "5", "--start-timeout", "60")
        if not forgets:
            wait_until(lambda: newest_step(run))
            hosts.cut(1)
            time.sleep(40)
            hosts.mend(1)
        for ended in ends_of(started):
            assert (ended.code, "waiting" in ended.err) == (0, False), ended.err
    assert status(run) == ("finished", 0)
    check_equal(run, alone, 2, num_machines=2)


@pytest.mark.soak
def test_fault_17_fault_18_a_late_node_and_a_link_that_is_cut_for_3_s_and_for_good(
    tmp_path: Path,
) -> None:
    run = tmp_path / "host0" / "run"
    flags = ["--epochs", "400", "--checkpoint-every", "5", "--dist-timeout", "8", "--quiet"]
    flags += ["--start-timeout", "60"]
    with Hosts(2) as hosts:
        started = train(hosts, tmp_path, *flags, late_s=5)
        wait_until(lambda: newest_step(run))
        hosts.cut(1)
        time.sleep(3)
        hosts.mend(1)
        mended = newest_step(run)
        wait_until(lambda: newest_step(run) > mended + 5)
        hosts.cut(1)
        began, kept = time.monotonic(), newest_step(run)
        both = ends_of(started)
        assert time.monotonic() - began < 8 + 10
    for rank, ended in enumerate(both):
        assert ended.code == 6
        [line] = ended.err.splitlines()
        assert line.startswith(f"ddp-mnist: error: lost contact with rank {1 - rank} of 2 (")
    assert status(run) == ("failed", 6)
    assert newest_step(run) >= kept
