"""The same training on torch alone, to see what Accelerate's `prepare` and `accumulate` stand for.

    python -m ddp_mnist.plain_ddp --dataset digits --epochs 2
    torchrun --nproc-per-node 2 -m ddp_mnist.plain_ddp --dataset digits --epochs 2

Same order, learning rates and weights as `ddp_mnist train` (a test compares them in float64); no
accumulation, augmentation, clipping, validation, run folder or mixed precision. Read it beside
train.py.
"""

import argparse
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.config.run import RunFlags
from ddp_mnist.data import cache
from ddp_mnist.data.augment import augment, augmentation_table
from ddp_mnist.data.batches import GlobalBatchSampler, ImageData, train_val_test_split
from ddp_mnist.errors import DdpMnistError, one_line
from ddp_mnist.nets.build import build_net
from ddp_mnist.nets.losses import make_loss
from ddp_mnist.nets.optim import make_optimizer


def train_plain(
    images: ImageData, given: Recipe, seed: int, dtype: torch.dtype
) -> tuple[nn.Module, float]:
    """Train in the existing process group. Return the net and the seconds that it took."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    every = len(images.train_labels)
    images = images.hold_out(given.val_size_of(every)).to(device)
    pictures = images.image_format.pictures
    recipe = resolve_recipe(given, every, world_size, len(images.val_rows), pictures)
    rows, _, _ = train_val_test_split(images)
    batches = GlobalBatchSampler(rows, recipe.batch_size, seed)
    share = recipe.batch_size // world_size
    mine = slice(rank * share, (rank + 1) * share)

    torch.manual_seed(seed)
    net = build_net(recipe.model, images.classes, images.image_format).to(device, dtype)
    net = net.to(memory_format=torch.channels_last)
    model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, recipe)
    mean_loss = make_loss(recipe, rows, device)

    # DDP settles how it groups the gradients in the first backward, which is discarded.
    model.eval()
    model(rows.__getitems__(torch.arange(share))[0]).sum().backward()
    model.zero_grad()
    model.train()

    step, clock = 0, time.monotonic()
    for epoch in range(recipe.epochs):
        batches.start_epoch(epoch)
        if recipe.augment:
            table = augmentation_table(images.image_format, len(rows), seed, epoch, recipe.epochs)
            augmentations = table.to(device)
        for batch in batches:
            inputs, labels, indices = rows.__getitems__(batch[mine])
            if recipe.augment:
                inputs = augment(inputs, augmentations[indices])
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate(step)
            # backward() averages the gradients over the ranks while it computes them
            mean_loss(model(inputs), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    if gpu:
        torch.cuda.synchronize()  # the last steps are only queued so far
    return net, time.monotonic() - clock


def test_accuracy(net: nn.Module, images: ImageData) -> float:
    """Return the accuracy: every rank counts its own rows, the counts are added, divided once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = next(net.parameters()).device
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # correct, seen
    net.eval()
    with torch.no_grad():
        for start in range(rank, len(images.test_labels), world_size * 1000):
            part = slice(start, start + world_size * 1000, world_size)
            labels = images.test_labels[part].to(device)
            predictions = net(images.test_images[part].to(device)).argmax(1)
            counts[0] += (predictions == labels).sum()
            counts[1] += len(labels)
    dist.all_reduce(counts)
    correct, seen = counts.tolist()
    assert seen == len(images.test_labels)
    return correct / seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="ddp_mnist.plain_ddp", description=__doc__)
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        run = RunFlags(arguments.dataset, seed=arguments.seed)
        recipe = Recipe(epochs=arguments.epochs)
        images = cache.load(run.dataset)
        rows, pictures = len(images.train_labels), images.image_format.pictures
        resolve_recipe(recipe, rows, int(os.environ.get("WORLD_SIZE", 1)), pictures=pictures)
    except DdpMnistError as error:
        print(one_line(error), file=sys.stderr)
        sys.exit(error.code)

    if not os.environ.keys() & {"RANK", "WORLD_SIZE", "SLURM_PROCID"}:  # no launcher: one process
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    processes_here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    backend = "nccl" if gpus >= processes_here else "gloo"  # NCCL needs a GPU for each process
    if gpus:  # else every process would open GPU 0 as well
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    # It reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    dist.init_process_group(backend, timeout=timedelta(seconds=300))
    net, seconds = train_plain(images, recipe, arguments.seed, torch.float32)
    accuracy = test_accuracy(net, images)
    if dist.get_rank() == 0:
        count = f"{len(images.test_labels):,}"
        print(f"test accuracy {accuracy:.4f} on {count} images, {seconds:.1f} s of training")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
