"""What an accelerate config of one's own asks for is done, or refused in one line."""

from pathlib import Path

import pytest

from ddp_mnist.cluster.device import choose_device
from ddp_mnist.cluster.launch import NOT_DDP, Launch, config_flag, find_launch
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError
from ddp_mnist.system.files import read_json
from tests.commands import ACCELERATE, PROOF, TRAIN, Started, all_succeed
from tests.run_checks import check_equal


@pytest.mark.parametrize("variable", NOT_DDP)
def test_a_variable_that_asks_for_something_else_than_ddp_is_refused(variable: str) -> None:
    for off in ("", "0", "False"):
        find_launch(Distribution(), {variable: off})
    with pytest.raises(UsageError) as raised:
        find_launch(Distribution(), {variable: "true"})
    use = f"use {config_flag('multi_gpu')} or multi_cpu.yaml"
    told = f"{variable}=true: this trainer is DDP on NVIDIA GPUs or CPUs; {use}"
    assert str(raised.value) == told


def test_the_compiler_that_the_launcher_names_beats_the_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, compiled = Distribution(), Distribution(compile=True)
    assert choose_device(plain, Launch()).compile_options == {}
    assert choose_device(compiled, Launch()).compile_options == {"backend": "inductor"}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    for flags in (plain, compiled):
        assert choose_device(flags, Launch()).compile_options["backend"] == "aot_eager"
        assert choose_device(flags, Launch(), full_precision=True).compile_options == {}
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "TVMM")
    with pytest.raises(UsageError, match=r"^ACCELERATE_DYNAMO_\*: "):
        choose_device(plain, Launch())


# --- The real launchers


@pytest.mark.system
def test_a_config_with_a_compiler_debug_and_affinity_changes_no_weight(
    alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(
        "{distributed_type: MULTI_GPU, num_processes: 2, debug: true, enable_cpu_affinity: true,"
        " dynamo_config: {dynamo_backend: EAGER}}"
    )
    words = [*ACCELERATE, "own.yaml", *TRAIN, *PROOF.split(), "run", "--grad-accum", "4"]
    slower = "ignore:Guards may run slower:RuntimeWarning"  # says torch's compiler on Python 3.13.0
    [printed] = all_succeed([Started(words, tmp_path, {"PYTHONWARNINGS": slower})])
    check_equal(tmp_path / "run", alone, 2)
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["grad_accum"], summary["compile"]) == (4, "eager")
    plan = " ".join(printed.split())
    assert "precision fp64, compiled by eager" in plan
    assert "72 images a step = 2 processes x 4 parts x 9" in plan
