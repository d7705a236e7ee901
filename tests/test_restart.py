import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist import cli
from ddp_mnist.config.run import RunFlags
from ddp_mnist.run.folder import RunFolder, read_json
from ddp_mnist.verbs import restart
from tests.chaos import wait_until
from tests.commands import Started

Capsys = pytest.CaptureFixture[str]
Run = Callable[..., int]

ENTRY = ["-m", "ddp_mnist", "restart"]
LOST = {"state": "failed", "exit_code": 6, "error": "rank 1 was lost"}
KILLED = {"state": "running", "exit_code": None, "error": None}
FINISHED = {"state": "finished", "exit_code": 0, "error": None}
PREEMPTED = {"state": "preempted", "exit_code": 143, "error": "saved"}

# Records its flags, then does what PLAN says of this attempt.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

calls = Path("calls.jsonl")
attempt = len(calls.read_text().splitlines()) if calls.exists() else 0
flags = sys.argv[sys.argv.index("train") + 1:]
with open(calls, "a") as file:
    file.write(json.dumps(flags) + "\\n")
code, status, wait, *_ = *json.loads(os.environ["PLAN"])[attempt], None, None

def end(number=0, frame=None):
    if status is not None:
        folder = Path(flags[flags.index("--run-dir") + 1])
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_text(json.dumps(status))
    if number:
        Path("signal").write_text(signal.Signals(number).name)
    os._exit(code)

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, end)
if wait:
    Path("ready").touch()
    time.sleep(wait)
end()
"""
pytestmark = pytest.mark.usefixtures("here")
COMMAND = ["-I", "-c", SCRIPT, "train"]
DIGITS = ("--dataset", "digits")
RUN_DIR = ["--run-dir", "runs/digits-001"]
AUTO = ["--resume", "auto"]
Attempt = tuple[Any, ...]  # exit code, what it writes into status.json, seconds before that


def calls() -> list[list[str]]:
    """Return the flags of `train` in each attempt."""
    return [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]


def names(folder: str | Path = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that runs a command whose attempts end as planned."""

    def run_plan(*plan: Attempt, flags: tuple[str, ...] = DIGITS, restarts: int = 3) -> int:
        monkeypatch.setenv("PLAN", json.dumps(plan))
        return restart.restart(restarts, [*COMMAND, *flags], cli.train_config(flags).run)

    return run_plan


# --- What is run again


WAS_LOST, WAS_KILLED = "rank 1 was lost", "the process that wrote the run folder was killed"


@pytest.mark.parametrize(
    ("restarts", "plan", "code", "reasons"),
    [
        (3, [(1, LOST), (0, FINISHED)], 0, [WAS_LOST]),
        (3, [(1, KILLED), (0, FINISHED)], 0, [WAS_KILLED]),
        # no more than requested
        (0, [(1, LOST)], 6, []),
        (2, [(1, LOST)] * 3, 6, [WAS_LOST] * 2),
        # the last attempt decides
        (3, [(1, LOST), (1, KILLED), (1, {**LOST, "exit_code": 7})], 7, [WAS_LOST, WAS_KILLED]),
        # a run that is done or needs its user
        *((3, [(1, {**LOST, "exit_code": code})], code, []) for code in (1, 5, 7)),
        (3, [(1, PREEMPTED)], 143, []),
        (3, [(0, {**FINISHED, "exit_code": 3})], 0, []),
        (3, [(0, KILLED)], 0, []),
        # a command that never began a run
        *((3, [(code, None)], code, []) for code in (2, 6)),
    ],
)
def test_a_lost_process_is_a_restart_and_nothing_else_is(
    restarts: int, plan: list[Attempt], code: int, reasons: list[str], run: Run, capsys: Capsys
) -> None:
    handlers = [signal.getsignal(number) for number in restart.SIGNALS]
    assert run(*plan, restarts=restarts) == code
    assert calls() == [[*DIGITS, *RUN_DIR], *[[*DIGITS, *RUN_DIR, *AUTO]] * len(reasons)]
    expected = [f"restart {n} of {restarts}: {why}" for n, why in enumerate(reasons, 1)]
    assert capsys.readouterr().out.splitlines() == expected
    assert [signal.getsignal(number) for number in restart.SIGNALS] == handlers
    _, status = plan[-1]
    assert names("runs") == (["digits-001"] if status else [])  # no latest: it is of runs
    assert not status or read_json(Path("runs/digits-001/status.json")) == status


