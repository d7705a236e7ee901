import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from ddp_mnist.bench import benches, steps
from ddp_mnist.bench import measurements as figures
from ddp_mnist.bench.measurements import Figure, ratio, spread
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.run import TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.errors import CheckFailed
from ddp_mnist.verbs.check_result import FAIL, PASS, CheckResult
from ddp_mnist.verbs.flags import Bench
from tests.commands import Typed

FLAGS = Bench("loop", dataset="digits")


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


def test_a_ratio_is_of_what_was_measured_in_one_round() -> None:
    # Each round has the ratio 2, whatever the machine did meanwhile.
    assert ratio([2, 20, 200], [1, 10, 100]) == Figure(2, 2, 2, 3, is_ratio=True)
    assert ratio([1, 2, 9], [1, 1, 1]) == Figure(2, 1, 9, 3, is_ratio=True)
    assert ratio([3, 30], [4, 40], less=[2, 20]) == Figure(0.25, 0.25, 0.25, 2, True)
    with pytest.raises(ValueError, match="zip"):
        ratio([1, 2], [1])
    # A figure is shown with its spread.
    assert str(spread([3.0, 1.0, 2.0])) == "2  (1 to 3, n = 3)"
    assert str(ratio([1, 2, 9], [1, 1, 1])) == "2.000  (1.000 to 9.000, n = 3)"
    assert str(ratio([1] * 5, [2] * 5)) == "0.500  (90 %: 0.500 to 0.500, n = 5)"


