from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_mnist import cli
from ddp_mnist import train as trainer
from ddp_mnist.bench import benches, commands, steps, strategies
from ddp_mnist.bench.benches import Options, Row
from ddp_mnist.bench.figures import (
    Ratio,
    alternate,
    interval,
    ratio,
    ratio_of_difference,
    spread,
)
from ddp_mnist.bench.steps import time_steps
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local import run_world
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import World, join_world
from ddp_mnist.config import (
    Distribution,
    Recipe,
    ResolvedConfig,
    Run,
    TrainConfig,
    resolve_recipe,
)
from ddp_mnist.data import cache
from ddp_mnist.errors import CheckFailed, UsageError

DIGITS_CONFIG = ResolvedConfig(recipe=resolve_recipe(Recipe(), rows=1437, world_size=1))

# --- Figures


@pytest.mark.parametrize(
    ("n", "k"),  # any table of the sign test at 5 %, one-sided
    [(2, 1), (5, 1), (7, 1), (8, 2), (11, 3), (13, 4), (25, 8)],
)
def test_the_interval_is_the_sign_test_s(n: int, k: int) -> None:
    values = [float((7 * i) % n if n % 7 else i) for i in range(n)]  # 0 to n-1 in some order
    assert sorted(values) == list(range(n))
    assert interval(values) == (k - 1, n - k)


def test_the_interval_holds_the_median_nine_times_in_ten() -> None:
    draws = torch.randn(2000, 11, generator=torch.Generator().manual_seed(0)).exp()  # median 1
    held = sum(low <= 1 <= high for low, high in map(interval, draws.tolist()))
    assert held / 2000 == pytest.approx(0.935, abs=0.02)  # 1 - 2 (1 + 11 + 55) / 2**11


def test_a_ratio_pairs_what_was_measured_together() -> None:
    # Each pair has the ratio 2, whatever the machine did meanwhile.
    assert ratio([2, 20, 200], [1, 10, 100]) == Ratio(2, 2, 2, 3)
    assert ratio([1, 2, 9], [1, 1, 1]) == Ratio(2, 1, 9, 3)
    with pytest.raises(ValueError, match="zip"):
        ratio([1, 2], [1])


def test_a_share_is_of_its_own_round() -> None:
    share = ratio_of_difference([3, 30], [2, 20], [4, 40])
    assert (share.median, share.low, share.high) == (0.25, 0.25, 0.25)


def test_a_spread() -> None:
    assert str(spread([3.0, 1.0, 2.0])) == "2  (1 to 3, n = 3)"


def test_rounds_alternate_and_the_first_is_thrown_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    order: list[str] = []

    def measure(kind: str) -> int:
        order.append(kind)
        return len(order)

    assert alternate("ab", 2, measure) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(order) == "baabba"
    assert capsys.readouterr().err.splitlines() == [
        "warm-up: a 2, b 1",
        "round 1 of 2: a 3, b 4",
        "round 2 of 2: a 6, b 5",
    ]
    alone = alternate("ab", 1, lambda kind: ord(kind), warm_up=False, verbose=False)
    assert alone == {"a": [97], "b": [98]}
    assert capsys.readouterr().err == ""


# --- What is measured


def measured(processes: int, folder: Path, kinds: list[str]) -> list[dict[str, list[float]]]:
    config = TrainConfig(
        Run(dataset="digits", quiet=True), distribution=Distribution(mixed_precision="no")
    )
    return run_world(processes, time_steps, config, benches.these(*kinds), 3, 2, folder=folder)


@pytest.mark.parametrize("processes", [1, 2])
def test_each_kind_of_step_is_timed(processes: int, tmp_path: Path) -> None:
    kinds = ["train", "resident", "silent", "lockstep", "independent", "evaluation"]
    kinds += ["plain"] * (processes > 1)
    ranks = measured(processes, tmp_path, kinds)
    assert len(ranks) == processes
    for speeds in ranks:
        assert list(speeds) == kinds
        for values in speeds.values():
            assert len(values) == 2
            assert all(1 < images_per_s < 1e6 for images_per_s in values)
    assert list(tmp_path.iterdir()) == []  # a timed run writes nothing


