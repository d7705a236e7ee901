"""A command's output arrives, or its exit code says so; a stream may be closed from the start.

A process that has torch loaded forks for each command, which then takes a second and not five.
"""

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
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.data import cache
from ddp_mnist.run.console import Console, as_json, count, passing, wrapped
from ddp_mnist.run.evaluation import Metrics
from ddp_mnist.run.folder import RunFolder
from ddp_mnist.run.hints import Hints
from ddp_mnist.run.state import Progress
from ddp_mnist.run.training_run import TrainingRun
from tests.chaos import SECONDS
from tests.commands import SLOW, TRAIN, Ended, Started, left_on_screen, on_forked_terminal
from tests.training import metrics, status

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
    for now in (112.0, 120.6, 121.0):
        console.progress(0, f"{now}", every_s=10)
    shown = capsys.readouterr().out.split("\n")
    assert shown == ["1.0", "2.0", "10.0", "one", "two", "120.6", ""]


ON_A_TERMINAL = """
from ddp_mnist.run.console import Console
with Console(True) as console:
    console.print("begins")
    console.progress(0.25, "step 1/4")
    console.progress(0.5, "step 2/4")
    console.print("epoch 1/2")
    console.progress(0.75, "step 3/4")
print("after it")
"""


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_on_a_terminal_progress_is_a_bar_below_the_lines(kind: str, tmp_path: Path) -> None:
    """A terminal shows the last text of each line, after its carriage returns; a dumb one all."""
    [(code, written)] = run_world(1, on_forked_terminal, ON_A_TERMINAL, 80, kind, folder=tmp_path)
    assert code == 0
    if kind == "dumb":  # in less than a second, no line of progress
        assert written == "begins\nepoch 1/2\nafter it\n"
        return
    assert re.search(r"█+ +step 1/4.*█+ +step 2/4", written, re.DOTALL)
    assert left_on_screen(written) == ["begins", "epoch 1/2", "after it", ""]  # the bar is gone


COLOURED = """
from ddp_mnist.errors import CheckFailed, one_line
from ddp_mnist.run.console import Console, tell
from ddp_mnist.verbs.check_result import warned
with Console(True) as console:
    console.draw(0, "checking data ...")
    console.print(str(warned("data", "cannot be reached", "set HF_ENDPOINT")))
tell(one_line(CheckFailed("--run-dir runs/a: holds a run; add --resume runs/a to the command")))
"""


READING = "reading    photos, decoded once into /home/me/cache: 500 images of 86x86 take 11 MB"
NARROW = f"""
from ddp_mnist.run.console import Console
from ddp_mnist.verbs.check_result import passed
Console(True).note({READING!r})
print(passed("training", "took all epochs of --epochs 20 and is done with them"))
"""


def test_on_a_terminal_a_status_has_its_colour_and_lines_break_between_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [(_, shown)] = run_world(1, on_forked_terminal, COLOURED, 63, folder=tmp_path)
    assert "checking data ..." in shown
    lines = left_on_screen(shown)
    assert lines[0] == "\x1b[1;33mWARN\x1b[0m  data           cannot be reached"
    assert lines[1].strip() == "-> set HF_ENDPOINT"
    assert lines[2:] == [  # `--resume runs/a` would be cut in two at column 63
        "ddp-mnist: error: --run-dir runs/a: holds a run; add",
        "--resume runs/a to the command (code 1)",
        "",
    ]
    [(_, shown)] = run_world(1, on_forked_terminal, NARROW, 50, folder=tmp_path)
    narrow = left_on_screen(shown)
    assert max(map(len, narrow)) <= 50
    assert narrow[:3] == [
        "reading    photos, decoded once into",
        " " * 11 + "/home/me/cache: 500 images of 86x86",
        " " * 11 + "take 11 MB",
    ]
    assert narrow[4:6] == [" " * 21 + "--epochs 20 and is done with", " " * 21 + "them"]
    no_color = {"NO_COLOR": "1"}
    for term, variables in (("xterm", no_color), ("dumb", {})):
        plain_on = (on_forked_terminal, COLOURED, 80, term)
        [(_, plain)] = run_world(1, *plain_on, folder=tmp_path, variables=variables)
        assert "WARN  data           cannot be reached\n" in plain
        assert "\x1b[1" not in plain
        assert ("checking" in plain) == (term == "xterm")
    Console(True).note(READING)
    assert capsys.readouterr().out == f"{READING}\n"  # in a file or a pipe it is one line
    [[piped]] = run_world(1, run_all, [(COLOURED, "in", "out", "err")], folder=tmp_path)
    assert "checking" not in piped.out and "\x1b" not in piped.out
    assert piped.err.count("\n") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_passing_line_is_gone_when_its_block_ends(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyError), passing("loading ..."):
        assert stream.getvalue() == "loading ..." * is_terminal
        raise KeyError
    assert stream.getvalue() == "loading ...\r\x1b[K" * is_terminal


