from __future__ import annotations

import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.run.folder import RunFolder, lock_folder, read_json, unlock
from ddp_mnist.verbs import restart
from ddp_mnist.verbs.restart import loss, place
from tests.commands import Started

LOST = {"state": "failed", "exit_code": 6, "error": "rank 1 was lost"}
KILLED = {"state": "running", "exit_code": None, "error": None}
FINISHED = {"state": "finished", "exit_code": 0, "error": None}

# Notes how it was called, then does what the plan says of this attempt.
SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path

calls = Path("calls.jsonl")
attempt = len(calls.read_text().splitlines()) if calls.exists() else 0
flags = sys.argv[sys.argv.index("train") + 1:]
with open(calls, "a") as file:
    file.write(json.dumps(flags) + "\\n")
code, status, wait = json.loads(os.environ["PLAN"])[attempt]

def end(number=0, frame=None):
    if status is not None:
        folder = Path(flags[flags.index("--run-dir") + 1])
        folder.mkdir(exist_ok=True)
        (folder / "status.json").write_text(json.dumps(status))
    if number:
        Path("signal").write_text(signal.Signals(number).name)
    os._exit(code)

for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, end)
if wait:
    Path("ready").touch()
    time.sleep(wait)
end()
"""
COMMAND = ["-I", "-c", SCRIPT, "train"]
DIGITS = ("--dataset", "digits")
RUN_DIR = ["--run-dir", "runs/digits-001"]
AUTO = ["--resume", "auto"]

Attempt = tuple[int, dict[str, Any] | None, float]


def attempt(code: int, status: dict[str, Any] | None = None, wait: float = 0) -> Attempt:
    """What the stand-in does: waits, writes status.json, and ends."""
    return code, status, wait


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def calls() -> list[list[str]]:
    """The flags of `train` in each attempt."""
    with contextlib.suppress(FileNotFoundError):
        return [json.loads(line) for line in Path("calls.jsonl").read_text().splitlines()]
    return []


def names(folder: str | Path = ".") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def run(
    monkeypatch: pytest.MonkeyPatch,
    plan: list[Attempt],
    flags: tuple[str, ...] = DIGITS,
    restarts: int = 3,
) -> int:
    monkeypatch.setenv("PLAN", json.dumps(plan))
    return restart.run([str(restarts), "--", *COMMAND, *flags])


# --- What is run again


def test_a_lost_process_is_one_restart(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [attempt(1, LOST), attempt(0, FINISHED)]) == 0
    assert calls() == [[*DIGITS, *RUN_DIR], [*DIGITS, *RUN_DIR, *AUTO]]
    assert capsys.readouterr().out == "restart 1 of 3: rank 1 was lost\n"
    assert read_json(Path("runs/digits-001/status.json")) == FINISHED


def test_a_run_that_was_killed_is_taken_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [attempt(1, KILLED), attempt(0, FINISHED)]) == 0
    assert len(calls()) == 2
    said = "restart 1 of 3: the process that wrote the run folder was killed\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("restarts", [0, 1, 3])
def test_no_more_restarts_than_were_asked_for(
    restarts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, [attempt(1, LOST)] * (restarts + 1), restarts=restarts) == 6
    assert len(calls()) == restarts + 1
    assert [line[:14] for line in capsys.readouterr().out.splitlines()] == [
        f"restart {number} of {restarts}" for number in range(1, restarts + 1)
    ]


def test_the_last_attempt_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    diverged = {"state": "failed", "exit_code": 7, "error": "diverged"}
    assert run(monkeypatch, [attempt(1, LOST), attempt(1, KILLED), attempt(1, diverged)]) == 7
    assert len(calls()) == 3


@pytest.mark.parametrize(
    ("state", "code"),
    [
        *(("failed", code) for code in (1, 2, 3, 4, 5, 7, 130)),
        *(("preempted", code) for code in (130, 143)),
    ],
)
def test_what_a_person_has_to_look_at_is_not_run_again(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status = {"state": state, "exit_code": code, "error": "why"}
    assert run(monkeypatch, [attempt(1, status)]) == code
    assert len(calls()) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("code", [1, 2, 6])
def test_a_command_that_never_came_to_a_run_leaves_no_folder(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, [attempt(code)]) == code
    assert len(calls()) == 1
    assert not Path("runs/digits-001").exists()


def test_a_folder_of_ones_own_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine").mkdir()
    assert run(monkeypatch, [attempt(2)], ("--run-dir", "mine")) == 2
    assert calls() == [["--run-dir", "mine"]]
    assert Path("mine").is_dir()
    assert not Path("runs").exists()


def test_a_run_that_finished_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [attempt(0, FINISHED)]) == 0
    assert calls() == [[*DIGITS, *RUN_DIR]]


def test_a_command_that_ends_in_order_has_code_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [attempt(0, {**FINISHED, "exit_code": 3})]) == 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--run-dir", "a", "--resume", "auto"),
        ("--resume", "auto", "--run-dir", "a"),
        ("--resume", "a", "--run-dir", "a"),
    ],
)
def test_resume_that_was_typed_is_left_as_it_is(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(monkeypatch, [attempt(1, LOST), attempt(0, FINISHED)], flags) == 0
    assert calls() == [list(flags)] * 2


def test_a_status_that_is_no_json_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a").mkdir()
    Path("a/status.json").write_bytes(b"{\xff")
    assert run(monkeypatch, [attempt(5)], ("--run-dir", "a")) == 5
    assert len(calls()) == 1


# --- Processes that outlive their launcher


@contextlib.contextmanager
def orphan(folder: Path) -> Iterator[threading.Event]:
    """Holds the folder's lock until the event; then says that it saved, and ends."""
    folder.mkdir()
    lock, ends = lock_folder(folder), threading.Event()

    def go_on() -> None:
        if ends.wait(10):
            preempted = {"state": "preempted", "exit_code": 143, "error": "saved"}
            RunFolder(folder).write_json("status.json", preempted)
        unlock(lock)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield ends
    finally:
        ends.set()
        thread.join()


