from dataclasses import replace
from typing import Any

import numpy as np

from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.image_data import ImageData
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.training import plan


def test_the_plan_says_for_what_the_recipe_was_chosen_and_which_flags_were_typed() -> None:
    colour = ImageFormat((3, 8, 8), (0.5,) * 3, (0.2,) * 3, [], False, False)
    photos = replace(of_classes(a=300, b=29), image_format=colour)

    def said(resumes: bool = False, **typed: Any) -> str:
        config = TrainConfig.from_flags(typed)
        flags, trained = resolve_recipe(config.recipe, 408, 1, 81, kind="pictures")
        return plan.recipe_line(replace(config, recipe=flags, resumes=resumes), photos, trained)

    assert said(preset="fast") == (
        "fast, chosen for 327 pictures: muon, learning rate up to 0.02 in the first 10% of the"
        " steps, mirrored, cropped, coloured, label smoothing 0.1 (the training loss levels off"
        " near 0.2)"
    )
    on = said(resumes=True, epochs=9, augment=False, seed=1, metrics=["f1", "recall"])
    assert on.startswith("fast, kept for 327 pictures: muon, learning rate up to 0.02 in")
    assert "steps, not augmented, label smoothing 0.1 (the" in on
    assert on.endswith("near 0.2); typed: --epochs 9, --no-augment, --metrics f1,recall")


def of_classes(tests: int = 0, **counts: int) -> ImageData:
    """Return images of these classes; the first of each is held out, and so many as a test."""
    labels = np.repeat(np.arange(len(counts)), [*counts.values()])
    _, first = np.unique(labels, return_index=True)
    train = np.delete(np.arange(len(labels)), first)
    rows = {"train": train, "validation": first, "test": np.arange(tests)}
    digits = cache.load("digits")
    return replace(digits, classes=[*counts], targets=labels, rows=rows, test_share=tests)


def test_the_plan_shows_the_train_images_of_each_class_in_a_line() -> None:
    found = plan.class_lines(of_classes(ladybird=129, moth=91, ant=21, bee=20, fly=3))
    assert found == {
        "classes": "ladybird: 128, moth: 90, ant: 20, bee: 19, fly: 2",
        "hint": "few train images of fly 2, bee 19: below 20 a class is hard to learn; add some"
        " or hold out fewer",
    }
    rare = of_classes(ladybird=129, moth=60, bee=12)
    hint = (
        "few train images of bee 11: below 20 a class is hard to learn; add some or hold out fewer"
    )
    more = ", or let rare classes count more by --class-weights balanced"
    assert plan.class_lines(rare)["hint"] == hint + more
    assert plan.class_lines(rare, "balanced")["hint"] == hint
    many = plan.class_lines(of_classes(0, **{f"c{number:03}": number + 2 for number in range(100)}))
    assert many == {
        "classes": "1 (c000) to 100 (c099) train images each",
        "hint": "few train images of c000 1, c001 2, c002 3, ...: below 20 a class is hard"
        " to learn; add some or hold out fewer",
    }