def equal_after_steps(exchange: bool) -> bool:
    """Whether the ranks hold the same weights after three steps on their own images."""
    config = TrainConfig(distribution=Distribution(cpu=True, mixed_precision="no"))
    with join_world(config.distribution, find_launch(config.distribution)) as world:
        config, images = steps.shortened(config, cache.load("digits"), 3, world)
        build, nets = trainer.build_model, []

        def remembered(*arguments: Any) -> torch.nn.Module:
            nets.append(build(*arguments))
            return nets[-1]

        trainer.build_model = remembered  # type: ignore[assignment]
        loader, step = steps.ready_to_step(config, images, world, exchange=exchange)
        assert len(loader) == 3
        assert steps.timed(step, loader, world) > 0
        mine = torch.cat([p.detach().flatten() for p in nets[0].parameters()])
        rank_0s = mine.clone()
        torch.distributed.broadcast(rank_0s, 0)
        return torch.equal(mine, rank_0s)


@pytest.mark.parametrize("exchange", [False, True])
def test_silent_steps_exchange_no_gradients(exchange: bool, tmp_path: Path) -> None:
    assert run_world(2, equal_after_steps, exchange, folder=tmp_path) == [True, exchange]


def test_only_full_batches_are_counted() -> None:
    images = cache.load("digits")  # 1,437 rows: 19 batches of 72
    world = Mock(accelerator=Mock(num_processes=2))
    for asked, batches in ((100, 19), (19, 19), (3, 3)):
        config, short = steps.shortened(TrainConfig(), images, asked, world)
        assert (config.recipe.epochs, config.recipe.val_size) == (1, 0)
        assert len(short.train_labels) == len(short.train_images) == 72 * batches


def test_ranks_that_wait_are_as_fast_as_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"train": [10.0, 20.0], "silent": [10.0, 40.0]} for _ in range(2)]
    ranks[1] = {"train": [30.0, 10.0], "silent": [30.0, 20.0]}
    monkeypatch.setattr(benches, "on_processes", lambda *_, **__: ranks)
    speeds = benches.speeds_of(benches.these("train", "silent"), Options("digits", None, 2, 2), 2)
    assert speeds == {"train": [10, 10], "silent": [20, 30]}


