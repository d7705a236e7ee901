from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ddp_mnist.cluster.signals import WEIGHTS, StopSignals, listen
from ddp_mnist.cluster.store import Store
from ddp_mnist.errors import FailedElsewhere, Preempted, StorageError
from tests.commands import Started

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


def until(condition: Callable[[], Any], timeout_s: float = 2) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)


# --- What the ranks do about the signals of all of them


def sum_of(ranks: dict[signal.Signals, int]) -> float:
    """What an all-reduce makes of so many ranks' signals."""
    weights = [WEIGHTS[number] for number, count in ranks.items() for _ in range(count)]
    return torch.tensor(weights, dtype=torch.float64).sum().item()


def obeyed(agreed: float, is_main_process: bool) -> tuple[type[Exception], int, str, int]:
    """The error that ends the run, its code and message, and how often was saved."""
    stop = StopSignals()
    save = Mock(return_value="stopped after step 5 and saved")
    stop.save = save
    with pytest.raises((Preempted, FailedElsewhere)) as told:
        stop.obey(agreed, is_main_process)
    return told.type, told.value.code, str(told.value), save.call_count


@pytest.mark.parametrize(
    ("ranks", "name", "code"),
    [
        ({TERM: 1}, "SIGTERM", 143),
        ({TERM: 2}, "SIGTERM", 143),
        ({TERM: 4096}, "SIGTERM", 143),
        ({USR1: 1}, "SIGUSR1", 143),
        ({USR1: 4096}, "SIGUSR1", 143),
        ({TERM: 4095, USR1: 1}, "SIGUSR1", 143),
        ({INT: 1}, "SIGINT", 130),
        ({INT: 4096}, "SIGINT", 130),
        ({USR1: 4095, INT: 1}, "SIGINT", 130),
        ({TERM: 4095, INT: 1}, "SIGINT", 130),
        ({TERM: 2000, USR1: 2095, INT: 1}, "SIGINT", 130),
        ({TERM: 1, USR1: 1, INT: 4094}, "SIGINT", 130),
    ],
)
@pytest.mark.parametrize(
    ("is_main_process", "error"), [(True, Preempted), (False, FailedElsewhere)]
)
def test_every_rank_saves_once_and_ends_with_the_strongest_signals_code(
    is_main_process: bool,
    error: type[Exception],
    ranks: dict[signal.Signals, int],
    name: str,
    code: int,
) -> None:
    message = f"{name}: stopped after step 5 and saved"
    assert obeyed(sum_of(ranks), is_main_process) == (error, code, message, 1)


