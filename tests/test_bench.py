from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist import cli, data, runtime
from ddp_mnist.bench import benches, commands, idx, steps
from ddp_mnist.bench.benches import Options, Row
from ddp_mnist.bench.conventional import accuracy, make_net
from ddp_mnist.bench.figures import Ratio, alternate, interval, ratio, ratio_of_difference, spread
from ddp_mnist.bench.plot import plot
from ddp_mnist.bench.steps import time_steps
from ddp_mnist.config import Distribution, Run, TrainConfig
from ddp_mnist.errors import CheckFailed, StorageError
from ddp_mnist.launch import find_launch
from ddp_mnist.local_world import run_world
from ddp_mnist.runtime import World

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


def test_rounds_alternate_and_the_first_is_thrown_away() -> None:
    order: list[str] = []

    def measure(kind: str) -> int:
        order.append(kind)
        return len(order)

    assert alternate("ab", 2, measure) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(order) == "baabba"
    assert alternate("ab", 1, lambda kind: kind, warm_up=False) == {"a": ["a"], "b": ["b"]}


# --- What is measured


def measured(processes: int, folder: Path, kinds: list[str]) -> list[dict[str, list[float]]]:
    config = TrainConfig(
        Run(dataset="digits", quiet=True), distribution=Distribution(mixed_precision="no")
    )
    return run_world(processes, time_steps, config, kinds, 3, 2, folder=folder)


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


def steps_that_take_turns() -> tuple[float, float]:
    """Seconds of ten steps, alone and in lockstep, where each rank is slow in every other one."""

    @contextlib.contextmanager
    def ready(_config: Any, _images: Any, world: World, *, exchange: bool) -> Iterator[Any]:
        assert not exchange
        turns = itertools.count(world.accelerator.process_index)
        yield range(10), lambda _: time.sleep(0.04 * (next(turns) % 2))

    steps.ready_to_step = ready  # type: ignore[assignment]
    config, images = TrainConfig(), data.load("digits")
    with runtime.start(config.distribution, find_launch(config.distribution)) as world:
        return steps.silent_steps(config, images, world), steps.lockstep(config, images, world)


def test_in_lockstep_each_step_is_as_long_as_on_its_slowest_rank(tmp_path: Path) -> None:
    for silent, lockstep in run_world(2, steps_that_take_turns, folder=tmp_path):
        assert silent == pytest.approx(0.2, abs=0.1)
        assert lockstep == pytest.approx(0.4, abs=0.1)


def test_the_conventional_recipe_is_that_of_pytorchs_example(tmp_path: Path) -> None:
    net = make_net()
    assert sum(p.numel() for p in net.parameters()) == 1_199_882
    images = data.load("digits")
    idx.write(images, tmp_path / "MNIST" / "raw")
    from torchvision.datasets import MNIST

    for split, is_train in (("train", True), ("test", False)):
        read = MNIST(str(tmp_path), train=is_train)
        assert torch.equal(read.data, getattr(images, f"{split}_images"))
        assert torch.equal(read.targets, getattr(images, f"{split}_labels"))

    class AlwaysThree(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return torch.eye(10)[3].expand(len(inputs), 10)

    rows = [(torch.zeros(1), label) for label in (3, 1, 3, 3, 9)]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    assert accuracy(AlwaysThree(), loader) == 3 / 5


def test_start_up_is_timed_to_the_first_step() -> None:
    floor = commands.seconds_to_floors_step([])
    first_step = commands.seconds_to_first_step([], ["--dataset", "digits"])
    assert 0.5 < floor < 60
    assert 0.5 < first_step < 60


def test_private_memory_is_that_of_the_largest_process() -> None:
    child = "held = bytearray(200_000_000); import time; time.sleep(0.3)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{child}'])"
    assert commands.peak_anonymous_mb(["-c", parent]) == pytest.approx(205, abs=10)
    with pytest.raises(CheckFailed, match="code 3: no memory"):
        commands.peak_anonymous_mb(["-c", "print('no memory'); raise SystemExit(3)"])


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
    assert "held: lower end at least 0.95" in lines[1]
    told = json.loads(lines[-1])
    assert told["rows"][0] == {
        "what": "train.py, images/s",
        "median": 1050.0,
        "lowest": 1000.0,
        "highest": 1100.0,
        "n": 2,
        "promise": None,
        "held": True,
    }
    assert told["rows"][1]["low"] == 0.96
    assert told["versions"]["torch"] == importlib.metadata.version("torch")
    assert told["machine"]["cores"] >= 1


def test_a_missed_promise_is_code_1_after_all_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, lines, err = bench(capsys, monkeypatch, SPEED, SLOWER)
    assert code == 1
    assert "MISSED: lower end at least 0.95" in lines[1]
    assert json.loads(lines[-1])["rows"][1]["held"] is False
    assert err.startswith("ddp-mnist: error: bench feed: ratio: ")


def test_a_benchmark_of_digits_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benches, "STEPS", 3)
    rows = benches.scaling(Options("digits", None, processes=2, repeats=2))
    by_name = {row.what: row.figure.median for row in rows}
    for who in ("1 process", "2 processes"):
        assert by_name[f"{who}: images/s"] > 1
        shares = [share for name, share in by_name.items() if name.startswith(f"{who}: share of")]
        assert len(shares) == 4
        assert sum(shares) == pytest.approx(1, abs=0.2)  # medians do not add up


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    plot("feed", [SPEED, FASTER, SLOWER], str(tmp_path / "feed.png"))
    assert (tmp_path / "feed.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(StorageError, match=r"--plot .*cannot be written"):
        plot("feed", [SPEED], str(tmp_path / "no" / "feed.png"))


def test_each_benchmark_can_be_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "none"])
    assert f"none: choose from {', '.join(benches.BENCHES)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "begins"),
    [
        (["feeds"], "feeds: choose from feed, loop, evaluation,"),
        (["feed", "--repeats", "1"], "--repeats 1: must be at least 2"),
        (["feed", "--processes", "0"], "--processes 0: must be at least 1"),
        (["feed", "--plot", ""], "--plot: the value is empty"),
    ],
)
def test_a_wrong_flag_is_one_line(
    argv: list[str], begins: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", *argv])
    assert begins in capsys.readouterr().err
