"""The result of a run: summary.json, and the lines that the console ends with."""

import time
from pathlib import Path
from typing import Any

import torch

from ddp_mnist.cluster import hardware
from ddp_mnist.cluster.store import name_of
from ddp_mnist.cluster.world import World
from ddp_mnist.config.flag_fields import flag_name
from ddp_mnist.config.mistakes import wrong_on_purpose
from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.state import State
from ddp_mnist.system.files import read_json
from ddp_mnist.system.text import count, named_lines, quoted
from ddp_mnist.training import scores
from ddp_mnist.training.folder import SUMMARY, RunFolder
from ddp_mnist.training.scores import number_text, score_texts
from ddp_mnist.training.training_run import TrainingRun
from ddp_mnist.training.versions import git_commit, package_versions, program


def summarise(run: TrainingRun, state: State, test: EvalResult) -> dict[str, Any]:
    """Return summary.json: the result, and everything needed to judge it.

    Seconds are wall-clock, summed over the parts of a run that was resumed.
    """
    config, world, images, progress = run.config, run.world, run.images, state.progress
    recipe, weights = config.recipe, run.found.weights
    images_trained_on = progress.step * run.recipe.batch_size
    device = world.device_name
    gpu = "none used" if device == "cpu" else torch.cuda.get_device_name(device)
    return {
        "outcome": "finished",
        "stopped_by": flag_name(progress.stopped_by) if progress.stopped_by else None,
        "score_name": test.name,
        f"test_{test.name}": test.score,
        "test_loss": test.loss,
        "test_count": test.count,
        f"val_{test.name}": progress.best_score if state.best_weights else progress.score,
        "val_loss": progress.best_loss if state.best_weights else progress.loss,
        "epochs": progress.epoch,
        "steps": progress.step,
        "skipped_steps": progress.skipped_steps,
        "resumed_from": progress.resumed_from,
        "global_batch_size": run.recipe.batch_size,
        "world_size": world.store.world_size,
        "num_machines": world.num_machines,
        "device": device,
        "backend": world.backend,
        "precision": world.precision,
        "compile": compiled_by(world),
        "threads": torch.get_num_threads(),
        "threads_tried": run.step_times,  # seconds of a step
        "seed": config.run.seed,
        "typed": config.typed_words(),
        **{n: getattr(recipe, n) for n in ("model", "lr", "inject", "grad_accum", "class_weights")},
        "loss_function": recipe.task or recipe.loss or scores.CROSS_ENTROPY,
        "weights": str(weights) if weights else None,  # DEFAULT may mean others one day
        "train_seconds": round(progress.train_seconds, 3),
        "save_seconds": round(progress.save_seconds, 3),
        "total_seconds": round(time.monotonic() - state.start_time, 3),
        "images_per_second": round(images_trained_on / max(progress.train_seconds, 1e-9), 1),
        "hosts": [name_of(host) for host in world.store.hosts],  # by rank
        "dataset": images.describe(),
        "classes": images.classes,
        "images_per_class": images.per_class() if images.classes else {},
        "notes": images.notes,
        "metrics": test.scores,
        **test.details,
        **({"confusion": scores.packed(test.details["confusion"])} if images.classes else {}),
        "machine": hardware.describe() | {"gpu": gpu},
        "versions": package_versions(recipe.model),
        "git": git_commit(),
    }


def compiled_by(world: World) -> str:
    """Return the compiler; "no" if it was not to compile, and also if torch went without it."""
    if world.compile_options and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        return f"no ({world.compiled_by} compiled nothing)"
    return world.compiled_by


def last_lines(outcome: dict[str, Any], run: RunFolder) -> str:
    """Return the result as lines; the first says it all."""
    name, classes = outcome["score_name"], outcome["classes"]
    score, images = outcome[f"test_{name}"], outcome["test_count"]
    wrong = f" ({round((1 - score) * images):,} wrong)" if classes else ""
    loss = scores.shown_loss(outcome, outcome["test_loss"])
    tested_on = f"{images:,} images of {outcome['dataset']['name']}"
    result = f"test {name} {number_text(score)} on {tested_on}{wrong}, {loss}"
    lines = {
        "and": ", ".join(score_texts(outcome["metrics"])),
        "trained": f"{outcome['train_seconds']:.1f} s on {count(outcome['world_size'], 'process')},"
        f" {outcome['images_per_second']:,.0f} images/s; {outcome['total_seconds']:.1f} s in all",
        "written to": str(run.path),
    }
    guessed = max(outcome["images_per_class"]["test"]) / images if classes else 0  # largest class
    if classes and score < guessed + 0.1 * (1 - guessed):
        fix = "look at its images (report), then try more --epochs or a lower --lr"
        lines["careful"] = f"that is hardly better than guessing: {fix}"
    lines["see"] = f"{program()} report {quoted(run.path)}"
    return "\n".join([result, named_lines(lines), *wrong_on_purpose(outcome["inject"])])


def finished_line(path: Path) -> str:
    """Return the line on a finished run that should not train longer."""
    summary = read_json(path / SUMMARY)
    stopped_by = summary["stopped_by"]
    early = f", stopped by {stopped_by}" if stopped_by else ""
    name = summary["score_name"]
    score = number_text(summary[f"test_{name}"])
    return (
        f"{path}: finished already, after epoch {summary['epochs']}{early}, test {name} {score};"
        f" to train longer, change {stopped_by or '--epochs'}"
    )
