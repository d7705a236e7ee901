"""What needs a CUDA device: `make gpu-check`.

`GPU_CHECK_ON=cpu make gpu-check` puts the CPU in the GPU's place, where that makes sense: it tests
the tests.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist.cluster.failures import A_GPU_EACH
from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify import proofs, watch
from tests.chaos import newest_step, wait_until, workers_of
from tests.commands import ACCELERATE, CONFIGS, MULTI_CPU, TRAIN, Started, python, torchrun
from tests.run_checks import apart, net_that, status, with_flags

DEVICE = "cpu" if os.environ.get("GPU_CHECK_ON") == "cpu" else "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="there is no CUDA device"
    ),
]
on_a_gpu_alone = pytest.mark.skipif(DEVICE == "cpu", reason="a CPU cannot stand in for this")
PLACE = ["--cpu"] if DEVICE == "cpu" else []
DIGITS = [*TRAIN, "--dataset", "digits", "--run-dir", "run", *PLACE]
SLOW_S = 300.0  # to compile, at the most
FP16 = [] if DEVICE == "cpu" else ["fp16"]  # needs a GPU

# cuBLAS is deterministic only with a workspace of its own, which it reads from this
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

HUNGRY = """
        if torch.is_grad_enabled() and len(x) > 18:
            torch.empty(2**42, device=x.device)  # 17 TB
"""


def summary_of(*arguments: str, folder: Path) -> dict[str, Any]:
    ended = python(*arguments, folder=folder, timeout_s=SLOW_S)
    assert ended.code == 0, ended.err
    assert "Grad strides" not in ended.err
    return read_json(folder / "run" / "summary.json")


# --- Right: equal to the CPU, to another number of processes, and to itself


def on_the_device(config: Any, **flags: Any) -> Any:
    """Return the config of a proof that is on the GPU; those of `verify` are on the CPU."""
    return with_flags(config, cpu=DEVICE == "cpu", **flags)


@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_float64_on_the_gpu_equals_the_cpu(model: str, tmp_path: Path) -> None:
    """So do two processes that share the GPU, over gloo."""
    alone = proofs.watched_run(1, tmp_path, watch.proof_config(model=model))
    checks = list(proofs.equal_on(DEVICE, alone))
    assert [check.status for check in checks] == ["PASS"] * 2, [check.text for check in checks]
    assert checks[0].figures["difference"] < 1e-9


def test_augmented_colour_images_on_the_gpu_equal_those_on_the_cpu(tmp_path: Path) -> None:
    config = with_flags(watch.proof_config(epochs=1, augment=True), dataset="patches")
    run_world(1, watch.just_train, with_flags(config, run_dir="cpu"), folder=tmp_path)
    there = on_the_device(config, run_dir="gpu")
    [summary] = run_world(1, watch.just_train, there, folder=tmp_path)
    assert summary["device"].startswith(DEVICE)
    assert apart(tmp_path / "gpu", tmp_path / "cpu") < 1e-9


def deterministically(function: Any, *arguments: Any) -> Any:
    torch.use_deterministic_algorithms(True)
    return function(*arguments)


@pytest.mark.parametrize("precision", ["fp64", "no", "bf16", *FP16])
def test_a_resumed_run_ends_as_an_unbroken_one(precision: str, tmp_path: Path) -> None:
    """Bit for bit, with a net for which all of torch's operations are deterministic on a GPU."""
    config = on_the_device(watch.proof_config(model="mlp"), mixed_precision=precision)
    broken = with_flags(config, run_dir="broken")

    def train(*called: Any) -> list[Any]:
        world = LocalWorld(1, deterministically, *called, folder=tmp_path, variables=DETERMINISTIC)
        return world.outcomes()

    [unbroken] = train(watch.just_train, config)
    [stopped] = train(watch.train_until, broken, 20, signal.SIGTERM)
    assert getattr(stopped, "code", stopped) == 143
    [resumed] = train(watch.just_train, watch.resumed(broken))
    # The signal comes with the optimizer's step 20, which with fp16 is later than the run's.
    noted = 20 + resumed["skipped_steps"]
    assert resumed["resumed_from"] in ([noted], [noted + 1])
    assert resumed["device"] == unbroken["device"]
    assert resumed["precision"] == unbroken["precision"] == precision
    assert watch.what_stays(tmp_path / "broken") == watch.what_stays(tmp_path / "run")