@pytest.mark.parametrize(("who", "is_terminal"), [("2 processes", True), ("", True), ("a", False)])
def test_rounds_alternate_and_the_first_is_discarded(
    who: str,
    is_terminal: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    def measure(kind: str) -> int:
        order.append(kind)
        return len(order)

    monkeypatch.setattr(figures, "draws", lambda _: is_terminal)
    assert figures.alternate("ab", 2, measure, who) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(order) == "baabba"
    shown = capsys.readouterr().err
    assert (f"{who}:" in shown and "/3 [" in shown) == (bool(who) and is_terminal)


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
            steps.bare_steps(run, feed=True, exchange=exchange)
            mine = torch.cat([p.detach().flatten() for p in nets[-1].parameters()])
            rank_0s = mine.clone()
            dist.broadcast(rank_0s, 0)
            equal.append(torch.equal(mine, rank_0s))
            world.accelerator.free_memory()
    return equal


def test_silent_steps_exchange_no_gradients(tmp_path: Path) -> None:
    assert run_world(2, equal_after_steps, folder=tmp_path) == [[True, True], [False, True]]


def test_only_full_batches_are_counted() -> None:
    images = cache.load("digits")  # 1,437 rows: 19 batches of 72
    world = Mock(accelerator=Mock(num_processes=2))
    for requested, batches in ((100, 19), (19, 19), (3, 3)):
        run = steps.shortened(TrainConfig(), world, images, requested)
        assert (run.config.recipe.epochs, run.config.recipe.val_size) == (1, 0)
        assert len(run.images.train_labels) == len(run.images.train_images) == 72 * batches


def test_each_kind_of_step_is_timed_from_end_to_end(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benches, "STEPS", 3)
    flags: Any = SimpleNamespace(dataset="digits", cache_dir=None, repeats=1)
    speeds = benches.speeds_of([*steps.KINDS], flags, 2)
    assert all(1 < images_per_s < 1e6 for [images_per_s] in speeds.values())
    assert list(here.iterdir()) == []  # a timed run writes nothing
    monkeypatch.setattr(benches, "speeds_of", lambda *_: speeds)
    found = {result.name: result.figures["median"] for result in benches.scaling(flags, 2)}
    for who in ("1 process", "2 processes"):
        assert found[f"{who}: images/s"] == speeds["train"][0]
        shares = [share for name, share in found.items() if name.startswith(f"{who}: share of")]
        assert len(shares) == 3
        assert sum(shares) == pytest.approx(1)  # in one round they add up


def test_ranks_that_wait_are_as_fast_as_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [{"train": [10.0, 20.0], "silent": [10.0, 40.0]} for _ in range(2)]
    ranks[1] = {"train": [30.0, 10.0], "silent": [30.0, 20.0]}
    monkeypatch.setattr(benches, "run_world", lambda *_, **__: ranks)
    speeds = benches.speeds_of(["train", "silent"], FLAGS, 2)
    assert speeds == {"train": [10, 10], "silent": [20, 30]}


# --- Goals


@pytest.mark.parametrize(("ratio", "status"), [(0.951, PASS), (0.949, FAIL)])
def test_a_goal_of_steps_is_missed_at_its_bound(
    ratio: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(kinds: list[str], *_: Any, **__: Any) -> dict[str, list[float]]:
        return {kind: [100.0] * 5 for kind in kinds} | {"train": [100 * ratio] * 5}

    monkeypatch.setattr(benches, "speeds_of", measured)
    for bench in (benches.loop, benches.scaling):
        results = bench(FLAGS, 2)
        assert [result.status for result in results if " goal " in result.text] == [status]
        assert all(result.status == PASS for result in results if " goal " not in result.text)


@pytest.mark.parametrize(("seconds", "status"), [(2.5, PASS), (2.51, FAIL)])
def test_start_up_is_compared_with_the_baseline_program(
    seconds: float, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(command: list[str]) -> float:
        return 2.0 if command[0] == "-c" else seconds

    monkeypatch.setattr(benches, "seconds_to_first_step", measured)
    baseline, train, over = benches.startup(FLAGS, 1)
    assert [each.figures["median"] for each in (baseline, train)] == [2, seconds]
    assert (over.figures["median"], over.status) == (seconds / 2, status)


@pytest.mark.system
def test_the_baseline_program_takes_a_real_first_step() -> None:
    assert 0.5 < benches.seconds_to_first_step(["-c", benches.BASELINE]) < 60


def test_a_command_without_a_first_step_is_reported() -> None:
    with pytest.raises(CheckFailed, match="ended without a first step; run it by hand"):
        benches.seconds_to_first_step(["-c", "pass"])


def test_fault_39_a_timed_command_has_no_part_in_the_batch_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is timed to its first line of metrics."""
    job = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "RANK": "1", "WORLD_SIZE": "4"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    step = f"""
import os, pathlib, sys, time
assert not {set(job)} & set(os.environ)
run = pathlib.Path(sys.argv[2])
run.mkdir()
time.sleep(0.2)
(run / "metrics.jsonl").write_text("a step")
"""
    assert 0.2 < benches.seconds_to_first_step(["-c", step]) < 60


# --- What is printed


@pytest.fixture
def free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches.neighbours, "cores_held", lambda: (0.0, 2, []))


SPEED = spread([1000.0, 1100.0]).beside("train.py, images/s")
GOAL = "lower end at least 0.95"
FASTER = Figure(0.97, 0.96, 0.98, 7, is_ratio=True).beside("ratio", GOAL, True)
SLOWER = Figure(0.9, 0.8, 0.99, 7, is_ratio=True).beside("ratio", GOAL, False)


@pytest.mark.usefixtures("free_cores")
def test_a_line_of_bench_breaks_between_words_on_a_narrow_terminal(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(benches.BENCHES, "loop", lambda *_: [SPEED, SLOWER])
    monkeypatch.setattr("ddp_mnist.run.console.width_of", lambda *_, **__: 76)
    _, speed, *ratio = typed("bench", "loop", "--dataset", "digits").out.splitlines()
    assert speed == "train.py, images/s 1050  (1000 to 1100, n = 2)"
    assert ratio == [
        "ratio              0.900  (90 %: 0.800 to 0.990, n = 7)  goal missed: lower",
        "                   end at least 0.95",
    ]


def test_bench_says_that_other_programs_hold_the_cores(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(benches.BENCHES, "loop", lambda *_: [SPEED])
    monkeypatch.setattr(benches.neighbours, "cores_held", lambda: (1.1, 2, ["other"]))
    command = ("bench", "loop", "--dataset", "digits")
    head, *careful, speed = typed(*command, "--processes", "4").out.splitlines()
    assert head.startswith("loop on digits") and speed.startswith("train.py")
    assert careful == [
        "careful    other programs use these cores, which have room for 1 thread of 2,",
        "           and each step waits for the slowest; end them, and repeat",
    ]
    monkeypatch.setattr(benches.neighbours, "cores_held", lambda: (0.4, 2, ["other"]))
    assert len(typed(*command).out.splitlines()) == 2


@pytest.mark.usefixtures("free_cores")
@pytest.mark.parametrize("flags", [[], ["--check"]])
@pytest.mark.parametrize(("result", "mark"), [(FASTER, "met"), (SLOWER, "missed")])
def test_a_goal_stands_beside_its_figure_and_missed_fails_a_check(
    flags: list[str], result: CheckResult, mark: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(benches.BENCHES, "loop", lambda *_: [SPEED, result])
    ended = typed("bench", "loop", "--dataset", "digits", *flags)
    begins, _, shown = ended.out.splitlines()
    assert begins == "loop on digits: a warm-up and 11 rounds of each comparison"
    code = int(bool(flags) and mark == "missed")
    assert ended.code == code
    assert f"{result.figures['median']:.3f}  (90 %: " in shown
    assert shown.endswith(f", n = 7)  goal {mark}: {GOAL}")
    again = typed("bench", "loop", "--dataset", "digits", "--json", *flags)
    assert (again.code, again.err) == (code, ended.err)
    report = json.loads(again.out)  # and nothing else
    speed, described = report["rows"]
    assert speed["figures"] == {"median": 1050.0, "low": 1000.0, "high": 1100.0, "n": 2}
    assert (described["status"], described["figures"]) == (result.status, result.figures)
    assert GOAL in described["text"]
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    assert report["machine"]["cores"] >= 1
    assert (report["dataset"], report["processes"], report["repeats"]) == ("digits", 2, 11)
    assert ended.err.startswith("ddp-mnist: error: bench loop: " if code else "")
    assert ("(ratio)" in ended.err, ended.err.count("\n")) == (bool(code), code)
