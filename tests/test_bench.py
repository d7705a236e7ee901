import importlib.metadata
import itertools
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
import torch.distributed as dist

from ddp_mnist import cli
from ddp_mnist.bench import benches, commands, figures, steps
from ddp_mnist.bench.benches import Options
from ddp_mnist.bench.figures import Figure, ratio, spread
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local import run_world
from ddp_mnist.cluster.store import Store
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config import Distribution, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.run.results import FAIL, PASS, WARN, CheckResult

OPTIONS = Options("digits", None, processes=2, repeats=5)


def medians(results: list[CheckResult]) -> dict[str, float]:
    return {result.name: result.figures["median"] for result in results if result.figures}


# --- Figures


@pytest.mark.parametrize(
    ("n", "k"),  # any table of the sign test at 5 %, one-sided
    [(2, 1), (5, 1), (7, 1), (8, 2), (11, 3), (13, 4), (25, 8)],
)
def test_the_interval_is_the_sign_test_s(n: int, k: int) -> None:
    values = [float((7 * i) % n if n % 7 else i) for i in range(n)]  # 0 to n-1 in some order
    assert sorted(values) == list(range(n))
    figure = ratio(values, [1.0] * n)
    assert (figure.low, figure.high) == (k - 1, n - k)


def test_the_interval_holds_the_median_nine_times_in_ten() -> None:
    draws = torch.randn(2000, 11, generator=torch.Generator().manual_seed(0)).exp()  # median 1
    found = [ratio(draw, [1.0] * 11) for draw in draws.tolist()]
    held = sum(figure.low <= 1 <= figure.high for figure in found)
    assert held / 2000 == pytest.approx(0.935, abs=0.02)  # 1 - 2 (1 + 11 + 55) / 2**11


def test_a_ratio_is_of_what_was_measured_in_one_round() -> None:
    # Each round has the ratio 2, whatever the machine did meanwhile.
    assert ratio([2, 20, 200], [1, 10, 100]) == Figure(2, 2, 2, 3, is_ratio=True)
    assert ratio([1, 2, 9], [1, 1, 1]) == Figure(2, 1, 9, 3, is_ratio=True)
    assert ratio([3, 30], [4, 40], less=[2, 20]) == Figure(0.25, 0.25, 0.25, 2, True)
    with pytest.raises(ValueError, match="zip"):
        ratio([1, 2], [1])


def test_a_figure_is_shown_with_its_spread() -> None:
    assert str(spread([3.0, 1.0, 2.0])) == "2  (1 to 3, n = 3)"
    assert str(ratio([1, 2, 9], [1, 1, 1])) == "2.000  (1.000 to 9.000, n = 3)"
    assert str(ratio([1] * 5, [2] * 5)) == "0.500  (90 %: 0.500 to 0.500, n = 5)"


