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
    where = "the weights are then in FILE.model.pt, without its suffix"
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help=where)
    parser.add_argument("--resume", action="store_true", help="from --checkpoint")
    return parser.parse_args()


# --- Yours


def make_rows(dataset: str) -> tuple[Rows, Rows, Rows]:
    """Return the rows to train on, to validate on and to test on; here none to validate on.

    Without them a recipe's `patience` and `target_accuracy` have no effect. The rows must be the
    same on every process and in every start: what is drawn needs a seed.
    """
    found = load_dataset(dataset)
    train, test = read(found["train"]), read(found["test"])
    return train, Rows(train.images, train.targets, torch.arange(0)), test


def read(split: Dataset) -> Rows:
    """Decode a split once, to uint8 [N, 1, 28, 28]; reading it later costs next to nothing."""
    columns = split.with_format("numpy")[:]
    images = torch.from_numpy(np.stack(columns["image"]))[:, None]
    return Rows(images, torch.from_numpy(np.asarray(columns["label"], np.int64)))


def make_net(rows: Rows, task: Task, float64: bool) -> Normalised:
    """Return the net for pixels, with the train rows' mean and deviation of each channel.

    `fit` needs a `Normalised` net, which casts rows to the dtype of its weights. Rows other than
    pixels [B, C, ...] stay as they are with a mean of 0 and a deviation of 1 / 255 per channel.
    """
    pixels = (rows.images.float() / 255).transpose(0, 1).flatten(1)  # [channels, all pixels]
    mean = [round(each, 4) for each in pixels.mean(1).tolist()]
    std = [round(each, 4) for each in pixels.std(1, correction=0).tolist()]
    channels, height, width = rows.images.shape[1:]
    net = CNN(task.outputs, (channels, height, width))
    net.to(torch.float64 if float64 else torch.float32).to(memory_format=torch.channels_last)
    return Normalised(net, mean, std)


def make_task(rows: Rows, device: torch.device) -> Task:
    """Return the task. For rare classes, add `weights=balanced(rows.targets).to(device)`."""
    del device
    classes = [str(label) for label in range(int(rows.targets.max()) + 1)]
    return Classification(classes, smoothing=0.1)


def make_recipe(rows: Rows, arguments: argparse.Namespace) -> Recipe:
    """Return how the net is trained; recipe.py has what else it may say. Rows must fill a batch."""
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
        raise SystemExit(f"WORLD_SIZE={started}: Accelerate joined none, so each would train alone")
    with accelerator.local_main_process_first():  # one fetches and converts it; each decodes it
        rows = make_rows(arguments.dataset)
    task = make_task(rows[0], accelerator.device)
    recipe = make_recipe(rows[0], arguments)
    make_our_net = partial(make_net, rows[0], task, arguments.float64)
    run = Run(accelerator, recipe, arguments.seed, arguments.checkpoint, arguments.resume)

    def ask_to_stop(*_: object) -> None:
        run.stop_requests[0] = 1.0

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask_to_stop)
    code = 0
    try:
        fit(accelerator, rows, make_our_net, task, recipe, arguments.seed, run)
    except StopRequested as stop:
        accelerator.print(f"{stop}; to continue, add --resume")
        code = 128 + signal.SIGTERM
    accelerator.free_memory()  # DDP before the group: else gloo's threads may abort as Python exits
    accelerator.end_training()
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
