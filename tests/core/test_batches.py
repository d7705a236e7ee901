from itertools import chain

import pytest
import torch

from ddp_mnist.core.batches import GlobalBatchSampler, Rows, make_loader
from ddp_mnist.core.seeding import generator
from tests.run_checks import fit_recipe

# --- Rows and their order


def rows_of(count: int) -> Rows:
    return Rows(torch.zeros(count, 1, 1, 1), torch.zeros(count, 1))


def sampler(count: int, size: int, seed: int, parts: int = 1) -> GlobalBatchSampler:
    steps = count // size
    recipe = fit_recipe(batch_size=size, steps_per_epoch=steps, grad_accum=parts)
    return GlobalBatchSampler(rows_of(count), recipe, seed)


def indices_of(batches: GlobalBatchSampler, epoch: int, skip_steps: int = 0) -> list[list[int]]:
    batches.start_epoch(epoch, skip_steps)
    steps = [batch.tolist() for batch in batches]
    assert len(steps) == len(batches)
    return steps


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    """An epoch has each row at most once, and leaves out others each time."""
    batches, left_out = sampler(100, 8, seed=0), set()
    orders = [indices_of(batches, epoch) for epoch in range(20)]
    for steps in orders:
        assert [len(step) for step in steps] == [8] * 12
        used = set(chain(*steps))
        assert len(used) == 96 and used <= set(range(100))
        left_out.add(frozenset(range(100)) - used)
    assert len(left_out) == 20
    torch.manual_seed(5)
    assert indices_of(batches, 0) == orders[0]  # whatever was read before
    permutation = torch.randperm(100, generator=generator("order", 1, 0)).tolist()
    assert list(chain(*indices_of(sampler(100, 8, seed=1), 0))) == permutation[:96]
    assert list(chain(*orders[0])) != permutation[:96]


@pytest.mark.parametrize(
    "wrong",
    [{"batch_size": 101}, {"steps_per_epoch": 11}, {"grad_accum": 3}, {"steps_per_epoch": 13}],
)
def test_a_recipe_for_other_rows_is_refused(wrong: dict[str, int]) -> None:
    """Batches would be smaller than it says, or an epoch would never end."""
    recipe = fit_recipe(**{"batch_size": 8, "steps_per_epoch": 12, **wrong})
    with pytest.raises(ValueError, match=r"^100 rows make \d+ steps|^a batch cannot be split"):
        GlobalBatchSampler(rows_of(100), recipe, seed=0)


def test_numbers_to_learn_have_columns() -> None:
    """Else a loss of [N, 1] outputs minus [N] targets is that of all pairs."""
    with pytest.raises(ValueError, match=r"^targets that are numbers need .*, not \[9\]$"):
        Rows(torch.zeros(9, 1), torch.zeros(9))


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_micro_batches_split_a_step_and_skip_steps_leaves_out_what_came_before(parts: int) -> None:
    whole = indices_of(sampler(100, 8, seed=3), 2)
    batches = sampler(100, 8, seed=3, parts=parts)
    assert batches.micro_batch_size == batches.batch_size == 8 // parts
    assert batches.steps_per_epoch == 12
    pieces = indices_of(batches, 2)
    assert {len(piece) for piece in pieces} == {8 // parts}
    assert list(chain(*pieces)) == list(chain(*whole))
    for skip_steps in (0, 1, 7, 11, 12):
        assert indices_of(batches, 2, skip_steps) == pieces[skip_steps * parts :]


def test_loaders_give_the_sampler_s_batches_or_all_rows_in_order() -> None:
    """Of twenty rows out of 40, or of all; each image is filled with its row in the split."""
    before, numbers = torch.get_rng_state(), torch.arange(40)
    images = numbers.to(torch.uint8)[:, None, None, None].expand(40, 3, 20, 28)
    rows, every = Rows(images, numbers + 100, torch.arange(39, 0, -2)), Rows(images, numbers + 100)
    batches = GlobalBatchSampler(rows, fit_recipe(batch_size=6, steps_per_epoch=3), seed=0)
    expected = indices_of(batches, 4, skip_steps=1)
    batches_read = list(make_loader(rows, batch_sampler=batches))
    assert [indices.tolist() for _, _, indices in batches_read] == expected
    for batch in batches_read:
        assert [part.dtype for part in batch] == [torch.uint8, torch.int64, torch.int64]
        images, labels, indices = batch
        assert images.shape == (6, 3, 20, 28)
        assert images[:, 2, 5, 5].tolist() == [39 - 2 * index for index in indices.tolist()]
        assert labels.tolist() == [139 - 2 * index for index in indices.tolist()]

    for some, expected_labels in ((rows, range(139, 100, -2)), (every, range(100, 140))):
        _, labels, indices = zip(*make_loader(some, batch_size=6), strict=True)
        assert {len(part) for part in labels[:-1]} == {6}
        assert torch.cat(indices).tolist() == list(range(len(some)))
        assert torch.cat(labels).tolist() == list(expected_labels)
    assert torch.equal(torch.get_rng_state(), before)  # nothing from the global generator
