"""A rank that is slow is named while it trains, and no other is."""

import contextlib
import copy
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
from torch import nn

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.nets.ours import MLP
from ddp_mnist.run import meter, slow_ranks
from ddp_mnist.run.folder import read_json
from ddp_mnist.run.slow_ranks import ForwardClock, SlowRanks
from ddp_mnist.verify import watch
from tests.training import metrics, what_it_says, with_flags

# --- Which rank is slow


def named(*parts: tuple[float, float, list[float]]) -> list[tuple[float, dict[int, float]]]:
    """Return when which ranks are named, with how many times the median, rounded.

    In each part, of so many seconds, a sync point comes every so many; the ranks spend these shares
    of the time in forward passes.
    """
    ranks = SlowRanks(len(parts[0][2]))
    now, spent, found = 0.0, [0.0] * len(parts[0][2]), []
    for seconds, every, shares in parts:
        for _ in range(round(seconds / every)):
            now += every
            spent = [a + b * every for a, b in zip(spent, shares, strict=True)]
            if slow := ranks.judge(spent, every):
                found.append((now, {rank: round(times, 2) for rank, times in slow.items()}))
    return found


@pytest.mark.parametrize(
    ("shares", "slow"),
    [
        ([0.3], {}),
        ([0.3, 0.3], {}),
        ([0.4, 0.3], {}),
        ([0.2, 0.32], {1: 1.6}),  # of two ranks the faster one's is the median
        ([0.3, 0.6, 0.3], {1: 2.0}),
        ([0.6, 0.2, 0.2, 0.4], {0: 3.0, 3: 2.0}),
        ([0.6, 0.6, 0.2], {}),  # one is fast, and none slower than most
        ([0.3] * 99 + [0.48], {99: 1.6}),
    ],
)
def test_a_rank_is_slow_at_one_and_a_half_times_the_median(
    shares: list[float], slow: dict[int, float]
) -> None:
    expected = [(pytest.approx(60, abs=0.2), slow)] if slow else []
    for every in (1.0, 0.02):
        assert named((300, every, shares)) == expected  # and it is named once


def test_a_rank_is_named_once_it_has_been_slow_for_a_minute() -> None:
    even, slow = [0.3, 0.3], [0.3, 0.6]
    assert named((50, 1, slow), (10, 1, even), (50, 1, slow), (10, 1, even)) == []
    assert named((30, 1, even), (300, 1, slow)) == [(90, {1: 2.0})]
    # one that recovers and is slow again is named again
    parts = (100, 1, slow), (20, 1, even), (100, 1, slow)
    assert [when for when, _ in named(*parts)] == [60, 180]
    assert [when for when, _ in named((600, 30, slow))] == [180]  # a step takes half a minute
    # a compilation, the first step, or a process that was stopped for an hour: in one interval
    assert named((3600, 3600, [0.01, 0.99]), (300, 1, even)) == []
    assert named((15, 1, slow), (3600, 3600, [0.0, 1.0]), (25, 1, slow), (300, 1, even)) == []


# --- A rank's own time


def test_forward_passes_are_timed_in_training_alone() -> None:
    net = nn.Linear(4, 2)
    clock = ForwardClock(net)
    net.register_forward_pre_hook(lambda *_: time.sleep(0.02))
    net(torch.zeros(1, 4))
    copy.deepcopy(net).eval()(torch.zeros(1, 4))  # the net that is tested
    net.eval()(torch.zeros(1, 4))
    time.sleep(0.05)
    net.train()(torch.zeros(1, 4))
    assert (clock.passes, clock.mean_ms) == (0, 0.0)
    clock.read()
    assert clock.passes == 2
    assert 20 <= clock.mean_ms < 40
    assert clock.mean_ms == pytest.approx(clock.seconds * 500)
    clock.read()
    assert clock.passes == 2


