import copy
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_mnist.core.errors import Diverged
from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.optim import OPTIMIZERS, make_optimizer
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.state import Progress, State, Sums
from ddp_mnist.core.task import Classification, Task
from tests.run_checks import fit_recipe


def begun(**counts: Any) -> tuple[State, Progress]:
    """Return the state of a run whose net has one weight."""
    progress = Progress(**counts)
    net, task = nn.Linear(1, 1, bias=False), Classification([*"ab"])
    return State(net, None, None, task, progress=progress), progress


def validated(accuracy: float, loss: float = 1.0) -> EvalResult:
    return EvalResult("accuracy", accuracy, loss, count=10)


def test_sums_of_all_ranks_become_means() -> None:
    state, progress = begun()
    progress.add(30.0, 6.0, 10.0, 0.0, 0.5)
    progress.add(12.0, 1.0, 4.0, 0.0, 0.25)
    assert progress.since_log == progress.in_epoch == Sums(42.0, 7.0, 14.0, 0.75)
    assert progress.end_log_line() == {"loss": 3.0, "score": 0.5, "images_per_second": 14 / 0.75}
    progress.add(8.0, 1.0, 2.0, 0.0, 0.25)
    assert progress.end_log_line() == {"loss": 4.0, "score": 0.5, "images_per_second": 8.0}
    assert progress.train_seconds == 1.0
    # the epoch's line is of all its steps, whatever was logged in between
    progress.add(14.0, 4.0, 0.0, 0.0, 0.0)
    means = state.end_epoch(fit_recipe(), None)
    assert means == {"loss": 4.0, "score": 0.75, "images_per_second": 16.0}
    assert (progress.epoch, progress.in_epoch) == (1, Sums())
    # no loss was finite
    assert progress.in_epoch.means() == {"loss": None, "score": None, "images_per_second": 0.0}


@pytest.mark.parametrize("patience", [None, 5])
def test_the_best_validation_is_the_first_of_the_highest(patience: int | None) -> None:
    state, progress = begun()
    for epoch, accuracy in enumerate([0.0, 0.7, 0.9, 0.8, 0.9], start=1):
        state.net.load_state_dict({"weight": torch.tensor([[float(epoch)]])})
        state.end_epoch(fit_recipe(patience=patience), validated(accuracy))
        assert (progress.epoch, progress.score) == (epoch, accuracy)
    assert (progress.best_score, progress.best_epoch) == (0.9, 3)
    assert state.best_weights == ({"weight": torch.tensor([[3.0]])} if patience else None)
    assert progress.stopped_by is None
    # of equal scores, which few images often have, the loss decides
    for loss in (0.5, 0.4, 0.6):
        state.end_epoch(fit_recipe(patience=patience), validated(0.9, loss))
    assert (progress.best_score, progress.best_epoch, progress.best_loss) == (0.9, 7, 0.4)
    # the test gets a copy: a signal during it saves the last weights
    state.net.load_state_dict({"weight": torch.tensor([[8.0]])})
    tested: Any = state.with_best_weights(state.net)
    assert (tested.weight, state.net.state_dict()["weight"]) == (5 if patience else 8, 8)
    # one that is infinite is no better
    state.end_epoch(fit_recipe(patience=patience), validated(math.inf))
    assert (progress.best_score, progress.best_epoch) == (0.9, 7)


@pytest.mark.parametrize(
    ("recipe", "accuracies", "epoch", "flag"),
    [
        (fit_recipe(), [0.5, 0.5, 0.5], 3, None),
        (fit_recipe(target_accuracy=0.9), [0.5, 0.89, 0.9, 0.95], 3, "target_accuracy"),
        (fit_recipe(patience=2), [0.5, 0.4, 0.6, 0.6, 0.5, 0.9], 5, "patience"),
        (fit_recipe(patience=3), [0.5, 0.4, 0.5], 3, None),
        (fit_recipe(patience=1, target_accuracy=0.5), [0.5], 1, "target_accuracy"),
    ],
)
def test_when_a_run_ends_early(
    recipe: Recipe, accuracies: list[float], epoch: int, flag: str | None
) -> None:
    state, progress = begun()
    for accuracy in accuracies:
        if not progress.stopped_by:
            state.end_epoch(recipe, validated(accuracy))
    assert (progress.epoch, progress.stopped_by) == (epoch, flag)


