"""What the documents tell people to type works, what they quote is in the code, no link is dead.

A fence may have a mark behind its language. If it names what the commands need (gpu, slurm, hub,
network, hosts, a person's own images, minutes), they are parsed only. All others are run, in the
order of their page, and end with 0.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from ddp_mnist.cluster.local import free_port
from tests.commands import REPOSITORY

NEEDS = ("gpu", "slurm", "hub", "network", "hosts", "images", "minutes")
PAGES = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("", "docs", "deploy")
    for path in (REPOSITORY / folder).glob("*.md")
)
LANGUAGES = ("sh", "python", "text", "diff", "mermaid")


@dataclass(frozen=True)
class Fence:
    """A block of code in a page."""

    page: Path
    line: int
    language: str
    mark: str
    body: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def fences_of(page: Path) -> list[Fence]:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    found = re.finditer(r"^```(\S*) *(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [Fence(page, text.count("\n", 0, m.start()) + 1, m[1], m[2], m[3]) for m in found]


FENCES = [fence for page in PAGES for fence in fences_of(page)]
RUN = [fence for fence in FENCES if fence.language == "sh" and fence.mark not in NEEDS]


def test_the_pages_are_there() -> None:
    names = {str(page) for page in PAGES}
    assert {"README.md", "README.zh-CN.md", "CONTRIBUTING.md", "docs/guide.md"} <= names
    assert len(RUN) >= 12


@pytest.mark.parametrize("fence", FENCES, ids=str)
def test_a_fence_says_what_it_is(fence: Fence) -> None:
    assert fence.language in LANGUAGES
    if fence.language == "sh":
        assert fence.mark in ("", *NEEDS)
        subprocess.run(["bash", "-n"], input=fence.body, text=True, check=True)


@pytest.mark.timeout(600)  # the guide has twenty commands, each of which starts Python
@pytest.mark.parametrize("page", [p for p in PAGES if any(f.page == p for f in RUN)], ids=str)
def test_what_a_page_tells_to_type_works(page: Path, tmp_path: Path) -> None:
    for name in ("ddp_mnist", "accelerate_configs", "Makefile", "pyproject.toml", "deploy"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    # `make` takes this environment, as it would its own
    makeflags = f"PYTHON={sys.executable} VENV="
    variables = {"PATH": path, "MAKEFLAGS": makeflags, "PYTHONPATH": str(tmp_path)}
    ports = {port: str(free_port()) for port in ("29500", "29501")}
    # In one shell, as a person types them: what a block exports reaches the blocks after it.
    blocks = [f"echo '# {fence}' >&2\n{fence.body}" for fence in RUN if fence.page == page]
    script = re.sub("29500|29501", lambda match: ports[match[0]], "".join(blocks))
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=590,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_what_a_page_quotes_is_in_the_code() -> None:
    quotes = [fence for fence in FENCES if fence.language == "python" and fence.mark]
    assert len(quotes) >= 5
    for fence in quotes:
        assert fence.body in (REPOSITORY / fence.mark).read_text(), str(fence)


def patched(text: str, hunk: str) -> str:
    """`text` with the lines of a diff's hunk replaced; these have to be there, once."""
    lines = hunk.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(old) == 1, hunk
    return text.replace(old, new)


def test_the_edits_for_ones_own_trainer_work(tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "ddp_mnist", tmp_path / "ddp_mnist")
    edits = [fence for fence in FENCES if fence.language == "diff"]
    assert len(edits) == 4
    for fence in edits:
        head, _, hunk = fence.body.partition("@@\n")
        file = tmp_path / head.splitlines()[1].removeprefix("+++ b/")
        # editors strip the space of a diff's blank lines
        hunk = "".join(line if line != "\n" else " \n" for line in hunk.splitlines(keepends=True))
        file.write_text(patched(file.read_text(), hunk))

    def ddp_mnist(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ddp_mnist", *words, "--model", "linear"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    accuracy = re.search(
        r"test accuracy (0\.\d+)", ddp_mnist("train", "--dataset", "digits", "--epochs", "5")
    )
    assert accuracy
    assert float(accuracy[1]) > 0.8
    assert "all 10 checks passed" in ddp_mnist("verify", "--processes", "2")


def anchor(heading: str) -> str:
    """As GitHub makes one of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", (REPOSITORY / page).read_text(), flags=re.DOTALL | re.M)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        place, _, fragment = link.partition("#")
        target = (REPOSITORY / page).parent / place if place else REPOSITORY / page
        assert target.exists(), link
        if fragment:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), link


def test_the_readmes_have_the_same_sections_and_commands() -> None:
    english, chinese = (
        (REPOSITORY / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
    )
    levels = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in (english, chinese)]
    assert levels[0] == levels[1]
    commands = [
        [
            fence.body.split("#")[0]
            for fence in FENCES
            if str(fence.page) == name and fence.language == "sh"
        ]
        for name in ("README.md", "README.zh-CN.md")
    ]
    assert commands[0] == commands[1]
    for pattern in (r"\]\((?!README)([^)]+)\)", r"^\| `(ddp-mnist [a-z]+)", r"(make [a-z-]+)"):
        found = [
            sorted(set(re.findall(pattern, text, re.MULTILINE))) for text in (english, chinese)
        ]
        assert found[0] == found[1], pattern
    for pattern in (r"--[a-z][a-z-]+", r"(?<![\w.])\d+(?:[,.]\d+)+"):  # flags, figures
        found = [sorted(set(re.findall(pattern, text))) for text in (english, chinese)]
        assert found[0] == found[1], pattern
