"""--compile: what torch.compile is asked for, and a machine that cannot compile."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from ddp_mnist.cluster.device import able_to_compile
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.errors import UsageError
from ddp_mnist.run.folder import read_json
from ddp_mnist.verify import watch
from tests.training import with_flags

COMPILED: Any = with_flags(
    watch.proof_config(model="mlp", epochs=1), compile=True, mixed_precision="no"
)
NO_PYTHON_H = """#!/bin/sh
case "$*" in *--version*) echo "g++ (Debian) 14.2.0"; exit 0;; esac
echo "main.cpp:1:10: fatal error: Python.h: No such file or directory" >&2; exit 1
"""


def graphs_of(config: Any) -> list[tuple[bool, int | str]]:
    """Return of each graph whether it has gradients, and for how many images it is."""
    found = list[tuple[bool, int | str]]()

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        [images] = [each for each in inputs if getattr(each, "dtype", None) == torch.uint8]
        size = images.shape[0] if isinstance(images.shape[0], int) else "any"
        found.append((torch.is_grad_enabled(), size))
        return graph.forward

    compiles = nn.Module.compile
    with patch.object(nn.Module, "compile", lambda net, **_: compiles(net, backend=record)):
        watch.just_train(config)
    return found


def test_training_compiles_one_graph_for_one_size(tmp_path: Path) -> None:
    config = with_flags(COMPILED, grad_accum=3)
    for graphs in run_world(2, graphs_of, config, folder=tmp_path):
        assert [images for trains, images in graphs if trains] == [72 // 2 // 3]


def errors_without_a_compiler() -> list[str]:
    """Return the errors where there is no C++ compiler, and where Python's headers are missing."""
    said = list[str]()
    for compiler in (None, NO_PYTHON_H):
        if compiler:
            Path("bin").mkdir()
            for name in ("g++", "gcc", "cc"):
                Path("bin", name).write_text(compiler)
                Path("bin", name).chmod(0o755)
        try:
            watch.just_train(with_flags(COMPILED, run_dir=f"run-{len(said)}"))
        except UsageError as error:
            said.append(str(error))
    return said


@pytest.mark.usefixtures("flock")  # torch's compiler needs it for its own cache
def test_a_machine_that_cannot_compile(tmp_path: Path) -> None:
    variables = {"PATH": str(tmp_path / "bin"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    world = run_world(1, errors_without_a_compiler, folder=tmp_path, variables=variables)
    for error, why in zip(*world, ("No working C++ compiler", "Python.h"), strict=True):
        assert error.startswith("--compile: this machine cannot compile (")
        assert error.endswith(
            "; install a C++ compiler and Python's headers (Debian and Ubuntu: apt install g++"
            " python3-dev), or leave it out"
        )
        assert why in error
    assert read_json(tmp_path / "run-0" / "status.json")["exit_code"] == 2


@pytest.mark.parametrize("compiler", [None, NO_PYTHON_H])
def test_tritons_errors_are_of_a_machine_that_cannot_compile(
    compiler: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function is the one by which Triton calls a C compiler; it needs no GPU."""
    build = pytest.importorskip("triton.runtime.build")
    if compiler:
        (tmp_path / "gcc").write_text(compiler)
        (tmp_path / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    build._find_compiler.cache_clear()
    said = "--compile: this machine cannot compile "
    said += r"\(Command '\['/" if compiler else r"\(Failed to find C compiler"
    with (
        pytest.raises(UsageError, match=said),
        able_to_compile(Distribution(compile=True), {"backend": "inductor"}),
    ):
        build._build("driver", str(tmp_path / "driver.c"), str(tmp_path), [], [], [], [])


def test_an_own_programs_failure_is_not_a_compilers() -> None:
    with (
        pytest.raises(subprocess.CalledProcessError, match="returned non-zero exit status 1"),
        able_to_compile(Distribution(compile=True), {"backend": "inductor"}),
    ):
        subprocess.run([sys.executable, "-c", "raise SystemExit(1)"], check=True)
