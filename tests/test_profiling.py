from __future__ import annotations

import dataclasses
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddp_mnist.local_world import run_world
from ddp_mnist.profiling import WARM_UP, table
from ddp_mnist.proofs import just_train, proof_config, weights_of
from tests.training import what_it_says

STEPS = 5  # after ten, of an epoch of 15: its validation is not among them


def test_each_rank_leaves_a_trace_of_its_steps(tmp_path: Path) -> None:
    config = proof_config()
    profiled = dataclasses.replace(config.run, profile=STEPS, quiet=False)
    said, silence = run_world(
        2, what_it_says, dataclasses.replace(config, run=profiled), folder=tmp_path
    )
    assert silence == ""
    for rank in (0, 1):
        with gzip.open(tmp_path / "run" / "profile" / f"rank-{rank}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("DistributedDataParallel.forward") == STEPS
        assert names.count("Optimizer.step#AdamW.step") == STEPS
        assert "gloo:all_reduce" in names
    shown = said.partition("profile    ")[2].partition("traces ")[0].splitlines()
    assert re.fullmatch(rf"{STEPS} steps of rank 0, \d+\.\d\d ms a step", shown[0])
    assert len(shown) == 2 + 10 + 1
    assert max(map(len, shown)) <= 80
    share = float(shown[-1].split()[-1].rstrip("%"))
    assert shown[-1].startswith("communication, beside the rest")
    assert share > 0.1  # gloo's threads are counted
    assert "traces     run/profile/rank-0.json.gz" in said

    # It changes no result
    run_world(2, just_train, proof_config("plain"), folder=tmp_path)
    watched, unwatched = weights_of(tmp_path / "run"), weights_of(tmp_path / "plain")
    assert all((watched[name] == unwatched[name]).all() for name in watched)


def test_a_run_that_ends_before_has_none(tmp_path: Path) -> None:
    config = proof_config(epochs=1)  # 15 steps
    run = dataclasses.replace(config.run, profile=15 - WARM_UP + 1)
    [summary] = run_world(1, just_train, dataclasses.replace(config, run=run), folder=tmp_path)
    assert summary["steps"] == 15
    assert not (tmp_path / "run" / "profile").exists()


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        # self time, on the CPU
        ({"self_cpu_time_total": 2000.0, "cpu_time_total": 9000.0}, "0.500   10.0%"),
        # a GPU's, where there is one
        ({"self_cpu_time_total": 100.0, "self_device_time_total": 4000.0}, "1.000   20.0%"),
    ],
)
def test_own_time_and_its_share_of_the_clock(entry: dict[str, float], shown: str) -> None:
    lines = table([SimpleNamespace(key="x", count=4, **entry)], 4, 0.02).splitlines()
    assert lines[0] == "profile    4 steps of rank 0, 5.00 ms a step"
    assert lines[2].endswith(shown)
    assert lines[-1].endswith("0.000    0.0%")


def test_gloos_threads_are_communication() -> None:
    entries = [
        SimpleNamespace(key="gloo:all_reduce", count=4, cpu_time_total=6e3, self_cpu_time_total=0),
        SimpleNamespace(
            key="ncclDevKernel_AllReduce",
            count=4,
            self_device_time_total=2e3,
            self_cpu_time_total=0,
        ),
        SimpleNamespace(key="aten::add", count=4, self_cpu_time_total=1e3),
    ]
    lines = table(entries, 4, 0.02).splitlines()
    assert lines[2].split() == ["gloo:all_reduce", "4", "1.500", "30.0%"]
    assert lines[-1].split()[-2:] == ["2.000", "40.0%"]
