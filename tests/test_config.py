from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig, resolve_recipe
from ddp_mnist.doctor.flags import Doctor
from ddp_mnist.errors import UsageError
from ddp_mnist.flags import Flags, flag_fields, flag_name, flag_values, value_type
from ddp_mnist.verbs.flags import Evaluate, Export, Multinode, Predict, Prepare, Report
from ddp_mnist.verify.flags import Verify

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
        with pytest.raises(UsageError) as refused:
            group(**{field.name: "quite-else"})
        assert str(refused.value) == f"{flag} quite-else: choose from {', '.join(choices)}"
        with pytest.raises(UsageError, match=re.escape(f"; did you mean {choices[-1]}?")):
            group(**{field.name: choices[-1] + "x"})


ALL = [
    (group, field)
    for group in (*GROUPS, Evaluate, Predict, Report, Export, Prepare, Multinode, Doctor, Verify)
    for field in flag_fields(group)
]


@pytest.mark.parametrize(("group", "field"), ALL, ids=[f"{g.__name__} {f.name}" for g, f in ALL])
def test_every_flag_has_a_sentence_and_a_legal_default(
    group: type[Flags], field: dataclasses.Field[Any]
) -> None:
    sentence = field.metadata["help"]
    assert sentence.endswith((".", "]"))
    assert len(sentence) < 100
    assert value_type(group, field) in (int, float, str, bool, tuple)
    required = {f.name: "x" for f in flag_fields(group) if "positional" in f.metadata}
    if field.name not in required:
        assert getattr(group(**required), field.name) == field.default


def test_policies_of_a_resumed_run_and_of_ranks() -> None:
    """Each flag of train has one; these are the ones that were meant."""

    def named(*policies: Any) -> set[str]:
        return {f.name for group in GROUPS for f in flag_fields(group, *policies)}

    assert named("same images") == {"dataset"}
    assert named("inherited") == {"cache_dir", "trackers"}
    assert named("may change") == {
        *("checkpoint_every", "keep", "log_every", "epochs"),
        *("target_accuracy", "patience", "grad_accum"),
    }
    assert named("must equal") - {f.name for f in flag_fields(Recipe)} == {"seed"}
    assert named("not inherited") == {f.name for f in flag_fields(Distribution)} | {
        *("run_dir", "resume", "profile", "quiet", "dry_run")
    }
    assert {f.name for _, f in FIELDS if f.metadata["may_differ"]} == {
        *("dataset", "run_dir", "resume", "cache_dir", "quiet"),
        *("rank", "local_rank", "world_size", "init_method"),
    }


def test_a_long_value_is_shown_shortened() -> None:
    with pytest.raises(UsageError, match=r"^--model x{60}: choose") as refused:
        Recipe(model="x" * 10_000)
    assert len(str(refused.value)) < 150


def test_configurations_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().lr = 1.0  # type: ignore[misc]


VALIDATION = "--{}: needs validation images; give --val-size, e.g. 5000"


@pytest.mark.parametrize(
    ("recipe", "sync_bn", "message"),
    [
        ({"val_size": 0, "patience": 2}, False, VALIDATION.format("patience")),
        ({"val_size": 0, "target_accuracy": 0.9}, False, VALIDATION.format("target-accuracy")),
        *[
            ({"model": net}, True, f"--sync-bn: {net} has no BatchNorm; use --model cnn_bn or")
            for net in ("cnn", "mlp")
        ],
        (
            {"model": "mlp", "optimizer": "muon"},
            False,
            "--optimizer muon: mlp has no convolutions; use --optimizer adamw",
        ),
    ],
)
def test_flags_that_contradict_each_other(
    recipe: dict[str, Any], sync_bn: bool, message: str
) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}"):
        TrainConfig(Run(), Recipe(**recipe), Distribution(sync_bn=sync_bn))


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
    assert recipe.steps_per_epoch == rows // batch_size


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


DIVIDE = "--batch-size {}: does not divide by {}; nearest legal: {}"
ONLY = "--batch-size {}: only {} train images (1437 less {} for validation); use at most {}"
PARTS = "processes x 5 parts (--grad-accum)"


@pytest.mark.parametrize(
    ("given", "rows", "world_size", "message"),
    [
        ({"batch_size": 128}, MNIST, 3, DIVIDE.format(128, "3 processes", "126 or 129")),
        (
            {"batch_size": 72, "grad_accum": 5},
            DIGITS,
            2,
            DIVIDE.format(72, f"2 {PARTS}", "70 or 80"),
        ),
        ({"batch_size": 2}, DIGITS, 3, DIVIDE.format(2, "3 processes", "3")),
        ({"batch_size": 80}, 100, 3, DIVIDE.format(80, "3 processes", "78")),
        ({"batch_size": 1152}, DIGITS, 2, ONLY.format(1152, 1150, 287, 1150)),
        ({"batch_size": 5000}, DIGITS, 7, ONLY.format(5000, 1150, 287, 1148)),
        ({"batch_size": 1440, "val_size": 0}, DIGITS, 1, ONLY.format(1440, 1437, 0, 1437)),
        ({"val_size": 100}, 100, 1, "--val-size 100: the train split has 100; give at most 99"),
        (
            {"grad_accum": 5},
            10,
            2,
            f"--batch-size: must be at least 10 for 2 {PARTS}, but only 8 train images (10 less 2"
            " for validation) are there; use fewer of them",
        ),
    ],
)
def test_fault_27_what_does_not_fit_is_refused_with_what_would(
    given: dict[str, Any], rows: int, world_size: int, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        resolve_recipe(Recipe(**given), rows, world_size)
    assert str(refused.value) == message


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
