"""Advice names what slows a run, and what to do."""

from ddp_mnist.run import hints


def test_slow_line() -> None:
    assert hints.slow_line(12, "node7", 2.04) == (
        "slow       rank 12 on node7 takes 2.0 times as long as the others, which wait for it; see"
        " what else runs there"
    )


def test_neighbours_line() -> None:
    assert hints.neighbours_line(1, 2).splitlines() == [
        "careful    other programs use these cores, which have room for 1 thread of 2,",
        "           and each step waits for the slowest; stop it, and resume it with",
        "           OMP_NUM_THREADS=1",
    ]
    more, one = (hints.neighbours_line(fit, 4, has_launcher=True) for fit in (2, 1))
    assert more.endswith("OMP_NUM_THREADS=2")
    assert one.endswith("; end them, or wait until they\n           have ended")
    assert hints.neighbours_line(1, 2, fix="end it").endswith("for the slowest; end it")
