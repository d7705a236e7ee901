"""Train MNIST: `python -m ddp_mnist.core`. The docstring of this folder says what is yours."""

import argparse
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, load_dataset

from .accelerator import make_accelerator
from .batches import Rows
from .errors import StopRequested
from .fit import fit
from .nets import CNN
from .recipe import Recipe
from .run import Run
from .task import Classification, Task
from .wrappers import Normalised


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ddp_mnist.core", description=__doc__)
    parser.add_argument("--dataset", default="ylecun/mnist", help="an id on the Hub, or a folder")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=144, help="of all processes together")
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--float64", action="store_true", help="to see N processes equal one")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--resume", action="store_true", help="from --checkpoint")
    return parser.parse_args()


# --- Yours


def make_rows(dataset: str) -> tuple[Rows, Rows, Rows]:
    """Return the rows to train on, to validate on and to test on; here none to validate on.

    They must be the same on every process and in every start: what is drawn needs a seed.
    """
    found = load_dataset(dataset)
    train, test = read(found["train"]), read(found["test"])
    return train, Rows(train.images, train.targets, torch.arange(0)), test


def read(split: Dataset) -> Rows:
    """Decode a split once, to uint8 [N, 1, 28, 28]; reading it later costs next to nothing."""
    columns = split.with_format("numpy")[:]
    images = torch.from_numpy(np.stack(columns["image"]))[:, None]
    return Rows(images, torch.from_numpy(np.asarray(columns["label"], np.int64)))


def make_net(rows: Rows, task: Task, dtype: torch.dtype) -> Normalised:
    """Return the net, for pixels. The mean and deviation are those of the train rows."""
    pixels = rows.images.float() / 255
    mean, std = round(pixels.mean().item(), 4), round(pixels.std(correction=0).item(), 4)
    net = CNN(task.outputs).to(dtype)
    return Normalised(net.to(memory_format=torch.channels_last), [mean], [std])


def make_task() -> Task:
    return Classification([*"0123456789"], smoothing=0.1)


def make_recipe(rows: Rows, arguments: argparse.Namespace) -> Recipe:
    return Recipe(
        epochs=arguments.epochs,
        batch_size=arguments.batch_size,
        steps_per_epoch=len(rows) // arguments.batch_size,
        grad_accum=arguments.grad_accum,
    )


# --- The run


def main() -> None:
    arguments = parse_arguments()
    accelerator = make_accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no" if arguments.float64 else None,  # None: the launcher's
    )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise SystemExit(f"WORLD_SIZE={started}: each process would train alone; start it anew")
    with accelerator.local_main_process_first():  # which fetches the data, or converts it, once
        rows = make_rows(arguments.dataset)
    task, recipe = make_task(), make_recipe(rows[0], arguments)
    dtype = torch.float64 if arguments.float64 else torch.float32
    run = Run(accelerator, recipe, arguments.checkpoint, arguments.resume)
    signal.signal(signal.SIGTERM, lambda *_: run.stop_requests.__setitem__(0, 1.0))
    try:
        make = partial(make_net, rows[0], task, dtype)
        fit(accelerator, rows, make, task, recipe, arguments.seed, run)
    except StopRequested as stop:
        accelerator.print(f"{stop}; to go on, add --resume")
        raise SystemExit(143) from None
    accelerator.free_memory()  # DDP before the group: else gloo's threads may abort as Python exits
    accelerator.end_training()


if __name__ == "__main__":
    main()
