"""tools/bench.py compares `fit` with a plain loop, not with itself."""

import importlib.util
from unittest.mock import Mock

import pytest

from tests.commands import REPOSITORY


@pytest.mark.usefixtures("here")
def test_each_kind_of_loop_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.spec_from_file_location("bench", REPOSITORY / "tools" / "bench.py")
    assert found and found.loader
    bench = importlib.util.module_from_spec(found)
    found.loader.exec_module(bench)
    plain = Mock(return_value=2.0)
    ours = Mock(return_value={"train_seconds": 4.0})
    monkeypatch.setattr(bench, "train_plain", plain)
    monkeypatch.setattr(bench, "fit_recorded", ours)
    images = 19 * 72  # the digits that fill a batch
    assert bench.images_per_s("plain", "digits", 1) == images / 2
    assert bench.images_per_s("fit", "digits", 1) == images / 4
    assert (plain.call_count, ours.call_count) == (1, 1)
