"""The training run, from joining the other processes to the test accuracy.

    accelerate launch --config_file accelerate_configs/multi_cpu.yaml -m ddp_mnist train

The default run, an epoch of MNIST, reaches 99.2 % in four to nine seconds on two cores.
"""

import math
import os
import sys
from typing import Any

from accelerate.utils import broadcast
from torch import nn

from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.signals import listen
from ddp_mnist.cluster.world import join_world, warm_up_ddp
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.data.augment import augment, augmentation_table
from ddp_mnist.data.batches import GlobalBatchSampler, make_loader, rows_of_splits
from ddp_mnist.data.seeding import seed_forward, seed_generators
from ddp_mnist.nets.build import build_net, memory_format_of
from ddp_mnist.nets.optim import make_optimizer
from ddp_mnist.training.evaluation import make_eval_loader
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.training.meter import Meter
from ddp_mnist.training.set_up import set_up_run
from ddp_mnist.training.state import State
from ddp_mnist.training.training_run import TrainingRun


def train(config: TrainConfig, launch: Launch) -> dict[str, Any]:
    """Train on this rank. Return the summary; {} after --dry-run, or if the run was finished.

    Raise a DdpMnistError for every expected failure, see errors.py; Preempted after a signal. What
    one rank raises ends all: the others raise FailedElsewhere, see cluster/failures.py.
    """
    with (
        listen() as stop,  # to signals, until the end of the run is recorded
        RunFolder() as folder,  # records how the run ends; only rank 0 gets a path, in set_up_run
        join_world(config.distribution, launch) as world,  # joins the others, makes the Accelerator
        set_up_run(config, world, launch, folder, stop) as run,  # all agree on settings and data
    ):
        return fit(run) if run else {}


def build_model(run: TrainingRun) -> nn.Module:
    """Return the net on its device, seeded alike on every rank; in float64 with fp64."""
    config, world, name = run.config, run.world, run.config.recipe.model
    seed_generators(world.accelerator.device, config.run.seed)
    image_format, weights = run.images.image_format, config.initial_weights
    model: nn.Module = build_net(name, run.task, image_format, weights)
    if world.precision == "fp64":
        model.double()
    if config.distribution.sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model.to(world.accelerator.device).to(memory_format=memory_format_of(name))
    if world.compile_options:
        model.compile(**world.compile_options)
    return model


def fit(run: TrainingRun) -> dict[str, Any]:
    """Train, validate after each epoch, test once. Return the summary."""
    recipe, flags, seed = run.config.recipe, run.config.run, run.config.run.seed
    accelerator, stop, task = run.world.accelerator, run.stop, run.task
    device, image_format = accelerator.device, run.images.image_format
    accelerator.gradient_accumulation_steps = recipe.grad_accum  # known only after set_up_run

    # Data. The batch of a step is global, the same on every rank, in grad_accum micro-batches.
    train_rows, val_rows, test_rows = rows_of_splits(run.images, device)
    batches = GlobalBatchSampler(train_rows, recipe.batch_size, seed, recipe.grad_accum)
    loader = make_loader(train_rows, batch_sampler=batches)

    # Net and optimizer, equal on every rank. `model` is the net in autocast and, on several ranks,
    # in DDP; the loader gives each its part of every batch: split_batches=True in cluster/world.py.
    net = build_model(run)
    optimizer = make_optimizer(net, recipe, accelerator.scaler)  # fused, unless there is a scaler
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    # DDP rebuilds its gradient buckets after the first backward pass. A pass that changes nothing
    # triggers that now, so that a resumed run sums in the same order.
    warm_up_ddp(accelerator, model, train_rows.take([*range(batches.micro_batch_size)])[0])
    val_loader = make_eval_loader(accelerator, val_rows)
    test_loader = make_eval_loader(accelerator, test_rows)

    # All that training changes: new, or from the checkpoint, which rank 0 sends to all.
    state = State(net, optimizer, accelerator.scaler, task, run.world.start_time)
    progress = run.begin_or_resume(state)  # from now on a stop signal saves the state
    meter = Meter(accelerator, progress, recipe, task)

    while progress.epoch < recipe.epochs and not progress.stopped_by:
        epoch, steps_before = progress.epoch, progress.epoch * recipe.steps_per_epoch
        run.phase("training")
        model.train()
        batches.start_epoch(epoch, skip_steps=progress.step - steps_before)
        if recipe.augment:
            table = augmentation_table(image_format, len(train_rows), seed, epoch, recipe.epochs)
            augmentations = table.to(device)
        meter.restart_clock()
        for images, targets, indices in meter.time_waits(loader):
            step = progress.step + 1  # of this batch, counted from 1
            ends_epoch = step == steps_before + recipe.steps_per_epoch
            log_due = ends_epoch or step % flags.log_every == 0
            # Rate and seed are functions of the step, so a checkpoint holds no scheduler or RNG.
            for group in optimizer.param_groups:
                group["lr"] = lr = recipe.learning_rate(progress.step)
            if accelerator.sync_gradients:  # the batch before ended a step
                seed_forward(device, "step", seed, progress.step, accelerator.process_index)
            if recipe.augment:
                images = augment(images, augmentations[indices])

            with accelerator.accumulate(model):  # DDP's no_sync() until the step's last micro-batch
                outputs = model(images)  # uint8 in; the net normalises them
                loss = task.training_loss(outputs, targets)  # mean over this rank's share
                accelerator.backward(loss)  # divides by grad_accum; DDP averages the gradients
                if accelerator.sync_gradients and (log_due or recipe.max_grad_norm):
                    max_norm = recipe.max_grad_norm or math.inf  # infinite: measured alone
                    meter.gradient_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()  # Accelerate skips it, and zero_grad, until the last micro-batch
                optimizer.zero_grad()
            meter.update(loss, outputs, targets)
            if not accelerator.sync_gradients:
                continue  # a micro-batch: the step is not complete
            progress.count_step(skipped=accelerator.optimizer_step_was_skipped)
            run.profile.step()

            # About once a second, at a step equal on all ranks, wait for the GPU; fp16 always does.
            save_due = meter.is_save_due(flags.checkpoint_every)  # None: >= 100 steps and 5 s apart
            if not (log_due or save_due or step >= meter.next_sync_step):
                continue
            stop_requests = meter.sync(stop.requests)  # one all-reduce: losses, counts, signals
            run.log(step, {"epoch": epoch, "lr": lr, **meter.line(end=log_due)}, write=log_due)
            stop.save_and_raise_if(stop_requests, accelerator.is_main_process)  # raises Preempted
            if save_due:
                run.save(state)
                meter.note_save()

        # Validate on held-out images; a stop signal is heard after each batch. Rank 0 counts and
        # sends its numbers to all, so all decide alike.
        validation = run.evaluate("validation", model, val_loader) if len(val_rows) else None
        means = state.end_epoch(recipe, validation)  # may stop early: --patience, --target-accuracy
        run.log_epoch(means, progress, validation)

    # Save, then test once, without autocast; with --patience, a copy that has the best weights.
    run.save(state)
    final_net = state.with_best_weights(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    if buffers := list(final_net.buffers()):  # BatchNorm's; DDP sends them only before a forward
        broadcast(buffers)  # rank 0's, in place
    test = run.evaluate("test", final_net, test_loader)
    return run.finish(final_net, test)


if __name__ == "__main__":  # as a script: restart as a module, without this folder on sys.path
    os.execv(sys.executable, [sys.executable, "-m", "ddp_mnist", "train", *sys.argv[1:]])
