from ddp_mnist.core.seeding import generator, seed_of


def test_seeds_are_the_same_for_all_time() -> None:
    """A change here changes the order of every run that is to be resumed."""
    assert seed_of("order", 0, 0) == 3188057147386964236
    assert seed_of("validation") == 5503978078027396547
    assert generator("order", 0, 0).initial_seed() == seed_of("order", 0, 0)
