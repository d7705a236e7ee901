"""Time the training loop here, as ratios of what ran in the same rounds.

    make bench                                            # MNIST, three minutes on two cores
    python tools/bench.py --dataset digits --model mlp --processes 4
    python tools/bench.py --busy 0 1 2 4                  # threads, beside so many busy programs

The first two compare, each in `--repeats` rounds after one that is discarded:

    fit over a plain loop   what Accelerate, log lines and sync points cost
    N processes over one    how far training scales; N would be perfect

The plain loop is `train_plain` below: the same batches, net and optimizer in DDP alone. Every
process has one CPU thread, as under `make train` on two cores. Other programs on the machine change
both sides of a ratio, but rarely by the same share: close them.

With `--busy`, whole runs of one process train beside programs that this one starts, each of which
keeps a core busy: with the number of threads that the run chooses by itself, with one, and with as
many as there are cores. Their speeds leave out the second at most in which a run chooses.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch.nn.parallel import DistributedDataParallel

from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import backend_among, preload, run_world
from ddp_mnist.cluster.signals import StopSignals
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.core.augment import augment, augmentation_table
from ddp_mnist.core.batches import GlobalBatchSampler
from ddp_mnist.core.optim import make_optimizer
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.splits import rows_of_splits
from ddp_mnist.errors import DdpMnistError, one_line
from ddp_mnist.system.affinity import cores
from ddp_mnist.system.files import read_json
from ddp_mnist.system.text import count
from ddp_mnist.train import fit_recorded
from ddp_mnist.training.folder import SUMMARY
from ddp_mnist.training.recorded_run import RecordedRun
from ddp_mnist.training.training_run import TrainingRun, make_net, make_run

TEST_ROWS = 1000
STEPS = 380  # optimizer steps in a measurement, at most: an epoch of MNIST
TIMEOUT_S = 600.0  # of a measurement

preload("ddp_mnist.train", "ddp_mnist.core.metrics")


def main() -> None:
    """Read the flags, prepare the data set, and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="auto", help="as for train [auto]")
    parser.add_argument("--processes", type=int, default=2, help="at least 2 [2]")
    parser.add_argument("--repeats", type=int, default=7, help="rounds [7]")
    parser.add_argument("--model", default="cnn", help="as for train [cnn]")
    parser.add_argument("--busy", type=int, nargs="+", metavar="N", help="numbers of programs")
    typed = parser.parse_args()
    if min(typed.processes, typed.repeats) < 2:
        parser.error("--processes and --repeats must be at least 2")
    try:
        dataset, notes = cache.choose(typed.dataset, None)
        print(*notes, f"{dataset}, {typed.repeats} rounds", sep="\n", flush=True)
        if typed.busy:
            for programs in typed.busy:
                measure_threads(dataset, typed.model, programs, typed.repeats)
        else:
            measure(dataset, typed.model, typed.processes, typed.repeats)
    except DdpMnistError as error:
        sys.exit(one_line(error))


def measure(dataset: str, model: str, processes: int, repeats: int) -> None:
    """Alternate between all programs, and print the ratios."""
    sizes = range(1, processes + 1)
    programs = [("train", size) for size in sizes] + [("plain", 1), ("plain", processes)]
    speeds: dict[tuple[str, int], list[float]] = {program: [] for program in programs}
    for number in range(repeats + 1):
        for program in programs if number % 2 else reversed(programs):
            kind, size = program
            given = kind, dataset, size, model
            folder, timeout_s = Path.cwd(), TIMEOUT_S
            ranks = run_world(size, images_per_s, *given, folder=folder, timeout_s=timeout_s)
            speeds[program].append(min(ranks))  # all wait for the slowest
    for size in (1, processes):
        ours, plain = speeds["train", size], speeds["plain", size]
        show(f"fit over a plain loop, {count(size, 'process')}", ours, plain)
    for size in sizes[1:]:
        show(f"{size} processes over one", speeds["train", size], speeds["train", 1])


def show(name: str, over: Sequence[float], under: Sequence[float]) -> None:
    """Print both speeds and the ratio, as the median and extremes of all rounds but the first."""
    ratios = sorted(a / b for a, b in zip(over[1:], under[1:], strict=True))
    middle = statistics.median(ratios)
    print(
        f"{name:<40} {middle:.3f}  ({ratios[0]:.3f} to {ratios[-1]:.3f}, n = {len(ratios)};"
        f" {statistics.median(over[1:]):,.0f} and {statistics.median(under[1:]):,.0f} images/s)",
        flush=True,
    )


