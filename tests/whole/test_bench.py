"""tools/bench.py compares `fit` with a plain loop, not with itself."""

import importlib.util
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from tests.commands import REPOSITORY


@pytest.fixture(scope="module")
def bench() -> Any:
    found = importlib.util.spec_from_file_location("bench", REPOSITORY / "tools" / "bench.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("here")
def test_each_kind_of_loop_is_its_own(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Mock(return_value=2.0)
    ours = Mock(return_value={"train_seconds": 4.0})
    monkeypatch.setattr(bench, "train_plain", plain)
    monkeypatch.setattr(bench, "fit_recorded", ours)
    images = 19 * 72  # the digits that fill a batch
    assert bench.images_per_s("plain", "digits", 1) == images / 2
    assert bench.images_per_s("fit", "digits", 1) == images / 4
    assert (plain.call_count, ours.call_count) == (1, 1)


def test_threads_are_compared_beside_programs_that_are_busy(
    bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speeds, beside = {"": 30.0, "1": 20.0, "2": 10.0}, []

    def busy() -> int:
        commands = (child.cmdline() for child in psutil.Process().children())
        return sum("while True: pass" in command for command in commands)

    def speed(_dataset: str, _model: str, threads: str) -> float:
        beside.append(busy())
        return speeds[threads]

    monkeypatch.setattr(bench, "cores", lambda: 2)
    monkeypatch.setattr(bench, "speed_of_run", speed)
    bench.measure_threads("digits", "mlp", programs=2, repeats=2)
    assert beside == [2] * 9
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("chosen threads over one, beside 2 programs 1.500 (")
    assert lines[1].startswith("chosen threads over 2, beside 2 programs 3.000 (")
    assert busy() == 0