def test_patience_counts_on_after_a_resume_also_if_no_score_was_a_number() -> None:
    """Only where none was asked for before does it begin with the resumed part."""
    for before, scores, counted in (
        (2, [math.nan], 1),  # as in an unbroken run: the second such epoch ends it
        (2, [0.5, 0.4], 1),
        (None, [0.5, 0.4], 0),
        (None, [math.nan], 0),
    ):
        state, _ = begun(step=15 * len(scores))
        state.optimizer = torch.optim.SGD(state.net.parameters(), lr=0.1)
        for score in scores:
            state.end_epoch(fit_recipe(patience=before, epochs=9), validated(score))
        recipe = fit_recipe(patience=2, epochs=9)
        again, _ = begun()
        again.optimizer = torch.optim.SGD(again.net.parameters(), lr=0.1)
        again.restore(state.content(fit_recipe(patience=before, epochs=9)), recipe)
        progress = again.progress
        assert (progress.epoch - progress.best_epoch, progress.stopped_by) == (counted, None)
        best = None if before is None or math.isnan(scores[0]) else 0.5  # of those that count
        assert (progress.best_score, again.best_weights is None) == (best, best is None)


def test_less_patience_ends_a_resumed_run_as_an_epoch_ends_and_not_within() -> None:
    for steps, flag in ((30, "patience"), (31, None)):
        state, _ = begun(step=steps)
        again, _ = begun()
        for each in (state, again):
            each.optimizer = torch.optim.SGD(each.net.parameters(), lr=0.1)
        recipe = fit_recipe(patience=9, epochs=9)
        for score in (0.5, 0.4):
            state.end_epoch(recipe, validated(score))
        again.restore(state.content(recipe), fit_recipe(patience=1, epochs=9))
        assert again.progress.stopped_by == flag


def test_weights_of_another_dtype_are_refused() -> None:
    """load_state_dict would convert them."""
    state, _ = begun()
    state.optimizer = torch.optim.SGD(state.net.parameters(), lr=0.1)
    content = state.content(fit_recipe())
    state.net.double()
    line = r"^weight was torch\.float32, and is torch\.float64 here$"
    with pytest.raises(ValueError, match=line):
        state.restore(content, fit_recipe())


def test_a_checkpoint_of_an_earlier_version_is_restored() -> None:
    """It says nothing of patience, nor of the rates of its groups."""
    state, _ = begun()
    groups = [{"params": state.net.parameters(), "rate": 9}]
    state.optimizer = torch.optim.SGD(groups, lr=0.1)
    content = state.content(fit_recipe())
    del content["patience"], content["optimizer"]["param_groups"][0]["rate"]
    state.restore(content, fit_recipe(patience=1))
    assert [group["rate"] for group in state.optimizer.param_groups] == [9]
    assert state.progress.best_score is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moments_are_restored_in_the_memory_format_of_the_net(name: str) -> None:
    """torch's fused steps read them as they lie in memory, whatever their strides."""
    recipe, task = fit_recipe(optimizer=name), Classification([*"ab"])
    torch.manual_seed(0)
    weights, gradient = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)

    def made(memory_format: torch.memory_format) -> State:
        net = nn.Conv2d(3, 4, 2, bias=False)
        net.weight.data.copy_(weights)
        net.to(memory_format=memory_format)
        return State(net, make_optimizer(net, recipe), None, task)

    def step(state: State) -> torch.Tensor:
        [kernel] = state.net.parameters()
        kernel.grad = torch.empty_like(kernel).copy_(gradient)
        state.optimizer.step()
        return kernel.detach()

    first, resumed = made(torch.contiguous_format), made(torch.channels_last)
    step(first)
    resumed.restore(copy.deepcopy(first.content(recipe)), recipe)
    assert torch.allclose(step(resumed), step(first), atol=1e-6)


