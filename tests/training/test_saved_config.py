import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_mnist.cluster.local_world import LocalWorld
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.core.nets import MNIST, MODELS
from ddp_mnist.core.task import Classification
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.data import cache
from ddp_mnist.nets import trial
from ddp_mnist.training.named_objects import NamedObjects
from ddp_mnist.training.saved_config import must_be_equal
from ddp_mnist.training.training_run import TrainingRun
from ddp_mnist.training.versions import code_digest, package_versions
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.run_checks import fit_recipe, told_once, with_flags


def test_what_has_to_be_equal_on_all_ranks_is_what_is_in_effect() -> None:
    """Not what was asked for, such as `auto`, nor what is each rank's own."""
    images, found, task = cache.load("digits"), NamedObjects(), Classification([])
    world: Any = SimpleNamespace(backend="gloo", precision="bf16", compiled_by=None)
    asked = Distribution(mixed_precision="auto", backend="auto")
    own = Distribution(rank=1, world_size=2, local_rank=1, init_method="tcp://h:1")
    runs = (
        TrainingRun(TrainConfig(*flags), world, images, found, task, fit_recipe())
        for flags in (
            (RunFlags(dataset="digits"), Recipe(), asked),
            (RunFlags(dataset="/data", run_dir="x", cache_dir="y", quiet=True), Recipe(), own),
        )
    )
    first, second = map(must_be_equal, runs)
    assert first == second
    in_effect = {"--mixed-precision": "bf16", "--backend": "gloo", "--seed": 0}
    code = {**package_versions(), "the code's digest": code_digest()}
    assert first.items() >= {**in_effect, **code}.items() and "torch" in first


def _train_otherwise(config: TrainConfig, variables: dict[str, str]) -> dict[str, Any]:
    """Train as rank 1 of a machine that computes otherwise."""
    os.environ.update(variables if os.environ["RANK"] == "1" else {})
    return just_train(config)


def _digest_of_step(threads: int) -> str:
    """Return what this CPU makes of a step of the net `cnn` with so many threads."""
    found = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return trial.digest_of_step(
            Normalised(MODELS["cnn"](10, MNIST), [0.0], [1.0]), fit_recipe()
        )
    finally:
        torch.set_num_threads(found)


@pytest.mark.parametrize(
    ("net", "variables", "drifts"),
    [
        ("mlp", {"ATEN_CPU_CAPABILITY": "default"}, True),
        ("mlp", {"ATEN_CPU_CAPABILITY": "avx2"}, False),  # adds alike
        ("cnn", {"OMP_NUM_THREADS": "2"}, None),  # Muon multiplies matrices: on some CPUs
        ("mlp", {"OMP_NUM_THREADS": "2"}, False),
    ],
)
def test_fault_65_ranks_on_which_a_step_has_other_bits(
    net: str, variables: dict[str, str], drifts: bool | None, tmp_path: Path
) -> None:
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs a processor with AVX-512")
    if drifts is None:
        drifts = _digest_of_step(1) != _digest_of_step(2)
    config = proof_config(model=net, epochs=1, max_grad_norm=1.0)
    given = (_train_otherwise, with_flags(config, mixed_precision="no"), variables)
    outcomes = LocalWorld(2, *given, folder=tmp_path).outcomes()
    assert (tmp_path / "run").exists() is not drifts
    if drifts:
        line = str(told_once(outcomes, 2))
        assert line.startswith("the last bits of a step (set OMP_NUM_THREADS, ATEN_CPU_CAPABILITY ")
    else:
        assert [summary["steps"] for summary in outcomes] == [15, 15]
