import dataclasses
import itertools
import math
import re
from typing import Any

import pytest

from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import (
    LARGEST,
    Flags,
    flag_fields,
    flag_name,
    flag_values,
    kind_of,
)
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import NETS, Recipe, resolve_recipe
from ddp_mnist.config.run import RunFlags
from ddp_mnist.errors import UsageError

GROUPS: tuple[type[Flags], ...] = (RunFlags, Recipe, Distribution)
ALL = [(group, field) for group in GROUPS for field in flag_fields(group)]
INTS, FLOATS, WORDS = (
    [(group, field) for group, field in ALL if kind_of(field) is kind] for kind in (int, float, str)
)
# The lowest and the highest legal value, where they are not 1 and a million.
LEGAL = {
    "seed": (0, 2**31),
    "keep": (2, LARGEST),
    "profile": (0, 1000),
    "val_size": (0, LARGEST),
    "lr": (math.ulp(0), 100),
    "weight_decay": (0, 10),
    "warmup": (0, math.nextafter(1, 0)),
    "label_smoothing": (0, math.nextafter(1, 0)),
    "target_accuracy": (math.ulp(0), 1),
    "max_grad_norm": (math.ulp(0), LARGEST),
    "test_size": (math.ulp(0), LARGEST),
    "rank": (0, LARGEST),
    "world_size": (1, 10**4),
    "local_rank": (0, LARGEST),
}
# Words with a form, where not any word will do.
WITH_A_FORM = {
    "model": (*NETS, "torchvision:resnet18", "own_net:Net", "my_package.nets:make_net"),
    "image_size": ("64", "48x64", "1x9999"),
}


@pytest.mark.parametrize(("group", "field"), INTS + FLOATS, ids=[f.name for _, f in INTS + FLOATS])
def test_bounds(group: type[Flags], field: dataclasses.Field[Any]) -> None:
    """Each number has them; NaN and infinity are outside all."""
    lowest, highest = LEGAL.get(field.name, (1, LARGEST))
    for value in (lowest, highest):
        assert getattr(group(**{field.name: value}), field.name) == value
    beside = (math.nextafter(lowest, -math.inf), math.nextafter(highest, math.inf))
    if kind_of(field) is int:
        beside = (lowest - 1, highest + 1)
    for value in (*beside, math.nan, math.inf, -math.inf):
        start = f"{flag_name(field)} {value}: must be "
        with pytest.raises(UsageError, match=rf"^{re.escape(start)}(at least|above) [0-9.,]+ and "):
            group(**{field.name: value})


@pytest.mark.parametrize(("group", "field"), WORDS, ids=[f.name for _, f in WORDS])
def test_words(group: type[Flags], field: dataclasses.Field[Any]) -> None:
    flag, choices = flag_name(field), field.metadata["choices"]
    for choice in choices or WITH_A_FORM.get(field.name) or ("anything", "数字", "a b"):
        assert getattr(group(**{field.name: choice}), field.name) == choice
    listed = f": choose from {', '.join(choices)}"
    with pytest.raises(UsageError) as refused:
        group(**{field.name: ""})
    empty = "is empty; give a value or leave it out"
    assert str(refused.value) == f"{flag} ''{listed if choices else f': {empty}'}"
    if choices:
        with pytest.raises(UsageError, match=rf"^{flag} quite-else{listed}$"):
            group(**{field.name: "quite-else"})
        with pytest.raises(UsageError, match=re.escape(f"; did you mean {[*choices][-1]}?")):
            group(**{field.name: [*choices][-1] + "x"})


NETS_LEGAL = "choose from cnn, cnn_deep, mlp, cnn_bn, torchvision:NAME (e.g. torchvision:resnet18)"
SIZE_LEGAL = "must be N or HEIGHTxWIDTH up to 9999, e.g. 64 or 48x64"
WRONG_FORMS: dict[str, list[str]] = {
    f"--model {{}}: {NETS_LEGAL} or MODULE:NAME": [
        *("resnet18", "torchvision:", ":Net", "net.py:Net:x", "a b:c", "a/b:c", "n:a.b")
    ],
    f"--model {{}}: {NETS_LEGAL} or MODULE:NAME; did you mean cnn?": ["cn"],
    f"--image-size {{}}: {SIZE_LEGAL}": [
        *("0", "x", "3x", "x3", "48x0", "-1", "1.5", "10000", "64X48", " 8")
    ],
}


@pytest.mark.parametrize("line", WRONG_FORMS)
def test_words_of_another_form_are_refused_with_the_form(line: str) -> None:
    for word in WRONG_FORMS[line]:
        with pytest.raises(UsageError) as refused:
            RunFlags(image_size=word) if "size" in line else Recipe(model=word)
        assert str(refused.value) == line.format(word)
    for word, size in (("64", (64, 64)), ("48x96", (48, 96))):
        assert ImageOptions.of(vars(RunFlags(image_size=word))).size == size


def test_what_may_differ_in_a_resumed_run_and_on_each_rank() -> None:
    changeable = {f.name for group in GROUPS for f in flag_fields(group, "may change")}
    assert changeable == {
        *("dataset", "cache_dir", "trackers", "checkpoint_every", "keep", "log_every", "epochs"),
        *("target_accuracy", "patience", "metrics", "grad_accum"),
    }
    assert {f.name for _, f in ALL if f.metadata["per_rank"]} == {
        *("dataset", "run_dir", "resume", "cache_dir", "quiet"),
        *("rank", "local_rank", "world_size", "init_method"),
    }


