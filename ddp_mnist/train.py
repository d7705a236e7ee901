"""The training run, from the first process met to the test accuracy.

    python -m ddp_mnist train --dataset digits
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m ddp_mnist train

An epoch of MNIST takes four to eight seconds on two cores and ends near 99.2 % test accuracy.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.utils import broadcast
from torch import nn

from ddp_mnist.augment import affine_table, apply_affine
from ddp_mnist.cluster import rendezvous
from ddp_mnist.cluster.failures import propagate_first_error
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.signals import StopSignals, listen
from ddp_mnist.cluster.world import World, join_world
from ddp_mnist.config import ResolvedConfig, TrainConfig, resolve_recipe
from ddp_mnist.data import cache
from ddp_mnist.data.batches import GlobalBatches, ImageData, Rows, split_images, train_loader
from ddp_mnist.data.sources import from_anywhere
from ddp_mnist.models import MODELS
from ddp_mnist.optim import learning_rate, make_optimizer
from ddp_mnist.run import resume, summary, tracking
from ddp_mnist.run import weights as weights_file
from ddp_mnist.run.console import Console
from ddp_mnist.run.evaluation import evaluate_split, import_metrics_meanwhile, prepare_split
from ddp_mnist.run.folder import CONFIG, MODEL, SUMMARY, RunFolder
from ddp_mnist.run.meter import SyncSchedule, sum_up
from ddp_mnist.run.profiling import StepProfiler, refuse_long_profile
from ddp_mnist.run.state import State
from ddp_mnist.seeding import seed_draws


def train(config: TrainConfig, launch: Launch) -> dict[str, Any]:
    """One rank's part of a run. Returns the summary; {} if there is nothing to train.

    Raises:
        DdpMnistError: every expected failure, see errors.py; Preempted if a signal came.
    """
    # --- Meet the other processes, and agree on what to do, on data and configuration
    verbose = launch.rank == 0 and not config.run.quiet
    with (
        RunFolder() as folder,
        Console(verbose, must_arrive=config.run.dry_run) as console,
        join_world(config.distribution, launch) as world,
        summary.told_elsewhere(world, verbose=not config.run.quiet),
    ):
        found = world.store.broadcast_from_rank0("resume", lambda: resume.find(config))
        if found and found["finished"]:
            console.print(found["finished"])
            return {}
        resolved, images = resolve(config, found, world, console)
        with listen(launch.child_of_launcher, world.store) as stop:
            rendezvous.check_same(world.store, summary.facts(resolved, world, images))
            if config.run.dry_run:
                console.print(summary.plan(resolved, world, images, None))
                return {}
            opened = resume.open_run(resolved, world, images, found, folder)  # all listen
            with (
                propagate_first_error(world.store),
                tracking.tracked(resolved, folder, world, console),
            ):
                outcome = train_in(opened, resolved, world, images, console, stop)
                world.store.barrier("trained", within_s=config.distribution.dist_timeout)
                return outcome


def train_in(
    opened: resume.Opened,
    config: ResolvedConfig,
    world: World,
    images: ImageData,
    console: Console,
    stop: StopSignals,
) -> dict[str, Any]:
    """The story: data, model, loop, validation, test."""
    folder, accelerator = opened.folder, world.accelerator
    recipe, seed = config.recipe, config.run.seed
    device, classes = accelerator.device, len(images.classes)
    accelerator.gradient_accumulation_steps = recipe.grad_accum
    console.print(summary.plan(config, world, images, folder.path))
    folder.write_json(CONFIG, opened.resolved)

    # --- Data on the device: global batches, the same on every rank, which Accelerate deals out
    images = images.to(device)
    train_rows, val_rows, test_rows = split_images(images, recipe.val_size)
    batches = GlobalBatches(len(train_rows), recipe.batch_size, seed, recipe.grad_accum, device)
    total_steps = recipe.total_steps

    # --- Model and optimizer, equal on every rank
    net = build_model(config, world, classes)
    optimizer = make_optimizer(net, recipe)
    model, optimizer, loader = accelerator.prepare(
        net, optimizer, train_loader(train_rows, batches)
    )
    val_loader = prepare_split(accelerator, val_rows)
    if config.distribution.compile:
        console.print("compiling  the model, which can take minutes")
    throw_away_one_backward(model, train_rows, batches.batch_size // accelerator.num_processes)
    if accelerator.is_main_process:
        import_metrics_meanwhile()

    # --- All that changes from here on, from the beginning or as a checkpoint left it
    state = State(net, optimizer, accelerator.scaler, world.started)
    if resumed := resume.go_on(state, opened, world, recipe, batches.steps_per_epoch):
        console.print(resumed)
    progress = state.progress
    stop.save = save = functools.partial(resume.save, opened, state, config.run.keep)
    stop.at_once = functools.partial(resume.give_up, opened)

    # --- Train: rate of the step, forward, backward, clip, update
    schedule = SyncSchedule(progress.step)
    profiler = StepProfiler(config.run.profile, accelerator, folder, console)
    profiler.plan(progress.step, batches.steps_per_epoch, total_steps)
    losses: list[torch.Tensor] = []  # of each batch since all ranks last looked
    hits: list[torch.Tensor] = []  # how many each of them got right
    while progress.epoch < recipe.epochs and not progress.stopped_by:
        epoch, first_step = progress.epoch, progress.epoch * batches.steps_per_epoch
        folder.status(phase="training", step=progress.step)
        model.train()
        batches.begin(epoch, progress.step - first_step)
        table = None
        if recipe.augment:
            table = affine_table(len(train_rows), seed, epoch, recipe.epochs).to(device)
        clock = time.monotonic()
        for inputs, labels, numbers in loader:
            seed_draws(device, "step", seed, progress.step, accelerator.process_index)
            rate = learning_rate(progress.step, total_steps, recipe.lr, recipe.warmup)
            for group in optimizer.param_groups:
                group["lr"] = rate
            if table is not None:
                inputs = apply_affine(inputs, table[numbers])

            with accelerator.accumulate(model):
                logits = model(inputs)
                loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
                accelerator.backward(loss)
                if accelerator.sync_gradients and recipe.max_grad_norm:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            hits.append((logits.detach().argmax(1) == labels).sum())
            if not accelerator.sync_gradients:
                continue  # only a part of a step
            progress.stepped(skipped=accelerator.optimizer_step_was_skipped)
            profiler.step(progress.step)

            # --- Now and then all ranks add up what they saw: the loop's one synchronisation, but
            # for fp16's loss scaler, which reads in each step whether the gradient overflowed
            end_of_epoch = progress.step == first_step + batches.steps_per_epoch
            log = end_of_epoch or progress.step % config.run.log_every == 0
            checkpoint_is_due = progress.step % config.run.checkpoint_every == 0
            if not (log or checkpoint_is_due or progress.step >= schedule.next):
                continue
            mine = torch.tensor([schedule.rate, *stop.requests], dtype=torch.float64, device=device)
            sums = torch.cat([sum_up(losses, hits, len(labels)), mine])
            loss_sum, right, seen, bad, rates, *requests = accelerator.reduce(sums).tolist()
            losses.clear()
            hits.clear()
            seconds, clock = time.monotonic() - clock, time.monotonic()
            progress.add(loss_sum, right, seen, bad, seconds)
            schedule.synced(progress.step, seconds, rates / accelerator.num_processes)
            progress.refuse_divergence(recipe, world)
            if log:
                line = {"epoch": epoch, "lr": rate, **progress.log_line()}
                folder.append_metrics(progress.step, line)
                shown = summary.step_line(line, progress.step, total_steps, recipe.batch_size)
                console.progress(progress.step / total_steps, shown)
            if checkpoint_is_due and not any(requests):
                save()
                clock = time.monotonic()
            stop.obey(requests, accelerator.is_main_process)  # saves too

        # --- Decide by the validation images, on numbers that all ranks share
        validation = None
        if recipe.val_size:
            folder.status(phase="validation", step=progress.step)
            console.progress(progress.step / total_steps, "validation")
            validation = evaluate_split(accelerator, model, val_loader, classes, stop)
        means = progress.end_epoch()
        if validation:
            decided = {"val_accuracy": validation.accuracy, "val_loss": validation.loss}
            folder.append_metrics(progress.step, {"epoch": epoch, **decided})
            if progress.validated(validation.accuracy, recipe) and recipe.patience:
                state.best_weights = {name: w.clone() for name, w in net.state_dict().items()}
        console.print(summary.epoch_line(epoch, recipe.epochs, means, validation))
        if progress.stopped_by:
            console.print(f"stopped by {progress.stopped_by} after epoch {progress.epoch}")

    # --- Test once, without autocast, the weights that are kept
    folder.status(phase="test", step=progress.step)
    console.progress(1.0, "test")
    save()
    final = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    if state.best_weights:
        final = build_model(config, world, classes)
        final.load_state_dict(state.best_weights)
    if buffers := list(final.buffers()):  # BatchNorm's, which DDP sends only before a forward
        broadcast(buffers)
    test_loader = prepare_split(accelerator, test_rows)
    test = evaluate_split(accelerator, final, test_loader, classes, stop)

    # --- Write what stays
    tested = {"test_accuracy": test.accuracy, "test_loss": test.loss}
    folder.append_metrics(progress.step, {"epoch": progress.epoch - 1, **tested})
    content = weights_file.to_bytes(
        final.state_dict(), recipe.model, images.classes, images.preparation
    )
    folder.write_bytes(MODEL, content)
    own_seconds = [progress.train_seconds - state.seconds_before]
    rank_seconds = accelerator.gather(torch.tensor(own_seconds, device=device)).tolist()
    outcome = summary.summarise(config, world, images, state, test, rank_seconds)
    folder.write_json(SUMMARY, outcome)
    console.print(summary.last_lines(outcome, folder))
    return outcome


def resolve(
    config: TrainConfig, found: dict[str, Any] | None, world: World, console: Console
) -> tuple[ResolvedConfig, ImageData]:
    """The configuration with every default filled in, and the data.

    Every machine has the data before the first collective; rank 0 decides what `auto` means.
    A run that goes on keeps what it began with, but for the flags that were typed.
    """
    config = resume.inherit(config, found)
    store, cache_dir, size = world.store, config.run.cache_dir, world.accelerator.num_processes
    store.broadcast_from_rank0("trackers", lambda: tracking.named(config.run.trackers))
    name, notes = store.broadcast_from_rank0(
        "dataset", lambda: cache.choose(config.run.dataset, cache_dir, console.print)
    )
    images = cache.load(name, cache_dir, say=console.print)
    images = dataclasses.replace(images, warnings=[*notes, *images.warnings])
    store.barrier("data")
    place = cache_dir and str(cache.cache_folder(cache_dir).absolute())
    run = dataclasses.replace(config.run, dataset=from_anywhere(name), cache_dir=place)
    resume.refuse_other_images(name, images.digest, found)
    resume.refuse_uneven(config.recipe, size, found)
    recipe = resolve_recipe(config.recipe, len(images.train_labels), size)
    refuse_long_profile(config.run.profile, recipe.steps_per_epoch)
    return ResolvedConfig(run, config.distribution, config.typed, recipe=recipe), images


def build_model(config: TrainConfig, world: World, classes: int) -> nn.Module:
    """The net on its device, in the dtype of its weights, seeded alike on every rank."""
    torch.manual_seed(config.run.seed)
    model = MODELS[config.recipe.model](classes)
    if world.precision == "fp64":
        model.double()
    if config.distribution.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(world.accelerator.device).to(memory_format=torch.channels_last)
    if config.distribution.compile:
        model.compile()
    return model


def throw_away_one_backward(model: nn.Module, rows: Rows, batch_size: int) -> None:
    """DDP regroups its gradient buckets after the first backward, which changes the last bits.

    Done once before training, in fresh and resumed runs alike, so that both sum in one order.
    In eval mode, which leaves BatchNorm's statistics alone.
    """
    model.eval()
    images, labels, _ = rows.__getitems__(torch.arange(batch_size))
    F.cross_entropy(model(images), labels).backward()
    model.zero_grad()


if __name__ == "__main__":  # as a script: begun anew, without this folder's names on the path
    os.execv(sys.executable, [sys.executable, "-m", "ddp_mnist", "train", *sys.argv[1:]])