@pytest.mark.parametrize(("speed", "met"), [(0.951, True), (0.949, False)])
def test_a_goal_is_missed_at_its_bound(
    speed: float, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options("digits", None, 2, 5)
    for bench, kinds in (
        (benches.feed, ("train", "resident")),
        (benches.loop, ("train", "plain")),
        (benches.scaling, ("train", "independent", "resident", "silent", "lockstep")),
    ):
        speeds = {kind: [100.0] * 5 for kind in kinds} | {"train": [100 * speed] * 5}
        monkeypatch.setattr(benches, "speeds_of", lambda *_, speeds=speeds, **__: speeds)
        rows = bench(options)
        assert [row.met for row in rows if row.goal] == [met]
        assert all(row.met for row in rows if not row.goal)
    # an evaluation that takes 0.35 of a training pass is three times as fast
    speeds = {"train": [35.0 / speed * 0.95] * 5, "evaluation": [100.0] * 5}
    monkeypatch.setattr(benches, "speeds_of", lambda *_, **__: speeds)
    assert [row.met for row in benches.evaluation(options) if row.goal] == [met]


Command = list[str]
OPTIONS = Options("digits", None, 2, 5)


def is_launched(command: Command) -> bool:
    return "accelerate.commands.launch" in command


@pytest.mark.parametrize(("seconds", "met"), [(2.5, True), (2.51, False)])
def test_start_up_is_a_ratio_to_the_floor(
    seconds: float, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone 2 s, launched 4; the trainer alone takes what is given, and launched 4.4."""
    monkeypatch.setattr(
        commands, "seconds_to_baseline_step", lambda before: 4.0 if is_launched(before) else 2.0
    )
    monkeypatch.setattr(
        commands,
        "seconds_to_first_step",
        lambda before, _flags: 4.4 if is_launched(before) else seconds,
    )
    rows = {row.what: row for row in benches.startup(OPTIONS)}
    assert rows["floor, s"].median == 2
    assert rows["train, launched, s"].median == 4.4
    assert rows["train over floor"].median == seconds / 2
    assert rows["train over floor"].met is met
    assert rows["train over floor, launched"].median == 1.1
    assert rows["train over floor, launched"].met


@pytest.mark.parametrize(("peak", "met"), [(550.0, True), (550.1, False)])
def test_memory_is_what_lies_above_the_floor(
    peak: float, met: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(command: Command) -> float:
        if commands.BASELINE[-1] in command:
            return 400.0
        return 500.0 if is_launched(command) else peak

    monkeypatch.setattr(commands, "peak_anonymous_mb", measured)
    rows = {row.what: row for row in benches.memory(OPTIONS)}
    assert rows["above the floor, MB"].median == pytest.approx(peak - 400)
    assert rows["above the floor, MB"].met is met
    assert rows["above the floor, launched, MB"].median == 100
    assert rows["above the floor, launched, MB"].met


def steps_that_take_turns() -> tuple[float, float]:
    """Seconds of ten steps, alone and in lockstep, where each rank is slow in every other one.

    By a clock that goes on by the steps alone, so that it does not matter what else runs.
    """

    seconds = [0.0]

    def ready(_config: Any, _images: Any, world: World, *, exchange: bool) -> Any:
        assert not exchange
        turns = itertools.count(world.accelerator.process_index)

        def step(_batch: Any) -> None:
            seconds[0] += 0.04 * (next(turns) % 2)

        return [None] * 10, step

    steps.ready_to_step = ready  # type: ignore[assignment]
    steps.time = SimpleNamespace(monotonic=lambda: seconds[0])  # type: ignore[assignment]
    config, images = DIGITS_CONFIG, cache.load("digits")
    with join_world(config.distribution, find_launch(config.distribution)) as world:
        return steps.silent_steps(config, images, world), steps.lockstep(config, images, world)


def test_in_lockstep_each_step_is_as_long_as_on_its_slowest_rank(tmp_path: Path) -> None:
    for silent, lockstep in run_world(2, steps_that_take_turns, folder=tmp_path):
        assert silent == pytest.approx(0.2)
        assert lockstep == pytest.approx(0.4)


def test_start_up_is_timed_to_the_first_step() -> None:
    floor = commands.seconds_to_baseline_step(commands.launcher(2))
    first_step = commands.seconds_to_first_step([], ["--dataset", "digits"])
    assert 0.5 < floor < 60
    assert 0.5 < first_step < 60


def test_private_memory_is_that_of_the_largest_process() -> None:
    child = "held = bytearray(200_000_000); import time; time.sleep(0.3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{child}'])"
    assert commands.peak_anonymous_mb(["-c", parent]) == pytest.approx(205, abs=10)
    with pytest.raises(CheckFailed, match="code 3: no memory"):
        commands.peak_anonymous_mb(["-c", "print('no memory'); raise SystemExit(3)"])


def test_without_proc_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: False)
    with pytest.raises(UsageError, match="bench memory: needs Linux's /proc"):
        commands.peak_anonymous_mb(["-c", "pass"])


def test_a_floor_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "floor.py").write_text("print('exitcode : 1'); raise SystemExit(1)")
    monkeypatch.setattr(commands, "BASELINE", [str(tmp_path / "floor.py")])
    with pytest.raises(CheckFailed, match="ended with code 1: exitcode : 1"):
        commands.seconds_to_baseline_step([])


def test_nothing_of_a_command_is_left() -> None:
    sleeper = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    spawn = f"subprocess.Popen([sys.executable, '-c', '{sleeper}'], start_new_session=True)"
    parent = f"import subprocess, sys, time; {spawn}; time.sleep(60)"
    with commands.started(["-c", parent]) as (process, output):
        while not (number := os.pread(output.fileno(), 100, 0)).endswith(b"\n"):
            time.sleep(0.01)
    assert process.returncode
    assert not psutil.pid_exists(int(number))


def test_a_command_that_fails_is_told() -> None:
    with pytest.raises(CheckFailed, match=r"ended with code 2.*--epochs 0: must be at least 1"):
        commands.seconds_to_end([*commands.TRAIN, "--epochs", "0"])
    with pytest.raises(CheckFailed, match="no-such-set"):
        commands.seconds_to_first_step([], ["--dataset", "no-such-set"])


# --- What is told

FASTER = Row("ratio", Ratio(0.97, 0.96, 0.98, 7), "lower end at least 0.95", True)
SLOWER = Row("ratio", Ratio(0.9, 0.8, 0.99, 7), "lower end at least 0.95", False)
SPEED = Row("train.py, images/s", spread([1000.0, 1100.0]))


def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *rows: Row, more: Any = ()
) -> tuple[int, list[str], str]:
    monkeypatch.setitem(benches.BENCHES, "feed", lambda _: list(rows))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "feed", "--dataset", "digits", *more])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out.splitlines(), shown.err


def test_the_last_line_is_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines, err = bench(capsys, monkeypatch, SPEED, FASTER)
    assert (code, err) == (0, "")
    assert lines[1].endswith("  goal met: lower end at least 0.95")
    told = json.loads(lines[-1])
    assert told["rows"][0] == {
        "what": "train.py, images/s",
        "median": 1050.0,
        "lowest": 1000.0,
        "highest": 1100.0,
        "n": 2,
        "goal": None,
        "met": True,
    }
    assert told["rows"][1]["low"] == 0.96
    assert told["versions"]["torch"] == importlib.metadata.version("torch")
    assert told["machine"]["cores"] >= 1
    assert (told["dataset"], told["processes"], told["repeats"]) == ("digits", 2, 11)


@pytest.mark.parametrize(("more", "ends_with"), [((), 0), (("--check",), 1)])
def test_a_missed_goal_is_told_and_fails_a_check(
    more: Any, ends_with: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines, err = bench(capsys, monkeypatch, SPEED, SLOWER, more=more)
    assert code == ends_with
    assert lines[1].endswith("  goal missed: lower end at least 0.95")
    told = json.loads(lines[-1])["rows"][1]
    assert (told["goal"], told["met"]) == ("lower end at least 0.95", False)
    assert err.startswith(
        "ddp-mnist: error: bench feed: ratio 0.900 (90 %: 0.800 to 0.990, n = 7), goal lower end"
        if ends_with
        else ""
    )
    assert err.count("\n") == ends_with


def test_a_check_of_goals_that_are_met_ends_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = bench(capsys, monkeypatch, SPEED, FASTER, more=("--check",))
    assert (code, err) == (0, "")


def test_a_benchmark_of_digits_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "STEPS", 3)
    rows = benches.scaling(Options("digits", None, processes=2, repeats=2))
    by_name = {row.what: row.median for row in rows}
    for who in ("1 process", "2 processes"):
        assert by_name[f"{who}: images/s"] > 1
        shares = [share for name, share in by_name.items() if name.startswith(f"{who}: share of")]
        assert len(shares) == 4
        assert sum(shares) == pytest.approx(1, abs=0.2)  # medians do not add up


def test_strategies_of_digits_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "STEPS", 3)
    rows = benches.strategies(Options("digits", None, processes=2, repeats=1))
    one, absent, *three = rows[:5]
    assert one.what.startswith("one process, ")
    assert all(row.median > 1 for row in (one, *three))
    assert absent.what == "DataParallel: images/s"
    assert str(absent.figure) == "needs two GPUs and finds 0; it knows no CPUs"
    with pytest.raises(ValueError, match="DataParallel: images/s: needs two GPUs"):
        _ = absent.median
    over = [row.what for row in rows if row.what.endswith("over one process")]
    assert over == [
        "DDP over one process",
        "DDP, fp16 hook over one process",
        "DDP, PowerSGD hook over one process",
    ]
    described = benches.describe("strategies", OPTIONS, rows)
    assert described["machine"]["gpus"] == 0
    assert json.loads(json.dumps(described))["rows"][1]["why_not"] == str(absent.figure)


def test_ranks_that_have_nothing_to_do_are_in_no_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There is no group here, so one would fail; with NCCL it would keep the rank's GPU busy."""
    store, seconds = dist.HashStore(), []
    monkeypatch.setattr(strategies, "train_alone", lambda *_: 1.5)
    accelerator = SimpleNamespace(device=torch.device("cpu"))
    for rank in (0, 1):
        monkeypatch.setattr(strategies, "ROUNDS", itertools.count())
        world: Any = SimpleNamespace(store=Store(store, rank, 2), accelerator=accelerator)
        seconds += [strategies.one_process(DIGITS_CONFIG, cache.load("digits"), world)]
    assert seconds == [1.5, 1.5]


def test_each_benchmark_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "none"])
    assert f"none: choose from {', '.join(benches.BENCHES)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["feeds"], "feeds: choose from feed, loop, evaluation,"),
        (["forecast"], "forecast: choose from feed, loop, evaluation,"),
        (["baseline"], "baseline: choose from feed, loop, evaluation,"),
        (["feed", "--repeats", "4"], "--repeats 4: must be at least 5"),
        (["feed", "--processes", "0"], "--processes 0: must be at least 1"),
        (["loop", "--processes", "1", "--dataset", "digits"], "--processes 1: plain_ddp.py needs"),
    ],
)
def test_a_wrong_flag_is_one_line(
    argv: list[str], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", *argv])
    assert begins in capsys.readouterr().err