# --- Precision, compiler, launchers


@pytest.mark.parametrize("way", ["no", "no --compile", "bf16", *FP16])
def test_each_precision_learns_and_compiled_code_does(way: str, tmp_path: Path) -> None:
    precision = way.split()[0]
    summary = summary_of(*DIGITS, "--mixed-precision", *way.split(), folder=tmp_path)
    assert summary["device"].startswith(DEVICE)
    assert summary["precision"] == precision
    assert summary["test_accuracy"] >= 0.975
    # the loss scaler starts too high and skips a step or two: these are counted
    assert 0 <= summary["skipped_steps"] < (10 if precision == "fp16" else 1)


@on_a_gpu_alone
def test_the_configuration_for_one_gpu_takes_fp16(tmp_path: Path) -> None:
    summary = summary_of(*ACCELERATE, str(CONFIGS / "single_gpu.yaml"), *DIGITS, folder=tmp_path)
    assert (summary["device"], summary["precision"]) == ("cuda:0", "fp16")


@on_a_gpu_alone
@pytest.mark.parametrize(
    ("processes", "flags", "backend"), [(1, [], "nccl"), (2, ["--backend", "gloo"], "gloo")]
)
def test_torchrun_on_one_gpu(
    processes: int, flags: list[str], backend: str, tmp_path: Path
) -> None:
    summary = summary_of(*torchrun(processes), *DIGITS, *flags, folder=tmp_path)
    assert (summary["backend"], summary["world_size"]) == (backend, processes)
    assert summary["test_accuracy"] >= 0.975


def test_a_cpu_config_uses_no_gpu(tmp_path: Path) -> None:
    summary = summary_of(*MULTI_CPU, *DIGITS, folder=tmp_path)
    assert (summary["device"], summary["backend"], summary["precision"]) == ("cpu", "gloo", "no")


def test_the_doctor_accepts_the_machine(tmp_path: Path) -> None:
    ended = python("-m", "ddp_mnist", "doctor", "--dataset", "digits", *PLACE, folder=tmp_path)
    assert ended.code == 0, ended.out


# --- A finished run


def test_a_run_is_evaluated_there_and_on_the_cpu(tmp_path: Path) -> None:
    summary = summary_of(*DIGITS, folder=tmp_path)
    for place in (PLACE, ["--cpu"]):
        command = ["-m", "ddp_mnist", "evaluate", "run", "--json", *place]
        found = json.loads(python(*command, folder=tmp_path).succeeds())
        assert found["count"] == 360
        # rounding may move an image that is as near to two classes
        assert abs(found["accuracy"] - summary["test_accuracy"]) <= 1 / 360
        assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-3)


# --- What goes wrong


@on_a_gpu_alone
def test_out_of_memory_is_torchs_own_words_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "hungry.py").write_text(net_that(HUNGRY))
    ended = python(*DIGITS, "--model", "hungry:Net", folder=tmp_path)
    [line] = ended.error_lines
    assert ": OutOfMemoryError: CUDA out of memory. " in line
    assert line.endswith("; the traceback is in run/traceback.txt (code 1)")
    assert (ended.code, status(tmp_path / "run")) == (1, ("failed", 1))
    assert "torch.empty(2**42" in (tmp_path / "run" / "traceback.txt").read_text()


@on_a_gpu_alone
def test_more_processes_than_gpus_with_nccl_are_refused(tmp_path: Path) -> None:
    launcher = torchrun(torch.cuda.device_count() + 1)
    ended = python(*launcher, *DIGITS, folder=tmp_path)
    [line] = ended.error_lines
    assert A_GPU_EACH in line


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_fault_01_a_worker_killed_over_nccl_ends_the_other(tmp_path: Path) -> None:
    """Within a minute, and the run goes on from its newest checkpoint."""
    flags = ["--epochs", "5000", "--checkpoint-every", "5"]
    started = Started([*torchrun(2), *DIGITS, *flags], tmp_path)
    wait_until(lambda: newest_step(tmp_path / "run"))
    workers_of(started)[1].kill()
    assert started.ended(timeout_s=60).code != 0
    saved = newest_step(tmp_path / "run")
    more = ["--resume", "run", "--epochs", str(saved // 15 + 2)]
    summary = summary_of(*torchrun(2), *TRAIN, *more, folder=tmp_path)
    assert (summary["resumed_from"], summary["backend"]) == ([saved], "nccl")
