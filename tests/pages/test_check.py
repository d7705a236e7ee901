"""docs/check.py finds each kind of fault in a page."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.commands import REPOSITORY

CHECK: dict[str, Any] = runpy.run_path(str(REPOSITORY / "docs" / "check.py"))
ENGLISH = """# A page

See [the part](#a-part), `core/state.py` and **bold**. It took 1.25 s with `--epochs 3`.

## A part

![A drawing](figures/ddp.en.svg)

| a | b |
|---|---|
| 1 | 2 |

<details>

```sh fails
ls -l
```

</details>

```python ddp_mnist/core/fit.py
    run.phase("test")
```
"""
CHINESE = ENGLISH.replace("A page", "一页").replace("A drawing", "图").replace("took", "用时")


def faults(page: Path, text: str) -> list[str]:
    page.write_text(text, encoding="utf-8")
    found: list[str] = CHECK["faults_of"](page)
    return found


@pytest.fixture
def pages(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "figures").symlink_to(REPOSITORY / "docs" / "figures")
    (tmp_path / "page.md").write_text(ENGLISH)
    return tmp_path / "page.md", tmp_path / "page.zh-CN.md"


def test_the_pages_are_found() -> None:
    """`make check` runs it on them."""
    names = {path.name for path in CHECK["pages"]()}
    assert {"README.md", "README.zh-CN.md", "CONTRIBUTING.md", "guide.md"} <= names
    quotes = [f for path in CHECK["pages"]() for f in CHECK["Page"](path).fences("python")]
    assert sum(len(fence.info.split()) == 2 for fence in quotes) >= 10


def test_each_fault_of_the_page_has_a_test_and_each_that_a_test_names_a_row() -> None:
    tests = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("*.py"))
    named = {int(number) for number in re.findall(r"fault_(\d\d)", tests)}
    for page in ("faults.md", "faults.zh-CN.md"):
        rows = re.findall(r"^\| (\d+) \|", (REPOSITORY / "docs" / page).read_text("utf-8"), re.M)
        assert [*map(int, rows)] == [*range(1, len(rows) + 1)]
        assert named == {*map(int, rows)}


def test_a_right_page_has_no_fault(pages: tuple[Path, Path]) -> None:
    for page, text in zip(pages, (ENGLISH, CHINESE), strict=True):
        assert faults(page, text) == []


FAULTS = [  # of a page: its text, what stands there instead, and what is said
    ("See [", "$$x$$ See [", "'$$' is not drawn everywhere"),
    ("| 1 | 2 |", "| 1 | 2 | 3 |", "line 9: the table's rows have unequally many cells"),
    ("</details>", "", "<details> without an end"),
    (
        '    run.phase("test")\n```\n',
        '    run.phase("test")\n',
        "line 21: a fence without an end",
    ),
    ("```sh fails", "```bash", "line 15: a fence of bash; write sh, python or text"),
    ("```sh fails", "```sh later", "line 15: unknown mark later; choose from fails, gpu"),
    ("ls -l", "ls (", "line 15: bash cannot parse it"),
    ('run.phase("test")', "run.keep(state)", "ddp_mnist/core/fit.py does not have these lines"),
    ("![A drawing]", "![]", "figures/ddp.en.svg: has no alternative text"),
    ("ddp.en.svg", "gone.svg", "figures/gone.svg: cannot be drawn"),
    ("(#a-part)", "(#b-part)", "#b-part: page.md has no such heading"),
    ("(#a-part)", "(gone.md)", "gone.md: leads nowhere"),
    ("`core/state.py`", "`training/gone.py`", "training/gone.py: there is no such file"),
]
OF_A_TRANSLATION = [
    ("## A part", "### A part", "headings' levels differ from page.md"),
    ("ls -l", "ls -a", "commands differ from page.md: 'ls -l"),
    ('run.phase("test")', "run.begin(state)", "code differ from page.md"),
    ("1.25", "1.26", "figures differ from page.md: '1.25'"),
    ("(#a-part)", "(page.md)", "links differ from page.md"),
    ("用时", "用时 很长", "a space or a line break between Chinese letters"),
]


@pytest.mark.parametrize(("right", "wrong", "fault"), FAULTS + OF_A_TRANSLATION)
def test_a_fault_is_named(right: str, wrong: str, fault: str, pages: tuple[Path, Path]) -> None:
    is_translation = (right, wrong, fault) in OF_A_TRANSLATION
    page, text = pages[is_translation], (ENGLISH, CHINESE)[is_translation]
    assert right in text
    found = faults(page, text.replace(right, wrong, 1))
    assert any(fault in line for line in found), found


def test_a_comment_is_translated_and_the_code_is_not(pages: tuple[Path, Path]) -> None:
    program = "\n```python\n# a.py\nf()  # a comment\n```\n"
    assert faults(pages[0], ENGLISH + program) == []
    assert faults(pages[1], CHINESE + program.replace("a comment", "注释")) == []
    assert faults(pages[1], CHINESE + program.replace("f()", "g()"))[0].startswith("code differ")
