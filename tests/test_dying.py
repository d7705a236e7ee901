"""A rank that ends at any place of a run, however the run was started: nobody waits for good.

`pytest -m soak tests/test_dying.py` tries all; each takes some seconds, and up to --dist-timeout
more where only the silence of the lost rank tells the others.
"""

import contextlib
import itertools
import time
from pathlib import Path

import psutil
import pytest

from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.run.folder import read_if_whole, read_json
from tests.chaos import newest_step
from tests.commands import REPOSITORY, TORCHRUN, TRAIN, Ended, Started

TIMEOUT_S = 5  # --dist-timeout
SLACK_S = 10  # in which every process has ended after that
START_S = 90.0  # until a rank comes to the place, where others use the machine too
PLACES = ("import", "decoding", "meeting", "first step", "training", "validation", "saving", "test")
HOWS = ("SIGKILL", "exit 3", "SIGHUP", "exception")
STARTS = ("tcp", "torchrun")
LISTENS = PLACES[3:]  # from the first step on a stop signal saves
FLAGS = "--dataset digits --model dying:Net --epochs 3 --batch-size 72 --checkpoint-every 10"
FLAGS += f" --mixed-precision no --quiet --run-dir run --dist-timeout {TIMEOUT_S}"

# The own net, which is imported after the meeting and before the data, and what strikes there.
NET = """
import math

from torch import nn

from striking import prepare, strike

strike("import")
prepare()


class Net(nn.Sequential):
    def __init__(self, classes, shape):
        super().__init__(nn.Flatten(), nn.Linear(math.prod(shape), classes))
"""
STRIKE = '''
import os, signal, sys, time
from pathlib import Path

PLACE, HOW, WHO = os.environ["STRIKE"].split("/")


def rank():
    typed = sys.argv[sys.argv.index("--rank") + 1] if "--rank" in sys.argv else "0"
    return os.environ.get("RANK", typed)


def strike(place):
    if place != PLACE or rank() != WHO or Path("struck").exists():
        return
    Path("struck").write_text(str(time.time()))
    if HOW == "exit 3":
        os._exit(3)
    if HOW == "exception":
        raise ValueError("struck")
    os.kill(os.getpid(), getattr(signal, HOW))


def before(owner, name, place, when=lambda *_: True):
    function = getattr(owner, name)

    def struck(*arguments, **options):
        if when(*arguments):
            strike(place)
        return function(*arguments, **options)

    setattr(owner, name, struck)


def prepare():
    """Strike at each place that comes after the import of the net."""
    from ddp_mnist import train
    from ddp_mnist.data import cache
    from ddp_mnist.run.training_run import TrainingRun

    before(cache, "load", "decoding")
    before(train, "warm_up_ddp", "first step")
    before(train, "seed_forward", "training", lambda device, what, seed, step, rank: step == 25)
    before(TrainingRun, "phase", "validation", lambda run, name: name == "validation")
    before(TrainingRun, "phase", "test", lambda run, name: name == "test")
    before(TrainingRun, "save", "saving", lambda run, state: state.progress.step >= 20)
'''
# Before PyTorch is imported: `host_id`, which is looked up at the meeting, asks for the name.
SITE = """
import os, platform, sys

if "STRIKE" in os.environ:
    name = platform.node

    def node():
        if sys._getframe(1).f_code.co_name == "host_id":
            from striking import strike

            strike("meeting")
        return name()

    platform.node = node
"""


def start(how: str, folder: Path, variables: dict[str, str], *more: str) -> list[Started]:
    """Start two processes, or a launcher of two."""
    flags = [*TRAIN, *FLAGS.split(), *more]
    if how == "tcp":
        place = ["--init-method", f"tcp://127.0.0.1:{free_port()}", "--world-size", "2", "--rank"]
        return [Started([*flags, *place, rank], folder, variables) for rank in ("0", "1")]
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", *flags]
    return [Started(launcher, folder, variables)]


def everyone(started: list[Started]) -> list[psutil.Process]:
    """Return the processes, with those that a launcher started."""
    found = []
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(each.process.pid)
            found += [process, *process.children(recursive=True)]
    return found


def struck_at(folder: Path, started: list[Started]) -> tuple[float, list[psutil.Process]]:
    """Return when the rank was struck, and all processes there were."""
    deadline, seen = time.monotonic() + START_S, dict[int, psutil.Process]()
    while time.monotonic() < deadline:
        seen |= {process.pid: process for process in everyone(started)}
        if (folder / "struck").exists() and (when := (folder / "struck").read_text()):
            return float(when), list(seen.values())
        time.sleep(0.05)
    for process in everyone(started):
        process.kill()
    raise AssertionError([each.ended(5) for each in started])


def check_outcome(
    starts: str, place: str, how: str, who: int, ends: list[Ended], run: Path
) -> None:
    """Check the codes, or in a launcher's place status.json, and the one line."""
    status = read_if_whole(run / "status.json")
    stops = how == "SIGHUP" and place in LISTENS  # else it kills, as SIGKILL does
    raises = how == "exception" and place != "meeting"  # where nobody can be told yet
    lost = 129 if stops else 1 if raises else 6
    if starts == "tcp":
        codes = [end.code for end in ends]
        own = {"SIGKILL": -9, "SIGHUP": -1, "exit 3": 3}.get(how, 1)
        own = 2 if (how, place) == ("exception", "import") else own
        assert codes[who] == (129 if stops else own), ends
        assert codes[1 - who] == (own if raises else lost), ends
        told = [line for end in ends for line in end.error_lines]
        if how != "exception" and not stops:
            [line] = told
            assert line.endswith("(code 6)")
            assert f"rank {who}" in line or (who, place) == (0, "meeting")
    else:
        assert [end.code for end in ends] == [1]
    if stops:
        found = (status["state"], status["exit_code"], status["step"])
        assert found == ("preempted", 129, newest_step(run))
    elif who == 0 and how != "exception":  # nobody is left who writes it
        assert status.get("state") in (None, "running")
    elif place in LISTENS[1:]:
        assert (status["state"], status["exit_code"]) == ("failed", lost)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("starts", "place", "how", "who"),
    [
        pytest.param(*case, id="-".join(map(str, case)))
        for case in itertools.product(STARTS, PLACES, HOWS, (0, 1))
    ],
)
def test_a_rank_that_ends_ends_all(
    starts: str, place: str, how: str, who: int, tmp_path: Path
) -> None:
    for name, source in (("dying", NET), ("striking", STRIKE), ("sitecustomize", SITE)):
        (tmp_path / f"{name}.py").write_text(source)
    variables = {
        "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
        "OMP_NUM_THREADS": "1",
        "STRIKE": f"{place}/{how}/{who}",
    }
    started = start(starts, tmp_path, variables)
    try:
        struck, processes = struck_at(tmp_path, started)
        ends = [each.ended(TIMEOUT_S + SLACK_S + 5) for each in started]
        took = time.time() - struck
    finally:
        for process in everyone(started):
            process.kill()
    assert took < TIMEOUT_S + SLACK_S, f"{took:.1f} s: {ends}"
    assert psutil.wait_procs(processes, timeout=1)[1] == []
    check_outcome(starts, place, how, who, ends, tmp_path / "run")
    if newest_step(tmp_path / "run"):
        again = start(starts, tmp_path, variables, "--resume", "auto")
        assert {each.ended().code for each in again} == {0}
        assert read_json(tmp_path / "run" / "summary.json")["resumed_from"]