def test_one_that_still_writes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with orphan(Path("a")) as ends:
        timer = threading.Timer(0.5, ends.set)
        timer.start()
        assert run(monkeypatch, [attempt(1, KILLED)], ("--run-dir", "a")) == 143
        assert ends.is_set()
        timer.join()
    assert len(calls()) == 1


def test_one_that_never_ends_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_mnist.verbs.restart.ORPHANS_MAY_TAKE_S", 0.3)
    with orphan(Path("a")):
        started = time.monotonic()
        assert run(monkeypatch, [attempt(1, KILLED)], ("--run-dir", "a")) == 1
        assert 0.3 <= time.monotonic() - started < 5
    assert len(calls()) == 1  # a second writer would be refused


@pytest.mark.parametrize("old", [LOST, KILLED, FINISHED])
def test_a_status_that_the_command_did_not_write_says_nothing(
    old: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a").mkdir()
    Path("a/status.json").write_text(json.dumps(old))
    assert run(monkeypatch, [attempt(2)], ("--run-dir", "a")) == 2
    assert len(calls()) == 1


def test_a_command_that_worked_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, [attempt(0, KILLED)]) == 0
    assert len(calls()) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_command_that_a_signal_ended_has_a_shells_code(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = f"import os; os.kill(os.getpid(), {int(number)})"
    monkeypatch.setenv("PLAN", "[]")
    assert restart.run(["0", "--", "-c", die, "train", *DIGITS]) == 128 + number


def test_the_lock_file_of_a_killed_process_is_no_reason_to_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("a").mkdir()
    Path("a/.lock").touch()
    started = time.monotonic()
    plan = [attempt(1, KILLED), attempt(0, FINISHED)]
    assert run(monkeypatch, plan, ("--run-dir", "a")) == 0
    assert time.monotonic() - started < 5
    assert len(calls()) == 2
    assert names("a") == [".lock", "status.json"]  # a run removes it, who only asks does not


# --- Signals


def stand_in_that_waits(folder: Path, first: Attempt) -> Started:
    started = Started(
        ["-m", "ddp_mnist.verbs.restart", "3", "--", *COMMAND, *DIGITS],
        folder,
        {"PLAN": json.dumps([first, attempt(0)])},
    )
    deadline = time.monotonic() + 20
    while not Path("ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return started


@pytest.mark.parametrize("status", [LOST, KILLED, {"state": "preempted", "exit_code": 143}])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_handed_on_and_nothing_is_run_after_it(
    number: signal.Signals, status: dict[str, Any], folder: Path
) -> None:
    started = stand_in_that_waits(folder, attempt(143, status, wait=30))
    started.process.send_signal(number)
    ended = started.ended(10)
    assert (ended.code, ended.out, ended.err) == (status["exit_code"] or 143, "", "")
    assert Path("signal").read_text() == number.name
    assert len(calls()) == 1


def test_an_interrupt_is_not_handed_on_and_nothing_is_run_after_it(folder: Path) -> None:
    """A terminal sends it to the command too."""
    started = stand_in_that_waits(folder, attempt(1, LOST, wait=0.5))
    started.process.send_signal(signal.SIGINT)
    ended = started.ended(10)
    assert (ended.code, ended.out, ended.err) == (6, "", "")
    assert not Path("signal").exists()
    assert len(calls()) == 1


def test_handlers_are_as_before_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    run(monkeypatch, [attempt(1, LOST), attempt(0, FINISHED)])
    assert [signal.getsignal(number) for number in numbers] == before


# --- Its parts


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (LOST, "rank 1 was lost"),
        (KILLED, "the process that wrote the run folder was killed"),
        ({}, None),
        (FINISHED, None),
        ({"state": "failed", "exit_code": 2, "error": "--lr 0"}, None),
        ({"state": "preempted", "exit_code": 143, "error": "SIGTERM"}, None),
        ({"state": "preempted", "exit_code": 6, "error": "x"}, None),
    ],
)
def test_loss(status: dict[str, Any], reason: str | None) -> None:
    assert loss(status) == reason


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ({"run_dir": "a"}, "a"),
        ({"run_dir": "a", "dataset": "digits"}, "a"),
        ({"resume": "b"}, "b"),
        ({"resume": "b", "run_dir": "b"}, "b"),
        ({"resume": "auto", "run_dir": "a"}, "a"),
    ],
)
def test_a_folder_that_was_typed_is_the_place(typed: dict[str, str], expected: str) -> None:
    assert place(typed) == (Path(expected), [])
    assert names() == []


