from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_mnist.cluster.local import free_port
from ddp_mnist.run.folder import read_json
from ddp_mnist.verbs import multinode
from ddp_mnist.verify.watch import largest_difference, weights_of
from tests.commands import REPOSITORY, Ended, python
from tests.hosts import Hosts, require_hosts

MULTINODE = ["-m", "ddp_mnist.verbs.multinode"]
PROOF = "--dataset digits --model mlp --epochs 3 --batch-size 72 --mixed-precision fp64 --run-dir"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("alone") / "run"
    ended = python("-m", "ddp_mnist", "train", *PROOF.split(), str(run), folder=run.parent)
    assert ended.code == 0, ended.err
    return run


def make(*targets: str, variables: dict[str, str], prefix: tuple[str, ...] = ()) -> Ended:
    settings = [f"{name}={value}" for name, value in variables.items()]
    done = subprocess.run(
        [*prefix, "make", "--no-print-directory", *targets, *settings],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHON": sys.executable, "VENV": ""},
        capture_output=True,
        text=True,
        timeout=150,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_rehearsal(alone: Path, tmp_path: Path) -> None:
    arguments = f"{PROOF} {tmp_path / 'run'}"
    ended = make("train-multinode", variables={"ARGS": arguments})
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[0].startswith("REHEARSAL: two nodes on this machine")
    assert ended.out.count("--machine_rank 0") == ended.out.count("--machine_rank 1") == 1
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["world_size"], summary["num_machines"]) == (2, 2)
    assert largest_difference(weights_of(tmp_path / "run"), weights_of(alone)) < 1e-9
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_two_hosts_whose_own_name_is_loopback(alone: Path, tmp_path: Path) -> None:
    """Separate networks, names, disks and caches, and no GLOO_SOCKET_IFNAME."""
    require_hosts()
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    with Hosts(2) as hosts:
        started = []
        for rank in (0, 1):
            disk = tmp_path / f"disk{rank}"
            disk.mkdir()
            command = [
                *("make", "--no-print-directory", "train-multinode"),
                *(f"MACHINE_RANK={rank}", f"MAIN_PROCESS_IP={hosts.address(0)}"),
                f"ARGS={PROOF} {disk / 'run'}",
            ]
            own = {"HOME": str(disk), "DDP_MNIST_CACHE": str(disk / "cache")}
            started.append(
                subprocess.Popen(
                    hosts.command(rank, *command),
                    cwd=REPOSITORY,
                    env={**os.environ, **own, "PYTHON": sys.executable, "VENV": ""},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for process in started:
            out, err = process.communicate(timeout=150)
            assert process.returncode == 0, out + err
        assert out.splitlines()[1:] == [
            f"joined     as rank 1 of 2; rank 0 on {hosts.names[0]} reports",
            f"done       the result is on {hosts.names[0]}, in {tmp_path / 'disk0' / 'run'}",
        ]
    run = tmp_path / "disk0" / "run"
    summary = read_json(run / "summary.json")
    assert (summary["world_size"], summary["num_machines"]) == (2, 2)
    assert largest_difference(weights_of(run), weights_of(alone)) < 1e-9
    assert not (tmp_path / "disk1" / "run").exists()  # only rank 0's machine has the run folder
    assert (tmp_path / "disk1" / "cache").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machine-rank", "0"], "MACHINE_RANK: needs MAIN_PROCESS_IP beside it"),
        (["--main-process-ip", "10.0.0.1"], "MAIN_PROCESS_IP: needs MACHINE_RANK beside it"),
        (
            ["--machine-rank", "2", "--main-process-ip", "127.0.0.1"],
            "MACHINE_RANK=2: of 2 machines, the ranks are 0 to 1",
        ),
        (
            ["--machine-rank", "x", "--main-process-ip", "127.0.0.1"],
            "MACHINE_RANK=x: must be a whole number",
        ),
        (
            ["--machine-rank", "0", "--main-process-ip", "127.0.0.1", "--main-process-port", "0"],
            "MAIN_PROCESS_PORT=0: must be a whole number",
        ),
        (["--nproc-per-node", "-1"], "NPROC_PER_NODE=-1: must be a whole number"),
    ],
)
def test_incomplete_or_wrong_variables(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        multinode.main(arguments)
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"ddp-mnist: error: {message}")


def test_fault_17_a_machine_that_never_comes(tmp_path: Path) -> None:
    """Machine 0 says how many came; machine 1, with nobody at the address, says which address."""
    port = str(free_port())
    here = ["--main-process-ip", "127.0.0.1", "--main-process-port", port]
    wait = ["--", "--dist-timeout", "2"]
    first = python(*MULTINODE, "--machine-rank", "0", *here, *wait, folder=tmp_path)
    assert first.code == 6
    assert "1 of 2 machines came within 2 s; missing: machine 1" in first.err
    second = python(*MULTINODE, "--machine-rank", "1", *here, *wait, folder=tmp_path)
    assert second.code == 6
    assert f"127.0.0.1:{port}: machine 1 of 2 reached nobody there within 2 s" in second.err


def test_make_lists_its_targets() -> None:
    ended = make(variables={})
    assert ended.code == 0
    listed = [line.split()[1] for line in ended.out.splitlines()]
    wanted = "venv train train-single train-multi train-multinode evaluate test soak check fmt"
    assert set(wanted.split()) <= set(listed)
