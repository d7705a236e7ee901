import dataclasses
import math
import re
from typing import Any

import pytest

from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import LARGEST, Flags, flag_fields, flag_name, kind_of
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import NETS, Recipe
from ddp_mnist.config.train_config import RunFlags
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
        assert ImageOptions.from_flags(vars(RunFlags(image_size=word))).size == size


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
