"""The training run, from the first process met to the test accuracy.

    python -m ddp_mnist train --dataset digits
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m ddp_mnist train

Two epochs of MNIST take about half a minute on two cores and end near 99.2 % test accuracy.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from ddp_mnist import data, rendezvous, run_folder, runtime, summary, weights
from ddp_mnist.augment import affine_table, apply_affine
from ddp_mnist.config import TrainConfig, resolve_recipe
from ddp_mnist.errors import DivergedError
from ddp_mnist.evaluation import evaluate_split, prepare_split
from ddp_mnist.launch import Launch
from ddp_mnist.models import MODELS
from ddp_mnist.optim import learning_rate, make_optimizer
from ddp_mnist.progress import Progress
from ddp_mnist.run_folder import RunFolder
from ddp_mnist.runtime import World
from ddp_mnist.screen import Screen
from ddp_mnist.seeding import seed_of

BAD_STEPS_ALLOWED = 3  # of fp16, in a row


def train(config: TrainConfig, launch: Launch) -> dict[str, Any]:
    """One rank's part of a run. Returns the summary; {} of a dry run.

    Raises:
        DdpMnistError: every expected failure, see errors.py.
    """
    # --- Meet the other processes, and agree on data and configuration
    parts = config.recipe.grad_accum
    with runtime.start(config.distribution, launch, grad_accum=parts) as world:
        config, images = resolve(config, world)
        screen = Screen(world.accelerator.is_main_process and not config.run.quiet)
        if config.run.dry_run:
            screen.say(summary.plan(config, world, images, None))
            return {}
        run = open_run_folder(config, world, images)
        with run.told_how_it_ended(), runtime.first_error_wins(world.board):
            outcome = train_in(run, config, world, images, screen)
            world.board.wait_for_all("trained")
            return outcome


def train_in(
    run: RunFolder, config: TrainConfig, world: World, images: data.ImageData, screen: Screen
) -> dict[str, Any]:
    """The story: data, model, loop, validation, test."""
    accelerator, recipe, seed = world.accelerator, config.recipe, config.run.seed
    assert recipe.epochs and recipe.batch_size and recipe.val_size is not None
    device, classes = accelerator.device, len(images.classes)
    screen.say(summary.plan(config, world, images, run.path))

    # --- Data: global batches, the same on every rank, which Accelerate deals out
    train_numbers, val_numbers = data.split_rows(len(images.train_labels), recipe.val_size)
    train_rows = data.Rows(images.train_images, images.train_labels, train_numbers)
    val_rows = data.Rows(images.train_images, images.train_labels, val_numbers)
    test_rows = data.Rows(images.test_images, images.test_labels)
    batches = data.GlobalBatches(len(train_rows), recipe.batch_size, seed, recipe.grad_accum)
    total_steps = recipe.epochs * batches.steps_per_epoch

    # --- Model and optimizer, equal on every rank
    model = build_model(config, world, classes)
    optimizer = make_optimizer(model, recipe)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, data.train_loader(train_rows, batches)
    )
    val_loader = prepare_split(accelerator, val_rows)
    throw_away_one_backward(model, train_rows, batches.batch_size // accelerator.num_processes)

    # --- Train: rate of the step, forward, backward, clip, update
    progress, best_weights, bad_in_a_row = Progress(), None, 0.0
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # loss_sum, seen, bad
    for epoch in range(recipe.epochs):
        run.status(phase="training", step=progress.step)
        model.train()
        batches.begin(epoch)
        table = affine_table(len(train_rows), seed, epoch).to(device) if recipe.augment else None
        clock = time.monotonic()
        for inputs, labels, numbers in loader:
            torch.manual_seed(seed_of("step", seed, progress.step, accelerator.process_index))
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
            sums += step_sums(loss.detach(), len(labels))
            if not accelerator.sync_gradients:
                continue  # only a part of a step
            progress.step += 1
            progress.skipped_steps += accelerator.optimizer_step_was_skipped

            # --- Now and then all ranks add up what they saw: the loop's one synchronisation
            end_of_epoch = progress.step % batches.steps_per_epoch == 0
            if progress.step % config.run.log_every == 0 or end_of_epoch:
                loss_sum, seen, bad = accelerator.reduce(sums).tolist()
                sums.zero_()
                bad_in_a_row = bad_in_a_row + bad if bad else 0.0
                refuse_divergence(bad_in_a_row, progress.step, config, accelerator)
                seconds, clock = time.monotonic() - clock, time.monotonic()
                progress.train_seconds += seconds
                line = {"epoch": epoch, "loss": loss_sum / seen if seen else None, "lr": rate}
                line["images_per_second"] = seen / seconds
                run.append_metrics(progress.step, line)
                shown = summary.progress_line(line, progress.step, total_steps, recipe.epochs)
                if not end_of_epoch:
                    screen.now_and_then(shown)
        progress.epoch += 1

        # --- Decide by the validation images, on numbers that all ranks share
        if recipe.val_size:
            run.status(phase="validation", step=progress.step)
            found = evaluate_split(accelerator, model, val_loader, classes)
            line = {"epoch": epoch, "val_accuracy": found.accuracy, "val_loss": found.loss}
            run.append_metrics(progress.step, line)
            shown += f"  validation {found.accuracy:.4f}"
            if progress.validated(found.accuracy, recipe) and recipe.patience:
                best_weights = {name: w.clone() for name, w in model.state_dict().items()}
        screen.say(shown)
        if progress.stopped_by:
            screen.say(f"stopped by {progress.stopped_by} after epoch {progress.epoch}")
            break

    # --- Test once, without autocast, the weights that are kept
    run.status(phase="test", step=progress.step)
    if best_weights is not None:
        model.load_state_dict(best_weights)
        progress.val_accuracy = progress.best_accuracy
    final = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    test = evaluate_split(accelerator, final, prepare_split(accelerator, test_rows), classes)

    # --- Write what stays
    content = weights.to_bytes(final.state_dict(), recipe.model, images.classes)
    run.write_bytes(run_folder.MODEL, content)
    outcome = summary.summarise(config, world, images, progress, test)
    run.write_json(run_folder.SUMMARY, outcome)
    screen.say(summary.last_lines(outcome, run))
    return outcome


def resolve(config: TrainConfig, world: World) -> tuple[TrainConfig, data.ImageData]:
    """The configuration with every default filled in, and the data.

    Every machine has the data before the first collective; rank 0 decides what `auto` means.
    Nothing starts unless all ranks believe the same.
    """
    board, cache_dir = world.board, config.run.cache_dir
    name, notes = board.decided_by_rank_0(
        "dataset", lambda: data.choose(config.run.dataset, cache_dir)
    )
    images = data.load(name, cache_dir)
    images = dataclasses.replace(images, warnings=[*notes, *images.warnings])
    board.wait_for_all("data")
    run = dataclasses.replace(config.run, dataset=name)
    size = world.accelerator.num_processes
    recipe = resolve_recipe(config.recipe, len(images.train_labels), size)
    config = TrainConfig(run, recipe, config.distribution)
    rendezvous.check_same(board, summary.facts(config, world, images))
    return config, images


def open_run_folder(config: TrainConfig, world: World, images: data.ImageData) -> RunFolder:
    """Made by rank 0, on its machine; the other ranks go on once it stands."""

    def create() -> str:
        return str(run_folder.create(config.run.run_dir, images.name))

    path = world.board.decided_by_rank_0("run folder", create)
    run = RunFolder(path if world.accelerator.is_main_process else None)
    resolved = dataclasses.asdict(config)
    resolved["run"]["run_dir"] = path
    resolved["distribution"] |= {"backend": world.backend, "mixed_precision": world.precision}
    run.write_json(run_folder.CONFIG, resolved)
    return run


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


def throw_away_one_backward(model: nn.Module, rows: data.Rows, batch_size: int) -> None:
    """DDP regroups its gradient buckets after the first backward, which changes the last bits.

    Done once before training, in fresh and resumed runs alike, so that both sum in one order.
    In eval mode, which leaves BatchNorm's statistics alone.
    """
    device = next(model.parameters()).device
    model.eval()
    images, labels, _ = rows.__getitems__(torch.arange(batch_size))
    F.cross_entropy(model(images.to(device)), labels.to(device)).backward()
    model.zero_grad()


def step_sums(loss: torch.Tensor, images: int) -> torch.Tensor:
    """float64 [loss_sum, seen, bad] of one batch, without asking the device for a number.

    A batch whose loss is not finite is one bad batch, and neither seen nor summed.
    """
    finite = torch.isfinite(loss)
    loss_sum = torch.where(finite, loss.double() * images, 0.0)
    return torch.stack([loss_sum, finite * float(images), (~finite).double()])


def refuse_divergence(
    bad_in_a_row: float, step: int, config: TrainConfig, accelerator: Accelerator
) -> None:
    """Raises DivergedError, on all ranks alike, once the weights are beyond repair.

    Without a loss scaler one loss that is not finite has spoilt them already; with fp16's, which
    leaves such a step out, it takes several steps in a row.

    Args:
        bad_in_a_row: batches over all ranks, since the last time that none was bad.
    """
    batches_per_step = accelerator.num_processes * config.recipe.grad_accum
    if bad_in_a_row > (BAD_STEPS_ALLOWED * batches_per_step if accelerator.scaler else 0):
        raise DivergedError(
            f"--lr {config.recipe.lr:g}: by step {step} the loss is not a finite number any more;"
            " use a lower rate, or --max-grad-norm 1"
        )
