import dataclasses
import math
import re
from typing import Any

import pytest

from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import Flags, flag_fields, flag_name, kind_of
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import NETS, Recipe
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.errors import UsageError

GROUPS: tuple[type[Flags], ...] = (RunFlags, Recipe, Distribution)
ALL = [(group, field) for group in GROUPS for field in flag_fields(group)]
OF_KIND = {kind: [each for each in ALL if kind_of(each[1]) is kind] for kind in (int, float, str)}
INTS, FLOATS, WORDS = OF_KIND.values()
# Words with a form, where not any word will do.
WITH_A_FORM = {
    "model": (*NETS, "torchvision:resnet18", "own_net:Net", "my_package.nets:make_net"),
    "image_size": ("64", "48x64", "1x9999"),
    "fold": ("1/2", "100/100"),
    "columns": ("label=species", "图像=a b, group = Tier"),
}


@pytest.mark.parametrize(("group", "field"), INTS + FLOATS, ids=[f.name for _, f in INTS + FLOATS])
def test_the_bounds_that_an_error_names_are_the_bounds_enforced(
    group: type[Flags], field: dataclasses.Field[Any]
) -> None:
    """Each number has two; NaN and infinity are outside."""

    def refused(value: float) -> str:
        with pytest.raises(UsageError) as raised:
            group(**{field.name: value})
        return str(raised.value).removeprefix(f"{flag_name(field)} {value}: must be ")

    def beside(number: float, towards: float) -> float:
        if kind_of(field) is int:
            return int(number) + (1 if towards > 0 else -1)
        return math.nextafter(number, towards)

    named = refused(math.nan)
    bounds = re.fullmatch(r"(at least|above) ([0-9.,]+) and (at most|below) ([0-9.,]+)", named)
    assert bounds
    lower, least, upper, most = bounds.groups()
    for word, limit, outside in ((lower, least, -math.inf), (upper, most, math.inf)):
        last = float(limit.replace(",", ""))
        if word in ("above", "below"):
            last = beside(last, -outside)
        assert getattr(group(**{field.name: last}), field.name) == last
        assert named == refused(beside(last, outside)) == refused(outside)


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


NETS_LEGAL = "choose from cnn, cnn_deep, mlp, cnn_bn, torchvision:NAME (e.g. torchvision:resnet18),"
NETS_LEGAL += " timm:NAME or MODULE:NAME"
SIZE_LEGAL = "must be N or HEIGHTxWIDTH up to 9999, e.g. 64 or 48x64"
WRONG_FORMS: dict[str, list[str]] = {
    f"--model {{}}: {NETS_LEGAL}": [
        *("resnet18", "torchvision:", ":Net", "net.py:Net:x", "a b:c", "a/b:c", "n:a.b")
    ],
    f"--model {{}}: {NETS_LEGAL}; did you mean cnn?": ["cn"],
    f"--image-size {{}}: {SIZE_LEGAL}": [
        *("0", "x", "3x", "x3", "48x0", "-1", "1.5", "10000", "64X48", " 8"),
        *("00", "0000x5", "5x000", "\u0660", "\u0662\u0668"),
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