def test_a_compiled_net_stays_one_graph() -> None:
    graphs, net = [], MLP()
    clock = ForwardClock(net)

    def record(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    net.compile(backend=record, fullgraph=True)
    for _ in range(3):
        net(torch.zeros(1, 1, 28, 28))
    clock.read()
    assert (len(graphs), clock.passes) == (1, 3)


# --- Runs


def slowed(config: Any) -> str:
    """Train with a net whose forward pass takes 30 ms more on rank 1; return what is printed."""
    forward = MLP.forward

    def slowly(net: MLP, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03 * (os.environ["RANK"] == "1"))
        return forward(net, x)

    with (
        patch.object(MLP, "forward", slowly),
        patch.object(slow_ranks, "WINDOW_S", 0.2),
        patch.object(slow_ranks, "WINDOWS", 3),
    ):
        return what_it_says(config)


def test_a_slow_rank_is_named_on_the_console_in_the_metrics_and_in_the_summary(
    tmp_path: Path,
) -> None:
    config = with_flags(watch.proof_config(model="mlp"), quiet=False)
    said, elsewhere = run_world(2, slowed, config, folder=tmp_path)
    first, *_ = lines = metrics(tmp_path / "run", "slow_rank")
    host = socket.gethostname()
    assert {(line["slow_rank"], line["host"]) for line in lines} == {(1, host)}
    assert 8 <= first["step"] <= 44
    assert first["times_median"] >= 1.5
    shown = [line for line in said.splitlines() if line.startswith("slow ")]
    assert len(shown) == len(lines)
    assert shown[0].startswith(f"slow       rank 1 on {host} takes {first['times_median']} times")
    assert "slow" not in elsewhere
    even, slow = read_json(tmp_path / "run" / "summary.json")["ranks"]
    assert even["forward_ms"] < 30 <= slow["forward_ms"]


# --- Real ones


@contextlib.contextmanager
def group_of(cores: float, period_ms: int = 100) -> Iterator[Path]:
    """Yield the file of a real control group, which takes in the process that is written to it.

    The process keeps the priority that it has outside.
    """
    group = Path("/sys/fs/cgroup/cpu") / f"ddp_mnist-slow-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"cgroup v1 cannot be written here: {error}")
    (group / "cpu.shares").write_text(str(round(1024 / 1.25 ** os.nice(0))))
    (group / "cpu.cfs_period_us").write_text(str(period_ms * 1000))
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * period_ms * 1000)))
    try:
        yield group / "cgroup.procs"
    finally:
        group.rmdir()


def confined(config: Any, group: Path | None) -> dict[str, Any]:
    """Train, rank 1 in a control group; a rank is named after nine seconds."""

    def begin(ranks: int) -> SlowRanks:
        if group and os.environ["RANK"] == "1":
            group.write_text(str(os.getpid()))
        return SlowRanks(ranks)

    with (
        patch.object(meter, "SlowRanks", begin),
        patch.object(slow_ranks, "WINDOW_S", 3.0),  # of many periods in which a group gets its time
        patch.object(slow_ranks, "WINDOWS", 3),
    ):
        return watch.just_train(config)


def named_in(run: Path, group: Path | None, **recipe: Any) -> set[int]:
    """Return the ranks that a run of two processes names."""
    given: dict[str, Any] = {"batch_size": 576, "val_size": 0, **recipe}
    config = with_flags(watch.proof_config(run.name, **given), mixed_precision="no")
    run_world(2, confined, config, group, folder=run.parent, timeout_s=240)
    return {line["slow_rank"] for line in metrics(run, "slow_rank")}


@pytest.mark.system
def test_a_rank_with_a_twentieth_of_a_core_is_named(tmp_path: Path) -> None:
    """Also beside other programs, which leave the other rank more than that.

    A forward pass takes many of the group's periods, or it could always fall between two halts.
    """
    with group_of(0.05, period_ms=20) as group:
        assert named_in(tmp_path / "run", group, epochs=10, model="cnn") == {1}


PLACES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "anywhere": contextlib.nullcontext,
    "half a core": lambda: group_of(0.5),
}


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", PLACES)
def test_of_ten_runs_each_names_the_slow_rank_and_no_other(
    where: str, tmp_path: Path, record_property: Any
) -> None:
    """On two cores of which other programs take little; a forward pass takes 30 ms of one."""
    if (busy := psutil.cpu_percent(2.0)) > 20:
        pytest.skip(f"the cores are not free: {busy:.0f} % busy; run this test alone")
    record_property("tried", 10)
    with PLACES[where]() as group:
        runs = [tmp_path / f"run-{number}" for number in range(10)]
        found = [named_in(run, group, epochs=70, model="cnn_deep") for run in runs]
    assert found == [{1} if group else set()] * 10
