"""Every way of starting, with the real launchers: one training, and always the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local import free_port
from ddp_mnist.run.folder import read_json
from ddp_mnist.verify.watch import largest_difference, weights_of
from tests.commands import ACCELERATE, CONFIGS, REPOSITORY, TORCHRUN, TRAIN, Started, python

# 45 steps in float64, of the net that needs the least time: launching is what is tested here.
PROOF = "--dataset digits --model mlp --epochs 3 --batch-size 72 --mixed-precision fp64"
PROOF += " --log-every 1 --run-dir"
# torchrun remarks that it sets OMP_NUM_THREADS, torch.distributed.launch that it is deprecated
HUSH = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
LAUNCH = ["-m", "torch.distributed.launch"]


def proof(run: Path, *more: str) -> list[str]:
    return [*TRAIN, *PROOF.split(), str(run), *more]


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plain python, one process: what every launcher has to equal."""
    run = tmp_path_factory.mktemp("alone") / "run"
    ended = python(*proof(run), folder=run.parent)
    assert (ended.code, ended.err) == (0, ""), ended.err
    assert read_json(run / "summary.json")["backend"] == "none"
    return run


def check_equal(run: Path, alone: Path, world_size: int, num_machines: int = 1) -> None:
    summary = read_json(run / "summary.json")
    assert summary["world_size"] == world_size
    assert summary["num_machines"] == num_machines
    assert summary["backend"] == "gloo"
    assert summary["test_count"] == 360
    ours, theirs = metrics(run), metrics(alone)
    assert len(ours) == 45
    assert [line["lr"] for line in ours] == [line["lr"] for line in theirs]
    # equal losses at every step: the same images were seen
    expected = [line["loss"] for line in theirs]
    assert [line["loss"] for line in ours] == pytest.approx(expected, rel=1e-9)
    assert largest_difference(weights_of(run), weights_of(alone)) < 1e-9


def test_torchrun_with_three(alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", *proof(run)]
    ended = python(*arguments, folder=tmp_path, variables=HUSH)
    assert (ended.code, ended.err) == (0, "")
    check_equal(run, alone, 3)


def test_torch_distributed_launch_with_two(alone: Path, tmp_path: Path) -> None:
    """It puts --local-rank=N before the verb."""
    run = tmp_path / "run"
    port = str(free_port())
    arguments = [*LAUNCH, "--nproc-per-node", "2", "--master-port", port, *proof(run)]
    ended = python(*arguments, folder=tmp_path, variables=HUSH)
    assert (ended.code, ended.err) == (0, "")
    check_equal(run, alone, 2)


def test_accelerate_multi_cpu(alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), *proof(run)]
    ended = python(*arguments, folder=tmp_path)
    assert (ended.code, ended.err) == (0, "")
    check_equal(run, alone, 2)


def test_the_file_as_tutorials_start_it(alone: Path, tmp_path: Path) -> None:
    """`torchrun train.py`, and `python -m ddp_mnist.train`."""
    two = [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]
    script = str(REPOSITORY / "ddp_mnist" / "train.py")
    runs = {"module": ["-m", "ddp_mnist.train"], "script": [*two, script]}
    started = {
        name: Started([*command, *proof(tmp_path / name)[len(TRAIN) :]], tmp_path, HUSH)
        for name, command in runs.items()
    }
    for name, each in started.items():
        ended = each.ended()
        assert (ended.code, ended.err) == (0, ""), name
        assert "test accuracy" in ended.out
    check_equal(tmp_path / "script", alone, 2)
    assert largest_difference(weights_of(tmp_path / "module"), weights_of(alone)) < 1e-9


def test_one_command_per_process_over_tcp(alone: Path, tmp_path: Path) -> None:
    run, address = tmp_path / "run", f"tcp://127.0.0.1:{free_port()}"
    started = [
        Started(
            proof(run, "--init-method", address, "--rank", str(rank), "--world-size", "2"), tmp_path
        )
        for rank in (1, 0)
    ]
    for each in started:
        ended = each.ended()
        assert (ended.code, ended.err) == (0, "")
    check_equal(run, alone, 2)


