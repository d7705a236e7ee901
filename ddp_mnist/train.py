"""The training run, from joining the other processes to the test accuracy.

    python -m ddp_mnist train --dataset digits
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m ddp_mnist train

An epoch of MNIST takes four to eight seconds on two cores and ends near 99.2 % test accuracy.
"""

import copy
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import nn

from ddp_mnist.augment import augment, draw_table
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.world import World, join_world, settle_ddp_buckets
from ddp_mnist.config import ResolvedConfig, TrainConfig
from ddp_mnist.data.batches import GlobalBatches, ImageData, make_loader, split_images
from ddp_mnist.faults import injected
from ddp_mnist.losses import make_loss
from ddp_mnist.nets import build_net, memory_format_of
from ddp_mnist.optim import learning_rate, make_optimizer
from ddp_mnist.run.evaluation import import_evaluate_meanwhile, prepare_split
from ddp_mnist.run.folder import RunFolder
from ddp_mnist.run.meter import Meter
from ddp_mnist.run.session import Session
from ddp_mnist.run.setup import open_run
from ddp_mnist.run.state import State
from ddp_mnist.seeding import seed_draws


def train(config: TrainConfig, launch: Launch) -> dict[str, Any]:
    """Train on this rank. Return the summary; {} after --dry-run, or if the run has finished.

    Raise a DdpMnistError for every expected failure, see errors.py; Preempted if a signal came.
    """
    with (
        RunFolder() as folder,  # records how the run ends
        join_world(config.distribution, launch) as world,  # meet the other processes
        open_run(config, world, launch, folder) as run,  # agree on settings, data and folder
    ):
        return fit(run, **injected(run, build_model)) if run else {}


def build_model(config: ResolvedConfig, world: World, images: ImageData) -> nn.Module:
    """Return the net on its device, in the dtype of its weights, seeded alike on every rank."""
    torch.manual_seed(config.run.seed)
    name, weights = config.recipe.model, config.initial_weights
    model: nn.Module = build_net(name, images.classes, images.preparation, weights)
    if world.precision == "fp64":
        model.double()
    if config.distribution.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(world.accelerator.device).to(memory_format=memory_format_of(name))
    if world.compiler:
        model.compile(**world.compiler)
    return model


def fit(
    run: Session,
    build: Callable[..., nn.Module] = build_model,
    make_batches: Callable[..., GlobalBatches] = GlobalBatches,
    learning_rate: Callable[..., float] = learning_rate,
    prepare_split: Callable[..., Any] = prepare_split,
) -> dict[str, Any]:
    """Train, validate after each epoch, test once. Return the summary.

    verify and doctor `build` the net themselves, to keep a reference to it. The functions are
    arguments so that a fault of faults.py can take the place of one; nothing else passes them.
    """
    recipe, flags, seed = run.config.recipe, run.config.run, run.config.run.seed
    accelerator, stop, preparation = run.world.accelerator, run.stop, run.images.preparation
    device = accelerator.device
    accelerator.gradient_accumulation_steps = recipe.grad_accum

    # Data, on the device if there is room. Batches are global: Accelerate gives each rank its part.
    train_rows, val_rows, test_rows = split_images(run.images.to(device))
    batches = make_batches(train_rows, recipe.batch_size, seed, recipe.grad_accum)

    # Loss, model and optimizer, equal on every rank.
    mean_loss = make_loss(recipe, train_rows, device)
    net = build(run.config, run.world, run.images)
    optimizer = make_optimizer(net, recipe, accelerator.scaler)
    loader = make_loader(train_rows, batch_sampler=batches)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    settle_ddp_buckets(accelerator, model, run.images.train_images[: batches.micro_batch_size])
    val_loader, test_loader = (prepare_split(accelerator, rows) for rows in (val_rows, test_rows))
    import_evaluate_meanwhile(accelerator)

    # All that training changes: new, or as a checkpoint left it.
    state = State(net, optimizer, accelerator.scaler, run.world.started)
    progress = run.restore(state)
    run.save_when_stopped(state)
    meter = Meter(accelerator, progress, recipe, net)

    # Train.
    while progress.epoch < recipe.epochs and not progress.stopped_by:
        epoch, first_step = progress.epoch, progress.epoch * batches.steps_per_epoch
        run.phase("training")
        model.train()
        batches.begin(epoch, progress.step - first_step)
        if recipe.augment:
            draws = draw_table(preparation, len(train_rows), seed, epoch, recipe.epochs).to(device)
        meter.restart_clock()
        for images, labels, indices in loader:
            # Learning rate and random draws are functions of the step: there is nothing to save.
            lr = learning_rate(progress.step, recipe.total_steps, recipe.lr, recipe.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr
            if accelerator.sync_gradients:  # the first micro-batch: the step before is complete
                seed_draws(device, "step", seed, progress.step, accelerator.process_index)
            if recipe.augment:
                images = augment(images, draws[indices])

            with accelerator.accumulate(model):
                logits = model(images)
                loss = mean_loss(logits, labels)  # of this rank's share of the batch
                accelerator.backward(loss)  # DDP averages the gradients over the ranks meanwhile
                if accelerator.sync_gradients and recipe.max_grad_norm:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            meter.update(loss, logits, labels)
            if not accelerator.sync_gradients:
                continue  # a micro-batch: the step is not complete
            progress.count_step(skipped=accelerator.optimizer_step_was_skipped)
            run.profiler.step(progress.step)

            # Once in a while, all ranks at the same step: the loop's only CPU-GPU sync point. With
            # fp16 the loss scaler has one in each step, where it looks for an overflow.
            ends_epoch = progress.step == first_step + batches.steps_per_epoch
            log = ends_epoch or progress.step % flags.log_every == 0
            save = meter.is_save_due(flags.checkpoint_every)
            if not (log or save or progress.step >= meter.next_sync):
                continue
            stop_requests = meter.all_reduce(stop.requests)
            run.report_step(progress, lr, meter.newly_slow, log)
            if save and not any(stop_requests):
                run.save(state)
                meter.count_save()
            stop.obey(stop_requests, accelerator.is_main_process)  # on a signal: save and end

        # Validate on images held out. All ranks get the same numbers, so all decide the same.
        validation = None
        if len(val_rows):
            run.phase("validation")
            validation = run.evaluate(model, val_loader)
        means = state.end_epoch(recipe, validation)  # counts it; may set stopped_by
        run.log_epoch(means, progress, validation)

    # Save, then test the weights that are kept once, in full precision.
    run.save(state)
    run.phase("test")
    kept = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    if state.best_weights:
        kept = copy.deepcopy(kept)  # a copy: a stop during the test still saves the last weights
        kept.load_state_dict(state.best_weights)
    if buffers := list(kept.buffers()):  # BatchNorm's; DDP sends them before a forward pass only
        broadcast(buffers)
    test = run.evaluate(kept, test_loader)
    return run.finish(state, kept, test, meter.forward.mean_ms)


if __name__ == "__main__":  # as a script: restart as a module, without this folder on sys.path
    os.execv(sys.executable, [sys.executable, "-m", "ddp_mnist", "train", *sys.argv[1:]])
