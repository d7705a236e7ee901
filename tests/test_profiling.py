import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import RunFolder
from ddp_mnist.run.profiling import StepProfiler
from ddp_mnist.verify.watch import just_train, proof_config, weights_of
from tests.training import what_it_says, with_flags

STEPS = 6  # of an epoch of 15


def test_each_rank_leaves_a_trace_of_its_steps_and_computes_the_same(tmp_path: Path) -> None:
    plain = proof_config("plain", model="mlp", epochs=1)
    profiled = with_flags(plain, run_dir="run", profile=STEPS, quiet=False)
    said, silence = run_world(2, what_it_says, profiled, folder=tmp_path)
    assert silence == ""
    for rank in (0, 1):
        with gzip.open(tmp_path / "run" / "profile" / f"rank-{rank}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("DistributedDataParallel.forward") == STEPS
        assert names.count("Optimizer.step#AdamW.step") == STEPS
        assert "gloo:all_reduce" in names
    first, *table = said.partition("profile    ")[2].partition("traces ")[0].splitlines()
    assert re.fullmatch(rf"{STEPS} steps of rank 0, \d+\.\d\d ms a step", first)
    assert {"Self CPU %", "# of Calls"} <= set(re.split(r"\s{2,}", table[1].strip()))
    assert len(table) >= 10  # which rows are the largest depends on the machine
    assert "traces     run/profile/rank-0.json.gz" in said
    run_world(2, just_train, plain, folder=tmp_path)
    watched, unwatched = weights_of(tmp_path / "run"), weights_of(tmp_path / "plain")
    assert all((watched[name] == unwatched[name]).all() for name in watched)


def test_more_than_an_epoch_has_is_refused_and_nothing_begun(tmp_path: Path) -> None:
    config = with_flags(proof_config(), profile=15)
    with pytest.raises(Exception, match=r"^--profile 15: an epoch has 15 steps; ask .* most 14\n"):
        run_world(1, just_train, config, folder=tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("steps", "done", "per_epoch", "total", "begin"),
    [
        (20, 0, 381, 381, 361),
        (5, 0, 15, 45, 10),
        (6, 0, 15, 45, 9),  # an epoch has no more before them
        (5, 4, 15, 45, 25),  # in this epoch they would be cold
        (14, 0, 15, 15, 1),  # the only place there is
        (5, 22, 15, 45, 40),
        (5, 30, 15, 45, 40),
        (5, 31, 15, 45, None),
        (1, 0, 1, 3, 1),
    ],
)
def test_the_last_steps_of_a_warm_epoch_are_traced(
    steps: int, done: int, per_epoch: int, total: int, begin: int | None
) -> None:
    world: Any = None  # the other processes are not asked
    profiler = StepProfiler(steps, world, RunFolder(), Console(False))
    profiler.plan(done, per_epoch, total)
    assert profiler.begin == begin


def test_a_run_with_too_few_steps_left_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    world: Any = None  # the other processes are not asked
    profiler = StepProfiler(5, world, RunFolder(), Console(True))
    profiler.plan(40, 15, 45)
    for step in range(41, 46):
        profiler.step(step)
    assert capsys.readouterr().out == (
        "--profile 5: nothing is traced, no epoch has so many warm steps\n"
    )
