import itertools
import re
from dataclasses import fields
from typing import Any

import pytest

from ddp_mnist.config.mistakes import MISTAKES
from ddp_mnist.config.recipe import PRESETS, Recipe, resolve_recipe
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import UsageError


def test_what_others_decide_for_a_flag_is_of_a_flag_that_there_is() -> None:
    """Of another name it would be dropped in silence."""
    names = {field.name for field in fields(Recipe)}
    every: list[Any] = [*PRESETS.values(), *MISTAKES.values()]
    assert all(names >= each.recipe.keys() for each in every)
    assert TrainConfig.from_flags({"loss": "own:loss"}).recipe.label_smoothing == 0


# --- What is decided by the data set

MNIST, DIGITS = 60_000, 1437


PICTURES: dict[str, Any] = {"kind": "pictures"}
FROM_WEIGHTS = PICTURES | {"fine_tunes": True}
ACCURATE: dict[str, Any] = {"preset": "accurate", "val_size": 0}


@pytest.mark.parametrize(
    ("rows", "given", "batch_size", "val_size", "epochs"),
    [
        *[(MNIST, {"world_size": size}, 144, 5000, 1) for size in (1, 2, 3, 4, 6, 8)],
        (MNIST, {"world_size": 5}, 145, 5000, 1),
        (MNIST, {"world_size": 2, "grad_accum": 5}, 150, 5000, 1),
        *[(DIGITS, {"world_size": size}, 72, 287, 20) for size in (1, 2, 3, 4, 6, 8)],
        (DIGITS, {"world_size": 7}, 77, 287, 22),
        (9000, {}, 144, 1800, 6),  # 50 batches of 144
        (8998, {}, 72, 1799, 4),  # one image less
        (100, {"world_size": 8, "grad_accum": 4}, 64, 20, 300),  # 96 would be nearer: there are 80
        (1, {}, 1, 0, 300),
        # Few pictures take smaller steps, and more of them.
        (408, PICTURES, 24, 81, 154),  # 327 to train on, 13 steps
        (4498, PICTURES, 24, 899, 14),  # 149 steps
        (4500, PICTURES, 72, 900, 14),  # 50 steps
        (9000, PICTURES, 144, 1800, 20),  # 50 steps
        (MNIST, PICTURES, 144, 5000, 10),
        # From weights it is short.
        (336, FROM_WEIGHTS, 24, 67, 11),  # 269 to train on, 11 steps
        (375, FROM_WEIGHTS, 24, 75, 13),  # 300, 12 steps
        (1500, FROM_WEIGHTS, 24, 300, 3),  # 50 steps
        (MNIST, PICTURES | {"epochs": 1, "batch_size": 72}, 72, 5000, 1),
        # The accurate preset takes 4,000 steps, each of twice the batch.
        (MNIST, PICTURES | {"preset": "accurate"}, 288, 5000, 22),  # 190 steps
        (MNIST, ACCURATE, 288, 0, 20),  # of 208 steps
        (DIGITS, ACCURATE, 144, 0, 445),  # of 9
    ],
)
def test_the_data_set_decides_batch_size_and_epochs(
    rows: int, given: dict[str, Any], batch_size: int, val_size: int, epochs: int
) -> None:
    options: dict[str, Any] = {"world_size": 1, "kind": "strokes", "fine_tunes": False}
    typed = {name: given[name] for name in given.keys() - options.keys()}
    options |= {name: given[name] for name in given.keys() & options.keys()}
    flags, recipe = resolve_recipe(Recipe(**typed), rows, **options)
    assert (flags.batch_size, flags.val_size, flags.epochs) == (batch_size, val_size, epochs)
    assert (recipe.batch_size, recipe.epochs) == (batch_size, epochs)
    assert recipe.steps_per_epoch == (rows - val_size) // batch_size


NOT_OURS = ("torchvision:resnet18", "own_net:Net")


@pytest.mark.parametrize(
    ("models", "preset", "typed", "optimizer", "lr"),
    [
        (("cnn", "cnn_deep", "cnn_bn"), "fast", None, "muon", 1e-2),
        (("mlp",), "fast", None, "adamw", 1e-2),
        (NOT_OURS, "fast", None, "adamw", 1e-3),
        (("cnn", "cnn_deep", "cnn_bn"), "accurate", None, "muon", 1.4e-2),
        (NOT_OURS, "accurate", None, "adamw", 1e-3),
        (NOT_OURS, "fast", "sgd", "sgd", 1e-2),
        (("cnn",), "fast", "adamw", "adamw", 1e-2),
    ],
)
def test_the_net_decides_optimizer_and_learning_rate(
    models: tuple[str, ...], preset: str, typed: str | None, optimizer: str, lr: float
) -> None:
    for model in models:
        flags, recipe = resolve_recipe(Recipe(preset, model, optimizer=typed), DIGITS, 1)
        assert (flags.optimizer, flags.lr) == (recipe.optimizer, recipe.lr) == (optimizer, lr)


def test_pictures_are_augmented_and_strokes_are_not_unless_told_otherwise() -> None:
    kinds = ("strokes", "pictures", "characters")
    for typed, kind in itertools.product((None, True, False), kinds):
        flags, recipe = resolve_recipe(Recipe(augment=typed), DIGITS, 1, kind=kind)
        assert flags.augment is (kind != "strokes" if typed is None else typed)
        assert recipe.augment == (kind if flags.augment else "")
        assert flags.model == ("cnn" if kind == "strokes" else "cnn_deep")


def test_what_is_given_stays() -> None:
    given: dict[str, Any] = {"model": "cnn", "epochs": 1, "batch_size": 64, "optimizer": "adamw"}
    recipe = Recipe(**given, lr=0.5, augment=True, val_size=437)
    assert resolve_recipe(recipe, DIGITS, 2)[0] == recipe


@pytest.mark.parametrize(
    ("given", "rows", "world_size", "begins", "ends"),
    [
        ({"batch_size": 128}, MNIST, 3, "--batch-size 128: is not divisible by 3", "126 or 129,.*"),
        ({"batch_size": 72, "grad_accum": 5}, DIGITS, 2, "--batch-size 72: is", "70 or 80, .*"),
        ({"batch_size": 80}, 100, 3, "--batch-size 80: is not", "use 78, or another .*"),
        ({"batch_size": 2}, DIGITS, 8, "--batch-size 2: is not", "use 8, or another .*"),
        ({"batch_size": 1440, "val_size": 0}, DIGITS, 1, "--batch-size 1440: is above", "use 1437"),
        ({"val_size": 100}, 100, 1, "--val-size 100: the train split has 100", "at most 99"),
        ({"grad_accum": 5}, 10, 2, "--batch-size: must be divisible by 10 (", "or micro-batches"),
        ({"patience": 2}, 4, 1, "--patience: needs validation images; give --val-size, e.g. 1", ""),
    ],
)
def test_fault_27_what_does_not_fit_is_refused_with_what_would(
    given: dict[str, Any], rows: int, world_size: int, begins: str, ends: str
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(begins)}.*{ends}$") as refused:
        resolve_recipe(Recipe(**given), rows, world_size)
    parts = f"({world_size} processes x --grad-accum {given.get('grad_accum', 1)})"
    assert {"val_size", "patience"} & given.keys() or parts in str(refused.value)


def test_sgd_from_weights_learns_at_its_own_rate() -> None:
    for optimizer, lr in (("sgd", 2e-3), (None, 5e-4)):
        given = Recipe(model="torchvision:resnet18", optimizer=optimizer)
        assert resolve_recipe(given, DIGITS, 1, fine_tunes=True)[0].lr == lr