def test_any_mixture_is_told_apart() -> None:
    numbers = random.Random(0)
    for _ in range(300):
        ranks = {}
        for number in numbers.sample([TERM, USR1, INT], numbers.randint(1, 3)):
            ranks[number] = numbers.randint(1, numbers.choice([2, 4096 // 3]))
        strongest = max(ranks, key=[TERM, USR1, INT].index)
        message = obeyed(sum_of(ranks), True)[2]
        assert message.startswith(f"{strongest.name}: "), ranks


@pytest.mark.parametrize("is_main_process", [True, False])
def test_without_a_signal_the_run_goes_on(is_main_process: bool) -> None:
    stop = StopSignals()
    stop.save = Mock(side_effect=AssertionError)
    stop.obey(0.0, is_main_process)


def test_what_cannot_be_saved_is_told_instead() -> None:
    stop = StopSignals()
    stop.save = Mock(side_effect=StorageError("the disk is full"))
    with pytest.raises(StorageError, match="the disk is full"):
        stop.obey(WEIGHTS[TERM], True)


def test_before_there_is_anything_to_save() -> None:
    with pytest.raises(Preempted) as told:
        StopSignals().obey(WEIGHTS[TERM], True)
    assert str(told.value) == "SIGTERM: stopped"
    assert told.value.agreed


def test_ask_adds_up_the_weights_of_all_ranks() -> None:
    sums: list[torch.Tensor] = []

    def reduce(mine: torch.Tensor) -> torch.Tensor:
        sums.append(mine)
        return mine + WEIGHTS[INT]

    accelerator = Mock(device="cpu", reduce=reduce, is_main_process=False)
    stop = StopSignals()
    stop.note(TERM)
    with pytest.raises(FailedElsewhere, match="SIGINT: stopped") as told:
        stop.ask(accelerator)
    assert told.value.code == 130
    assert (sums[0].item(), sums[0].dtype) == (1.0, torch.float64)


@pytest.mark.parametrize(
    ("noted", "strongest"),
    [
        ([TERM], TERM),
        ([TERM, TERM, TERM], TERM),
        ([TERM, USR1], USR1),
        ([USR1, TERM], USR1),
        ([TERM, INT], INT),
        ([INT, TERM, USR1], INT),
    ],
)
def test_the_strongest_signal_is_kept(
    noted: list[signal.Signals], strongest: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "_exit", Mock(side_effect=AssertionError))
    stop = StopSignals()
    assert stop.weight == 0
    for number in noted:
        stop.note(number)
    assert stop.weight == WEIGHTS[strongest]


@pytest.mark.parametrize("at_once", [Mock(), Mock(side_effect=StorageError("full"))])
@pytest.mark.parametrize("between", [[], [TERM, USR1]])
def test_a_second_interrupt_ends_the_process_whatever_happens(
    between: list[signal.Signals], at_once: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once.reset_mock()
    exits = Mock(side_effect=SystemExit)
    monkeypatch.setattr(os, "_exit", exits)
    stop = StopSignals()
    stop.at_once = at_once
    for number in (INT, *between):
        stop.note(number)
    exits.assert_not_called()
    with pytest.raises(SystemExit):
        stop.note(INT)
    at_once.assert_called_once_with()
    exits.assert_called_once_with(130)


# --- Listening


Handlers = dict[int, Any]


def handlers() -> Handlers:
    return {number: signal.getsignal(number) for number in WEIGHTS}


@pytest.fixture
def before() -> Iterator[Handlers]:
    """Handlers that are not the usual ones; the test's own are back afterwards."""
    usual = handlers()
    signal.signal(TERM, signal.SIG_IGN)
    signal.signal(USR1, lambda *_: None)
    signal.signal(INT, signal.SIG_DFL)
    yield handlers()
    for number, handler in usual.items():
        signal.signal(number, handler)


@pytest.fixture
def wakeup_fd() -> Iterator[int]:
    """A wakeup fd that was there already."""
    ours, other = socket.socketpair()
    ours.setblocking(False)
    usual = signal.set_wakeup_fd(ours.fileno())
    yield ours.fileno()
    signal.set_wakeup_fd(usual)
    ours.close()
    other.close()


def wakeup_fd_now() -> int:
    found = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(found)
    return found


def test_all_is_as_before_when_it_ended_in_order(before: Handlers, wakeup_fd: int) -> None:
    threads = set(threading.enumerate())
    with listen():
        assert all(now != before[number] for number, now in handlers().items())
        assert wakeup_fd_now() not in (wakeup_fd, -1)
    assert handlers() == before
    assert wakeup_fd_now() == wakeup_fd
    until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.usefixtures("before")
def test_after_an_error_the_signals_stay_ignored(wakeup_fd: int) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError), listen():
        raise ZeroDivisionError
    assert handlers() == dict.fromkeys(WEIGHTS, signal.SIG_IGN)
    assert wakeup_fd_now() == wakeup_fd
    for number in WEIGHTS:
        os.kill(os.getpid(), number)
    until(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("number", WEIGHTS)
def test_a_signal_is_noted_and_nothing_else_happens(number: signal.Signals) -> None:
    with listen() as stop:
        assert stop.weight == 0
        os.kill(os.getpid(), number)
        until(lambda: stop.weight)
        assert stop.weight == WEIGHTS[number]


@pytest.mark.usefixtures("before")
def test_the_board_is_told_when_the_first_signal_came() -> None:
    store = Store(dist.HashStore(), 0, 1)
    with listen(store=store) as stop:
        assert store.signalled is None
        began = time.monotonic()
        os.kill(os.getpid(), TERM)
        until(lambda: store.signalled)
        first = store.signalled
        assert first is not None
        assert began <= first <= time.monotonic()
        os.kill(os.getpid(), INT)
        until(lambda: stop.weight == WEIGHTS[INT])
        assert store.signalled == first


@pytest.mark.usefixtures("before")
def test_signals_that_follow_each_other_are_all_noted() -> None:
    with listen() as stop:
        for number in (TERM, TERM, USR1, TERM, INT, TERM):
            os.kill(os.getpid(), number)
            time.sleep(0.02)
        until(lambda: stop.weight == WEIGHTS[INT])


def test_another_thread_than_the_main_one_changes_nothing(before: Handlers) -> None:
    found: list[Any] = []

    def inside() -> None:
        with listen() as stop:
            found.extend([handlers(), set(threading.enumerate()), stop.weight])

    threads = set(threading.enumerate())
    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found[0] == handlers() == before
    assert found[1] <= {*threads, thread}
    assert found[2] == 0


# Its main thread is in a call that no signal ends, so that no Python handler would run.
HANGS = """
import ctypes, sys, threading, time
from pathlib import Path
from unittest.mock import Mock
sys.modules.update(torch=Mock(), accelerate=Mock())  # seconds, and not needed to listen
from ddp_mnist.cluster.signals import listen

libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(256)
libc.pthread_mutex_init(mutex, None)
libc.pthread_mutex_lock(mutex)

with listen() as stop:
    def tell():
        while not stop.weight:
            time.sleep(0.01)
        Path("noted").touch()

    stop.at_once = lambda: Path("at_once").write_text(f"{stop.weight:g}")
    threading.Thread(target=tell).start()
    Path("ready").touch()
    libc.pthread_mutex_lock(mutex)
"""


def test_a_process_that_hangs_notes_a_signal_and_ends_at_the_second_interrupt(
    tmp_path: Path,
) -> None:
    process = Started(["-c", HANGS], tmp_path).process
    try:
        until((tmp_path / "ready").exists, 20)
        process.send_signal(INT)
        until((tmp_path / "noted").exists, 5)
        time.sleep(0.1)
        assert process.poll() is None
        assert not (tmp_path / "at_once").exists()
        process.send_signal(INT)
        assert process.wait(5) == 130
        assert (tmp_path / "at_once").read_text() == f"{WEIGHTS[INT]:g}"
    finally:
        process.kill()
        assert process.communicate() == ("", "")


def test_other_signals_with_a_handler_do_no_harm() -> None:
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        with listen() as stop:
            os.kill(os.getpid(), signal.SIGWINCH)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: stop.weight)
            assert stop.weight == WEIGHTS[TERM]
    finally:
        signal.signal(signal.SIGWINCH, before)
