import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, patch

import pytest

from ddp_mnist.cluster.signals import EXIT_CODES, StopSignals, end_at_signals, listen
from ddp_mnist.errors import FailedElsewhere, Preempted, Stopped, StorageError

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
def test_every_rank_ends_with_the_strongest_signals_code(
    requests: list[float], name: str, code: int
) -> None:
    for is_main_process, kind in ((True, Preempted), (False, FailedElsewhere)):
        error = StopSignals().ending(requests, "stopped after step 5", is_main_process)
        assert (type(error), str(error)) == (kind, f"{name}: stopped after step 5")
        assert (error.code, error.agreed) == (code, is_main_process)


# --- Hearing them


def handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in EXIT_CODES}


@pytest.fixture(autouse=True)
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
def test_whoever_heard_the_signals_before_hears_them_afterwards(
    fails: bool, before: dict[int, Any]
) -> None:
    with contextlib.suppress(ZeroDivisionError), listen():
        assert all(now != before[number] for number, now in handlers().items())
        if fails:
            raise ZeroDivisionError
    assert handlers() == before


def test_after_an_error_the_program_ends_undisturbed() -> None:
    end_at_signals()
    with contextlib.suppress(ZeroDivisionError), listen():
        raise ZeroDivisionError
    assert handlers() == dict.fromkeys(EXIT_CODES, signal.SIG_IGN)


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (USR1, 143), (HUP, 129), (INT, 130)])
def test_the_first_signal_ends_what_has_nothing_to_save_and_the_next_do_not_hurry_it(
    number: int, code: int
) -> None:
    with listen():
        line = r"^SIG\w+: stopped before there was anything to save$"
        with pytest.raises(Stopped, match=line) as raised:
            os.kill(os.getpid(), number)
        assert raised.value.code == code
        for other in (TERM, USR1, HUP):
            os.kill(os.getpid(), other)


@pytest.mark.parametrize("saves", [False, True])
def test_a_second_interrupt_ends_the_process_whatever_happens_then(saves: bool) -> None:
    with listen() as stop, patch("os._exit") as ended:
        stop.saves_on_stop = saves
        stop.on_second_sigint = Mock(side_effect=StorageError("full"))
        with contextlib.nullcontext() if saves else pytest.raises(Stopped):
            os.kill(os.getpid(), INT)
        os.kill(os.getpid(), INT)  # the same press, passed on by a notebook
        stop.on_second_sigint.assert_not_called()
        stop.first_sigint -= 1
        with pytest.raises(StorageError):
            os.kill(os.getpid(), INT)
        ended.assert_called_once_with(130)
