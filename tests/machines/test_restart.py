"""accelerate launch restarts a run whose worker is killed, is killed itself, then gets SIGTERM.

Its command is the second of docs/reference.md, section "Automatic restarts".
"""

from pathlib import Path

import pytest

from ddp_mnist.system.files import read_json
from ddp_mnist.system.locks import is_held
from ddp_mnist.training.folder import LOCK
from ddp_mnist.verbs.verify import watch
from tests.chaos import flags_of, leftovers, newest_step, seconds_until_gone, trains_on, workers_of
from tests.commands import MULTI_CPU, TRAIN, Started
from tests.run_checks import status

pytestmark = pytest.mark.system


def test_fault_01_fault_02_fault_11_fault_34_a_worker_is_killed_and_then_the_launcher(
    tmp_path: Path,
) -> None:
    """It begins the run again by itself; a person who begins it again needs no other command.

    The run ends with the unbroken run's weights. A worker that took too much memory is killed by
    the kernel with the same signal.
    """
    run = tmp_path / "run"

    def start(name: str = "run") -> Started:
        train = [*TRAIN, *flags_of("patient", Path(name), "--cpu", "--resume", "auto")]
        return Started(
            [*MULTI_CPU, "--max_restarts", "1", *train], tmp_path, {"OMP_NUM_THREADS": "1"}
        )

    started = start()
    trains_on(run, started)
    workers = {each.environ()["RANK"]: each for each in workers_of(started)}
    workers["1"].kill()
    assert seconds_until_gone([*workers.values()]) < 5
    assert status(run) == ("failed", 6)
    first = trains_on(run, started)  # by itself
    anew = workers_of(started)
    started.process.kill()
    assert seconds_until_gone(anew) < 5  # no orphan, and no second writer
    assert not is_held(run / LOCK)
    assert status(run) == ("preempted", 143)  # the workers had the time to save
    second = newest_step(run)
    lost, saved = started.ended().error_lines
    assert lost.startswith("ddp-mnist: error: lost contact with rank 1 of 2 (")
    assert lost.endswith("(code 6)")
    assert saved.startswith(f"ddp-mnist: error: SIGTERM: stopped after step {second} ")

    started = start()
    assert trains_on(run, started) == second
    anew = workers_of(started)
    started.process.terminate()
    assert seconds_until_gone(anew) < 10
    assert status(run) == ("preempted", 143)
    third = newest_step(run)
    [told] = started.ended().error_lines
    assert told.startswith(f"ddp-mnist: error: SIGTERM: stopped after step {third} ")
    assert told.endswith("and saved; to go on, add --resume run to the command (code 143)")

    assert [each.ended().code for each in (start(), start("whole"))] == [0, 0]
    assert read_json(run / "summary.json")["resumed_from"] == [first, second, third]
    assert watch.what_stays(run) == watch.what_stays(tmp_path / "whole")
    assert leftovers(run) == []
