"""The README and what belongs to it: pictures that are there and small, one version, short text."""

import re
from pathlib import Path

import PIL.Image
import pytest
import yaml

import ddp_mnist
from ddp_mnist import cli
from tests.commands import REPOSITORY

READMES = [REPOSITORY / "README.md", REPOSITORY / "README.zh-CN.md"]
NAMES = [path.name for path in READMES]


@pytest.mark.parametrize("page", READMES, ids=NAMES)
def test_the_pictures_are_there_for_light_and_dark(page: Path) -> None:
    pictures = re.findall(
        r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(\S+)">'
        r'<img src="(\S+)" width="400" alt="([^"]+)"></picture>',
        page.read_text("utf-8"),
    )
    assert [(dark, light) for dark, light, _ in pictures] == [
        (f"docs/figures/{name}.dark.png", f"docs/figures/{name}.light.png")
        for name in ("report", "doctor")
    ]
    for dark, light, alt in pictures:
        assert bool(re.search("[\u4e00-\u9fff]", alt)) == (page.name == "README.zh-CN.md")
        for file in (dark, light):
            assert (REPOSITORY / file).stat().st_size < 150_000
            with PIL.Image.open(REPOSITORY / file) as picture:
                assert picture.size == (960, 1336)  # side by side; two pixels a point


def test_the_readme_is_short() -> None:
    prose = re.sub(r"^```.*?^```$|<[^>]*>", "", READMES[0].read_text(), flags=re.M | re.S)
    assert len(re.findall(r"\S*\w\S*", prose)) < 1300


@pytest.mark.parametrize("page", READMES, ids=NAMES)
def test_the_first_screen_clones_trains_and_makes_the_report(page: Path) -> None:
    [block] = re.findall(r"```sh network\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    commands = [re.sub(" *#.*", "", line) for line in block.splitlines()]
    assert commands == ["git clone URL ddp_mnist && cd ddp_mnist", "make train", "make report"]


@pytest.mark.parametrize("name", ["reference.md", "reference.zh-CN.md"])
def test_the_reference_has_the_exit_codes_of_the_help(name: str) -> None:
    of_help = re.findall(r"\b(\d+) ", cli.HELP)
    text = (REPOSITORY / "docs" / name).read_text("utf-8")
    assert re.findall(r"^\| (\d+) \| [^|]+ \|$", text, re.MULTILINE) == of_help
    assert len(of_help) == 11


def test_there_is_one_version() -> None:
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == ddp_mnist.__version__
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The ddp_mnist developers"}]
    assert f"## [{ddp_mnist.__version__}]" in (REPOSITORY / "CHANGELOG.md").read_text()
