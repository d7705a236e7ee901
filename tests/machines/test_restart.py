"""A launcher restarts a run that lost a process: it goes on, and ends as the unbroken run.

The commands are those of docs/reference.md, section "Automatic restarts".
"""

import time
from pathlib import Path

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify.watch import what_stays
from tests.chaos import newest_step, workers_of
from tests.commands import ACCELERATE, CONFIGS, SLOW, TORCHRUN, Started, proof, run_here

pytestmark = pytest.mark.system

LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"],
    "accelerate": [*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), "--max_restarts", "2"],
}
FLAGS = ["--model", "slow:Slow", "--lr", "0.01", "--checkpoint-every", "5", "--resume", "auto"]


def test_a_run_whose_process_is_killed_ends_with_the_unbroken_ones_weights(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    started, left = {}, {"torchrun": "0", "accelerate": "1"}  # the rank that each loses
    for name in left:
        words = [*LAUNCHERS[name], *proof(Path(name), *FLAGS)]
        started[name] = Started(words, tmp_path, {"OMP_NUM_THREADS": "1"})
    while left:
        for name in [name for name in left if newest_step(tmp_path / name) >= 5]:
            workers = {each.environ()["RANK"]: each for each in workers_of(started[name])}
            workers[left.pop(name)].kill()
        time.sleep(0.01)
    assert [each.ended().code for each in started.values()] == [0, 0]
    run_world(2, run_here, proof(Path("unbroken"), *FLAGS)[2:], False, folder=tmp_path)
    for name in started:
        assert len(read_json(tmp_path / name / "summary.json")["resumed_from"]) == 1
        assert what_stays(tmp_path / name) == what_stays(tmp_path / "unbroken")