def test_rounds_alternate_and_the_first_is_discarded(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def measure(kind: str) -> int:
        order.append(kind)
        return len(order)

    assert figures.alternate("ab", 2, measure) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(order) == "baabba"
    assert capsys.readouterr().err.splitlines() == [
        "warm-up: a 2, b 1",
        "round 1 of 2: a 3, b 4",
        "round 2 of 2: a 6, b 5",
    ]
    assert figures.alternate("ab", 1, ord, verbose=False) == {"a": [97], "b": [98]}
    assert capsys.readouterr().err == ""


# --- Steps


def equal_after_steps() -> list[bool]:
    """Return whether the ranks hold equal weights after three silent steps, and after others."""
    config, equal = TrainConfig(distribution=Distribution(cpu=True, mixed_precision="no")), []
    build, nets = steps.build_model, []

    def remembered(*arguments: Any) -> torch.nn.Module:
        nets.append(build(*arguments))
        return nets[-1]

    steps.build_model = remembered  # type: ignore[assignment]
    with join_world(config.distribution, find_launch(config.distribution)) as world:
        run = steps.shortened(config, world, cache.load("digits"), 3)
        for exchange in (False, True):
            loader, step = steps.prepare_step(run, exchange)
            assert len(loader) == 3
            assert steps.timed(run, step, loader) > 0
            mine = torch.cat([p.detach().flatten() for p in nets[-1].parameters()])
            rank_0s = mine.clone()
            dist.broadcast(rank_0s, 0)
            equal.append(torch.equal(mine, rank_0s))
            world.accelerator.free_memory()
    return equal


def test_silent_steps_exchange_no_gradients(tmp_path: Path) -> None:
    assert run_world(2, equal_after_steps, folder=tmp_path) == [[True, True], [False, True]]


def steps_that_take_turns() -> tuple[float, float]:
    """Return the seconds of ten steps, silent and in lockstep; ranks are slow in turns.

    They are read from a clock that the steps alone advance, so it does not matter what else runs.
    """
    seconds = [0.0]

    def prepared(run: Any, exchange: bool) -> Any:
        assert not exchange
        turns = itertools.count(run.world.accelerator.process_index)

        def step(_batch: Any) -> None:
            seconds[0] += 0.04 * (next(turns) % 2)

        return [None] * 10, step

    steps.prepare_step = prepared
    steps.time = SimpleNamespace(monotonic=lambda: seconds[0])  # type: ignore[assignment]
    flags = Distribution()
    with join_world(flags, find_launch(flags)) as world:
        run: Any = SimpleNamespace(world=world)
        return steps.KINDS["silent"](run), steps.KINDS["lockstep"](run)


def test_in_lockstep_each_step_is_as_long_as_on_its_slowest_rank(tmp_path: Path) -> None:
    for silent, lockstep in run_world(2, steps_that_take_turns, folder=tmp_path):
        assert silent == pytest.approx(0.2)
        assert lockstep == pytest.approx(0.4)


def test_only_full_batches_are_counted() -> None:
    images = cache.load("digits")  # 1,437 rows: 19 batches of 72
    world = Mock(accelerator=Mock(num_processes=2))
    for requested, batches in ((100, 19), (19, 19), (3, 3)):
        run = steps.shortened(TrainConfig(), world, images, requested)
        assert (run.config.recipe.epochs, run.config.recipe.val_size) == (1, 0)
        assert len(run.images.train_labels) == len(run.images.train_images) == 72 * batches


def test_idle_ranks_are_in_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no group here, so one would fail; with NCCL it would keep the rank's GPU busy."""
    store, seconds = dist.HashStore(), []
    monkeypatch.setattr(steps, "without_others", lambda *_: 1.5)
    for rank in (0, 1):
        monkeypatch.setattr(steps, "ROUNDS", itertools.count())
        run: Any = SimpleNamespace(world=SimpleNamespace(store=Store(store, rank, 2)))
        seconds.append(steps.STRATEGIES["one process"](run))
    assert seconds == [1.5, 1.5]


def test_each_kind_of_step_is_timed_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "STEPS", 3)
    monkeypatch.chdir(tmp_path)
    options = Options("digits", None, processes=2, repeats=2)
    scaling = medians(benches.scaling(options))
    for who in ("1 process", "2 processes"):
        assert scaling[f"{who}: images/s"] > 1
        shares = [share for name, share in scaling.items() if name.startswith(f"{who}: share of")]
        assert len(shares) == 4
        assert sum(shares) == pytest.approx(1, abs=0.2)  # medians do not add up
    for speeds in benches.speeds_of(["plain", "evaluation"], options, 2).values():
        assert len(speeds) == 2
        assert all(1 < images_per_s < 1e6 for images_per_s in speeds)
    one, absent, *three = (strategies := benches.strategies(options))[:5]
    assert all(result.figures["median"] > 1 for result in (one, *three))
    assert (absent.status, absent.name) == (WARN, "DataParallel: images/s")
    assert absent.text == "needs two GPUs and finds 0; it knows no CPUs"
    assert [result.name for result in strategies[5:]] == [
        "DDP over one process",
        "DDP, fp16 hook over one process",
        "DDP, PowerSGD hook over one process",
    ]
    assert list(tmp_path.iterdir()) == []  # a timed run writes nothing


