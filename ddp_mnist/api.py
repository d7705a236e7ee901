"""The trainer from Python, for a notebook or a script: keywords are the command line's flags.

    from ddp_mnist.api import evaluate, predict, train

    summary = train(dataset="digits", epochs=2, run_dir="a")
    evaluate("a")["accuracy"]
    predict("a", ["seven.png"])

An expected failure raises one of ddp_mnist.errors, with the sentence that the command line prints;
Ctrl-C, or the notebook's stop button, saves a checkpoint and raises Preempted. Several processes
start as Accelerate's users do it: `accelerate.notebook_launcher(train_it, num_processes=2)`.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.errors import UsageError, did_you_mean
from ddp_mnist.flags import Flags, flag_fields
from ddp_mnist.run.folder import SUMMARY, read_json
from ddp_mnist.train import train as run_training
from ddp_mnist.verbs import evaluate as evaluation
from ddp_mnist.verbs import predict as prediction
from ddp_mnist.verbs.flags import Evaluate, Predict


def train(**flags: Any) -> dict[str, Any]:
    """Train as `ddp-mnist train` does. Return what summary.json holds; {} after `dry_run`."""
    config = TrainConfig.of(checked(flags, Run, Recipe, Distribution))
    adopt_ranks_of_debug_launcher()
    summary = run_training(config, find_launch(config.distribution))
    if not summary and not config.run.dry_run:  # it had finished before
        summary = read_json(Path(config.run.run_dir or config.run.resume or "") / SUMMARY)
    return summary


def evaluate(run: str | Path, **flags: Any) -> dict[str, Any] | None:
    """Return the exact metrics of a finished run on a split; None on other ranks than rank 0."""
    typed = checked({"run": run, **flags}, Evaluate, Distribution)
    distribution = Distribution.of(typed)
    adopt_ranks_of_debug_launcher()
    launch = find_launch(distribution)
    return evaluation.evaluate_run(Evaluate.of(typed), distribution, launch)


def predict(run: str | Path, images: Sequence[str | Path], **flags: Any) -> list[dict[str, Any]]:
    """Return for each image file its class, as `ddp-mnist predict` prints it: a dict for a line."""
    names = tuple(os.fspath(image) for image in images)
    typed = checked({"run": run, "images": names, **flags}, Predict)
    return [line for line, _ in prediction.predict(Predict.of(typed))]


def checked(typed: dict[str, Any], *groups: type[Flags]) -> dict[str, Any]:
    """Return the keywords with paths as text. Raise UsageError for one that is no flag's name."""
    known = [field.name for group in groups for field in flag_fields(group)]
    for name in typed.keys() - known:
        hint = did_you_mean(name, known) or "; see help() of this function"
        raise UsageError(f"{name}: there is no such keyword here{hint}")
    return {k: os.fspath(v) if isinstance(v, os.PathLike) else v for k, v in typed.items()}


def adopt_ranks_of_debug_launcher() -> None:
    """Leave the group that accelerate.debug_launcher forms, and take over its ranks."""
    file = os.environ.get("ACCELERATE_DEBUG_RDV_FILE")
    if file and dist.is_initialized():
        rank = str(dist.get_rank())
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        dist.destroy_process_group()
        Path(file).touch()  # the group removed it, and the launcher is going to


def document(function: Callable[..., Any], *groups: type[Flags]) -> None:
    """Give a function of keywords the signature and the help of the flags."""
    own = inspect.signature(function).parameters
    named = [parameter for parameter in own.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fields = [f for group in groups for f in flag_fields(group) if f.name not in own]
    keyword = inspect.Parameter.KEYWORD_ONLY
    named += [
        inspect.Parameter(f.name, keyword, default=f.default, annotation=f.type) for f in fields
    ]
    function.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    lines = [f"    {field.name}: {field.metadata['help']}" for field in fields]
    function.__doc__ = "\n".join([function.__doc__ or "", "", *lines])


document(train, Run, Recipe, Distribution)
document(evaluate, Evaluate, Distribution)
document(predict, Predict)