def test_what_is_copied_stays_on_one_line() -> None:
    """A command that breaks would be two commands."""
    copied = (
        "python -m ddp_mnist report runs/a",
        "pip install onnx onnxscript onnxruntime",
        "--resume runs/a-run-with-a-long-name",
        "make train-multinode MACHINE_RANK=0",
        "/a/very/long/path/" * 4,
    )
    for text in copied:
        for columns in range(20, 90, 7):
            lines = wrapped(f"some words before; {text}, and others behind it", columns=columns)
            assert sum(text in line for line in lines) == 1, (columns, lines)
            assert " ".join(lines) == f"some words before; {text}, and others behind it"
            assert [line for line in lines if len(line) > columns and text not in line] == []


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


STOPPING = "ddp-mnist: stopping after this step; press Ctrl-C again to stop without saving"


def test_control_c_is_answered_once_on_a_machine_and_promises_only_what_a_launcher_lets_it_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run: Any = SimpleNamespace(where="run", console=Console(False))
    for has_launcher, local_rank, quiet, said in (
        (False, 0, False, STOPPING),
        (True, 0, False, STOPPING.partition(";")[0]),
        (True, 1, False, ""),
        (False, 0, True, ""),
    ):
        run.stop = StopSignals(has_launcher)
        run.world = SimpleNamespace(local_rank=local_rank)
        run.config = SimpleNamespace(run=SimpleNamespace(quiet=quiet))
        TrainingRun.answer(run)
        assert capsys.readouterr().err.strip() == said


def test_hints_come_once(capsys: pytest.CaptureFixture[str]) -> None:
    """On a net that knows its images by heart, on programs that take the cores, on hours."""
    recipe = SimpleNamespace(epochs=9, total_steps=90, batch_size=72)
    recipe.model, recipe.weights, recipe.augment = "cnn", None, False
    config = SimpleNamespace(recipe=recipe)
    run: Any = SimpleNamespace(folder=RunFolder(), console=Console(True), config=config)
    run.progress_line, run.left_s = lambda: (0.5, "step 45/90"), lambda: 9000.0
    run.world = SimpleNamespace(store=SimpleNamespace(rank=0))
    neighbours: Any = SimpleNamespace(threads=2, judge=lambda: 1)
    run.hints = Hints(run.console, neighbours, judges_length=True)
    run.stop, run.began = StopSignals(has_launcher=False), (time.monotonic() - 30, 1)
    far = Metrics(0.5, 1.0, 10, [], [])
    for epoch in (1, 2):
        progress = Progress(epoch=epoch, step=10 * epoch)
        TrainingRun.report_step(run, progress, 0.1, {}, False)
        means = {"loss": 0.5, "accuracy": 1.0, "images_per_second": 9.0}
        TrainingRun.log_epoch(run, means, progress, far)
    said = capsys.readouterr().out
    for hint in ("OMP_NUM_THREADS=1", "--augment", "--epochs 3"):
        assert said.count(hint) == 1
    assert said.count("validation 0.5000\n") == 2


