from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
import termios
import time

import pytest

from ddp_mnist.run.console import Console, panel


def test_only_a_screen_that_speaks_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    Console(True).print("one\ntwo")
    Console(False).print("silent")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_progress_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    voice = Console(True)
    for second in (0.0, 0.5, 1.0, 1.5, 1.9, 2.0, 10.0, 10.5):
        now = 100.0 + second
        voice.progress(second / 20, f"{second}")
    now = 110.6
    voice.print("said anyway")
    now = 111.5
    voice.progress(0.6, "too soon after it")
    assert capsys.readouterr().out.split("\n") == ["1.0", "2.0", "10.0", "said anyway", ""]


ON_A_TERMINAL = """
from ddp_mnist.console import Console
with Console(True) as voice:
    voice.print("begins")
    voice.progress(0.25, "step 1/4")
    voice.progress(0.5, "step 2/4")
    voice.print("epoch 1/2")
    voice.progress(0.75, "step 3/4")
print("after it")
"""


def test_on_a_terminal_progress_is_a_bar_below_the_lines() -> None:
    """What a terminal would show: the last text of each line, after its carriage returns."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    with subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL], stdout=theirs) as process:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # Linux's way to say that the other end is closed
            while part := os.read(ours, 4096):
                written += part
    os.close(ours)
    assert process.returncode == 0
    assert re.search(r"█+ +step 1/4.*█+ +step 2/4", written.decode(), re.DOTALL)
    lines = [line.rpartition("\r")[2] for line in written.decode().split("\r\n")]
    assert lines == ["begins", "epoch 1/2", "after it", ""]  # the bar is gone


def test_a_panel_fits_in_80_columns() -> None:
    path = "/a/very/long/path/" * 6
    shown = panel({"data": "of " + 30 * "words ", "source": path}).splitlines()
    assert shown[0].startswith("data       of words words")
    assert shown[1].startswith("           words")
    assert max(map(len, shown[:-1])) <= 80
    assert path in shown[-1]  # a path stays whole, to be copied


PROGRAM = """
import sys
from ddp_mnist.console import Console
voice = Console(True)
for number in range(20_000):
    voice.print(f"line {number}")
print("trained on", voice.verbose, file=sys.stderr)
"""


def test_fault_35_a_reader_that_goes_away_does_not_end_the_training() -> None:
    reading, writing = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=writing, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(writing)
        with open(reading, "rb") as reader:
            first = reader.readline()
        _, err = process.communicate(timeout=20)
    assert first == b"line 0\n"
    assert (process.returncode, err) == (0, "trained on False\n")


def test_each_line_is_out_at_once() -> None:
    program = "import time; from ddp_mnist.console import Console; Console(True).print('x'); " + (
        "time.sleep(60)"
    )
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"x\n"
        assert time.monotonic() - started < 30
        process.kill()
