import itertools
import resource
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_mnist.core import meter
from ddp_mnist.core.errors import Diverged
from ddp_mnist.core.state import Progress, Sums
from ddp_mnist.core.task import Classification
from tests.run_checks import fit_recipe


def test_a_batch_whose_loss_is_not_finite_is_neither_seen_nor_summed() -> None:
    losses = [torch.tensor(loss) for loss in (0.5, float("nan"), 2.25, float("-inf"))]
    correct = torch.arange(72) < torch.tensor([[50], [40], [60], [30]])  # [batches, images]
    assert meter.sum_up(losses, correct).tolist() == [(0.5 + 2.25) * 72, 110, 2 * 72, 2]


def test_sums_are_the_same_to_the_bit_however_a_run_was_divided() -> None:
    losses = [*torch.rand(99, dtype=torch.float64, generator=torch.Generator().manual_seed(0))]
    scores = torch.rand((99, 7), generator=torch.Generator().manual_seed(1))
    for cut in range(1, 99):
        parts = [meter.sum_up(losses[of], scores[of]) for of in (slice(cut), slice(cut, None))]
        assert torch.equal(meter.sum_up(losses, scores), parts[0] + parts[1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what stands in for the time: the tests move its `now`."""
    time: Any = SimpleNamespace(now=100.0, monotonic=lambda: time.now)
    monkeypatch.setattr(meter, "time", time)
    return time


RANK_0 = {"process_index": 0, "scaler": None}
RECIPE = fit_recipe()
TWO = Classification([*"ab"])


def ranks(count: int) -> Any:
    """Return an accelerator whose ranks all saw the same."""
    return SimpleNamespace(**RANK_0, num_processes=count, reduce=lambda mine: mine * count)


def see(made: meter.Meter, loss: float, labels: list[int]) -> None:
    """Show a batch whose images are all taken for class 1."""
    made.update(torch.tensor(loss), torch.tensor([[0.0, 1.0]] * len(labels)), torch.tensor(labels))


def test_at_a_sync_point_all_ranks_add_up_what_they_saw(clock: Any) -> None:
    progress = Progress(step=3)
    made = meter.Meter(ranks(2), progress, RECIPE, TWO)
    see(made, 0.5, [1, 0, 1])
    see(made, 0.25, [1, 1, 1])
    clock.now += 0.5
    assert made.sync([0.0, 1.0, 0.0]) == [0.0, 2.0, 0.0]
    assert progress.in_epoch == Sums(loss=4.5, score=10.0, seen=12.0, seconds=0.5)
    clock.now += 5.0
    made.mark_saved()  # which took 5 s that are not the training's
    see(made, 1.0, [0])
    clock.now += 0.25
    made.sync([0.0])
    assert progress.since_log == Sums(loss=6.5, score=10.0, seen=14.0, seconds=0.75)
    see(made, float("nan"), [1])
    with pytest.raises(Diverged, match=r"^lr 0\.01: by step 3 the loss is no longer"):
        made.sync([0.0])


def test_a_line_has_the_norm_the_share_of_waiting_and_the_memory(clock: Any) -> None:
    """Of 4 s of training 1 s was waiting; the next line counts from there."""

    def slowly() -> Any:
        for batch in range(2):
            clock.now += 0.5
            yield batch

    one = SimpleNamespace(**vars(ranks(1)), device=torch.device("cpu"))
    made = meter.Meter(one, Progress(), RECIPE, TWO)
    made.gradient_norm = torch.tensor(0.75)
    assert [*made.steps_of(slowly())] == [[0], [1]]
    see(made, 0.5, [1, 0])
    clock.now += 3
    made.sync([])
    line = made.line(end=True)
    peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert line["gradient_norm"] == 0.75
    assert line["waiting_for_data"] == 0.25
    assert 0 <= peak_kb * 1024 / 10**6 - line["peak_memory_mb"] < 50
    see(made, 0.5, [1, 0])
    clock.now += 3
    made.sync([])
    assert made.line(end=True)["waiting_for_data"] == 0


def simulated(
    clock: Any, seconds_per_step: float, steps: int, first: int = 0, every: int | None = None
) -> tuple[list[int], list[int]]:
    """Return the steps at which a rank of this speed syncs, and saves, each time in a second."""
    progress, synced, saved = Progress(step=first), list[int](), list[int]()
    made = meter.Meter(ranks(2), progress, RECIPE, TWO)
    for progress.step in range(first + 1, first + steps + 1):
        clock.now += seconds_per_step
        save = made.is_save_due(every)
        if progress.step >= made.next_sync_step or save:
            see(made, 0.5, [1])
            made.sync([])
            synced.append(progress.step)
        if save:
            clock.now += 1
            made.mark_saved()
            saved.append(progress.step)
    return synced, saved


def test_sync_points_come_after_a_step_or_two_and_then_once_a_second(clock: Any) -> None:
    assert simulated(clock, 0.125, 30)[0] == [1, 2, 10, 18, 26]  # the second one measures
    assert simulated(clock, 0.125, 30, first=1000)[0] == [1001, 1002, 1010, 1018, 1026]
    for slow in (1.0, 5.0, 1e9):
        assert simulated(clock, slow, 3)[0] == [1, 2, 3]
    for pace in (1e-3, 0.0137, 0.1, 0.26, 0.49):
        found, _ = simulated(clock, pace, int(20 / pace), every=10**9)
        gaps = [(b - a) * pace for a, b in itertools.pairwise(found[1:])]
        assert 19 <= len(gaps) <= 40
        assert all(0.5 < gap < 1.01 for gap in gaps), pace


def test_the_plan_is_made_from_numbers_that_all_ranks_share(clock: Any) -> None:
    """Two ranks' clocks differ; what the all-reduce gives them does not."""
    progress, shared = Progress(), [0.0]

    def reduce(mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine[:-1], mine.new_tensor(shared)])

    both: Any = SimpleNamespace(**RANK_0, num_processes=2, reduce=reduce)
    one, other = (meter.Meter(both, progress, RECIPE, TWO) for _ in range(2))
    for number in range(1, 50):
        progress.step += 1 + number % 40
        shared[0] = 10 ** (number % 13 - 6)
        for made, seconds in ((one, 0.1 * number), (other, 0.0)):  # no time is no error
            made.clock = clock.now - seconds
            see(made, 0.5, [1])
            made.sync([])
        assert progress.step < one.next_sync_step == other.next_sync_step
        assert one.agreed_steps_per_s == other.agreed_steps_per_s  # by which saves are due


def test_checkpoints_come_every_100_steps_but_not_within_5_seconds(clock: Any) -> None:
    for slow in (0.06, 0.3, 10.0):
        assert simulated(clock, slow, 1000)[1] == list(range(100, 1001, 100))
    assert simulated(clock, 0.02, 1000)[1] == [300, 600, 900]
    for fast in (0.002, 0.01):  # a GPU's
        _, saved = simulated(clock, fast, 20_000)
        gaps = [(b - a) * fast for a, b in itertools.pairwise([0, *saved])]
        assert all(5 <= gap < 5.01 + 100 * fast for gap in gaps)
    assert simulated(clock, 0.002, 100, every=20)[1] == [20, 40, 60, 80, 100]  # as it was typed
