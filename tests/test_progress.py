from __future__ import annotations

import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_mnist.config import Recipe
from ddp_mnist.errors import DivergedError
from ddp_mnist.run.meter import SyncSchedule, sum_up
from ddp_mnist.run.state import Progress, Sums


def test_what_the_ranks_saw_is_added_up() -> None:
    progress = Progress()
    progress.add(30.0, 6.0, 10.0, 0.0, 0.5)
    progress.add(12.0, 1.0, 4.0, 0.0, 0.25)
    assert progress.since_log == progress.in_epoch == Sums(42.0, 7.0, 14.0, 0.75)
    assert progress.log_line() == {"loss": 3.0, "accuracy": 0.5, "images_per_second": 14 / 0.75}
    progress.add(8.0, 1.0, 2.0, 0.0, 0.25)
    assert progress.log_line() == {"loss": 4.0, "accuracy": 0.5, "images_per_second": 8.0}
    assert progress.train_seconds == 1.0
    # the epoch's line is of all its steps, whatever was logged in between
    progress.add(14.0, 4.0, 0.0, 0.0, 0.0)
    assert progress.end_epoch() == {"loss": 4.0, "accuracy": 0.75, "images_per_second": 16.0}
    assert progress.epoch == 1
    progress.add(3.0, 1.0, 2.0, 0.0, 0.5)
    assert progress.end_epoch() == {"loss": 1.5, "accuracy": 0.5, "images_per_second": 4.0}


def test_a_batch_whose_loss_is_not_finite_is_neither_seen_nor_summed() -> None:
    losses = [torch.tensor(loss) for loss in (0.5, float("nan"), 2.25, float("-inf"))]
    hits = [torch.tensor(hit) for hit in (50, 40, 60, 30)]
    assert sum_up(losses, hits, images=72).tolist() == [(0.5 + 2.25) * 72, 110, 2 * 72, 2]


def test_sums_are_equal_however_they_were_cut() -> None:
    losses = list(torch.rand(100, generator=torch.Generator().manual_seed(0)))
    hits = list(torch.randint(73, (100,)))
    whole = sum_up(losses, hits, 72)
    for cut in (1, 33, 50, 99):
        parts = sum_up(losses[:cut], hits[:cut], 72) + sum_up(losses[cut:], hits[cut:], 72)
        assert torch.equal(parts, whole)
    assert whole[0].item() == pytest.approx(72 * sum(loss.item() for loss in losses), rel=1e-9)


def test_a_line_of_which_no_loss_was_finite() -> None:
    progress = Progress()
    progress.add(0.0, 0.0, 0.0, 3.0, 0.5)
    assert progress.log_line() == {"loss": None, "accuracy": None, "images_per_second": 0.0}
    assert progress.log_line() == {"loss": None, "accuracy": None, "images_per_second": 0.0}


def test_bad_batches_count_until_a_look_finds_none() -> None:
    progress = Progress()
    counts = []
    for bad in (2.0, 3.0, 0.0, 1.0):
        progress.add(1.0, 0.0, 1.0, bad, 0.1)
        progress.log_line()
        counts.append(progress.bad_in_a_row)
    assert counts == [2.0, 5.0, 0.0, 1.0]


def test_the_best_validation_is_the_first_of_the_highest() -> None:
    progress = Progress()
    improved = []
    for epoch, accuracy in enumerate([0.0, 0.7, 0.9, 0.8, 0.9], start=1):
        progress.epoch = epoch
        improved.append(progress.validated(accuracy, Recipe()))
        assert progress.val_accuracy == accuracy
    assert improved == [True, True, True, False, False]
    assert (progress.best_accuracy, progress.best_epoch) == (0.9, 3)
    assert progress.stopped_by is None


def stopped_after(recipe: Recipe, accuracies: list[float]) -> tuple[int, str | None]:
    """The epoch after which the run ends, and the flag that ended it."""
    progress = Progress()
    for accuracy in accuracies:
        progress.epoch += 1
        progress.validated(accuracy, recipe)
        if progress.stopped_by:
            break
    return progress.epoch, progress.stopped_by


@pytest.mark.parametrize(
    ("recipe", "accuracies", "expected"),
    [
        (Recipe(), [0.5, 0.5, 0.5], (3, None)),
        (Recipe(target_accuracy=0.9), [0.5, 0.89, 0.9, 0.95], (3, "--target-accuracy")),
        (Recipe(target_accuracy=1.0), [0.5, 0.99], (2, None)),
        (Recipe(patience=1), [0.5, 0.6, 0.6, 0.7], (3, "--patience")),
        (Recipe(patience=2), [0.5, 0.4, 0.6, 0.6, 0.5, 0.9], (5, "--patience")),
        (Recipe(patience=3), [0.5, 0.4, 0.5], (3, None)),
        (Recipe(patience=1, target_accuracy=0.5), [0.5], (1, "--target-accuracy")),
        (Recipe(patience=1, target_accuracy=0.9), [0.5, 0.4], (2, "--patience")),
    ],
)
def test_when_a_run_ends_early(
    recipe: Recipe, accuracies: list[float], expected: tuple[int, str | None]
) -> None:
    assert stopped_after(recipe, accuracies) == expected


