"""Two stop signals at any place of a run, however the run was started, as schedulers send them.

`pytest -m soak tests/test_dying.py` tries all; each takes some seconds.
"""

import contextlib
import functools
import itertools
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddp_mnist.cluster.local_world import free_port, run_world
from ddp_mnist.system.files import read_if_whole
from tests.chaos import newest_step
from tests.commands import (
    REPOSITORY,
    TORCHRUN,
    TRAIN,
    Started,
    run_here,
)
from tests.training import apart

START_S = 90.0  # until a rank comes to the place, where others use the machine too
PLACES = ("loading", "import", "decoding", "first step", "training", "validation", "saving", "test")
FLAGS = "--dataset digits --model dying:Net --epochs 3 --batch-size 72 --checkpoint-every 10"
FLAGS += " --mixed-precision no --quiet --run-dir run --dist-timeout 5"

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
import os, signal, subprocess, sys
from pathlib import Path

PLACE, HOW, WHO = os.environ["STRIKE"].split("/")
FIRST, _, THEN = HOW.partition(" then ")  # e.g. SIGTERM then INT after 0.02


def rank():
    typed = sys.argv[sys.argv.index("--rank") + 1] if "--rank" in sys.argv else "0"
    return os.environ.get("RANK", typed)


def strike(place):
    if place != PLACE or rank() != WHO or Path("struck").exists():
        return
    Path("struck").touch()
    second, _, seconds = THEN.partition(" after ")
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -s {second} {os.getpid()}"])
    os.kill(os.getpid(), getattr(signal, FIRST))


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
    from ddp_mnist.training.training_run import TrainingRun

    before(cache, "load", "decoding")
    before(train, "warm_up_ddp", "first step")
    before(train, "seed_forward", "training", lambda device, what, seed, step, rank: step == 25)
    before(TrainingRun, "phase", "validation", lambda run, name: name == "validation")
    before(TrainingRun, "phase", "test", lambda run, name: name == "test")
    before(TrainingRun, "save", "saving", lambda run, state: state.progress.step >= 20)
'''
# As Python imports it before all else.
SITE = """
import os, sys

def hear(event, arguments):
    if event == "import" and arguments[0] == "torch" and "train" in sys.argv[1:2]:
        from striking import strike

        strike("loading")

if os.environ.get("STRIKE", "").startswith("loading"):
    sys.addaudithook(hear)  # which costs half of the time
"""


def start(
    how: str, folder: Path, variables: dict[str, str], *more: str, size: int = 2
) -> list[Started]:
    """Start `size` processes, a launcher of as many, or one as the first of a PID namespace."""
    flags = [*TRAIN, *FLAGS.split(), *more]
    if how == "pid 1":
        first = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable]
        return [Started([*first, *flags], folder, variables, program=None)]
    if how == "tcp":
        where = f"--init-method=tcp://127.0.0.1:{free_port()}"
        place = [where, f"--world-size={size}", "--rank"]
        return [Started([*flags, *place, str(n)], folder, variables) for n in range(size)]
    launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", str(size)]
    return [Started([*launcher, *flags], folder, variables)]


def everyone(started: list[Started]) -> list[psutil.Process]:
    """Return the processes, with those that a launcher started."""
    found = []
    for each in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(each.process.pid)
            found += [process, *process.children(recursive=True)]
    return found


def set_trap(folder: Path, strike: str) -> dict[str, str]:
    """Write the net that strikes. Return the variables with which a run falls into it."""
    for name, source in (("dying", NET), ("striking", STRIKE), ("sitecustomize", SITE)):
        (folder / f"{name}.py").write_text(source)
    python_path = f"{folder}:{REPOSITORY}"
    return {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "STRIKE": strike}


SIZES = {"pid 1": 1, "torchrun": 2, "tcp": 3}
CODES = {"TERM": 143, "USR1": 143, "HUP": 129, "INT": 130}
SOON, LATER = "soon", "1"  # seconds; soon is a moment below 0.05, another one for each case
TWICE = itertools.product(PLACES, SIZES, CODES, CODES, (SOON, LATER))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return a function that returns the run of so many processes that nothing disturbs."""

    @functools.cache
    def undisturbed(size: int) -> Path:
        folder = tmp_path_factory.mktemp("unbroken")
        variables = set_trap(folder, "none/none/0")
        command = ["train", *FLAGS.split()]
        ended = run_world(size, run_here, command, False, folder=folder, variables=variables)
        assert [code for code, _ in ended] == [0] * size, ended
        return folder / "run"

    return undisturbed


@pytest.mark.parametrize(
    ("place", "starts", "first", "second", "delay"),
    [
        # some of 96 for each place, of all launchers and signals in turn
        pytest.param(*case, id="-".join(case), marks=marks)
        for number, case in enumerate(TWICE)
        for marks in [pytest.mark.system if number % 149 == 0 else pytest.mark.soak]
    ],
)
def test_fault_45_two_stop_signals_end_a_run_once_and_it_goes_on_bit_for_bit(
    place: str,
    starts: str,
    first: str,
    second: str,
    delay: str,
    tmp_path: Path,
    unbroken: Callable[[int], Path],
) -> None:
    if starts == "pid 1" and not (sys.platform == "linux" and os.geteuid() == 0):
        pytest.skip("a PID namespace needs Linux and root")
    chance, size = random.Random(f"{starts}{place}{first}{second}"), SIZES[starts]
    seconds = chance.uniform(0, 0.05) if delay == SOON else float(delay)
    trap = f"{place}/SIG{first} then {second} after {seconds:.3f}/{chance.randrange(size)}"
    variables = set_trap(tmp_path, trap)
    started = start(starts, tmp_path, variables, size=size)
    try:
        ends = [each.ended(START_S) for each in started]
    finally:
        for process in everyone(started):
            process.kill()
    allowed = {CODES[first], CODES[second]}
    if first == second == "INT" and delay == LATER:
        allowed.add(6)  # the others', which did not hear of it
    codes = {end.code for end in ends}
    if starts == "torchrun":
        assert codes == {1}
    elif place == "loading":  # the others wait in vain
        assert codes <= allowed | {6}, ends
    else:
        assert codes <= allowed, ends
    if status := read_if_whole(tmp_path / "run" / "status.json"):
        assert status["state"] in ("preempted", "failed"), ends
        assert status["exit_code"] in allowed, ends
    if not newest_step(tmp_path / "run"):  # nothing to resume
        assert place in PLACES[:4]
        return
    again = start(starts, tmp_path, variables, "--resume", "auto", size=size)
    assert {each.ended(300).code for each in again} == {0}
    assert apart(tmp_path / "run", unbroken(size)) == 0
