from types import SimpleNamespace
from typing import Any

from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.core.task import Classification
from ddp_mnist.data import cache
from ddp_mnist.training.named_objects import NamedObjects
from ddp_mnist.training.saved_config import must_be_equal
from ddp_mnist.training.training_run import TrainingRun
from tests.run_checks import fit_recipe


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
    assert (first["--mixed-precision"], first["--backend"]) == ("bf16", "gloo")
