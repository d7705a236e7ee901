"""The number of threads is chosen by timing, where nobody has set it."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_mnist import api
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.task import Classification
from ddp_mnist.data import cache
from ddp_mnist.training import threads
from ddp_mnist.training.named_objects import NamedObjects
from ddp_mnist.training.set_up import agree
from ddp_mnist.training.training_run import TrainingRun
from tests.ranks import each_of
from tests.run_checks import fit_recipe

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def threads_as_found() -> Any:
    found = torch.get_num_threads()
    yield
    torch.set_num_threads(found)


@pytest.mark.parametrize(
    ("ms_per_image", "most", "took_s"),
    [
        ({1: 0.1, 2: 0.05}, 40, threads.LEAST_S),  # all at once, as in the run
        ({1: 10.0, 2: 20.0}, 18, threads.MOST_S),  # too slow for that
        ({1: 100.0, 2: 20.0}, 2, threads.MOST_S),
    ],
)
def test_steps_are_timed_with_one_thread_and_with_several(
    ms_per_image: dict[int, float], most: int, took_s: float, monkeypatch: Patch
) -> None:
    torch.set_num_threads(2)
    now, counts = 0.0, list[int]()
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: now))

    def step(images: int) -> None:
        nonlocal now
        counts.append(images)
        now += images * ms_per_image[torch.get_num_threads()] / 1000

    times = threads.time_threads(step, 40, total_steps=500)
    expected = {str(n): round(most * ms / 1000, 5) for n, ms in ms_per_image.items()}
    assert times == expected
    assert max(counts) == most
    assert took_s <= now < took_s + sum(expected.values())
    assert torch.get_num_threads() == 2
    assert threads.time_threads(step, 40, threads.LEAST_STEPS - 1) is None


def test_all_ranks_choose_by_the_slowest(monkeypatch: Patch) -> None:
    images, task, recipe = cache.load("digits"), Classification([]), fit_recipe()
    monkeypatch.setenv("OMP_NUM_THREADS", "4")

    def agreed(by_rank: list[threads.Times | None]) -> list[Any]:
        def of_rank(store: Any) -> Any:
            world: Any = SimpleNamespace(store=store, backend="", precision="", compiled_by="")
            run = TrainingRun(TrainConfig(), world, images, NamedObjects(), task, recipe)
            return agree(TrainingRun(**vars(run) | {"step_times": by_rank[store.rank]})).step_times

        return each_of(len(by_rank), of_rank)

    slowest = {"1": 0.08, "4": 0.06}
    assert agreed([{"1": 0.08, "4": 0.02}, {"1": 0.03, "4": 0.06}]) == [slowest, slowest]
    # On rank 1 a person has set them
    assert agreed([{"1": 0.01, "4": 0.06}, None]) == [None, None]
    assert os.environ["OMP_NUM_THREADS"] == "4"  # as it was, each time
    close = {"1": 0.01, "4": 0.0095}
    assert agreed([close] * 2) == [close] * 2
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_a_resumed_run_keeps_its_threads_unless_they_are_set(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last bits depend on their number."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("ddp_mnist.cluster.device.cores", lambda: 2)
    timed: list[int] = []

    def time_threads(_step: Any, images: int, _total: int) -> threads.Times:
        timed.append(images)
        return {"1": 0.01, "2": 0.02}

    monkeypatch.setattr("ddp_mnist.training.training_run.time_threads", time_threads)
    flags: dict[str, Any] = {"cpu": True, "batch_size": 100}
    run = tmp_path / "run"
    first = api.train(dataset="digits", model="mlp", epochs=1, run_dir=run, **flags)
    tried = {"1": 0.01, "2": 0.02}
    assert (first["threads"], first["threads_tried"], timed) == (1, tried, [100])
    line = "threads    1, as a step on trial took 10.0 ms with 1 and 20.0 ms with 2"
    assert re.search(f"^{re.escape(line)}", capsys.readouterr().out, re.MULTILINE)

    again = api.train(resume=run, epochs=2, cpu=True)
    assert (again["threads"], again["threads_tried"], timed) == (1, None, [100])
    assert "nothing changed" not in capsys.readouterr().out  # --epochs
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    third = api.train(resume=run, epochs=3, cpu=True)
    assert (third["threads"], third["threads_tried"], timed) == (2, None, [100])
    assert "threads 1 -> 2" in capsys.readouterr().out


def test_the_timing_takes_a_share_of_the_run_and_leaves_out_first_steps(monkeypatch: Patch) -> None:
    torch.set_num_threads(2)
    now, kinds = 0.0, set[tuple[int, int]]()
    monkeypatch.setattr(threads, "time", SimpleNamespace(perf_counter=lambda: now))

    def step(images: int) -> None:
        nonlocal now
        kind = images, torch.get_num_threads()
        now += images * (0.02 if kind in kinds else 0.03)
        kinds.add(kind)

    times = threads.time_threads(step, 12, threads.LEAST_STEPS)
    assert times == {"1": 0.12, "2": 0.12}  # of the 6 images that take long enough
    assert threads.SHARE * threads.LEAST_STEPS * 12 * 0.02 <= now < threads.MOST_S + 0.24
