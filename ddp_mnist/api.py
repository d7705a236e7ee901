"""The trainer from Python, for a notebook or a script: keywords are the command line's flags.

`ddp-mnist train --help` lists them.

    from ddp_mnist.api import evaluate, predict, train

    summary = train(dataset="digits", epochs=2, run_dir="a")
    evaluate("a")["accuracy"]
    predict("a", ["seven.png"])

An expected failure raises one of ddp_mnist.errors, with the sentence that the command line prints;
Ctrl-C, or the notebook's stop button, saves a checkpoint and raises Preempted. Several processes
are started as always with Accelerate: `accelerate.notebook_launcher(train_it, num_processes=2)`.
"""

import contextlib
import os
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddp_mnist.cluster.hardware import is_forked
from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import Flags
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig, fields_of
from ddp_mnist.errors import UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.system.text import did_you_mean
from ddp_mnist.train import train as run_training
from ddp_mnist.training.folder import SUMMARY
from ddp_mnist.verbs import evaluate as evaluation
from ddp_mnist.verbs import predict as prediction
from ddp_mnist.verbs.flags import Evaluate, Predict
from ddp_mnist.verbs.verify.mistakes import make_mistake


def train(**flags: Any) -> dict[str, Any]:
    """Train as `ddp-mnist train` does. Return the content of summary.json; {} after `dry_run`.

    All arguments are keywords, e.g. `dataset="photos"`. `model` and `metrics` may be classes and
    functions from a file, which Python imports once in a process. If `resume` names a finished run,
    return its summary.
    """
    config = TrainConfig.from_flags(_checked(flags, RunFlags, Recipe, Distribution))
    with _process_as_found():
        summary = run_training(config, find_launch(config.distribution), make_mistake)
    file = Path(config.run.run_dir or config.run.resume or "") / SUMMARY
    if not summary and not config.run.dry_run and file.exists():  # only on rank 0's machine
        summary = read_json(file)
    return summary


def evaluate(run: str | Path, **flags: Any) -> dict[str, Any] | None:
    """Return the exact metrics of a finished run on a split; None on ranks other than 0."""
    typed = _checked({"run": run, **flags}, Evaluate, Distribution)
    options, distribution = Evaluate.from_flags(typed), Distribution.from_flags(typed)
    with _process_as_found():
        return evaluation.evaluate_run(options, distribution)


def predict(
    run: str | Path, images: str | Path | Sequence[str | Path], **flags: Any
) -> list[dict[str, Any]]:
    """Return the class of each image file: the dict that `ddp-mnist predict` prints as a line.

    Raise DataError if a file cannot be read; the answers for the others are not returned.
    """
    files: list[Any] = [images]
    if not isinstance(images, str | bytes | os.PathLike):
        with contextlib.suppress(TypeError):  # one that is no collection
            files = [*images]
    for file in files:
        if not isinstance(file, str | os.PathLike):  # an image, an array, bytes
            raise UsageError(f"images: got {type(file).__name__}; save it, and give its path")
    options = Predict.from_flags(_checked({"run": run, "images": files, **flags}, Predict))
    if is_forked():
        torch.set_num_threads(1)
    with torch.random.fork_rng(()):  # a user's net draws its weights on the CPU
        return list(prediction.answer(options, prediction.load(options)))


def _checked(typed: dict[str, Any], *groups: type[Flags]) -> dict[str, Any]:
    """Return the keywords, dropping a None that is the default.

    Raise UsageError for unknown ones.
    """
    known = {field.name: field.default for field in chain(*fields_of(*groups).values())}
    for name in typed.keys() - known.keys():
        hint = did_you_mean(name, known) or "; see ddp-mnist VERB --help"
        raise UsageError(f"{name}: unknown keyword{hint}")
    return {k: value for k, value in typed.items() if value is not None or known[k] is not None}


@contextlib.contextmanager
def _process_as_found() -> Iterator[None]:
    """Restore what a run changes in its process, which may be a notebook's.

    These are the environment, sys.path, the number of threads and the state of random numbers;
    `join_world` restores Accelerate's own state.
    """
    if threading.current_thread() is not threading.main_thread():
        name, fix = threading.current_thread().name, "call the trainer there, or in a process"
        raise UsageError(f"thread {name}: signals reach the main thread alone; {fix} of its own")
    variables, path = dict(os.environ), sys.path[:]
    drawn = random.getstate(), np.random.get_state()
    gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    threads = 1 if is_forked() else torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(range(gpus)):
            yield
    finally:
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
        sys.path[:] = path
        for name in os.environ.keys() - variables:
            del os.environ[name]
        os.environ.update(variables)
        torch.set_num_threads(threads)
