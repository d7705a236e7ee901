"""What a reader of the documents sees: tables, pictures, links, quotes; and two languages alike.

The pages are parsed as CommonMark with GitHub's tables. What one viewer draws and another shows as
source code (mermaid, TeX between dollars) is not in them: pictures are files.
"""

import re
import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import PIL.Image
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.commands import PAGES, REPOSITORY, fences_of

pytestmark = pytest.mark.system
CHINESE = [page for page in PAGES if page.name.endswith(".zh-CN.md")]
FENCES = [fence for page in PAGES for fence in fences_of(page)]
READER = MarkdownIt("commonmark").enable("table")
WIDE = re.compile(r"[\u3000-\u9fff\uff00-\uffef]")
BLOCKS = {"bullet_list_open", "ordered_list_open", "blockquote_open", "heading_open"}
MARKER = re.compile(r"`{3,}|~{3,}")


def text_of(page: Path) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def test_the_pages_are_there() -> None:
    names = {str(page) for page in PAGES}
    assert {"README.md", "README.zh-CN.md", "CONTRIBUTING.md", "docs/guide.md"} <= names


# --- As a reader's page


def cells(row: str) -> int:
    """Return the number of cells of a table's row; `\\|` is a character in one."""
    return len(re.findall(r"(?<!\\)\|", row.strip().strip("|"))) + 1


def images_of(tokens: list[Token]) -> list[tuple[str, str]]:
    """Return (file, alternative text) of each image, in Markdown or in HTML."""
    found = []
    for token in tokens:
        if token.type == "image":
            found.append((str(token.attrs["src"]), token.content))
        for tag in re.findall(r"<img\b[^>]*>", token.content) if "html" in token.type else ():
            attributes = dict(re.findall(r'(\w+)="([^"]*)"', tag))
            found.append((attributes["src"], attributes.get("alt", "")))
        found += images_of(token.children or [])
    return found


def check_picture(file: Path) -> None:
    if file.suffix == ".svg":
        assert ET.parse(file).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    else:
        with PIL.Image.open(file) as image:
            image.verify()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_page_can_be_drawn(page: Path) -> None:
    text = text_of(page)
    for undrawn in ("mermaid", "$$", r"\;"):
        assert undrawn not in text
    lines, tokens, depth = text.splitlines(), READER.parse(text), 0
    for token in tokens:
        if token.map is None:
            continue
        source = lines[token.map[0] : token.map[1]]
        if token.type == "table_open":
            assert {cells(row) for row in source} == {cells(source[0])}, "\n".join(source)
        if token.level == 0 and token.type in BLOCKS and token.map[0]:
            # a wrapped line that begins with "1. " or "- " is a list to Markdown
            assert not lines[token.map[0] - 1].strip(), source[0]
        if token.type == "fence":
            closed = len(source) > 1 and source[-1].strip() == token.markup
            assert closed, f"line {token.map[0] + 1}: a fence without an end"
        if token.type == "html_block":
            # Markdown begins again behind a blank line
            assert "<details>" not in token.content or len(source) == 1, token.content
            depth += token.content.count("<details>") - token.content.count("</details>")
            assert depth in (0, 1), token.content
    assert depth == 0
    assert not [t.content for t in tokens if t.type == "inline" and MARKER.match(t.content)]
    for file, alternative in images_of(tokens):
        assert alternative.strip(), file
        if not file.startswith("https://"):
            check_picture((REPOSITORY / page).parent / file)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_bold_text_is_bold(page: Path) -> None:
    """Behind a Chinese full stop or colon, ** ends nothing if a letter follows at once."""
    html = READER.render(text_of(page))
    assert not re.findall(r".*\*\*.*", re.sub(r"<code.*?</code>", "", html, flags=re.S))


def test_images_are_found() -> None:
    guide = images_of(READER.parse(text_of(Path("docs/guide.md"))))
    names = [Path(file).name.removesuffix(".en.svg") for file, _ in guide]
    assert names == ["ddp", "buckets", "ring", "speed", "dataparallel", "multinode"]


