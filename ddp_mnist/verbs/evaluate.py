"""`evaluate RUN`: exact metrics of a finished run, on any number of processes.

Only rank 0's machine needs the run folder: rank 0 reads the weights and sends them to the others.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_mnist.cluster import rendezvous
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.world import broadcast_bytes, join_world
from ddp_mnist.config import Distribution
from ddp_mnist.data import cache
from ddp_mnist.data.batches import ImageData, Rows, split_rows
from ddp_mnist.errors import CheckpointError, UsageError
from ddp_mnist.run import weights
from ddp_mnist.run.evaluation import evaluate_split, prepare_split
from ddp_mnist.run.folder import CONFIG, read_json


def evaluate_run(
    run: str,
    split: str,
    flags: Distribution,
    launch: Launch,
    *,
    dataset: str | None = None,
    cache_dir: str | None = None,
    per_process: int | None = None,
) -> dict[str, Any] | None:
    """Metrics in full precision, as a dict for JSON on rank 0; None on the other ranks.

    Args:
        run: run folder, needed on rank 0's machine only.
        split: test, validation or train (train without the validation images).
        dataset: another one than the run's own.
        per_process: images per process and forward pass; changes no result.

    Raises:
        CheckpointError: the run folder or its weights cannot be read.
        DataError: the data set is not there.
        UsageError: it has another number of classes, or too few images for the split.
    """
    if per_process is not None and per_process < 1:
        raise UsageError(f"--batch-size {per_process}: must be at least 1")
    with join_world(flags, launch, full_precision=True) as world:
        store = world.store
        content = weights.read_bytes(run) if store.rank == 0 else b""
        sent = store.broadcast_from_rank0("run", lambda: _read_config(run))
        trained = weights.from_bytes(broadcast_bytes(world.accelerator, content), run)
        name = dataset or sent["dataset"]
        images = cache.load(name, cache_dir or sent["cache_dir"])
        store.barrier("data")
        rendezvous.check_same(store, {"the data's digest": images.digest})
        rows = _rows(images, split, sent["val_size"])
        if len(images.classes) > len(trained.classes):
            raise UsageError(
                f"--dataset {name}: has {len(images.classes)} classes, the run"
                f" {len(trained.classes)}; choose a data set of the same classes"
            )
        model = trained.model.to(world.accelerator.device)
        loader = prepare_split(world.accelerator, rows, per_process)
        metrics = evaluate_split(world.accelerator, model, loader, len(trained.classes))
        if not world.accelerator.is_main_process:
            return None
        return {
            "run": run,
            "split": split,
            "dataset": images.describe(),
            "world_size": world.accelerator.num_processes,
            "classes": trained.classes,
            **asdict(metrics),
        }


def _read_config(run: str) -> dict[str, Any]:
    """What the other ranks need beside the weights: data set and size of the validation split."""
    try:
        config = read_json(Path(run) / CONFIG)
        return {
            "dataset": config["run"]["dataset"],
            "cache_dir": config["run"]["cache_dir"],
            "val_size": config["recipe"]["val_size"],
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{run}: {CONFIG} is missing or damaged; name a run that `train` wrote"
        ) from error


def _rows(images: ImageData, split: str, val_size: int) -> Rows:
    if split == "test":
        return Rows(images.test_images, images.test_labels)
    if split == "validation" and val_size == 0:
        raise UsageError("--split validation: the run held no images out (--val-size 0)")
    if (there := len(images.train_labels)) <= val_size:
        raise UsageError(
            f"--split {split}: {images.name} has {there:,} train images, and the run held"
            f" {val_size:,} out; use --split test"
        )
    train_numbers, val_numbers = split_rows(there, val_size)
    numbers = train_numbers if split == "train" else val_numbers
    return Rows(images.train_images, images.train_labels, numbers)
