from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist.bench import benches
from ddp_mnist.bench.benches import Options
from ddp_mnist.bench.forecast import (
    LARGE,
    SMALL,
    Link,
    Round,
    all_reduce_seconds,
    gradient_bytes,
    link_from,
)
from ddp_mnist.config import TrainConfig
from ddp_mnist.errors import UsageError
from ddp_mnist.models import CNN
from tests import hosts

SLOW = Link(latency_s=1e-3, bytes_per_s=1e6)


def test_a_ring_all_reduce_by_hand() -> None:
    # 2 processes: one round adds up, one hands out; each sends half of 1 MB, 0.5 s and 1 ms
    assert all_reduce_seconds(2, 1e6, SLOW) == pytest.approx(2 * (0.001 + 0.5))
    # 4 processes: 3 rounds each, a quarter each
    assert all_reduce_seconds(4, 1e6, SLOW) == pytest.approx(6 * (0.001 + 0.25))
    # of very many, each sends everything twice, and waits for everybody twice
    assert all_reduce_seconds(1001, 1e6, SLOW) == pytest.approx(2 * 1000 * 0.001 + 2, rel=1e-2)
    assert all_reduce_seconds(1, 1e6, SLOW) == 0


@pytest.mark.parametrize("processes", [2, 3, 8])
def test_a_link_is_found_from_two_all_reduces(processes: int) -> None:
    small, large = (all_reduce_seconds(processes, size, SLOW) for size in (SMALL, LARGE))
    found = link_from(processes, small, large)
    assert found.latency_s == pytest.approx(SLOW.latency_s)
    assert found.bytes_per_s == pytest.approx(SLOW.bytes_per_s)


def test_gradients_are_as_large_as_the_parameters() -> None:
    net = CNN()
    net(torch.zeros(1, 28, 28, dtype=torch.uint8)).sum().backward()
    sizes = [p.grad.numel() * p.grad.element_size() for p in net.parameters() if p.grad is not None]
    assert gradient_bytes(TrainConfig(), 10) == sum(sizes) == 151_336


def test_a_forecast_is_the_share_of_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1 ms of computing; 8 processes pass 14 messages of 1 us and 151,336 / 8 bytes
    round_ = Round(Link(1e-6, 1e9), compute_s=1e-3, step_s=1.5e-3, exchange_s=1e-4)
    monkeypatch.setattr(benches, "on_processes", lambda *_: [[round_, round_]])
    rows = benches.forecast(Options("digits", None, processes=2, repeats=2))
    medians = {row.what: row.median for row in rows}
    all_reduce = 14 * (1e-6 + 151_336 / 8 / 1e9)
    assert medians["8 processes, this link"] == pytest.approx(1e-3 / (1e-3 + all_reduce))
    two = 2 * (1e-6 + 151_336 / 2 / 1e9)
    assert medians["2 processes: all-reduce over formula"] == pytest.approx(1e-4 / two)
    assert medians["2 processes: step over formula"] == pytest.approx(1.5e-3 / (1e-3 + two))


def test_a_forecast_of_digits_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "STEPS", 3)
    rows = benches.forecast(Options("digits", None, processes=2, repeats=2))
    medians: dict[str, Any] = {row.what: row.median for row in rows}
    for link in ("this link", "10 Gbit/s"):
        shares = [medians[f"{2**power:,} processes, {link}"] for power in range(1, 11)]
        assert shares == sorted(shares, reverse=True)
        assert 0 < shares[-1] < shares[0] < 1
    with pytest.raises(UsageError, match="--processes 1: "):
        benches.forecast(Options("digits", None, processes=1, repeats=2))


def all_reduces_on(network: hosts.Hosts, processes: int, size: int) -> dict[str, float]:
    """The link and the seconds of an all-reduce of `size` bytes, on as many hosts."""
    address = f"tcp://{network.address(0)}:29444"
    started = [
        subprocess.Popen(
            network.command(
                *(rank, sys.executable, "-m", "tests.links", address),
                *(str(rank), str(processes), str(size)),
            ),
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for rank in range(processes)
    ]
    said = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0] * processes
    return json.loads(said[0])


@pytest.mark.soak
@pytest.mark.parametrize("delay_ms", [1, 5, 20])
def test_the_forecast_from_two_hosts_holds_on_three_and_four(delay_ms: float) -> None:
    hosts.require_hosts()
    size = gradient_bytes(TrainConfig(), 10)
    with hosts.Hosts(4, delay_ms=delay_ms) as network:
        two = all_reduces_on(network, 2, size)
        link = Link(two["latency_s"], two["bytes_per_s"])
        # a frame passes two cables, and gloo asks the receiver before it sends
        assert link.latency_s == pytest.approx(4 * delay_ms / 1000, rel=0.3, abs=0.002)
        for processes in (2, 3, 4):
            measured = all_reduces_on(network, processes, size)["seconds"]
            expected = all_reduce_seconds(processes, size, link)
            print(f"{4 * delay_ms} ms, {processes}: {measured:.4f} s, formula {expected:.4f} s")
            assert measured == pytest.approx(expected, rel=0.25)