def test_a_recipe_that_asks_for_more_goes_on() -> None:
    state, _ = begun()
    state.progress = Progress(epoch=4, score=0.9, best_score=0.9, best_epoch=2)
    for recipe, flag in (
        (fit_recipe(target_accuracy=0.9), "target_accuracy"),
        (fit_recipe(target_accuracy=0.91), None),
        (fit_recipe(patience=2), "patience"),
        (fit_recipe(patience=3), None),
        (fit_recipe(), None),
    ):
        state.decide_to_stop(recipe)
        assert state.progress.stopped_by == flag


@pytest.mark.parametrize(
    ("scores", "epoch"), [([0.5, 0.3, 0.1], 2), ([math.nan, 0.31, 0.2], 3), ([math.inf, 0.3], 2)]
)
def test_a_score_of_which_less_is_better_reaches_its_target_from_above(
    scores: list[float], epoch: int
) -> None:
    class Distance(Task):
        def better(self, score: float, best: float) -> bool:
            return score < best

    state, progress = begun()
    state.task = Distance([], [])
    for score in scores:
        if not progress.stopped_by:
            state.end_epoch(fit_recipe(target_accuracy=0.3), validated(score))
    assert (progress.epoch, progress.stopped_by) == (epoch, "target_accuracy")
    assert progress.best_score == min(filter(math.isfinite, scores[:epoch]))


def ranks(count: int, scaler: bool) -> Any:
    return SimpleNamespace(scaler=scaler or None, num_processes=count)


def test_without_a_scaler_one_bad_loss_is_the_end_and_with_one_several() -> None:
    progress, recipe = Progress(step=7), fit_recipe(grad_accum=2)
    for _ in range(3):
        progress.add(0.0, 0.0, 0.0, 4.0, 0.1)  # 2 processes x 2 parts
        progress.raise_if_diverged(recipe, ranks(2, scaler=True))
        with pytest.raises(Diverged, match=r"^lr 0.01: by step 7 the loss is no longer a"):
            progress.raise_if_diverged(recipe, ranks(2, scaler=False))
    progress.add(0.0, 0.0, 0.0, 1.0, 0.1)
    with pytest.raises(Diverged):
        progress.raise_if_diverged(recipe, ranks(2, scaler=True))
    progress.step = 1  # before the learning rate has done anything
    with pytest.raises(Diverged, match=r"^lr 0.01: by step 1 "):
        progress.raise_if_diverged(recipe, ranks(2, scaler=True))
    progress.add(1.0, 0.0, 1.0, 0.0, 0.1)
    for scaler in (True, False):
        progress.raise_if_diverged(recipe, ranks(2, scaler))


def test_fault_24_gradients_that_always_overflow_have_an_end() -> None:
    progress, recipe = Progress(), fit_recipe()
    for skipped in [True] * 24 + [False] + [True] * 24:
        progress.count_step(skipped)
        progress.raise_if_diverged(recipe, ranks(1, scaler=True))
    assert (progress.step, progress.skipped_steps) == (49, 48)
    progress.count_step(skipped=True)
    with pytest.raises(Diverged, match=r"^lr 0.01: by step 50 the gradient is no longer"):
        progress.raise_if_diverged(recipe, ranks(1, scaler=True))


def test_a_weight_that_is_not_finite_is_not_saved() -> None:
    """A loss may be finite nevertheless, as behind a ReLU."""
    state, _ = begun(step=5)
    state.optimizer = torch.optim.SGD(state.net.parameters(), lr=0.1)
    assert state.content(fit_recipe())["progress"]["step"] == 5
    state.net.load_state_dict({"weight": torch.tensor([[torch.inf]])})
    with pytest.raises(Diverged, match=r"^lr 0.01: by step 5 a weight is no longer a finite num"):
        state.content(fit_recipe())
    (with_a_buffer, _), seen = begun(), torch.tensor(torch.nan)
    with_a_buffer.net.register_buffer("seen", seen)
    with pytest.raises(Diverged, match="a weight is no longer a finite number"):
        with_a_buffer.content(fit_recipe())
