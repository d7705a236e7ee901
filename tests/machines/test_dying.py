"""A rank that ends at any place of a run, however the run was started: nobody waits for good.

`pytest -m soak tests/machines/test_dying.py` tries all; each takes some seconds, and up to
--dist-timeout more where only the silence of the lost rank tells the others.
"""

import contextlib
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.system.files import read_if_whole
from tests.chaos import newest_step
from tests.commands import MULTI_CPU, REPOSITORY, TRAIN, Ended, Started, run_command, torchrun
from tests.hosts import require_root
from tests.run_checks import apart

TIMEOUT_S = 5  # --dist-timeout
SLACK_S = 10  # in which every process has ended after that
START_S = 90.0  # until a rank comes to the place, where others use the machine too
SAVES = ("training", "validation", "saving", "test")  # where a stop signal saves what the run has
HAS_FOLDER = ("first step", *SAVES)
PLACES = ("import", "decoding", "rendezvous", *HAS_FOLDER)
HOWS = ("SIGKILL", "exit 3", "SIGTERM", "exception")
STARTS = ("tcp", "torchrun", "accelerate")
FLAGS = "--dataset digits --model dying:Net --epochs 3 --batch-size 72 --checkpoint-every 10"
FLAGS += f" --mixed-precision no --quiet --run-dir run --dist-timeout {TIMEOUT_S}"

# The own net, which is imported after the rendezvous and before the data, and what strikes there.
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
import os, signal, subprocess, sys, time
from pathlib import Path

PLACE, HOW, WHO = os.environ["STRIKE"].split("/")
FIRST, _, THEN = HOW.partition(" then ")  # e.g. SIGTERM then INT after 0.02


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
    if THEN:
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
    from ddp_mnist.core import fit
    from ddp_mnist.data import cache
    from ddp_mnist.training.recorded_run import RecordedRun

    before(cache, "load", "decoding")
    before(fit, "warm_up_ddp", "first step")
    before(fit, "seed_forward", "training", lambda device, what, seed, step, rank: step == 25)
    before(RecordedRun, "phase", "validation", lambda run, name: name == "validation")
    before(RecordedRun, "phase", "test", lambda run, name: name == "test")
    before(RecordedRun, "save", "saving", lambda run, state: state.progress.step >= 20)
