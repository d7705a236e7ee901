"""torchrun's elastic agents, real ones on two hosts: one is lost, and comes back.

Their command is that of deploy/README.md. At every step the loss has to be that of one process
which nothing disturbed, in float64, and so the images that were drawn; at the end, the weights.
"""

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGTERM

import psutil
import pytest

from ddp_mnist.system.files import read_json
from tests.chaos import PATIENCE_S, trains_on, wait_until, workers_of
from tests.commands import SLOW, TORCHRUN, Started, fences_of, proof
from tests.hosts import Hosts, require_flock, require_hosts
from tests.run_checks import check_equal

pytestmark = pytest.mark.system

[FENCE] = [fence for fence in fences_of(Path("deploy/README.md")) if "--nnodes 1:2" in fence.body]
EXPORT, COMMAND = map(shlex.split, FENCE.body.splitlines())
CAN_JOIN = dict([EXPORT[1].split("=")])  # the variable without which no machine joins later
# A lost agent is noticed after 15 s, as always: one that starves beats late. It is waited for 5 s
# more, not 30.
HASTE = "keep_alive_interval=1,keep_alive_max_attempt=15,last_call_timeout=5"


@contextlib.contextmanager
def agents(folder: Path) -> Iterator[Callable[[int], Started]]:
    """Yield a function that starts the agent of one of two hosts.

    The hosts share a disk, `folder`, and the agent of host 1 serves the rendezvous.
    """
    (folder / "slow.py").write_text(SLOW)
    started, flags = list[Started](), ["--resume", "auto", "--checkpoint-every", "1"]
    train = proof(Path("run"), *flags, "--model", "slow:Slow", "--lr", "0.01")
    with Hosts(2) as hosts:

        def agent(index: int) -> Started:
            torchrun = COMMAND[1 : COMMAND.index("-m")]
            for flag, value in (
                ("--rdzv-endpoint", f"{hosts.address(1)}:29400"),
                ("--rdzv-conf", f"is_host={index},{HASTE}"),
                ("--local-addr", hosts.address(index)),
            ):
                torchrun[torchrun.index(flag) + 1] = value
            command = hosts.command(index, sys.executable, *TORCHRUN, *torchrun, *train)
            own = {"OMP_NUM_THREADS": "1", **CAN_JOIN}
            started.append(Started(command, folder, own, program=None))
            return started[-1]

        yield agent
        for each in started:
            kill(each)


def kill(agent: Started) -> None:
    """Kill an agent with its worker, as a machine that loses its power; not one that has ended."""
    if agent.process.poll() is None:
        for process in (*workers_of(agent), agent.process):
            process.kill()
        agent.process.communicate()


def resume_once_told_to_end(worker: psutil.Process) -> None:
    """Let a frozen worker go on once its agent, which wants to restart it, has sent SIGTERM."""
    status = Path(f"/proc/{worker.pid}/status")

    def told() -> bool:
        [pending] = re.findall(r"ShdPnd:\s*(\w+)", status.read_text())
        return bool(int(pending, 16) >> SIGTERM - 1 & 1)

    wait_until(told, PATIENCE_S)
    worker.resume()


def test_a_run_goes_on_without_a_lost_machine_and_takes_it_back(
    tmp_path: Path, alone: Path
) -> None:
    """Rank 0 moves to the other machine, and back."""
    require_hosts()
    require_flock(tmp_path)  # else the lock of a lost machine stays
    run = tmp_path / "run"
    with agents(tmp_path) as start:
        zero, one = start(0), start(1)
        trains_on(run, zero)
        kill(zero)
        first = trains_on(run, one)
        [alone_now] = workers_of(one)
        alone_now.suspend()  # else it may be through before the other is back
        back = start(0)
        resume_once_told_to_end(alone_now)
        wait_until(lambda: len(workers_of(back)) == 1, PATIENCE_S)
        second = trains_on(run, back)
        [here], [there] = workers_of(back), workers_of(one)
        counted = [each.environ()["TORCHELASTIC_RESTART_COUNT"] for each in (here, there)]
        assert counted == ["0", "1"]
        both = [agent.ended(PATIENCE_S) for agent in (back, one)]
    assert [ended.code for ended in both] == [0, 0], both
    assert read_json(run / "summary.json")["resumed_from"] == [first, second]
    changes = (
        f"after step {second}; changed: world size 1 -> 2, --backend none -> gloo",
        f"after step {first}; changed: world size 2 -> 1, --backend gloo -> none",
    )
    for ended, change in zip(both, changes, strict=True):
        [line] = [line for line in ended.out.splitlines() if line.startswith("resumed ")]
        assert line.endswith(change)
    check_equal(run, alone, 2, num_machines=2)
