from __future__ import annotations

import dataclasses
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from ddp_mnist.cluster.local import run_world
from ddp_mnist.run.console import Console
from ddp_mnist.run.folder import RunFolder
from ddp_mnist.run.profiling import StepProfiler, first_traced, own_times, table
from ddp_mnist.verify.watch import just_train, proof_config, weights_of
from tests.training import what_it_says

STEPS = 6  # of an epoch of 15


def test_each_rank_leaves_a_trace_of_its_steps_and_computes_the_same(tmp_path: Path) -> None:
    config = proof_config(epochs=1)
    profiled = dataclasses.replace(config.run, profile=STEPS, quiet=False)
    said, silence = run_world(
        2, what_it_says, dataclasses.replace(config, run=profiled), folder=tmp_path
    )
    assert silence == ""
    for rank in (0, 1):
        with gzip.open(tmp_path / "run" / "profile" / f"rank-{rank}.json.gz") as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert names.count("DistributedDataParallel.forward") == STEPS
        assert names.count("Optimizer.step#Muon.step") == STEPS
        assert "gloo:all_reduce" in names
    shown = said.partition("profile    ")[2].partition("traces ")[0].splitlines()
    assert re.fullmatch(rf"{STEPS} steps of rank 0, \d+\.\d\d ms a step", shown[0])
    assert len(shown) == 2 + 10 + 1
    assert max(map(len, shown)) <= 80
    share = float(shown[-1].split()[-1].rstrip("%"))
    assert shown[-1].startswith("communication, partly at the same time")
    assert share > 0.1  # gloo's threads are counted
    assert "traces     run/profile/rank-0.json.gz" in said
    run_world(2, just_train, proof_config("plain", epochs=1), folder=tmp_path)
    watched, unwatched = weights_of(tmp_path / "run"), weights_of(tmp_path / "plain")
    assert all((watched[name] == unwatched[name]).all() for name in watched)


def test_more_than_an_epoch_has_is_refused_and_nothing_begun(tmp_path: Path) -> None:
    config = proof_config()
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, profile=15))
    with pytest.raises(Exception, match=r"^--profile 15: an epoch has 15 steps; ask .* most 14\n"):
        run_world(1, just_train, config, folder=tmp_path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("steps", "done", "per_epoch", "total", "begin"),
    [
        (20, 0, 381, 381, 10),  # warm, in the first epoch
        (5, 0, 15, 45, 10),
        (6, 0, 15, 45, 16),  # not 10 to 16: the epoch's end and its validation lie between
        (14, 0, 15, 45, 16),
        (14, 0, 15, 15, 1),  # the only place there is, warm or not
        (6, 0, 15, 15, 9),
        (5, 22, 15, 45, 32),  # of a resumed run
        (5, 30, 15, 45, 40),
        (5, 39, 15, 45, 40),
        (5, 40, 15, 45, None),
    ],
)
def test_steps_of_one_epoch_are_traced(
    steps: int, done: int, per_epoch: int, total: int, begin: int | None
) -> None:
    assert first_traced(steps, done, per_epoch, total) == begin


def test_a_run_with_too_few_steps_left_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    accelerator: Any = SimpleNamespace(device=torch.device("cpu"))
    profiler = StepProfiler(5, accelerator, RunFolder(), Console(True))
    profiler.plan(40, 15, 45)
    for step in range(41, 46):
        profiler.step(step)
    assert capsys.readouterr().out == (
        "--profile 5: nothing is traced, no epoch has so many steps left\n"
    )


def entry(key: str, **times: Any) -> Any:
    """Return an entry as torch averages it, of 4 calls."""
    values = {
        "cpu_time_total": 0.0,
        "self_cpu_time_total": 0.0,
        "self_device_time_total": 0.0,
        "device_type": DeviceType.CPU,
        "is_user_annotation": False,
    }
    return SimpleNamespace(key=key, count=4, **{**values, **times})


def test_own_time_on_a_cpu_and_gloos_threads() -> None:
    entries = [
        entry("aten::add", cpu_time_total=9e3, self_cpu_time_total=2e3),
        entry("gloo:all_reduce", cpu_time_total=6e3),
    ]
    lines = table(own_times(entries, on_gpu=False), 4, 0.02).splitlines()
    assert lines[0] == "profile    4 steps of rank 0, 5.00 ms a step"
    assert lines[2].split() == ["gloo:all_reduce", "4", "1.500", "30.0%"]
    assert lines[3].split() == ["aten::add", "4", "0.500", "10.0%"]
    assert lines[-1].split()[-2:] == ["1.500", "30.0%"]


def test_on_a_gpu_its_kernels_count_once() -> None:
    """torch lists a kernel, the operation that started it and the range around, with one time."""
    gpu = {"device_type": DeviceType.CUDA, "self_device_time_total": 4e3}
    entries = [
        entry("aten::conv2d", self_cpu_time_total=3e3, self_device_time_total=4e3),
        entry("implicit_convolve_sgemm", **gpu),
        entry("DistributedDataParallel.forward", **gpu, is_user_annotation=True),
        entry("nccl:all_reduce", self_cpu_time_total=1e3, self_device_time_total=2e3),
        entry("ncclDevKernel_AllReduce", **{**gpu, "self_device_time_total": 2e3}),
    ]
    lines = table(own_times(entries, on_gpu=True), 4, 0.02).splitlines()
    assert [line.split() for line in lines[2:4]] == [
        ["implicit_convolve_sgemm", "4", "1.000", "20.0%"],
        ["ncclDevKernel_AllReduce", "4", "0.500", "10.0%"],
    ]
    assert lines[-1].split()[-2:] == ["0.500", "10.0%"]
    assert len(lines) == 5