@pytest.mark.parametrize("old", [None, json.dumps(LOST), '{"'])
def test_a_typed_folder_stays_and_its_old_status_decides_nothing(old: str | None, run: Run) -> None:
    Path("mine").mkdir()
    if old:
        Path("mine/status.json").write_text(old)
    assert run((2,), flags=("--run-dir", "mine")) == 2
    assert calls() == [["--run-dir", "mine"]]
    assert names("mine") == (["status.json"] if old else [])
    assert not Path("runs").exists()


@pytest.mark.parametrize("resume", ["auto", "a"])
def test_a_typed_resume_is_left_as_it_is(resume: str, run: Run) -> None:
    flags = ("--resume", resume, "--run-dir", "a")
    assert run((1, LOST), (0, FINISHED), flags=flags) == 0
    assert calls() == [list(flags)] * 2


def test_a_command_that_a_signal_ended_has_a_shells_code() -> None:
    die = f"import os; os.kill(os.getpid(), {int(signal.SIGKILL)})"
    assert restart.restart(0, ["-c", die, "train"], RunFlags()) == 128 + signal.SIGKILL


def test_the_run_goes_into_the_folder_that_it_resumes_else_into_a_new_one() -> None:
    assert restart.choose_folder(RunFlags(resume="b")) == (Path("b"), [])
    assert names() == []
    for dataset, new in (("a/b", "runs/a--b-001"), ("auto", "runs/auto-001")):
        chosen = restart.choose_folder(RunFlags(dataset=dataset))
        assert chosen == (Path(new), ["--run-dir", new])


# --- Processes that outlive their launcher


@contextlib.contextmanager
def orphan(folder: Path) -> Iterator[threading.Event]:
    """Hold the folder's lock until the event; then write that the run is saved, and end."""
    folder.mkdir()
    locked, ends = RunFolder(), threading.Event()
    locked.open(folder)

    def go_on() -> None:
        if ends.wait(10):
            locked.write_json("status.json", PREEMPTED)
        locked.release()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield ends
    finally:
        ends.set()
        thread.join()


@pytest.mark.parametrize(("ends_after_s", "waits_s", "code"), [(0.3, 60, 143), (9, 0.3, 1)])
def test_a_process_that_still_writes_is_waited_for_a_while(
    ends_after_s: float, waits_s: float, code: int, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restart, "ORPHANS_MAY_TAKE_S", waits_s)
    with orphan(Path("a")) as ends:
        timer, started = threading.Timer(ends_after_s, ends.set), time.monotonic()
        timer.start()
        assert run((1, KILLED), flags=("--run-dir", "a")) == code
        assert 0.3 <= time.monotonic() - started < 5
        timer.cancel()
    assert len(calls()) == 1  # a second writer would be refused


@pytest.mark.usefixtures("flock")
def test_the_lock_file_of_a_killed_process_is_no_reason_to_wait(run: Run) -> None:
    Path("a").mkdir()
    Path("a/.lock").touch()
    started = time.monotonic()
    assert run((1, KILLED), (0, FINISHED), flags=("--run-dir", "a")) == 0
    assert time.monotonic() - started < 5
    assert len(calls()) == 2
    assert names("a") == [".lock", "status.json"]  # a run removes it, this command does not


# --- Signals


@pytest.mark.parametrize(
    ("number", "status", "code"),
    [
        (signal.SIGTERM, KILLED, 143),
        (signal.SIGUSR1, PREEMPTED, 143),
        (signal.SIGHUP, {**PREEMPTED, "exit_code": 129}, 129),
        (signal.SIGINT, LOST, 6),
    ],
)
def test_a_signal_is_forwarded_and_nothing_is_run_after_it(
    number: signal.Signals, status: dict[str, Any], code: int, here: Path
) -> None:
    """SIGINT is not forwarded: a terminal sends it to the command too."""
    interrupt = number == signal.SIGINT
    plan = [(143, status, 0.5 if interrupt else 30), (0,)]
    arguments = [*ENTRY, "3", "--", *COMMAND, *DIGITS]
    started = Started(arguments, here, {"PLAN": json.dumps(plan)})
    wait_until(Path("ready").exists, timeout_s=20)
    started.process.send_signal(number)
    ended = started.ended(10)
    assert (ended.code, ended.out, ended.err) == (code, "", "")
    assert interrupt or Path("signal").read_text() == number.name
    assert interrupt is not Path("signal").exists()
    assert len(calls()) == 1