def test_the_figures_are_what_the_script_draws(tmp_path: Path) -> None:
    drawn = runpy.run_path(str(REPOSITORY / "docs" / "figures.py"))
    drawn["main"](tmp_path)
    stored = {file.name: file.read_bytes() for file in (REPOSITORY / "docs/figures").glob("*.svg")}
    assert len(stored) == 14
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == stored
    measured = text_of(Path("docs/benchmarks.md"))
    for median, low, high in drawn["MEASURED"]:
        assert f"{median:,} ({low:,} to {high:,})" in measured
    for row in zip(drawn["HERE"], drawn["ETHERNET"], strict=True):
        assert "| {:.2f} | {:.2f} |".format(*row) in measured


# --- What it quotes, and where it leads


def test_what_a_page_quotes_is_in_the_code() -> None:
    quotes = [fence for fence in FENCES if fence.language == "python" and fence.mark]
    assert len(quotes) >= 5
    for fence in quotes:
        assert fence.body in text_of(Path(fence.mark)), str(fence)


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = prose(text_of(page))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        place, _, fragment = link.partition("#")
        target = (REPOSITORY / page).parent / place if place else REPOSITORY / page
        assert target.exists(), link
        if fragment:
            text = prose(target.read_text(encoding="utf-8"))
            headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            assert fragment in map(anchor, headings), link


def english(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh-CN", ""))


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_a_chinese_page_has_the_sections_commands_links_and_figures_of_the_english_one(
    page: Path,
) -> None:
    pages = [english(page), page]
    texts = [text_of(page) for page in pages]
    levels = [re.findall(r"^(#+) ", prose(text), re.MULTILINE) for text in texts]
    assert levels[0] == levels[1]
    fences = [[fence for fence in FENCES if fence.page == page] for page in pages]
    commands = [
        [re.sub(" *#.*", "", f.body) for f in each if f.language == "sh"] for each in fences
    ]
    assert commands[0] == commands[1]
    code = [[f.body for f in each if f.language == "python"] for each in fences]
    assert code[0] == code[1]
    shown = [[f.body for f in each if f.language == "text"] for each in fences]
    for ours, theirs in zip(*shown, strict=True):
        assert ours == theirs or WIDE.search(theirs), theirs
    quoted = [
        {" ".join(c.split()) for c in re.findall(r"`([^`]+)`", prose(text))} for text in texts
    ]
    assert quoted[0] <= quoted[1]
    texts = [re.sub(r"\.zh-CN(?=\.md)|\.(en|zh)(?=\.svg)", "", text) for text in texts]
    links, flags, figures = r"\]\(([^)#]*)", r"--[a-z][a-z-]+", r"(?<![\w.])\d+(?:[,.]\d+)+"
    for pattern in (links, flags, figures):
        found = [sorted(set(re.findall(pattern, text, re.MULTILINE))) for text in texts]
        assert found[0] == found[1], pattern


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_a_chinese_page_leads_to_chinese_ones_and_has_no_stray_space(page: Path) -> None:
    """A link to a page in English alone says so. Browsers show a line break as a space."""
    text = prose(text_of(page))
    for place, remark in re.findall(r"\]\(([^)#]+)\.md[^)]*\)(.英文.)?", text):
        target = (REPOSITORY / page).parent / f"{place}.md"
        if target.resolve() != REPOSITORY / english(page) and not place.endswith(".zh-CN"):
            assert bool(remark) != target.with_suffix(".zh-CN.md").exists(), place
    wide = WIDE.pattern
    assert not re.findall(rf"{wide} *\n{wide}.*|{wide} +{wide}.*", text)


def prose(text: str) -> str:
    """Return a page without its fences."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def test_both_glossaries_have_the_same_terms() -> None:
    row = re.compile(r"^\| (.+?) \| (.+) \| (.+?) \|$", re.MULTILINE)
    english_rows, chinese_rows = (
        row.findall((REPOSITORY / "docs" / name).read_text(encoding="utf-8"))
        for name in ("glossary.md", "glossary.zh-CN.md")
    )
    terms = [(word, chinese) for word, _, chinese in english_rows[1:]]
    assert terms == [(word, chinese) for word, chinese, _ in chinese_rows[1:]]
    assert len(terms) >= 41
