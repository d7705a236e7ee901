import contextlib
import operator
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ddp_mnist.cluster.signals import EXIT_CODES, StopSignals, listen
from ddp_mnist.errors import FailedElsewhere, Preempted, StorageError
from tests.chaos import wait_until
from tests.commands import Started

TERM, USR1, HUP, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT


# --- What the ranks do about the signals of all of them


@pytest.mark.parametrize(
    ("requests", "name", "code"),
    [
        ([1, 0, 0, 0], "SIGTERM", 143),
        ([4095, 1, 0, 0], "SIGUSR1", 143),
        ([2, 0, 1, 0], "SIGHUP", 129),
        ([0, 0, 0, 1], "SIGINT", 130),
        ([2000, 2095, 0, 1], "SIGINT", 130),
    ],
)
@pytest.mark.parametrize("is_main_process", [True, False])
def test_every_rank_saves_once_and_ends_with_the_strongest_signals_code(
    is_main_process: bool, requests: list[float], name: str, code: int
) -> None:
    stop = StopSignals()
    stop.save = save = Mock(return_value="stopped after step 5 and saved")
    stop.save_and_exit_if([0.0] * 4, is_main_process)  # no signal came
    with pytest.raises(Preempted if is_main_process else FailedElsewhere) as raised:
        stop.save_and_exit_if(requests, is_main_process)
    assert (raised.value.code, raised.value.agreed) == (code, is_main_process)
    assert str(raised.value) == f"{name}: stopped after step 5 and saved"
    save.assert_called_once_with()


def test_what_cannot_be_saved_is_the_error_instead() -> None:
    stop = StopSignals()
    with pytest.raises(Preempted, match=r"^SIGTERM: stopped$"):
        stop.save_and_exit_if([1, 0, 0, 0], True)  # before there is anything to save
    stop.save = Mock(side_effect=StorageError("the disk is full"))
    with pytest.raises(StorageError, match="the disk is full"):
        stop.save_and_exit_if([1, 0, 0, 0], True)


def test_ask_adds_up_the_requests_of_all_ranks() -> None:
    sent: list[torch.Tensor] = []

    def reduce(mine: torch.Tensor) -> torch.Tensor:
        sent.append(mine)
        return mine + torch.tensor([0, 0, 0, 1])

    stop = StopSignals()
    stop.note(TERM)
    with pytest.raises(FailedElsewhere, match="SIGINT: stopped"):
        stop.ask(Mock(device="cpu", reduce=reduce, is_main_process=False))
    assert (sent[0].tolist(), sent[0].dtype) == ([1, 0, 0, 0], torch.float64)


# --- Listening


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in EXIT_CODES}


@pytest.fixture
def before() -> Iterator[dict[int, Any]]:
    """Set handlers that are not the usual ones, and restore the test's own afterwards."""
    usual = handlers()
    signal.signal(TERM, signal.SIG_IGN)
    signal.signal(USR1, lambda *_: None)
    signal.signal(INT, signal.SIG_DFL)
    yield handlers()
    for number, handler in usual.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("fails", [False, True])
def test_all_is_as_before_but_after_an_error_the_signals_stay_ignored(
    fails: bool, before: dict[int, Any]
) -> None:
    threads = set(threading.enumerate())
    ours, other = socket.socketpair()
    ours.setblocking(False)
    with ours, other:
        usual = signal.set_wakeup_fd(ours.fileno())  # as somebody else may have done before
        with contextlib.suppress(ZeroDivisionError), listen(has_launcher=True):
            assert all(now != before[number] for number, now in handlers().items())
            assert signal.set_wakeup_fd(-1) not in (ours.fileno(), -1)
            if fails:
                raise ZeroDivisionError
        assert signal.set_wakeup_fd(usual) == ours.fileno()
    assert handlers() == (dict.fromkeys(EXIT_CODES, signal.SIG_IGN) if fails else before)
    wait_until(lambda: set(threading.enumerate()) <= threads, 2)


@pytest.mark.usefixtures("before")
def test_each_signal_has_a_slot() -> None:
    winch = signal.signal(signal.SIGWINCH, lambda *_: None)  # some other signal with a handler
    try:
        with listen(has_launcher=True) as stop:
            os.kill(os.getpid(), signal.SIGWINCH)
            time.sleep(0.1)
            assert stop.requests == [0] * 4
            for number, expected in (
                *((USR1, [0, 1, 0, 0]), (USR1, [0, 1, 0, 0]), (INT, [0, 1, 0, 1])),
                *((TERM, [1, 1, 0, 1]), (HUP, [1] * 4), (TERM, [1] * 4)),
            ):
                os.kill(os.getpid(), number)
                time.sleep(0.02)
                wait_until(partial(operator.eq, stop.requests, expected), 2)
    finally:
        signal.signal(signal.SIGWINCH, winch)


# Its main thread is in a call that no signal ends, so that no Python handler would run.
HANGS = """
import ctypes, sys, time
from pathlib import Path
from unittest.mock import MagicMock
stand_ins = dict.fromkeys(["torch", "accelerate"], MagicMock())
sys.modules.update(stand_ins)  # seconds, and not needed to listen
from ddp_mnist.cluster.signals import listen
from ddp_mnist.errors import StorageError

libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(256)
libc.pthread_mutex_init(mutex, None)
libc.pthread_mutex_lock(mutex)

with listen(has_launcher=True) as stop:
    def at_once():
        Path("at_once").write_text(str(stop.requests))
        raise StorageError("full")

    def answer():
        Path("answered").touch()
        time.sleep(100)  # as on a terminal that is held

    stop.answer, stop.at_once = answer, at_once
    Path("ready").touch()
    libc.pthread_mutex_lock(mutex)
"""


def test_a_process_that_hangs_notes_signals_and_ends_at_the_second_interrupt(
    tmp_path: Path,
) -> None:
    """It ends whatever happens then: `answer` waits and `at_once` fails."""
    process = Started(["-c", HANGS], tmp_path).process
    try:
        wait_until((tmp_path / "ready").exists, 20)
        process.send_signal(INT)
        wait_until((tmp_path / "answered").exists, 5)
        for number in (TERM, USR1, HUP):
            process.send_signal(number)
            time.sleep(0.1)
        assert process.poll() is None
        assert not (tmp_path / "at_once").exists()
        process.send_signal(INT)
        assert process.wait(5) == 130
        assert (tmp_path / "at_once").read_text() == str([1.0] * 4)
    finally:
        process.kill()
        assert process.communicate() == ("", "")