def measure_threads(dataset: str, model: str, programs: int, repeats: int) -> None:
    """Alternate between numbers of threads beside busy programs, and print the ratios."""
    numbers = ("", "1", str(cores()))  # the first one lets the run choose
    speeds: dict[str, list[float]] = {threads: [] for threads in numbers}
    with busy(programs):
        for number in range(repeats + 1):
            for threads in numbers if number % 2 else reversed(numbers):
                speeds[threads].append(speed_of_run(dataset, model, threads))
    chosen, one, several = speeds.values()
    beside = f"beside {count(programs, 'program')}"
    show(f"chosen threads over one, {beside}", chosen, one)
    show(f"chosen threads over {cores()}, {beside}", chosen, several)


@contextlib.contextmanager
def busy(programs: int) -> Iterator[None]:
    """Run so many programs, each of which keeps a core busy, beside the block."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(programs)]
    try:
        yield
    finally:
        for program in started:
            program.kill()
            program.wait()


def speed_of_run(dataset: str, model: str, threads: str) -> float:
    """Return the images/s of a whole run of one process with so many threads."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"OMP_NUM_THREADS": threads} if threads else {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ddp_mnist", "train", "--cpu", "--quiet"]
        flags = ["--dataset", dataset, "--model", model, "--run-dir", f"{folder}/run"]
        subprocess.run([*command, *flags], env=variables, check=True)
        return float(read_json(Path(folder, "run", SUMMARY))["images_per_second"])


def images_per_s(kind: str, dataset: str, size: int, model: str = "cnn") -> float:
    """Return the speed over all ranks of an epoch of at most STEPS full batches."""
    flags = Distribution(mixed_precision="no", backend=backend_among(size))
    with join_world(flags, find_launch(flags)) as world:
        images = cache.load(dataset)
        rows, shown = len(images.rows["train"]), images.image_format.kind
        resolved, full = resolve_recipe(Recipe(model=model), rows, size, kind=shown)
        steps = min(STEPS, rows // full.batch_size)
        recipe = replace(full, epochs=1, steps_per_epoch=steps)
        short = first_rows(images, steps * recipe.batch_size)
        config = TrainConfig(RunFlags(dataset=dataset, quiet=True), resolved, flags)
        run = make_run(config, recipe, world, short)
        if kind == "plain":
            seconds = train_plain(run)
        else:
            seconds = fit_recorded(RecordedRun(run, StopSignals()))["train_seconds"]
        return steps * recipe.batch_size / seconds


def train_plain(run: TrainingRun) -> float:
    """Train an epoch with DistributedDataParallel alone. Return the seconds that it took."""
    accelerator, recipe, seed = run.world.accelerator, run.recipe, run.config.run.seed
    device, rank, size = accelerator.device, accelerator.process_index, accelerator.num_processes
    rows, _, _ = rows_of_splits(run.images, device)
    batches = GlobalBatchSampler(rows, recipe, seed)
    share = recipe.batch_size // size
    mine = slice(rank * share, (rank + 1) * share)
    net = make_net(run).to(device)
    model = DistributedDataParallel(net, gradient_as_bucket_view=True) if size > 1 else net
    optimizer = make_optimizer(model, recipe)
    batches.start_epoch(0)
    if recipe.augment:
        augmentations = augmentation_table(recipe, rows, seed, 0).to(device)
    started = time.monotonic()
    for step, batch in enumerate(batches):
        inputs, labels, indices = rows.take(batch[mine])
        if recipe.augment:
            inputs = augment(inputs, augmentations[indices])
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        loss = run.task.training_loss(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    run.world.wait_for_gpu()  # the last steps are only queued so far
    return time.monotonic() - started


def first_rows(images: ImageData, train_rows: int) -> ImageData:
    """Return the data set with the first rows of its splits alone, without a validation."""
    most = {"train": train_rows, "test": TEST_ROWS}
    rows = {name: images.rows[name][:most_rows] for name, most_rows in most.items()}
    return replace(images, rows=rows | {"validation": np.arange(0)})


if __name__ == "__main__":
    main()