'''
# Before PyTorch is imported: `host_id`, which is looked up at the rendezvous, asks for the name.
SITE = """
import os, platform, sys

def hear(event, arguments):
    if event == "import" and arguments[0] == "torch" and "train" in sys.argv[1:2]:
        from striking import strike

        strike("loading")

if "STRIKE" in os.environ:
    if os.environ["STRIKE"].startswith("loading"):
        sys.addaudithook(hear)  # which costs half of the time
    name = platform.node

    def node():
        if sys._getframe(1).f_code.co_name == "host_id":
            from striking import strike

            strike("rendezvous")
        return name()

    platform.node = node
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
    multi_cpu = [*MULTI_CPU, "--num_processes", str(size)]
    launcher = multi_cpu if how == "accelerate" else torchrun(size)
    return [Started([*launcher, *flags], folder, variables)]


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
    saves = how == "SIGTERM" and place in SAVES
    # at the rendezvous nobody can be told yet
    tells = how in ("SIGTERM", "exception") and place != "rendezvous"
    own = {"SIGKILL": -9, "SIGTERM": 143, "exit 3": 3}.get(how, 2 if place == "import" else 1)
    others = own if tells else 6
    if starts == "tcp":
        codes = [end.code for end in ends]
        assert codes.pop(who) == own, ends
        assert set(codes) == {others}, ends
        told = [line for end in ends for line in end.error_lines]
        *_, line = sorted(told, key=lambda line: line.endswith("(code 6)"))
        assert line.endswith(f"(code {others})")
        assert tells or f"rank {who}" in line or (who, place) == (0, "rendezvous")
        its_own = how in ("SIGTERM", "exception") and not tells
        # without rank 0, which serves the store, the others cannot agree on who tells
        most = len(codes) if who == 0 and not tells else 1
        assert 1 <= len(told) - its_own <= most, told
    else:
        assert [end.code for end in ends] == [1]
    if saves:
        found = (status["state"], status["exit_code"], status["step"])
        assert found == ("preempted", 143, newest_step(run))
    elif who == 0 and how in ("SIGKILL", "exit 3"):  # nobody is left who writes it
        assert status.get("state") in (None, "running")
    elif place in HAS_FOLDER:
        # A launcher that lost a worker sends SIGTERM to the others, which may see it first.
        either = {others, 143} if starts != "tcp" and place not in SAVES else {others}
        assert status["state"] == "failed" and status["exit_code"] in either


def set_trap(folder: Path, strike: str) -> dict[str, str]:
    """Write the net that strikes. Return the variables with which a run falls into it."""
    for name, source in (("dying", NET), ("striking", STRIKE), ("sitecustomize", SITE)):
        (folder / f"{name}.py").write_text(source)
    python_path = f"{folder}:{REPOSITORY}"
    return {"PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "STRIKE": strike}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("starts", "place", "how", "who", "size"),
    [
        pytest.param(*case, id="-".join(map(str, case)))
        for case in itertools.product(STARTS, PLACES, HOWS, (0, 1, 2), (2, 3))
        if case[-2] < case[-1]
    ],
)
def test_a_rank_that_ends_ends_all(
    starts: str, place: str, how: str, who: int, size: int, tmp_path: Path
) -> None:
    variables = set_trap(tmp_path, f"{place}/{how}/{who}")
    started = start(starts, tmp_path, variables, size=size)
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


# --- Two stop signals, as schedulers send them


SIZES = {"pid 1": 1, "torchrun": 2, "tcp": 3}
CODES = {"TERM": 143, "USR1": 143, "HUP": 129, "INT": 130}
SOON, LATER = "soon", "1"  # seconds; soon is a moment below 0.05, another one for each case
EVERY = itertools.product(("loading", *PLACES), SIZES, CODES, CODES, (SOON, LATER))
TWICE = [(how, place, f"SIG{one} then {two}", delay) for place, how, one, two, delay in EVERY]


def train_undisturbed(size: int, folder: Path, *more: str) -> None:
    """Train in forked processes: how a run starts does not change its weights."""
    trap = set_trap(folder, "none/none/0")
    argv = ["train", *FLAGS.split(), *more]
    run_command(argv, folder, size, variables=trap, timeout_s=300)


@pytest.mark.parametrize(
    ("starts", "place", "how", "delay"),
    [
        # one of 96 for each place, together of all launchers and signals; most are of one process
        pytest.param(*case, id="-".join(case), marks=marks)
        for number, case in enumerate(TWICE)
        for place, which in [divmod(number, 96)]
        for marks in [pytest.mark.system if which == (36 - 5 * place) % 96 else pytest.mark.soak]
    ],
)
def test_fault_45_two_stop_signals_end_a_run_once_and_it_goes_on_bit_for_bit(
    starts: str, place: str, how: str, delay: str, tmp_path: Path, once: Callable[..., Path]
) -> None:
    if starts == "pid 1":
        require_root("a PID namespace")
    chance, size = random.Random(f"{starts}{place}{how}"), SIZES[starts]
    seconds = chance.uniform(0, 0.05) if delay == SOON else float(delay)
    trap = f"{place}/{how} after {seconds:.3f}/{chance.randrange(size)}"
    variables = set_trap(tmp_path, trap)
    started = start(starts, tmp_path, variables, size=size)
    try:
        ends = [each.ended(START_S) for each in started]
    finally:
        for process in everyone(started):
            process.kill()
    allowed = {CODES[word.removeprefix("SIG")] for word in how.split(" then ")}
    if how == "SIGINT then INT" and delay == LATER:
        allowed.add(6)  # the others', which did not hear of it
    codes = {end.code for end in ends}
    if starts == "torchrun":
        assert codes == {1}
    elif place in ("loading", "rendezvous"):  # the others wait in vain
        assert codes <= allowed | {6}, ends
    else:
        assert codes <= allowed, ends
    if status := read_if_whole(tmp_path / "run" / "status.json"):
        assert status["state"] in ("preempted", "failed"), ends
        assert status["exit_code"] in allowed, ends
    if not newest_step(tmp_path / "run"):  # nothing to resume
        assert place in ("loading", *PLACES[:4])
        return
    train_undisturbed(size, tmp_path, "--resume", "auto")
    whole = once(f"undisturbed-{size}", functools.partial(train_undisturbed, size))
    assert apart(tmp_path / "run", whole / "run") == 0
