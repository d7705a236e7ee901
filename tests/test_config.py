from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig, resolve_recipe
from ddp_mnist.errors import UsageError
from ddp_mnist.flags import Flags, flag_name, flag_values, value_type

GROUPS: tuple[type[Flags], ...] = (Run, Recipe, Distribution)
FIELDS = [
    (group, field)
    for group in GROUPS
    for field in dataclasses.fields(group)  # type: ignore[arg-type]
]


def at_the_bounds(group: type[Flags], field: dataclasses.Field[Any]) -> list[tuple[Any, bool]]:
    """The values on both sides of each bound, and whether they are legal."""
    bounds = field.metadata["bounds"]
    cases: list[tuple[Any, bool]] = []
    for name, outwards in (("least", -1), ("most", 1), ("above", -1), ("below", 1)):
        if (bound := bounds[name]) is None:
            continue
        closed = name in ("least", "most")
        if value_type(group, field) is int:
            cases += [(bound, closed), (bound + (outwards if closed else -outwards), not closed)]
        else:
            inside = math.nextafter(bound, -outwards * math.inf)
            outside = math.nextafter(bound, outwards * math.inf)
            cases += [(float(bound), closed), (inside, True), (outside, False)]
    return cases


BOUNDS = [
    (group, field.name, value, legal)
    for group, field in FIELDS
    for value, legal in at_the_bounds(group, field)
]


@pytest.mark.parametrize(("group", "name", "value", "legal"), BOUNDS)
def test_bounds(group: type[Flags], name: str, value: Any, legal: bool) -> None:
    if legal:
        assert getattr(group(**{name: value}), name) == value
        return
    flag = "--" + name.replace("_", "-")
    with pytest.raises(UsageError, match=f"^{flag} {re.escape(str(value))}: must be .*[0-9]"):
        group(**{name: value})


def test_the_bounds_are_those_that_were_meant() -> None:
    assert len(BOUNDS) > 60
    assert (Recipe, "lr", 0.0, False) in BOUNDS
    assert (Recipe, "batch_size", 1, True) in BOUNDS
    assert (Recipe, "batch_size", 0, False) in BOUNDS
    assert (Recipe, "warmup", 1.0, False) in BOUNDS
    assert (Distribution, "dist_timeout", 1.0, True) in BOUNDS


NUMBERS = [(group, field) for group, field in FIELDS if value_type(group, field) is float]


@pytest.mark.parametrize(("group", "field"), NUMBERS, ids=[f.name for _, f in NUMBERS])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(
    group: type[Flags], field: dataclasses.Field[Any], value: float
) -> None:
    begins = f"^{flag_name(field)} {value}: must be a finite number (at least|more than) "
    with pytest.raises(UsageError, match=begins):
        group(**{field.name: value})


WORDS = [(group, field) for group, field in FIELDS if value_type(group, field) is str]


@pytest.mark.parametrize(("group", "field"), WORDS, ids=[f.name for _, f in WORDS])
def test_words(group: type[Flags], field: dataclasses.Field[Any]) -> None:
    flag, choices = flag_name(field), field.metadata["choices"]
    with pytest.raises(UsageError, match=f"^{flag}: the value is empty; "):
        group(**{field.name: ""})
    for choice in choices or ("anything", "数字", "a b"):
        assert getattr(group(**{field.name: choice}), field.name) == choice
    if choices:
        with pytest.raises(UsageError) as told:
            group(**{field.name: "quite-else"})
        assert str(told.value) == f"{flag} quite-else: choose from {', '.join(choices)}"
        with pytest.raises(UsageError, match=re.escape(f"; did you mean {choices[-1]}?")):
            group(**{field.name: choices[-1] + "x"})


@pytest.mark.parametrize(("group", "field"), FIELDS, ids=[f.name for _, f in FIELDS])
def test_every_flag_has_a_sentence_and_a_legal_default(
    group: type[Flags], field: dataclasses.Field[Any]
) -> None:
    sentence = field.metadata["help"]
    assert sentence.endswith((".", "]"))
    assert len(sentence) < 100
    assert getattr(group(), field.name) == field.default
    assert value_type(group, field) in (int, float, str, bool)


def test_a_long_value_is_shown_shortened() -> None:
    with pytest.raises(UsageError, match=r"^--model x{60}: choose") as told:
        Recipe(model="x" * 10_000)
    assert len(str(told.value)) < 150


