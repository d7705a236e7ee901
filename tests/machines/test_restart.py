"""A launcher restarts a run that lost a process: it goes on, and ends as the unbroken run.

The commands are those of docs/reference.md, section "Automatic restarts".
"""

from pathlib import Path

import pytest

from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify.watch import what_stays
from tests.chaos import newest_step, wait_until, workers_of
from tests.commands import ACCELERATE, CONFIGS, SLOW, TORCHRUN, Started, proof, run_here

pytestmark = pytest.mark.system
PATIENCE_S = 200  # for what takes some 5 s on a machine that does nothing else

LAUNCHERS = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "2"],
    "accelerate": [*ACCELERATE, str(CONFIGS / "multi_cpu.yaml"), "--max_restarts", "2"],
}
FLAGS = ["--model", "slow:Slow", "--lr", "0.01", "--checkpoint-every", "5", "--resume", "auto"]


# accelerate's agent is torchrun's, which goes on in test_elastic.py too
@pytest.mark.parametrize(
    "launcher", ["accelerate", pytest.param("torchrun", marks=pytest.mark.soak)]
)
def test_a_run_whose_process_is_killed_ends_with_the_unbroken_ones_weights(
    launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = [*LAUNCHERS[launcher], *proof(Path("run"), *FLAGS)]
    started = Started(words, tmp_path, {"OMP_NUM_THREADS": "1"})
    unbroken = LocalWorld(2, run_here, proof(Path("unbroken"), *FLAGS)[2:], False, folder=tmp_path)
    wait_until(lambda: newest_step(tmp_path / "run") >= 5, PATIENCE_S)
    workers = {each.environ()["RANK"]: each for each in workers_of(started)}
    workers["0" if launcher == "torchrun" else "1"].kill()
    assert [code for code, _ in unbroken.outcomes()] == [0, 0]
    assert started.ended().code == 0
    assert len(read_json(tmp_path / "run" / "summary.json")["resumed_from"]) == 1
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")