def test_a_recipe_that_asks_for_more_goes_on() -> None:
    progress = Progress(epoch=4, val_accuracy=0.9, best_accuracy=0.9, best_epoch=2)
    progress.decide(Recipe(target_accuracy=0.9))
    assert progress.stopped_by == "--target-accuracy"
    progress.decide(Recipe(patience=2))
    assert progress.stopped_by == "--patience"
    for more in (Recipe(target_accuracy=0.91), Recipe(patience=3), Recipe()):
        progress.stopped_by = "--patience"
        progress.decide(more)
        assert progress.stopped_by is None


def test_without_a_validation_nothing_is_decided_by_it() -> None:
    progress = Progress(epoch=1, best_epoch=1)
    progress.decide(Recipe(target_accuracy=0.1))
    assert progress.stopped_by is None


def test_it_can_be_saved_as_plain_values() -> None:
    progress = Progress(step=7, resumed_from=[3])
    progress.add(1.5, 0.0, 2.0, 1.0, 0.1)
    copy = Progress.of(dataclasses.asdict(progress))
    assert copy == progress
    copy.resumed_from.append(7)
    assert (progress.resumed_from, Progress().resumed_from) == ([3], [])


# --- When the ranks look up


def looks(seconds_per_step: float, steps: int, first: int = 0) -> list[int]:
    """The steps at which ranks of this pace look up."""
    schedule, last, found = SyncSchedule(first), first, []
    for step in range(first + 1, first + steps + 1):
        if step >= schedule.next:
            schedule.synced(step, (step - last) * seconds_per_step, schedule.rate)
            last = step
            found.append(step)
    return found


def test_they_look_up_after_a_step_or_two_and_then_once_a_second() -> None:
    assert SyncSchedule(5).next == 6
    assert looks(0.125, 30) == [1, 2, 10, 18, 26]  # the second one measures
    assert looks(0.125, 30, first=1000) == [1001, 1002, 1010, 1018, 1026]
    assert looks(0.3, 10) == [1, 2, 5, 8]
    assert looks(1.0, 3) == looks(5.0, 3) == looks(1e9, 3) == [1, 2, 3]


@pytest.mark.parametrize("pace", [1e-3, 0.0137, 0.1, 0.26, 0.49])
def test_about_a_second_lies_between_two_looks(pace: float) -> None:
    found = looks(pace, int(20 / pace))
    gaps = [(b - a) * pace for a, b in itertools.pairwise(found[1:])]
    assert 19 <= len(gaps) <= 40
    assert all(0.5 < gap < 1.01 for gap in gaps)


def test_a_step_that_took_no_time_is_no_error() -> None:
    schedule = SyncSchedule(0)
    schedule.synced(1, 0.0, 0.0)
    assert (schedule.next, schedule.rate) == (2, 1000.0)


def test_looks_in_between_change_the_plan() -> None:
    schedule = SyncSchedule(0)
    schedule.synced(1, 0.1, 10.0)
    assert (schedule.next, schedule.rate) == (11, pytest.approx(10))
    schedule.synced(5, 2.0, 2.9)  # for a log line
    assert (schedule.next, schedule.rate) == (7, 2.0)


def test_equal_rates_make_equal_plans_with_a_step_at_least() -> None:
    numbers = random.Random(0)
    a, b, step = SyncSchedule(3), SyncSchedule(3), 3
    for _ in range(1000):
        step += numbers.randrange(1, 50)
        rate = 10 ** numbers.uniform(-6, 6)
        a.synced(step, numbers.uniform(0.1, 3), rate)
        b.synced(step, numbers.uniform(0.1, 3), rate)
        assert step < a.next == b.next


def scaled(world_size: int, scaler: bool) -> Any:
    accelerator = SimpleNamespace(scaler=scaler or None, num_processes=world_size)
    return SimpleNamespace(accelerator=accelerator)


def test_without_a_scaler_one_bad_loss_is_the_end() -> None:
    progress = Progress(step=7)
    progress.refuse_divergence(Recipe(), scaled(2, scaler=False))
    progress.add(1.0, 0.0, 1.0, 1.0, 0.1)
    with pytest.raises(DivergedError, match=r"^--lr 0.01: by step 7 the loss is not a finite"):
        progress.refuse_divergence(Recipe(), scaled(2, scaler=False))


def test_with_a_scaler_a_few_bad_steps_are_not() -> None:
    progress, world = Progress(), scaled(2, scaler=True)
    recipe = Recipe(grad_accum=2)
    for _ in range(3):
        progress.add(0.0, 0.0, 0.0, 4.0, 0.1)  # 2 processes x 2 parts
        progress.refuse_divergence(recipe, world)
    progress.add(0.0, 0.0, 0.0, 1.0, 0.1)
    with pytest.raises(DivergedError):
        progress.refuse_divergence(recipe, world)
    progress.add(1.0, 0.0, 1.0, 0.0, 0.1)
    progress.refuse_divergence(recipe, world)


def test_fault_24_gradients_that_always_overflow_have_an_end() -> None:
    progress, world = Progress(), scaled(1, scaler=True)
    for _ in range(24):
        progress.stepped(skipped=True)
        progress.refuse_divergence(Recipe(), world)
    progress.stepped(skipped=False)
    for _ in range(24):
        progress.stepped(skipped=True)
    progress.refuse_divergence(Recipe(), world)
    assert (progress.step, progress.skipped_steps) == (49, 48)
    progress.stepped(skipped=True)
    with pytest.raises(DivergedError, match=r"^--lr 0.01: by step 50 the gradient is not"):
        progress.refuse_divergence(Recipe(), world)
