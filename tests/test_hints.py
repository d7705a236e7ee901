"""Advice comes when it helps, says how, and is silent else."""

from types import SimpleNamespace
from typing import Any

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


def test_a_run_of_hours_gets_the_flag_with_which_it_takes_one() -> None:
    assert hints.long_line(3600.0, 154) == ""
    assert hints.long_line(9000.0, 154).splitlines() == [
        "careful    this takes about 2.5 hours on the CPU; for an hour or less, begin",
        "           anew with --epochs 61",
    ]
    alone = " ".join(hints.long_line(9000.0, 1).split())
    assert alone.endswith("begin anew with a smaller --image-size")


def test_a_net_that_has_learned_its_images_by_heart_gets_the_flag_that_helps() -> None:
    far = SimpleNamespace(accuracy=0.5595, count=84)
    near, few = SimpleNamespace(accuracy=0.95, count=84), SimpleNamespace(accuracy=0.85, count=20)

    def hint(accuracy: Any, validation: Any, **flags: Any) -> str:
        recipe: Any = SimpleNamespace(**{"model": "cnn", "weights": None, "augment": False} | flags)
        return " ".join(hints.overfit_line(accuracy, validation, recipe).split())

    assert hint(1.0, far) == (
        "hint accuracy 1.0000 and validation 0.5595: the net has learned its images by heart"
        " (overfitting); to try in a new run: more images, or --augment, or --model"
        " torchvision:resnet18 --weights DEFAULT"
    )
    assert hint(0.98, far, augment=True, model="torchvision:vgg11").endswith(
        "more images, or --weights DEFAULT"
    )
    assert hint(0.98, far, augment=True, weights="x").endswith("to try in a new run: more images")
    for arguments in ((1.0, near), (1.0, few), (0.97, far), (None, far), (1.0, None)):
        assert hint(*arguments) == ""