def test_configurations_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("recipe", "distribution", "message"),
    [
        (
            {"val_size": 0, "patience": 2},
            {},
            "--patience: needs validation images; give --val-size, e.g. 5000",
        ),
        (
            {"val_size": 0, "target_accuracy": 0.9},
            {},
            "--target-accuracy: needs validation images; give --val-size, e.g. 5000",
        ),
        (
            {"model": "mlp"},
            {"sync_bn": True},
            "--sync-bn: mlp has no BatchNorm; use --model cnn_bn or leave it out",
        ),
        (
            {"model": "mlp", "optimizer": "muon"},
            {},
            "--optimizer muon: mlp has no convolutions; use --optimizer adamw",
        ),
    ],
)
def test_flags_that_contradict_each_other(
    recipe: dict[str, Any], distribution: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as told:
        TrainConfig(Run(), Recipe(**recipe), Distribution(**distribution))
    assert str(told.value) == message


@pytest.mark.parametrize("model", ["cnn_bn", "resnet18"])
def test_sync_bn_goes_with_the_nets_that_have_batch_norm(model: str) -> None:
    config = TrainConfig(Run(), Recipe(model=model), Distribution(sync_bn=True))
    assert config.distribution.sync_bn


@pytest.mark.parametrize(
    ("rows", "given", "batch_size", "epochs"),
    [
        (60_000, {}, 288, 20),  # of 208 steps
        (1437, {}, 144, 445),  # of 9
        (60_000, {"epochs": 3, "batch_size": 100}, 100, 3),
        (60_000, {"batch_size": 1000}, 1000, 67),
    ],
)
def test_the_accurate_preset_takes_four_thousand_steps_of_twice_the_batch(
    rows: int, given: dict[str, Any], batch_size: int, epochs: int
) -> None:
    recipe = resolve_recipe(Recipe(preset="accurate", val_size=0, **given), rows, 1)
    assert (recipe.batch_size, recipe.epochs) == (batch_size, epochs)


# --- What is decided by the data set

MNIST, DIGITS = 60_000, 1437


@pytest.mark.parametrize(
    ("rows", "world_size", "grad_accum", "batch_size", "val_size", "epochs"),
    [
        *[(MNIST, size, 1, 144, 5000, 1) for size in (1, 2, 3, 4, 6, 8)],
        (MNIST, 5, 1, 145, 5000, 1),
        (MNIST, 7, 1, 147, 5000, 1),
        (MNIST, 2, 5, 150, 5000, 1),
        *[(DIGITS, size, 1, 72, 287, 20) for size in (1, 2, 3, 4, 6, 8)],
        (DIGITS, 5, 1, 75, 287, 20),
        (DIGITS, 7, 1, 77, 287, 22),
        (9000, 1, 1, 144, 1800, 6),  # 50 batches of 144
        (8998, 1, 1, 72, 1799, 4),  # one image less
        (100, 1, 1, 72, 20, 300),
        (100, 3, 1, 72, 20, 300),
        (100, 7, 1, 77, 20, 300),
        (100, 8, 4, 64, 20, 300),  # 96 would be nearer, but there are 80
        (10, 1, 1, 8, 2, 300),
        (10, 3, 1, 6, 2, 300),
        (10, 8, 1, 8, 2, 300),
        (1, 1, 1, 1, 0, 300),
    ],
)
def test_defaults(
    rows: int, world_size: int, grad_accum: int, batch_size: int, val_size: int, epochs: int
) -> None:
    recipe = resolve_recipe(Recipe(grad_accum=grad_accum), rows, world_size)
    assert (recipe.batch_size, recipe.val_size, recipe.epochs) == (batch_size, val_size, epochs)


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        *[(model, "muon") for model in ("cnn", "cnn_deep", "cnn_bn")],
        *[(model, "adamw") for model in ("mlp", "resnet18")],
    ],
)
def test_the_net_decides_the_optimizer(model: str, optimizer: str) -> None:
    assert resolve_recipe(Recipe(model=model), DIGITS, 1).optimizer == optimizer
    typed = Recipe(model=model, optimizer="adamw")
    assert resolve_recipe(typed, DIGITS, 1).optimizer == "adamw"


def test_what_is_given_stays() -> None:
    given = Recipe(
        model="mlp", optimizer="adamw", epochs=1, batch_size=64, val_size=437, lr=0.5, patience=2
    )
    assert flag_values(resolve_recipe(given, DIGITS, 2)) == flag_values(given)


