"""The number of threads is chosen by timing, where nobody has set it."""

import os
import re
import time
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
    ("ms_per_image", "at_once", "most"),
    [
        ({1: 0.1, 2: 0.05}, 40, 40),  # all at once, as in the run
        ({1: 10.0, 2: 20.0}, 40, 6),  # too slow for that
    ],
)
def test_steps_are_timed_with_one_thread_and_with_several(
    ms_per_image: dict[int, float], at_once: int, most: int
) -> None:
    torch.set_num_threads(2)
    counts = []

    def step(images: int) -> None:
        counts.append(images)
        time.sleep(images * ms_per_image[torch.get_num_threads()] / 1000)

    begun = time.monotonic()
    times = threads.time_threads(step, at_once, total_steps=500)
    assert time.monotonic() - begun < threads.MOST_S + 5 * threads.STEP_S
    assert torch.get_num_threads() == 2
    assert times and times.keys() == {"1", "2"}
    assert times["1"] / times["2"] == pytest.approx(ms_per_image[1] / ms_per_image[2], rel=0.4)
    assert 2 < max(counts) <= most
    assert threads.time_threads(step, at_once, threads.LEAST_STEPS - 1) is None


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
    assert os.environ["OMP_NUM_THREADS"] == "4"
    # On rank 1 a person has set them
    assert agreed([{"1": 0.01, "4": 0.06}, None]) == [None, None]
    assert os.environ["OMP_NUM_THREADS"] == "4"
    torch.set_num_threads(2)
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
    line = "threads    1, as a step on trial took 10.0 ms with 1 and 20.0 ms with 2; other programs"
    assert re.search(f"^{re.escape(line)}", capsys.readouterr().out, re.MULTILINE)

    again = api.train(resume=run, epochs=2, cpu=True)
    assert (again["threads"], again["threads_tried"], timed) == (1, None, [100])
    assert "nothing changed" not in capsys.readouterr().out  # --epochs
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    third = api.train(resume=run, epochs=3, cpu=True)
    assert (third["threads"], third["threads_tried"], timed) == (2, None, [100])
    assert "threads 1 -> 2" in capsys.readouterr().out