def test_ranks_that_wait_are_as_fast_as_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"train": [10.0, 20.0], "silent": [10.0, 40.0]} for _ in range(2)]
    ranks[1] = {"train": [30.0, 10.0], "silent": [30.0, 20.0]}
    monkeypatch.setattr(benches, "run_world", lambda *_, **__: ranks)
    speeds = benches.speeds_of(["train", "silent"], OPTIONS, 2)
    assert speeds == {"train": [10, 10], "silent": [20, 30]}


# --- Goals


@pytest.mark.parametrize(("speed", "status"), [(0.951, PASS), (0.949, FAIL)])
def test_a_goal_of_steps_is_missed_at_its_bound(
    speed: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(kinds: list[str], *_: Any) -> dict[str, list[float]]:
        if "evaluation" in kinds:  # which takes 0.35 of a training pass, or a little more
            return {"train": [35.0 / speed * 0.95] * 5, "evaluation": [100.0] * 5}
        return {kind: [100.0] * 5 for kind in kinds} | {"train": [100 * speed] * 5}

    monkeypatch.setattr(benches, "speeds_of", measured)
    for bench in (benches.feed, benches.loop, benches.scaling, benches.evaluation):
        results = bench(OPTIONS)
        assert [result.status for result in results if " goal " in result.text] == [status]
        assert all(result.status == PASS for result in results if " goal " not in result.text)


@pytest.mark.parametrize(
    ("bench", "measure", "train", "baseline", "median", "launched", "status"),
    [
        ("startup", "seconds_to_first_step", 2.5, 2, 1.25, 1.1, PASS),
        ("startup", "seconds_to_first_step", 2.51, 2, 1.255, 1.1, FAIL),
        ("memory", "peak_anonymous_mb", 550, 400, 150, 40, PASS),
        ("memory", "peak_anonymous_mb", 550.1, 400, 150.1, 40, FAIL),
    ],
)
def test_a_command_is_compared_with_the_baseline_program(
    *,
    bench: str,
    measure: str,
    train: float,
    baseline: float,
    median: float,
    launched: float,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Launched, train takes a tenth more than the baseline program."""

    def measured(command: list[str], run_dir: Path) -> float:
        assert command[-2:] == ["--run-dir", str(run_dir)]
        is_launched = "accelerate.commands.launch" in command
        if commands.BASELINE[-1] in command:
            return baseline
        return 1.1 * baseline if is_launched else train

    monkeypatch.setattr(commands, measure, measured)
    results = benches.BENCHES[bench](OPTIONS)
    found = [result.figures["median"] for result in results]
    expected = [baseline, train, baseline, 1.1 * baseline, median, launched]
    assert found == pytest.approx(expected)
    alone, under_launcher = results[4:]
    assert "launched" in under_launcher.name
    assert (alone.status, under_launcher.status) == (status, PASS)


# --- Commands


def test_start_up_is_timed_to_the_first_step(tmp_path: Path) -> None:
    def seconds(name: str, *command: str) -> float:
        folder = tmp_path / name
        return commands.seconds_to_first_step([*command, "--run-dir", str(folder)], folder)

    baseline = [*commands.launcher(2), *commands.BASELINE]
    train = [*commands.TRAIN, "--dataset", "digits"]
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(seconds, "a", *baseline), pool.submit(seconds, "b", *train)]
    assert all(0.5 < each.result() < 60 for each in running)


def test_private_memory_is_that_of_the_largest_process(monkeypatch: pytest.MonkeyPatch) -> None:
    child = "held = bytearray(200_000_000); import time; time.sleep(0.3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{child}'])"
    assert commands.peak_anonymous_mb(["-c", parent]) == pytest.approx(205, abs=10)
    monkeypatch.setattr(Path, "exists", lambda _: False)  # as on macOS
    with pytest.raises(UsageError, match="bench memory: needs /proc"):
        commands.peak_anonymous_mb(["-c", "pass"])


def test_none_of_a_command_s_processes_is_left() -> None:
    sleeper = "subprocess.Popen(['sleep', '60'], start_new_session=True)"
    children: list[psutil.Process] = []

    def has_started(process: psutil.Popen) -> bool:
        children.extend(process.children(recursive=True))
        return bool(children)

    commands.run(["-c", f"import subprocess, time; {sleeper}; time.sleep(60)"], has_started)
    assert not any(child.is_running() for child in children)


def test_a_command_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckFailed, match="ended with code 3: no memory"):
        commands.peak_anonymous_mb(["-c", "print('no memory'); raise SystemExit(3)"])
    with pytest.raises(CheckFailed, match=r"ended with code 2.*--epochs 0: must be at least 1"):
        commands.seconds_to_first_step([*commands.TRAIN, "--epochs", "0"], tmp_path)
    with pytest.raises(CheckFailed, match="ended without a step"):
        commands.seconds_to_first_step(["-c", "pass"], tmp_path)
    monkeypatch.setattr(commands, "TIMEOUT_S", 0.1)
    with pytest.raises(CheckFailed, match="still runs after"):
        commands.run(["-c", "import time; time.sleep(60)"])


# --- What is printed

SPEED = spread([1000.0, 1100.0]).beside("train.py, images/s")
GOAL = "lower end at least 0.95"
FASTER = Figure(0.97, 0.96, 0.98, 7, is_ratio=True).beside("ratio", GOAL, True)
SLOWER = Figure(0.9, 0.8, 0.99, 7, is_ratio=True).beside("ratio", GOAL, False)


@pytest.mark.parametrize("flags", [[], ["--check"]])
@pytest.mark.parametrize(("result", "mark"), [(FASTER, "met"), (SLOWER, "missed")])
def test_a_goal_stands_beside_its_figure_and_missed_fails_a_check(
    flags: list[str],
    result: CheckResult,
    mark: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(benches.BENCHES, "feed", lambda _: [SPEED, result])
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "feed", "--dataset", "digits", *flags])
    out, err = capsys.readouterr()
    _, shown, last = out.splitlines()
    code = int(bool(flags) and mark == "missed")
    assert ended.value.code == code
    assert f"{result.figures['median']:.3f}  (90 %: " in shown
    assert shown.endswith(f", n = 7)  goal {mark}: {GOAL}")
    report = json.loads(last)
    speed, described = report["rows"]
    assert speed["figures"] == {"median": 1050.0, "low": 1000.0, "high": 1100.0, "n": 2}
    assert (described["status"], described["figures"]) == (result.status, result.figures)
    assert GOAL in described["text"]
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["machine"]["cores"] >= 1
    assert (report["dataset"], report["processes"], report["repeats"]) == ("digits", 2, 11)
    assert err.startswith("ddp-mnist: error: bench feed: " if code else "")
    assert ("(ratio)" in err, err.count("\n")) == (bool(code), code)


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["feeds"], f"feeds: choose from {', '.join(benches.BENCHES)}; did you mean feed?"),
        (["forecast"], "forecast: choose from feed, loop, evaluation,"),
        (["baseline"], "baseline: choose from feed, loop, evaluation,"),
        (["feed", "--repeats", "4"], "--repeats 4: must be at least 5"),
        (["feed", "--processes", "0"], "--processes 0: must be at least 1"),
        (["loop", "--processes", "1", "--dataset", "digits"], "--processes 1: bench loop needs a"),
        (["strategies", "--processes=1", "--dataset=digits"], "--processes 1: bench strategies "),
    ],
)
def test_a_wrong_flag_is_code_2(
    argv: list[str], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", *argv])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"ddp-mnist: error: {begins}")