@pytest.mark.parametrize(
    ("typed", "name"),
    [({}, "mnist-001"), ({"dataset": "digits"}, "digits-001"), ({"dataset": "a/b"}, "a--b-001")],
)
def test_else_one_is_made(typed: dict[str, str], name: str) -> None:
    made = Path("runs") / name
    assert place(typed) == (made, ["--run-dir", str(made)])
    assert (made.is_dir(), names(made)) == (True, [])
    assert names("runs") == [name]  # runs/latest leads to runs that began


NEEDS = "python -m ddp_mnist.verbs.restart: needs RESTARTS -- COMMAND ... train FLAGS"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], NEEDS),
        (["3"], NEEDS),
        (["3", "--"], NEEDS),
        (["3", "--", "train.py"], NEEDS),
        (["3", "--", "-c", SCRIPT], NEEDS),
        (["3", *COMMAND], NEEDS),
        ([*COMMAND], NEEDS),
        (["-1", "--", *COMMAND], "RESTARTS=-1: must be a whole number"),
        (["", "--", *COMMAND], "RESTARTS=: must be a whole number"),
        (["1.5", "--", *COMMAND], "RESTARTS=1.5: must be a whole number"),
        (["many", "--", *COMMAND], "RESTARTS=many: must be a whole number"),
        (["3", "--", *COMMAND, "--epoch", "3"], "--epoch: there is no such flag .*--epochs.*"),
        (["3", "--", *COMMAND, "--lr", "fast"], "--lr fast: must be a finite number .*"),
        (["3", "--", *COMMAND, "--run-dir"], "--run-dir: needs a value; .*"),
        (["3", "--", *COMMAND, "--run-dir", ""], "--run-dir: the value is empty; .*"),
    ],
)
def test_a_command_line_that_is_wrong_is_one_line(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        restart.main(argv)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"ddp-mnist: error: {message} \(code 2\)\n", err), err
    assert names() == []


def test_a_place_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs").touch()
    with pytest.raises(SystemExit) as ended:
        restart.main(["3", "--", *COMMAND])
    assert ended.value.code == 5
    assert re.fullmatch(r"ddp-mnist: error: runs: .+ \(code 5\)\n", capsys.readouterr().err)


def test_its_exit_code_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, status in ((0, FINISHED), (1, {"state": "failed", "exit_code": 3})):
        Path("calls.jsonl").unlink(missing_ok=True)
        monkeypatch.setenv("PLAN", json.dumps([attempt(code, status)]))
        with pytest.raises(SystemExit) as ended:
            restart.main(["3", "--", *COMMAND, *DIGITS])
        assert ended.value.code == status["exit_code"]
