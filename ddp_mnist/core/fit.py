"""The training run from its first step to the test."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator

from .accelerator import check_reduced, sum_over_ranks, warm_up_ddp
from .augment import augment, augmentation_table
from .batches import GlobalBatchSampler, Rows, make_loader
from .errors import StopRequested
from .evaluation import evaluate_split, make_eval_loader
from .meter import Meter
from .optim import make_optimizer
from .recipe import Recipe
from .run import Run
from .seeding import seed_forward, seed_generators
from .state import State
from .task import Task
from .wrappers import Normalised, as_tested


def fit(
    accelerator: Accelerator,  # from `make_accelerator`
    rows: tuple[Rows, Rows, Rows],  # to train, to validate after each epoch, to test once
    make_net: Callable[[], Normalised],  # called once, after all random generators are seeded
    task: Task,
    recipe: Recipe,
    seed: int,
    run: Run,
) -> Any:
    """Train, validate after each epoch, test once. Return what `run.finish` returns.

    Every rank calls it with the same arguments, and ends with the same weights. Raise StopRequested
    after saving, Diverged for numbers that are not finite; both on all ranks, at the same step.
    """
    device = accelerator.device
    accelerator.gradient_accumulation_steps = recipe.grad_accum  # by which `backward` divides

    # Data. The batch of a step is global, the same on every rank, in grad_accum micro-batches.
    train_rows, val_rows, test_rows = rows
    batches = GlobalBatchSampler(train_rows, recipe, seed)
    loader = make_loader(train_rows, batch_sampler=batches)

    # Net and optimizer, equal on every rank. `model` is the net in autocast and, on several ranks,
    # in DDP; the loader, which still reads `batches`, gives each its part of every batch.
    seed_generators(device, seed)
    net = make_net().to(device)
    as_tested(net)  # of any net but a `Normalised` one, this would end the run after its last epoch
    optimizer = make_optimizer(net, recipe, accelerator.scaler)  # fused, unless there is a scaler
    model, prepared, loader = accelerator.prepare(net, optimizer, loader)
    # A prepared optimizer adds fp16's loss scaler, and searches the disk for a package in each
    # step: see docs/benchmarks.md.
    optimizer = prepared if accelerator.scaler else optimizer
    # DDP regroups gradients after its first backward pass: so it does one now, resumed or not.
    warm_up_ddp(accelerator, model, train_rows.take([*range(batches.micro_batch_size)])[0])
    val_loader, test_loader = (make_eval_loader(accelerator, r) for r in (val_rows, test_rows))

    # All that training changes: new, or from the checkpoint, which `begin` sends to all ranks.
    state = State(net, optimizer, accelerator.scaler, task)
    run.begin(state)
    progress = state.progress
    meter = Meter(accelerator, progress, recipe, task)

    def stop_if_any(requests: Sequence[float]) -> None:  # these are sums: all ranks stop, or none
        if any(requests):
            run.save(state)
            raise StopRequested(progress.step, requests)

    def check_for_stop() -> None:  # after each batch of an evaluation
        stop_if_any(sum_over_ranks(accelerator, run.stop_requests))

    while progress.epoch < recipe.epochs and not progress.stopped_by:
        epoch, steps_before = progress.epoch, progress.epoch * recipe.steps_per_epoch
        run.phase("training")
        model.train()
        batches.start_epoch(epoch, skip_steps=progress.step - steps_before)
        if recipe.augment:
            augmentations = augmentation_table(recipe, train_rows, seed, epoch).to(device)
        meter.restart_clock()
        for micro_batches in meter.steps_of(loader):
            this_step = progress.step + 1  # counted from 1
            ends_epoch = this_step == steps_before + recipe.steps_per_epoch
            log_due = ends_epoch or this_step % run.log_every == 0
            # Rate and seed are functions of the step, so a checkpoint holds no scheduler or RNG.
            lr = recipe.learning_rate(progress.step)
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("rate", 1.0)
            seed_forward(device, "step", seed, progress.step, accelerator.process_index)

            for part, (images, targets, indices) in enumerate(micro_batches, start=1):
                if recipe.augment:
                    images = augment(images, augmentations[indices])
                # DDP averages the gradients over the ranks in the backward pass of the last one.
                is_last = part == recipe.grad_accum
                with nullcontext() if is_last else accelerator.no_sync(model):
                    outputs = model(images)  # uint8 in; the net normalises them
                    loss = task.training_loss(outputs, targets)  # mean over this rank's share
                    accelerator.backward(loss)
                meter.update(loss, outputs, targets)
            if log_due or recipe.max_grad_norm:
                max_norm = recipe.max_grad_norm or math.inf  # inf: only measure the norm
                meter.gradient_norm = accelerator.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            optimizer.zero_grad()
            progress.count_step(skipped=accelerator.optimizer_step_was_skipped)
            run.step()

            # At a log line, a save, or else about once a second, at the same step on all ranks,
            # wait for the GPU. (fp16 waits in each step, to see whether its gradients overflowed.)
            save_due = meter.is_save_due(run.checkpoint_every)
            if not (log_due or save_due or this_step >= meter.next_sync_step):
                continue
            check_reduced(model)
            stop_requests = meter.sync(run.stop_requests)  # one all-reduce; may raise Diverged
            run.log(this_step, {"epoch": epoch, "lr": lr, **meter.line(end=log_due)}, write=log_due)
            stop_if_any(stop_requests)
            if save_due:
                run.save(state)
                meter.mark_saved()

        # Validate. Rank 0 counts and sends its numbers to all, so all decide alike.
        validation = None
        if len(val_rows):
            run.phase("validation")
            tested = as_tested(net, model)
            validation = evaluate_split(accelerator, tested, val_loader, task, check_for_stop)
        means = state.end_epoch(recipe, validation)  # counts the epoch, and may stop early
        run.log_epoch(state, means, validation)

    # Save, then test once in full precision, without the autocast that `prepare` put into the
    # net's forward; with patience, a copy that has the best weights.
    run.save(state)
    run.phase("test")
    final_net = state.with_best_weights(accelerator.unwrap_model(model, keep_fp32_wrapper=False))
    test = evaluate_split(accelerator, as_tested(final_net), test_loader, task, check_for_stop)
    return run.finish(state, final_net, test)
