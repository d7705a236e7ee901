"""A launcher restarts a run that lost a process: it goes on, and ends as the unbroken run.

The commands are those of docs/reference.md, section "Automatic restarts".
"""

from pathlib import Path

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify.watch import what_stays
from tests.chaos import newest_step, wait_until, workers_of
from tests.commands import ACCELERATE, CONFIGS, SLOW, TORCHRUN, Started, proof, run_here

pytestmark = pytest.mark.system

LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"],
    "accelerate": [*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), "--max_restarts", "2"],
}
FLAGS = ["--model", "slow:Slow", "--lr", "0.01", "--checkpoint-every", "5", "--resume", "auto"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with slow.py, and in `unbroken` the run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "slow.py").write_text(SLOW)
    ended = run_world(2, run_here, proof(Path("unbroken"), *FLAGS)[2:], False, folder=folder)
    assert [code for code, _ in ended] == [0, 0], ended
    return folder


@pytest.mark.parametrize(("launcher", "lost"), [("torchrun", 0), ("accelerate", 1)])
def test_a_run_whose_process_is_killed_ends_with_the_unbroken_ones_weights(
    launcher: str, lost: int, unbroken: Path
) -> None:
    run = unbroken / launcher
    words = [*LAUNCHERS[launcher], *proof(run, *FLAGS)]
    started = Started(words, unbroken, {"OMP_NUM_THREADS": "1"})
    wait_until(lambda: newest_step(run) >= 5)
    workers = {worker.environ()["RANK"]: worker for worker in workers_of(started)}
    workers[str(lost)].kill()
    assert started.ended().code == 0
    assert len(read_json(run / "summary.json")["resumed_from"]) == 1
    assert what_stays(run) == what_stays(unbroken / "unbroken")