def test_variables_as_srun_sets_them(alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shared = {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }
    started = [
        Started(proof(run), tmp_path, {**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": "0"})
        for rank in ("0", "1")
    ]
    for each in started:
        ended = each.ended()
        assert (ended.code, ended.err) == (0, "")
    check_equal(run, alone, 2, num_machines=2)


def test_variables_set_by_hand(alone: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    started = [Started(proof(run), tmp_path, {**shared, "RANK": rank}) for rank in ("0", "1")]
    for each in started:
        ended = each.ended()
        assert (ended.code, ended.err) == (0, "")
    check_equal(run, alone, 2)


def test_accelerate_cpu_is_one_process(tmp_path: Path) -> None:
    arguments = [*ACCELERATE, str(CONFIGS / "cpu.yaml"), *TRAIN, "--dataset", "digits"]
    ended = python(*arguments, "--epochs", "1", "--run-dir", "run", folder=tmp_path)
    assert ended.code == 0
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["world_size"], summary["backend"], summary["precision"]) == (1, "none", "no")


@pytest.mark.parametrize(
    ("config", "instead"),
    [
        ("single_gpu.yaml", "cpu.yaml"),
        ("multi_gpu.yaml", "multi_cpu.yaml"),
        ("multi_node.yaml", "multi_node_cpu.yaml"),
    ],
)
def test_gpu_configs_without_a_gpu(config: str, instead: str, tmp_path: Path) -> None:
    """No two lone trainers: one line that names the config to use."""
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}
    here = ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port"]
    nodes: list[list[str]] = [[]]
    if config == "multi_node.yaml":
        port = str(free_port())
        nodes = [[*here, port, "--machine_rank", rank] for rank in ("0", "1")]
    started = [
        Started([*ACCELERATE, str(CONFIGS / config), *node, *TRAIN], tmp_path, hidden)
        for node in nodes
    ]
    for each in started:
        ended = each.ended()
        assert ended.code == 1  # accelerate's own; the line has ours
        [line] = ended.error_lines
        assert line.endswith(f"use --config_file accelerate_configs/{instead} (code 2)")
    assert list(tmp_path.iterdir()) == []


def test_accelerates_cpu_flag_that_starts_one_process_for_two(tmp_path: Path) -> None:
    arguments = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", *TRAIN]
    ended = python(*arguments, folder=tmp_path)
    [line] = ended.error_lines
    assert "MASTER_ADDR=127.0.0.1: is set, but accelerate launch started one process" in line
    assert line.endswith("(code 2)")
    assert list(tmp_path.iterdir()) == []


def test_fault_23_nobody_else_comes(tmp_path: Path) -> None:
    """The second kind of loner: WORLD_SIZE=2 and one process."""
    variables = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    variables["MASTER_PORT"] = str(free_port())
    arguments = [*TRAIN, "--dataset", "digits", "--dist-timeout", "2"]
    ended = python(*arguments, folder=tmp_path, variables=variables, timeout_s=20)
    assert ended.code == 6
    [line] = ended.err.splitlines()
    assert "1 of 2 processes came within 2 s; missing: rank 1" in line
    assert list(tmp_path.iterdir()) == []


def test_evaluate_on_two_processes_equals_the_summary(alone: Path, tmp_path: Path) -> None:
    summary = read_json(alone / "summary.json")
    evaluate = ["-m", "ddp_mnist", "evaluate", str(alone), "--json"]
    for launcher in ([], [*TORCHRUN, "--standalone", "--nproc-per-node", "2"]):
        ended = python(*launcher, *evaluate, folder=tmp_path)
        assert ended.code == 0, ended.err
        found = json.loads(ended.out)
        assert found["world_size"] == (2 if launcher else 1)
        assert found["count"] == 360
        assert found["confusion"] == summary["confusion"]
        assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-12)


@pytest.mark.soak
def test_fifty_runs_end_in_order(tmp_path: Path) -> None:
    """Exit 0, and nothing on stderr: no abort at exit, no warning of a library's."""
    arguments = [*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), *TRAIN, "--dataset", "digits"]
    for number in range(50):
        run = ["--epochs", "1", "--run-dir", f"run-{number}"]
        ended = python(*arguments, *run, folder=tmp_path)
        assert (ended.code, ended.err) == (0, ""), f"run {number}"
