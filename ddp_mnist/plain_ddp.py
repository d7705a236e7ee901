"""The core of the training without Accelerate, to see what `accelerator.prepare` does for it.

    python -m ddp_mnist.plain_ddp --dataset digits --epochs 2
    torchrun --nproc-per-node 2 -m ddp_mnist.plain_ddp --dataset digits --epochs 2

Read it next to train.py. The order of the images, the learning rates and the weights are those of
`ddp_mnist train`; a test compares them in float64. Left out are gradient accumulation, clipping,
validation, mixed precision, checkpoints and the run folder.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_mnist.config.recipe import Recipe, ResolvedRecipe, resolve_recipe
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.data import cache
from ddp_mnist.data.augment import augment, augmentation_table
from ddp_mnist.data.batches import GlobalBatchSampler, rows_of_splits, subset
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.errors import DdpMnistError, one_line
from ddp_mnist.nets.build import build_net
from ddp_mnist.nets.optim import make_optimizer
from ddp_mnist.task import make_task


def load(dataset: str, given: Recipe, world_size: int) -> tuple[ImageData, ResolvedRecipe]:
    """Return the images, without those held out for validation, and the recipe for them."""
    images = cache.load(dataset)
    train_rows, pictures = len(images.rows["train"]), images.image_format.pictures
    images = images.hold_out(given.val_size_of(train_rows))
    held_out = len(images.rows["validation"])
    return images, resolve_recipe(given, train_rows, world_size, held_out, pictures)


def train_plain(
    images: ImageData, recipe: ResolvedRecipe, seed: int, dtype: torch.dtype
) -> tuple[nn.Module, float]:
    """Train in the existing process group. Return the net and the seconds that it took."""
    rank, gpu = dist.get_rank(), torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    rows, _, _ = rows_of_splits(images, device)

    # Every rank draws the same global batches and takes its own share of each.
    batches = GlobalBatchSampler(rows, recipe.batch_size, seed)
    share = recipe.batch_size // dist.get_world_size()
    mine = slice(rank * share, (rank + 1) * share)

    # The seed makes the weights those of train.py; DDP sends rank 0's to all in any case.
    torch.manual_seed(seed)
    task = make_task(recipe, images.classes, rows, device)
    net = build_net(recipe.model, task, images.image_format).to(device, dtype)
    model = DistributedDataParallel(
        net.to(memory_format=torch.channels_last), gradient_as_bucket_view=True
    )
    optimizer = make_optimizer(model, recipe)

    # As in train.py: DDP rebuilds its buckets once, after the first backward pass. Its gradients
    # are discarded.
    model.eval()
    model(rows.take(torch.arange(share))[0]).sum().backward()
    model.zero_grad()
    model.train()

    step, started = 0, time.monotonic()
    for epoch in range(recipe.epochs):
        batches.start_epoch(epoch)
        if recipe.augment:
            table = augmentation_table(images.image_format, len(rows), seed, epoch, recipe.epochs)
            augmentations = table.to(device)
        for batch in batches:
            inputs, labels, indices = rows.take(batch[mine])
            if recipe.augment:
                inputs = augment(inputs, augmentations[indices])
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate(step)
            loss = task.training_loss(model(inputs), labels)  # of this rank's share
            loss.backward()  # while it computes the gradients, DDP averages them over the ranks
            optimizer.step()  # the same on every rank, so the weights stay equal
            optimizer.zero_grad()
            step += 1
    if gpu:
        torch.cuda.synchronize()  # the last steps are only queued so far
    return net, time.monotonic() - started


@torch.no_grad()
def test_accuracy(net: nn.Module, images: ImageData) -> float:
    """Return the accuracy: each rank counts its own test images, and the counts are added up."""
    device = next(net.parameters()).device
    correct = torch.zeros((), dtype=torch.int64, device=device)
    test = subset(images, "test")
    net.eval()
    for rows in torch.arange(dist.get_rank(), len(test), dist.get_world_size()).split(1000):
        pixels, labels, _ = test.take(rows)
        correct += (net(pixels.to(device)).argmax(1) == labels.to(device)).sum()
    dist.all_reduce(correct)  # the sum over the ranks, on every rank
    return correct.item() / len(test)


def join_process_group() -> None:
    """Join the other processes that torchrun started, or form a group of one."""
    if not os.environ.keys() & {"RANK", "WORLD_SIZE", "SLURM_PROCID"}:
        alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= alone | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if gpus:  # each process takes one; otherwise all would open GPU 0 as well
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    backend = "nccl" if gpus >= processes_here else "gloo"  # NCCL needs a GPU for each process
    # It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    dist.init_process_group(backend, timeout=timedelta(seconds=300))


def main() -> None:
    parser = argparse.ArgumentParser(prog="ddp_mnist.plain_ddp", description=__doc__)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    typed = parser.parse_args()
    try:
        run, given = RunFlags(typed.dataset, seed=typed.seed), Recipe(epochs=typed.epochs)
        images, recipe = load(run.dataset, given, int(os.environ.get("WORLD_SIZE", "1")))
    except DdpMnistError as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(error.code)

    join_process_group()
    net, seconds = train_plain(images, recipe, run.seed, torch.float32)
    accuracy = test_accuracy(net, images)
    if dist.get_rank() == 0:
        count = f"{len(images.rows['test']):,}"
        print(f"test accuracy {accuracy:.4f} on {count} images, {seconds:.1f} s of training")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