@pytest.mark.parametrize(
    ("given", "rows", "world_size", "message"),
    [
        (
            {"batch_size": 128},
            MNIST,
            3,
            "--batch-size 128: does not divide by 3 processes; nearest legal: 126 or 129",
        ),
        (
            {"batch_size": 72, "grad_accum": 5},
            DIGITS,
            2,
            "--batch-size 72: does not divide by 2 processes x 5 parts (--grad-accum);"
            " nearest legal: 70 or 80",
        ),
        (
            {"batch_size": 3, "grad_accum": 2},
            DIGITS,
            1,
            "--batch-size 3: does not divide by 1 process x 2 parts (--grad-accum);"
            " nearest legal: 2 or 4",
        ),
        (
            {"batch_size": 2},
            DIGITS,
            3,
            "--batch-size 2: does not divide by 3 processes; nearest legal: 3",
        ),
        (
            {"batch_size": 80},
            100,
            3,
            "--batch-size 80: does not divide by 3 processes; nearest legal: 78",
        ),
        (
            {"batch_size": 1152},
            DIGITS,
            2,
            "--batch-size 1152: only 1150 train images (1437 less 287 for validation);"
            " use at most 1150",
        ),
        (
            {"batch_size": 5000},
            DIGITS,
            7,
            "--batch-size 5000: only 1150 train images (1437 less 287 for validation);"
            " use at most 1148",
        ),
        (
            {"batch_size": 1440, "val_size": 0},
            DIGITS,
            1,
            "--batch-size 1440: only 1437 train images (1437 less 0 for validation);"
            " use at most 1437",
        ),
        (
            {"val_size": 100},
            100,
            1,
            "--val-size 100: the train split has 100; give at most 99",
        ),
        (
            {"val_size": 10**9},
            DIGITS,
            1,
            "--val-size 1000000000: the train split has 1437; give at most 1436",
        ),
        (
            {"grad_accum": 5},
            10,
            2,
            "--batch-size: must be at least 10 for 2 processes x 5 parts (--grad-accum), but only"
            " 8 train images (10 less 2 for validation) are there; use fewer of them",
        ),
    ],
)
def test_fault_27_what_does_not_fit_is_refused_with_what_would(
    given: dict[str, Any], rows: int, world_size: int, message: str
) -> None:
    with pytest.raises(UsageError) as told:
        resolve_recipe(Recipe(**given), rows, world_size)
    assert str(told.value) == message


ROWS = (1, 2, 5, 9, 10, 11, 50, 79, 100, 333, 1437, 7199, 8999, 9000, 9001, 60_000)


@pytest.mark.parametrize("rows", ROWS)
def test_resolved_values_are_legal_and_resolving_is_done_once(rows: int) -> None:
    for world_size in range(1, 9):
        for grad_accum in (1, 2, 3, 5, 16):
            least = world_size * grad_accum
            val_size = min(5000, rows // 5)
            if rows - val_size < least:
                with pytest.raises(UsageError, match=f"must be at least {least} for "):
                    resolve_recipe(Recipe(grad_accum=grad_accum), rows, world_size)
                continue
            recipe = resolve_recipe(Recipe(grad_accum=grad_accum), rows, world_size)
            assert recipe.batch_size and recipe.epochs
            assert recipe.batch_size % least == 0
            assert 0 < recipe.batch_size <= rows - val_size
            assert recipe.batch_size < 144 + least
            assert recipe.val_size == val_size
            steps = (rows - val_size) // recipe.batch_size
            assert recipe.epochs * steps >= 300
            assert recipe.epochs == 2 or (recipe.epochs - 1) * steps < 300
            assert resolve_recipe(recipe, rows, world_size) == recipe


@pytest.mark.parametrize("rows", ROWS)
def test_batch_sizes_that_are_suggested_are_accepted(rows: int) -> None:
    for world_size, grad_accum in [(1, 1), (2, 1), (3, 2), (8, 1), (7, 5)]:
        for batch_size in (1, 2, 7, 64, 100, 143, 1000, 59_999, 10**7):
            given = Recipe(batch_size=batch_size, grad_accum=grad_accum, epochs=1)
            try:
                assert resolve_recipe(given, rows, world_size).batch_size == batch_size
                assert batch_size % (world_size * grad_accum) == 0
            except UsageError as error:
                legal = re.search(
                    r"(?:nearest legal: |use at most )(\d+)(?: or (\d+))?$", str(error)
                )
                if legal is None:
                    assert rows - rows // 5 < world_size * grad_accum
                    continue
                for size in filter(None, legal.groups()):
                    suggested = dataclasses.replace(given, batch_size=int(size))
                    assert resolve_recipe(suggested, rows, world_size).batch_size == int(size)