# --- What is decided by the data set

MNIST, DIGITS = 60_000, 1437


PICTURES: dict[str, Any] = {"pictures": True}
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
        (MNIST, PICTURES | {"epochs": 1, "batch_size": 72}, 72, 5000, 1),
        # The accurate preset takes 4,000 steps, each of twice the batch.
        (MNIST, PICTURES | {"preset": "accurate"}, 288, 5000, 22),  # 190 steps
        (MNIST, ACCURATE, 288, 0, 20),  # of 208 steps
        (DIGITS, ACCURATE, 144, 0, 445),  # of 9
        (MNIST, ACCURATE | {"batch_size": 1000}, 1000, 0, 67),
    ],
)
def test_the_data_set_decides_batch_size_and_epochs(
    rows: int, given: dict[str, Any], batch_size: int, val_size: int, epochs: int
) -> None:
    typed = {name: given[name] for name in given if name not in ("world_size", "pictures")}
    recipe = resolve_recipe(
        Recipe(**typed), rows, given.get("world_size", 1), pictures="pictures" in given
    )
    assert (recipe.batch_size, recipe.val_size, recipe.epochs) == (batch_size, val_size, epochs)
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
        found = resolve_recipe(Recipe(preset, model, optimizer=typed), DIGITS, 1)
        assert (found.optimizer, found.lr) == (optimizer, lr)


def test_pictures_are_augmented_and_strokes_are_not_unless_told_otherwise() -> None:
    for typed, pictures in itertools.product((None, True, False), (True, False)):
        found = resolve_recipe(Recipe(augment=typed), DIGITS, 1, pictures=pictures)
        assert found.augment is (pictures if typed is None else typed)
        assert found.model == ("cnn_deep" if pictures else "cnn")


def test_what_is_given_stays() -> None:
    given: dict[str, Any] = {"model": "cnn", "epochs": 1, "batch_size": 64, "optimizer": "adamw"}
    recipe = Recipe(**given, lr=0.5, augment=True, val_size=437)
    assert flag_values(resolve_recipe(recipe, DIGITS, 2)) == flag_values(recipe)


@pytest.mark.parametrize(
    ("given", "rows", "world_size", "begins", "ends"),
    [
        ({"batch_size": 128}, MNIST, 3, "--batch-size 128: is not divisible by 3", "126 or 129,.*"),
        ({"batch_size": 72, "grad_accum": 5}, DIGITS, 2, "--batch-size 72: is", "70 or 80, .*"),
        ({"batch_size": 80}, 100, 3, "--batch-size 80: is not", "use 78, or another .*"),
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


def test_a_resumed_run_s_batch_is_not_to_be_changed() -> None:
    """It must stay, so the line advises what may change."""
    shared = resolve_recipe(Recipe(batch_size=24, grad_accum=2), DIGITS, 3, resumes=True)
    assert shared.batch_size == 24
    with pytest.raises(UsageError) as refused:
        resolve_recipe(Recipe(batch_size=24, grad_accum=5), DIGITS, 1, resumes=True)
    assert str(refused.value) == (
        "--resume: the run's batch of 24 is not divisible by 5 (1 process x --grad-accum 5); let"
        " that product be one of 1, 2, 3, 4, 6, 8, 12, 24"
    )


ROWS = (1, 2, 5, 9, 10, 11, 50, 79, 100, 333, 1437, 7199, 8999, 9000, 9001, 60_000)
TYPED = (1, 2, 7, 64, 100, 143, 1000, 59_999, 10**6)


@pytest.mark.parametrize("rows", ROWS)
def test_resolved_and_suggested_values_are_legal_and_resolving_is_done_once(rows: int) -> None:
    val_size = min(5000, rows // 5)
    train_rows = rows - val_size
    for world_size, grad_accum in itertools.product(range(1, 9), (1, 2, 3, 5, 16)):
        least = world_size * grad_accum
        if train_rows < least:
            with pytest.raises(UsageError, match=f"--batch-size: must be divisible by {least} "):
                resolve_recipe(Recipe(grad_accum=grad_accum), rows, world_size)
            continue
        recipe = resolve_recipe(Recipe(grad_accum=grad_accum), rows, world_size)
        assert recipe.batch_size % least == 0
        assert 0 < recipe.batch_size <= train_rows
        assert recipe.batch_size < 144 + least
        assert recipe.val_size == val_size
        steps = train_rows // recipe.batch_size
        assert recipe.epochs * steps >= 300
        assert recipe.epochs == 2 or (recipe.epochs - 1) * steps < 300
        assert resolve_recipe(recipe, rows, world_size) == recipe
        for batch_size in TYPED:
            given = Recipe(batch_size=batch_size, grad_accum=grad_accum, epochs=1)
            if batch_size % least == 0 and batch_size <= train_rows:
                assert resolve_recipe(given, rows, world_size).batch_size == batch_size
                continue
            with pytest.raises(UsageError) as refused:
                resolve_recipe(given, rows, world_size)
            legal = re.search(r"; use (\d+)(?: or (\d+))?(, or another .*)?$", str(refused.value))
            assert legal
            for size in map(int, filter(None, legal.groups()[:2])):
                suggested = dataclasses.replace(given, batch_size=size)
                assert resolve_recipe(suggested, rows, world_size).batch_size == size
