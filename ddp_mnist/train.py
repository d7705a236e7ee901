"""`ddp-mnist train`: a run from joining the other processes to the result in its folder.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m ddp_mnist train

The loop itself is `fit` in core/fit.py. The default run, an epoch of MNIST, reaches 99.2 % in four
to nine seconds on two cores.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core.fit import fit
from ddp_mnist.data.splits import rows_of_splits
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.training.recorded_run import RecordedRun
from ddp_mnist.training.resume import distribution_before
from ddp_mnist.training.set_up import set_up_run
from ddp_mnist.training.training_run import TrainingRun, make_net


def train(
    config: TrainConfig, launch: Launch, make_mistake: Callable[[TrainingRun], TrainingRun]
) -> dict[str, Any]:
    """Train on this rank. Return the summary; {} after --dry-run, or if the run was finished.

    `make_mistake` is called with --inject alone, and returns the run with that mistake. Raise a
    DdpMnistError for every expected failure, see errors.py; Preempted after a signal. What one rank
    raises ends all: the others raise FailedElsewhere, see cluster/failures.py.
    """
    before = partial(distribution_before, config)
    with (
        listen() as stop,  # to signals, until the end of the run is recorded
        RunFolder() as folder,  # records how the run ends; only rank 0 gets a path, in set_up_run
        # joins the others, makes the Accelerator
        join_world(config.distribution, launch, earlier=before) as world,
        set_up_run(config, world, folder, stop) as recorded,  # all agree
    ):
        if recorded is None:
            return {}
        if recorded.run.config.recipe.inject:
            recorded.run = make_mistake(recorded.run)
        return fit_recorded(recorded)


def fit_recorded(recorded: RecordedRun) -> dict[str, Any]:
    """Train, validate and test. Return the summary."""
    run, accelerator = recorded.run, recorded.run.world.accelerator
    rows = rows_of_splits(run.images, accelerator.device)
    with recorded.as_errors():
        make, seed = partial(make_net, run), run.config.run.seed
        return fit(accelerator, rows, make, run.task, run.recipe, seed, recorded)


if __name__ == "__main__":  # as a script: restart as a module, without this folder on sys.path
    os.execv(sys.executable, [sys.executable, "-m", "ddp_mnist", "train", *sys.argv[1:]])
