"""A command's output arrives, or its exit code says so."""

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist import cli
from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.system.console import Console, tell
from ddp_mnist.system.files import read_json
from ddp_mnist.system.text import as_json
from tests.chaos import SECONDS
from tests.commands import SLOW, TRAIN, Ended, left_on_screen, on_forked_terminal
from tests.data_sets import write_noise
from tests.run_checks import metrics, status

# --- What a console prints


def test_progress_comes_now_and_then_and_only_from_who_is_verbose(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    console, silent = Console(True), Console(False)
    for second in (0.0, 0.5, 1.0, 1.5, 1.9, 2.0, 10.0, 10.5):
        now = 100.0 + second
        console.progress(second / 20, f"{second}")
        silent.progress(second / 20, "silent")
    now = 110.6
    console.print("one\ntwo")
    silent.print("silent")
    now = 111.5
    console.progress(0.6, "too soon after it")
    assert capsys.readouterr().out.split("\n") == ["1.0", "2.0", "10.0", "one", "two", ""]


ON_A_TERMINAL = """
from ddp_mnist.system.console import Console, tell
from ddp_mnist.verbs.check_result import warned
with Console(True) as console:
    console.print("begins")
    console.progress(0.25, "step 1/4")
    console.progress(0.5, "step 2/4")
    console.print(str(warned("data", "is slow", "wait")), coloured=True)
    console.progress(0.75, "step 3/4")
print("after it")
"""


def test_on_a_terminal_progress_is_a_bar_below_the_lines_and_a_status_has_its_colour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A terminal shows the last text of each line; a dumb one and a pipe get no control codes."""
    plain = ["begins", "WARN  data           is slow", " " * 21 + "-> wait", "after it", ""]
    in_yellow = [line.replace("WARN", "\x1b[1;33mWARN\x1b[0m") for line in plain]
    shown = ("xterm", "", in_yellow), ("xterm", "1", plain), ("dumb", "", plain)
    for kind, no_color, expected in shown:
        does, variables = (on_forked_terminal, ON_A_TERMINAL, 80, kind), {"NO_COLOR": no_color}
        [(code, written)] = run_world(1, *does, folder=tmp_path, variables=variables)
        assert (code, left_on_screen(written)) == (0, expected)  # the bar is gone
        has_bar = re.search(r"█+ +step 1/4.*█+ +step 2/4", written, re.DOTALL)
        assert has_bar if kind == "xterm" else "\r" not in written
    exec(ON_A_TERMINAL, {})
    assert capsys.readouterr().out == "\n".join(plain)


def read_until(terminal: int, wanted: str, timeout_s: float) -> str:
    """Return what is written to a terminal until it has `wanted`, or all if it is closed before."""
    written, deadline = b"", time.monotonic() + timeout_s
    while wanted.encode() not in written and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                written += os.read(terminal, 4096)
            except OSError:  # Linux's way to say that the other end is closed
                break
    return written.decode()


STOPPING = "ddp-mnist: stopping after this step"


@pytest.mark.system
def test_the_bar_shows_a_step_all_the_time_and_control_c_is_answered(tmp_path: Path) -> None:
    """From before the first step on, between log lines and while it validates."""
    (tmp_path / "slow.py").write_text(SLOW)
    flags = "--dataset digits --model slow:Slow --epochs 3 --log-every 1000 --run-dir run --cpu"
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = ["setsid", "--ctty", sys.executable, *TRAIN, *flags.split()]
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    with subprocess.Popen(command, cwd=tmp_path, **streams) as process:
        os.close(theirs)
        before = read_until(ours, "epoch 2/3", 120)
        os.write(ours, b"\x03")
        answer = read_until(ours, STOPPING, 0.1 * SECONDS)  # half a second on a free machine
        rest = read_until(ours, "no such line", 20)
    os.close(ours)
    assert process.returncode == 130
    assert STOPPING in [line.rpartition("\r")[2] for line in answer.splitlines()], answer
    assert (before + answer + rest).count("stopping after this step") == 1
    shown = re.findall(r"\r[█▏▎▍▌▋▊▉ ]{8} (\S[^\r\n]*)", before)
    assert shown[0] == "step  0/45  starting"
    assert [frame for frame in shown if not re.match(r"step +\d+/45  ", frame)] == []
    assert any(re.match(r"step 15/45  loss \d\.\d+  validation .* left", each) for each in shown)
    assert {0, 1, 15, 30} < {int(frame[5:7]) for frame in shown}  # and some between, unlogged
    assert len(metrics(tmp_path / "run")) == 2


# --- Commands whose output cannot be written

# A full disk, a pipe whose reader has gone, and what a shell's `>&-` leaves
FULL, UNREAD, CLOSED = "/dev/full", "|", "-"
QUICK = ("--dataset", "digits", "--model", "mlp", "--epochs", "1")
CANNOT = "stdout: cannot be written (No space left on device); "


def program(words: list[str], *streams: str) -> None:
    """Be the program; stdout, stderr and perhaps stdin are files, UNREAD or CLOSED."""
    from ddp_mnist.verbs.verify import proofs

    proofs.verify = lambda *_: iter(["begins"])  # which would take minutes
    closed = list[int]()
    for file, name, number in zip(streams, ("stdout", "stderr", "stdin"), (1, 2, 0), strict=False):
        if file == CLOSED:
            closed.append(number)  # at the end: what is opened next would get its number
            setattr(sys, name, None)
            continue
        if file == UNREAD:
            reading, opened = os.pipe()
            os.close(reading)
        else:
            opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    for number in closed:
        os.close(number)
    sys.argv = ["ddp-mnist", *words]
    cli.program()


def run(folder: Path, words: list[str], *streams: str) -> Ended:
    """Run a command in a process of its own."""
    world = LocalWorld(1, program, words, *streams, folder=folder)
    assert [str(outcome) for outcome in world.outcomes()] == ["was killed"]  # it ended by itself
    files = [folder / file for file in streams[:2]]
    said = [file.read_text() if file.is_file() else "" for file in files]
    return Ended(world.processes[0].exitcode or 0, *said)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a finished run and an image."""
    place = write_noise(tmp_path_factory.mktemp("streams"), "image.png", size=(28, 28))
    assert run(place, ["train", *QUICK, "--run-dir", "run"], "out", "err").code == 0
    return place


@pytest.mark.parametrize(
    "words",
    [
        "predict run image.png",
        "evaluate run",
        "report run --out page.html",
        "export run --out there",
        "prepare --dataset digits",
        "doctor --dataset digits",
        "verify --save proofs.json",
        "train --dataset digits --dry-run",
        "--version",
    ],
)
def test_fault_05_what_cannot_be_written_to_stdout_is_code_5(words: str, folder: Path) -> None:
    line = f"ddp-mnist: error: {CANNOT}free space, or redirect it elsewhere (code 5)\n"
    assert run(folder, words.split(), FULL, "err") == Ended(5, "", line)


def test_fault_05_fault_35_a_training_goes_on_without_stdout_and_errors_keep_their_code(
    folder: Path,
) -> None:
    train = ["train", *QUICK, "--run-dir"]
    warning = f"ddp-mnist: warning: {CANNOT}the run continues without output; see its folder\n"
    assert run(folder, [*train, "silent"], FULL, "err") == Ended(0, "", warning)
    assert run(folder, ["evaluate", "run"], UNREAD, "err") == Ended(0, "", "")
    assert run(folder, [*train, "mute"], FULL, FULL).code == 0
    assert run(folder, [*train, "unread"], UNREAD, UNREAD).code == 0
    assert run(folder, ["train", "--lr", "0"], "out", FULL).code == 2
    assert run(folder, ["predict", "no", "x"], UNREAD, UNREAD).code == 4
    for name in ("silent", "mute", "unread"):
        assert status(folder / name) == ("finished", 0)
        assert metrics(folder / name, "step")[-1]["test_accuracy"] > 0.1


def test_fault_35_closed_streams_lose_no_result_and_no_file_gets_their_number(folder: Path) -> None:
    """The run's files would have the number of stdout."""
    ended = run(folder, ["train", *QUICK, "--run-dir", "closed"], CLOSED, "err")
    assert ended.code == 0
    assert "stdout: cannot be written (Bad file descriptor); the run continues" in ended.err
    ended = run(folder, ["evaluate", "closed", "--json"], "out", CLOSED)
    accuracy = read_json(folder / "closed" / "summary.json")["test_accuracy"]
    assert (ended.code, json.loads(ended.out)["accuracy"]) == (0, accuracy)
    assert run(folder, ["predict", "run", "-"], "out", "err", CLOSED).code == 3
    words = ["bash", "-c", 'exec "$0" -m ddp_mnist --version >&-', sys.executable]  # from the start
    assert subprocess.run(words, stderr=subprocess.DEVNULL).returncode == 5


def test_a_line_is_out_at_once_and_letters_of_any_script_are_readable_in_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in it steers a terminal."""
    content = {"寺": "é кот\x9b2J\u202e\udcff\n😀", "number": 1.5}
    shown = '{"寺": "é кот\\u009b2J\\u202e\\udcff\\n😀", "number": 1.5}'
    for encoding, expected in (("utf-8", shown), ("ascii", json.dumps(content))):
        written = io.BytesIO()
        stdout = io.TextIOWrapper(written, encoding=encoding, errors="backslashreplace")
        monkeypatch.setattr(sys, "stdout", stdout)
        Console(True).print(as_json(content))
        assert written.getvalue().decode(encoding) == f"{expected}\n"
        assert json.loads(expected) == content


def test_nothing_that_is_printed_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Console(True).print("a\x1b[2J\nb\u202e\u2028寺")
    tell("a\x07\nb")
    assert capsys.readouterr() == ("a\\x1b[2J\nb\\u202e\\u2028寺\n", "a\\x07\nb\n")
