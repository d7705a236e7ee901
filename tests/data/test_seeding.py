import itertools

import torch

from ddp_mnist.data.seeding import generator, seed_of


def test_seeds_are_the_same_for_all_time() -> None:
    """A change here changes the order of every run that is to be resumed."""
    assert seed_of("order", 0, 0) == 3188057147386964236
    assert seed_of("validation") == 5503978078027396547


def test_seeds_differ_in_purpose_and_counters() -> None:
    purposes = [("order",), ("augment",), ("step",), ("order1",)]
    counters = [(), (0,), (1,), (10,), (0, 0), (0, 1), (1, 0), (1, 10), (11, 0), (110,), (-1,)]
    seeds = {seed_of(*purpose, *c) for purpose, c in itertools.product(purposes, counters)}
    assert len(seeds) == len(purposes) * len(counters)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_generator_is_a_stream_of_its_own() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again = (torch.rand(4, generator=generator("order", 1, 2)) for _ in range(2))
    assert torch.equal(again, first)
    assert torch.equal(torch.get_rng_state(), before)
    assert generator("order").initial_seed() == seed_of("order")
