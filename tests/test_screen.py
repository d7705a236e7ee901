from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from ddp_mnist import screen
from ddp_mnist.screen import Screen


def test_only_a_screen_that_speaks_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(True).say("one\ntwo")
    Screen(False).say("silent")
    assert capsys.readouterr().out == "one\ntwo\n"


def test_progress_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(screen.time, "monotonic", lambda: now)
    voice = Screen(True)
    for second in (0.0, 0.5, 1.0, 1.5, 1.9, 2.0, 10.0, 10.5):
        now = 100.0 + second
        voice.now_and_then(f"{second}")
    now = 110.6
    voice.say("said anyway")
    now = 111.5
    voice.now_and_then("too soon after it")
    assert capsys.readouterr().out.split("\n") == ["1.0", "2.0", "10.0", "said anyway", ""]


PROGRAM = """
import sys
from ddp_mnist.screen import Screen
voice = Screen(True)
for number in range(20_000):
    voice.say(f"line {number}")
print("trained on", voice.speaks, file=sys.stderr)
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
    program = "import time; from ddp_mnist.screen import Screen; Screen(True).say('x'); " + (
        "time.sleep(60)"
    )
    started = time.monotonic()
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"x\n"
        assert time.monotonic() - started < 30
        process.kill()