def test_of_many_epochs_some_are_shown_and_the_last(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = SimpleNamespace(epochs=151, augment=True)
    config = SimpleNamespace(recipe=recipe)
    run: Any = SimpleNamespace(folder=RunFolder(), console=Console(True), config=config)
    run.hints = Hints(run.console)
    for epoch in range(1, 152):
        means = {"loss": 0.5, "accuracy": 0.9, "images_per_second": 9.0}
        TrainingRun.log_epoch(run, means, Progress(epoch=epoch), None)
    shown = [
        int(line.split()[1].partition("/")[0]) for line in capsys.readouterr().out.splitlines()
    ]
    assert shown == [*range(4, 151, 4), 151]


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
        pressed = time.monotonic()
        answer = read_until(ours, STOPPING, 20)
        answered_s = time.monotonic() - pressed
        rest = read_until(ours, "no such line", 20)
    os.close(ours)
    assert process.returncode == 130
    assert answered_s < 0.1 * SECONDS  # half a second on a free machine
    assert STOPPING in [line.rpartition("\r")[2] for line in answer.splitlines()], answer
    assert (before + answer + rest).count("stopping after this step") == 1
    shown = re.findall(r"\r[█▏▎▍▌▋▊▉ ]{8} (\S[^\r\n]*)", before)
    assert shown[0] == "step  0/45  starting"
    assert [frame for frame in shown if not re.match(r"step +\d+/45  ", frame)] == []
    assert any(re.match(r"step 15/45  loss \d\.\d+  validation .* left", each) for each in shown)
    steps = {int(frame[5:7]) for frame in shown}
    assert {0, 1, 15, 30} < steps  # and some between, although none is logged there
    assert len(metrics(tmp_path / "run")) == 2


MANY_LINES = """
import sys, time
from ddp_mnist.run.console import Console
console = Console(True)
console.print("the first")
time.sleep(0.2)
for number in range(20_000):
    console.print(f"line {number}")
print("went on", console.verbose, file=sys.stderr)
"""


def test_fault_35_a_line_is_out_at_once_and_a_reader_that_goes_away_ends_nothing() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", MANY_LINES], stdout=writing, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writing)
        with open(reading, "rb", buffering=0) as reader:
            first = b""
            while not first.endswith(b"\n"):
                first += reader.read(100)  # returns what is there, without waiting for more
        _, err = process.communicate(timeout=20)
    assert first == b"the first\n"
    assert (process.returncode, err) == (0, "went on False\n")


# --- Commands whose streams are full or closed

FULL, CLOSED = "/dev/full", None
QUICK = ("--dataset", "digits", "--model", "mlp", "--epochs", "1")
CANNOT = "stdout: cannot be written"


def run_forked(does: Sequence[str] | str, *streams: str | None) -> Ended:
    """Run a command, or Python code, in a process that was forked.

    Each stream is a file's name, or closed.
    """
    pid = os.fork()
    if pid == 0:
        for number, (file, name) in enumerate(
            zip(streams, ("stdin", "stdout", "stderr"), strict=True)
        ):
            if file is CLOSED:
                os.close(number)
                setattr(sys, name, None)  # as Python starts
            else:
                opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                os.dup2(opened, number)
                os.close(opened)
                setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        from ddp_mnist import cli

        try:
            if isinstance(does, str):
                exec(does, {})
                sys.stdout.flush()
                os._exit(0)
            sys.argv = ["ddp-mnist", *does]
            cli.program()
        finally:  # whatever else comes out of it is a traceback
            import traceback

            traceback.print_exc()
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (
        Path(file).read_text() if file not in (CLOSED, FULL) else "" for file in streams[1:]
    )
    return Ended(code, out, err)


def run_all(commands: list[Any]) -> list[Ended]:
    """Run one after the other; what verify and bench would take minutes for is left out."""
    import numpy as np  # noqa: F401
    import PIL.Image  # noqa: F401

    import ddp_mnist.verbs.predict  # noqa: F401
    from ddp_mnist.bench import benches
    from ddp_mnist.verify import proofs

    proofs.verify = lambda *_: iter(["begins"])
    benches.BENCHES["loop"] = lambda *_: []
    return [run_forked(*command) for command in commands]


def run_in(folder: Path, commands: list[Any]) -> list[Ended]:
    [ended] = run_world(1, run_all, commands, folder=folder)
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a finished run and an image."""
    import PIL.Image

    place = tmp_path_factory.mktemp("streams")
    images = cache.load("digits")
    PIL.Image.fromarray(images.test_images[0].squeeze().numpy()).save(place / "image.png")
    [done] = run_in(place, [(["train", *QUICK, "--run-dir", "run"], "in", "out", "err")])
    assert done.code == 0, done.err
    return place


def check_finished(run: Path) -> None:
    """Assert that the run finished, and that nothing which was printed went into its files."""
    assert status(run) == ("finished", 0)
    assert metrics(run, "step")[-1]["test_accuracy"] > 0.1


def test_fault_35_streams_that_were_closed_before_the_start(folder: Path) -> None:
    commands: list[Any] = [(["predict", "run", "-"], CLOSED, "out", "err")]
    choices = ("out", "err"), (CLOSED, "err"), ("out", CLOSED), (CLOSED, CLOSED)
    for number, streams in enumerate(
        [("in", "out", "err"), *((CLOSED, *each) for each in choices)]
    ):
        commands.append((["predict", "run", "image.png"], *streams))
        commands.append((["train", *QUICK, "--run-dir", f"closed-{number}"], *streams))
    without_stdin, *others = run_in(folder, commands)
    assert without_stdin.code == 3
    assert without_stdin.err.lower().startswith("ddp-mnist: error: -: bad file descriptor; ")
    for (argv, _, out, err), ended in zip(commands[1:], others, strict=True):
        said = ended.err.splitlines()
        if argv[0] == "train":
            check_finished(folder / argv[-1])
        assert ended.code == (5 if argv[0] == "predict" and not out else 0), argv
        if out:
            assert ended.out and not said, argv
        elif err:
            assert len(said) == 1 and f"{CANNOT} (Bad file descriptor)" in said[0], said


def test_fault_35_a_process_that_was_really_started_with_nothing_open(tmp_path: Path) -> None:
    command = f"{sys.executable} -m ddp_mnist --version <&- >&- 2>&-"
    ended = Started(["bash", "-c", command], tmp_path, program=None).ended()
    assert (ended.code, ended.out, ended.err) == (5, "", "")


def test_fault_05_what_cannot_be_written_to_stdout_is_code_5(folder: Path) -> None:
    verbs: list[list[str]] = [
        ["predict", "run", "image.png"],
        ["evaluate", "run"],
        ["evaluate", "run", "--json"],
        ["report", "run", "--out", "page.html"],
        ["export", "run", "--out", "there"],
        ["prepare", "--dataset", "digits"],
        ["configs"],
        ["doctor", "--dataset", "digits"],
        ["verify", "--save", "proofs.json"],
        ["bench", "loop", "--dataset", "digits"],
        ["train", *QUICK, "--dry-run"],
        ["--help"],
        ["--version"],
    ]
    commands = [(verb, "in", FULL, "err") for verb in verbs]
    for (verb, *_), ended in zip(commands, run_in(folder, commands), strict=True):
        assert ended.code == 5, verb
        assert ended.err.startswith(f"ddp-mnist: error: {CANNOT} (No space left on dev"), ended.err
        assert ended.err.endswith("; free space, or redirect it elsewhere (code 5)\n"), ended.err
        assert ended.err.count("\n") == 1, ended.err


def test_fault_05_a_training_goes_on_although_stdout_is_full_and_errors_keep_their_code(
    folder: Path,
) -> None:
    commands: list[Any] = [
        (["train", *QUICK, "--run-dir", "silent"], "in", FULL, "err"),
        (["train", *QUICK, "--run-dir", "mute"], "in", FULL, FULL),
        (["train", "--lr", "0"], "in", "out", FULL),
        (["predict", "no", "x"], "in", FULL, FULL),
    ]
    full, *others = run_in(folder, commands)
    assert [ended.code for ended in (full, *others)] == [0, 0, 2, 4]
    assert full.err.startswith(f"ddp-mnist: warning: {CANNOT} (No space left on device); ")
    assert full.err.endswith("the run continues without output; see its folder\n")
    assert full.err.count("\n") == 1
    check_finished(folder / "silent")
    check_finished(folder / "mute")


def test_letters_of_any_script_are_readable_in_json_and_nothing_steers_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = {"寺": "é кот\x9b2J\u202e\udcff\n😀", "number": 1.5}
    shown = '{"寺": "é кот\\u009b2J\\u202e\\udcff\\n😀", "number": 1.5}'
    for encoding, expected in (("utf-8", shown), ("ascii", json.dumps(content))):
        stdout = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="backslashreplace")
        monkeypatch.setattr(sys, "stdout", stdout)
        Console(True).print(as_json(content))
        stdout.seek(0)
        assert stdout.read() == f"{expected}\n"
        assert json.loads(expected) == content


def test_numbers_of_things_have_the_plural() -> None:
    counted = [count(1, "process"), count(2, "process"), count(0, "thread"), count(1234, "machine")]
    assert counted == ["1 process", "2 processes", "0 threads", "1,234 machines"]
