"""Check what a reader of the documents sees: tables, pictures, links, quotes; two languages alike.

    make check    # or, for the documents alone: PYTHONPATH=. python docs/check.py

It prints a line for each fault, and ends with code 1 if there is one. The pages are parsed as
CommonMark with GitHub's tables. What one viewer draws and another shows as source code (mermaid,
TeX between dollars) is not in them: pictures are files.
"""

import io
import re
import runpy
import subprocess
import sys
import tempfile
import tokenize
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import PIL.Image
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

REPOSITORY = Path(__file__).resolve().parent.parent
READER = MarkdownIt("commonmark").enable("table")
WIDE = r"[\u3000-\u9fff\uff00-\uffef]"  # a letter or a sign of Chinese
BLOCKS = {"bullet_list_open", "ordered_list_open", "blockquote_open", "heading_open"}
FENCE_MARK = re.compile(r"`{3,}|~{3,}")
# What the commands of a fence need, or what is done with them; see tests/pages/test_docs.py.
MARKS = {"gpu", "slurm", "hub", "network", "hosts", "images", "minutes", "proof", "fails"}
README_WORDS = 1300
FOLDERS = ("ddp_mnist", "docs", "tests", "tools", "deploy", "accelerate_configs", ".github")
COURSE = REPOSITORY / "docs" / "course"
COURSE_LINES = 400
COURSE_PROGRAMS = "docs/course/"  # their comments are translated in Chinese pages
COURSE_FIGURES = ["ddp", "dataparallel", "buckets", "ring", "speed", "multinode"]
GONE = (
    *("--against", "--tolerance", "--format torch", "RESTARTS=", "BENCH="),
    *("ddp-mnist bench", "ddp-mnist configs", "ddp-mnist restart", "debug_launcher", "out of date"),
    *(
        "ddp_mnist/run/",
        "ddp_mnist/bench/",
        "hf_dataset",
        "NcclAccelerator",
        "your data, your model",
    ),
)
# Turns of phrase that tire a reader of the package, and what to write instead.
WORN_PHRASES = {
    r"\b(?:Return|Say) what\b": "name the thing",
    r"\b(?:is|are) none\b": "is not one, is missing, without",
    r"(?<!there )\b(?:is|are) no\b(?! longer)": "is not a, lacks",
    r"\b(?:a|the) person\b": "the user, you",
    r"\b(?:go|goes|going) on\b": "continue, resume",
    r"\bbeside\b": "next to, besides, with",
    r"\b(?:came|comes?)\b": "arrive, join, follow",
    r"\bof (?:its|one's|their) own\b": "its own, separate",
    r"\bany more\b": "no longer",
    r"\b[Ww]here (?:there (?:is|are)|it can|no|none|nobody)\b": "if",
}
OFTEN_ENOUGH = 4
PICTURE_BYTES, PICTURE_SIZE = 150_000, (960, 1336)  # side by side; two pixels a point


class Page:
    """A page in Markdown, and its translation's or its original's path."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, path.read_text("utf-8")
        self.is_chinese = path.name.endswith(".zh-CN.md")
        self.english = path.with_name(path.name.replace(".zh-CN", ""))
        self.chinese = self.english.with_suffix(".zh-CN.md")

    @cached_property
    def tokens(self) -> list[Token]:
        return READER.parse(self.text)

    @cached_property
    def prose(self) -> str:
        """The page without its fences."""
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.DOTALL | re.MULTILINE)

    def fences(self, language: str) -> list[Token]:
        found = [token for token in self.tokens if token.type == "fence"]
        return [token for token in found if token.info.split()[:1] == [language]]


def line_of(token: Token) -> int:
    return (token.map or [0])[0] + 1


# --- One page


def blocks(page: Page) -> Iterator[str]:
    """What is meant as one block is one: tables, lists, fences, what can be unfolded."""
    lines, depth = page.text.splitlines(), 0
    for undrawn in ("mermaid", "$$", r"\;"):
        if undrawn in page.text:
            yield f"{undrawn!r} is not drawn everywhere; use a figure"
    for token in page.tokens:
        if token.type == "inline" and FENCE_MARK.match(token.content):
            yield f"line {line_of(token)}: a fence in one line; give its marks lines of their own"
        if token.map is None:
            continue
        source = lines[token.map[0] : token.map[1]]
        if token.type == "table_open" and len({*map(cells, source)}) > 1:
            yield f"line {line_of(token)}: the table's rows have unequally many cells; add |"
        # e.g. a wrapped line that begins with "1. "
        begins_here = token.level == 0 and token.type in BLOCKS and token.map[0] > 0
        if begins_here and lines[token.map[0] - 1].strip():
            yield f"line {line_of(token)}: begins a block without a blank line before it"
        if token.type == "fence" and (len(source) < 2 or source[-1].strip() != token.markup):
            yield f"line {line_of(token)}: a fence without an end; close it"
        if token.type == "html_block":
            if "<details>" in token.content and len(source) > 1:
                yield f"line {line_of(token)}: Markdown begins again behind a blank line; add one"
            depth += token.content.count("<details>") - token.content.count("</details>")
            if depth not in (0, 1):
                yield f"line {line_of(token)}: <details> and </details> do not match"
    if depth:
        yield "<details> without an end; close it"


def cells(row: str) -> int:
    """Return the number of cells of a table's row; `\\|` is a character in one."""
    return len(re.findall(r"(?<!\\)\|", row.strip().strip("|"))) + 1


def fences(page: Page) -> Iterator[str]:
    """A fence says what it is; commands parse; code that names a file stands in it."""
    for token in (token for token in page.tokens if token.type == "fence"):
        language, mark, *_ = [*token.info.split(), "", ""]
        where = f"line {line_of(token)}"
        if language not in ("sh", "python", "text"):
            yield f"{where}: a fence of {language or 'nothing'}; write sh, python or text"
        if language == "sh" and mark and mark not in MARKS:
            yield f"{where}: unknown mark {mark}; choose from {', '.join(sorted(MARKS))}"
        if language == "sh":
            parsed = subprocess.run(["bash", "-n"], input=token.content, text=True, check=False)
            if parsed.returncode:
                yield f"{where}: bash cannot parse it; correct it"
        if language == "python" and mark:
            file = REPOSITORY / mark
            text = file.read_text("utf-8") if file.is_file() else ""
            translated = page.is_chinese and mark.startswith(COURSE_PROGRAMS)
            if token.content not in text and not (
                translated and without_comments(token.content) == without_comments(text)
            ):
                yield f"{where}: {mark} does not have these lines; quote it as it is now"


def bold(page: Page) -> Iterator[str]:
    """Behind a Chinese full stop or colon, ** ends nothing if a letter follows at once."""
    html = re.sub(r"<code.*?</code>", "", READER.render(page.text), flags=re.DOTALL)
    for line in re.findall(r".*\*\*.*", html):
        yield f"** is shown, not bold: {line[:60]}; put a space behind it"


def pictures(page: Page) -> Iterator[str]:
    for file, alternative in images_of(page.tokens):
        if not alternative.strip():
            yield f"{file}: has no alternative text; describe it"
        if file.startswith("https://"):
            continue
        try:
            check_picture(page.path.parent / file)
        except (OSError, ET.ParseError, ValueError) as error:
            yield f"{file}: cannot be drawn ({error}); make it again"


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
    """Raise OSError, ParseError or ValueError if it is no picture."""
    if file.suffix == ".svg":
        if ET.parse(file).getroot().tag != "{http://www.w3.org/2000/svg}svg":
            raise ValueError("not SVG")
        return
    with PIL.Image.open(file) as image:
        image.verify()


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def links(page: Page) -> Iterator[str]:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.prose):
        if link.startswith(("http://", "https://")):
            continue
        place, _, fragment = link.partition("#")
        target = page.path.parent / place if place else page.path
        if not target.exists():
            yield f"{link}: leads nowhere; correct it"
        elif fragment:
            headings = re.findall(r"^#+ (.*)$", Page(target).prose, re.MULTILINE)
            if fragment not in map(anchor, headings):
                yield f"{link}: {target.name} has no such heading; correct it"


def named_files(page: Page) -> Iterator[str]:
    """A file in backticks that is named with its folder is one of ours; so is one in a table."""
    in_tables = "\n".join(re.findall(r"^\|.*$", page.prose, re.MULTILINE))
    files = [path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.*")]
    with_folder = re.findall(r"`((?:\w+/)+[\w.-]+\.(?:py|sh|sbatch|yaml))`", page.prose)
    for name in [*with_folder, *re.findall(r"`(\w+\.py)`", in_tables)]:
        if not any(path.match(name) for path in files):
            yield f"{name}: there is no such file; name it as it is called now"


# --- Two languages


def translation(page: Page) -> Iterator[str]:
    """The Chinese page has the sections, commands, code, links and figures of the English one."""
    if not page.is_chinese:
        return
    pair = Page(page.english), page
    for what, of in SAME.items():
        ours, theirs = map(of, pair)
        if ours != theirs:
            yield f"{what} differ from {page.english.name}: {difference(ours, theirs)}"
    quoted = [
        {" ".join(code.split()) for code in re.findall(r"`([^`]+)`", each.prose)} for each in pair
    ]
    if quoted[0] - quoted[1]:
        yield f"lacks `{min(quoted[0] - quoted[1])}` of {page.english.name}; add it"
    shown = [[fence.content for fence in each.fences("text")] for each in pair]
    for text, translated in zip(*shown, strict=False):
        if text != translated and not re.search(WIDE, translated):
            yield f"shows another output than {page.english.name}: {translated[:40]!r}"


def difference(ours: list[str], theirs: list[str]) -> str:
    """Return what one list has and the other has not, or that only the order differs."""
    odd = [each for each in ours if each not in theirs] + [e for e in theirs if e not in ours]
    return repr(odd[0][:60]) if odd else "their order or number"


def found_in(pattern: str) -> Callable[[Page], list[str]]:
    """Return a function for what a pattern finds in a page, but for the language of its links."""

    def find(page: Page) -> list[str]:
        text = re.sub(r"\.zh-CN(?=\.md)|\.(en|zh)(?=\.svg)", "", page.text)
        return sorted(set(re.findall(pattern, text, re.MULTILINE)))

    return find


def code_of(fence: Token) -> str:
    """Return a program without its comments, which are in the page's language, as its tokens.

    Its first line stays, which names its file; so does all of a quote from a file of ours, but for
    the course's programs.
    """
    _, file, *_ = [*fence.info.split(), ""]
    if file and not file.startswith(COURSE_PROGRAMS):
        return fence.content
    return f"{file or fence.content.splitlines()[0]} {without_comments(fence.content)}"


def without_comments(program: str) -> str:
    found = tokenize.generate_tokens(io.StringIO(program).readline)
    no_code = {tokenize.COMMENT, tokenize.NL}
    return " ".join(token.string for token in found if token.type not in no_code)


SAME: dict[str, Callable[[Page], list[str]]] = {
    "headings' levels": lambda page: re.findall(r"^(#+) ", page.prose, re.MULTILINE),
    "commands": lambda page: [re.sub(" *#.*", "", f.content) for f in page.fences("sh")],
    "code": lambda page: [code_of(fence) for fence in page.fences("python")],
    "numbers of outputs": lambda page: [str(len(page.fences("text")))],
    "links": found_in(r"\]\(([^)#]*)"),
    "flags": found_in(r"--[a-z][a-z-]+"),
    "figures": found_in(r"(?<![\w.])\d+(?:[,.]\d+)+"),
}


def chinese(page: Page) -> Iterator[str]:
    """It leads to Chinese pages, or says that one is in English; it has no stray space."""
    if not page.is_chinese:
        return
    for place, remark in re.findall(r"\]\(([^)#]+)\.md[^)]*\)(.英文.)?", page.prose):
        target = page.path.parent / f"{place}.md"
        is_english = target.resolve() != page.english and not place.endswith(".zh-CN")
        if is_english and bool(remark) == target.with_suffix(".zh-CN.md").exists():
            yield f"{place}.md: link the Chinese page, or say behind it that it is in English"
    for line in re.findall(rf"{WIDE} *\n{WIDE}.*|{WIDE} +{WIDE}.*", page.prose):
        yield f"a space or a line break between Chinese letters: {line.strip()[:30]}; remove it"


# --- Facts that stand in two places


def facts() -> Iterator[str]:
    yield from course()
    yield from readmes()
    yield from glossaries()
    yield from figures()
    yield from versions()
    yield from worn_phrases()
    yield from gone()


def gone() -> Iterator[str]:
    """No page names what was removed; CHANGELOG.md does."""
    pages = (path for path in REPOSITORY.glob("**/*.md") if ".venv" not in path.parts)
    for path in sorted(pages):
        for name in GONE if path.name != "CHANGELOG.md" else ():
            if name in path.read_text("utf-8"):
                yield f"{path.relative_to(REPOSITORY)}: {name} was removed; say what replaces it"


def course_pages() -> list[Page]:
    """Return the English pages of the course, in its order."""
    return [page for page in map(Page, sorted(COURSE.glob("*.md"))) if not page.is_chinese]


def course() -> Iterator[str]:
    """Each page leads to the ones before and after it, above and below; its lessons are listed."""
    english = course_pages()
    for number, page in enumerate(english):
        if len(page.text.splitlines()) > COURSE_LINES:
            yield f"{page.path.name}: has more than {COURSE_LINES} lines; split it"
        around = [*english[:number][-1:], *english[number + 1 : number + 2]]
        for each in (page, Page(page.chinese)):
            ends = ["../guide.md", *(f"{other.path.name}" for other in around)]
            ends = [name.replace(".md", ".zh-CN.md") if each.is_chinese else name for name in ends]
            parts = each.text.split("\n## ")
            top, bottom = parts[0], parts[-1].split("</details>")[-1]
            if missing := [name for name in ends if f"({name})" not in top or name not in bottom]:
                yield f"{each.path.name}: lacks a link to {missing[0]} above or below; add it"
            contents = (each.path.parent / ends[0]).read_text("utf-8")
            for heading in re.findall(r"^## (\d+\. .*)$", each.prose, re.MULTILINE):
                if f"(course/{each.path.name}#{anchor(heading)})" not in contents:
                    yield f"{ends[0]}: does not list {heading!r} of {each.path.name}; add it"


def readmes() -> Iterator[str]:
    for name in ("README.md", "README.zh-CN.md"):
        text = (REPOSITORY / name).read_text("utf-8")
        shown = re.findall(
            r'<picture><source media="\(prefers-color-scheme: dark\)" srcset="(\S+)">'
            r'<img src="(\S+)" width="400" alt="([^"]+)"></picture>',
            text,
        )
        if [pair[:2] for pair in shown] != [
            (f"docs/figures/{of}.dark.png", f"docs/figures/{of}.light.png")
            for of in ("report", "doctor")
        ]:
            yield f"{name}: show report and doctor, light and dark"
        for *files, alternative in shown:
            if bool(re.search(r"[\u4e00-\u9fff]", alternative)) != ("zh-CN" in name):
                yield f"{name}: {files[0]} has its alternative text in the other language"
            for file in map(REPOSITORY.joinpath, files):
                with PIL.Image.open(file) as picture:
                    if file.stat().st_size >= PICTURE_BYTES or picture.size != PICTURE_SIZE:
                        yield f"{file.name}: make it {PICTURE_SIZE}, below {PICTURE_BYTES} bytes"
        blocks = re.findall(r"```sh network\n(.*?)```", text, re.DOTALL)
        typed = [[re.sub(" *#.*", "", line) for line in block.splitlines()] for block in blocks]
        if typed != [["git clone URL ddp_mnist && cd ddp_mnist", "make train", "make report"]]:
            yield f"{name}: the first screen clones, trains and makes the report, nothing else"
    prose = re.sub(r"<[^>]*>", "", Page(REPOSITORY / "README.md").prose)
    if (words := len(re.findall(r"\S*\w\S*", prose))) >= README_WORDS:
        yield f"README.md: has {words:,} words; keep it below {README_WORDS:,}"


def glossaries() -> Iterator[str]:
    row = re.compile(r"^\| (.+?) \| (.+) \| (.+?) \|$", re.MULTILINE)
    english, translated = (
        row.findall((REPOSITORY / "docs" / name).read_text("utf-8"))[1:]
        for name in ("glossary.md", "glossary.zh-CN.md")
    )
    terms = [(word, in_chinese) for word, _, in_chinese in english]
    if terms != [(word, in_chinese) for word, in_chinese, _ in translated] or len(terms) < 41:
        yield "glossary.zh-CN.md: has not the terms of glossary.md in its order; copy them"


def figures() -> Iterator[str]:
    """The figures are what figures.py draws, of numbers that benchmarks.md has."""
    drawn = runpy.run_path(str(REPOSITORY / "docs" / "figures.py"))
    with tempfile.TemporaryDirectory() as scratch:
        drawn["main"](Path(scratch))
        new = {file.name: file.read_bytes() for file in Path(scratch).iterdir()}
    stored = {file.name: file.read_bytes() for file in (REPOSITORY / "docs/figures").glob("*.svg")}
    if new != stored:
        yield "docs/figures: differ from what docs/figures.py draws; run it"
    shown = [Path(file).name for page in course_pages() for file, _ in images_of(page.tokens)]
    if shown != [f"{name}.en.svg" for name in COURSE_FIGURES]:
        yield f"docs/course: shows {', '.join(shown)}; show {', '.join(COURSE_FIGURES)}"
    measured = (REPOSITORY / "docs/benchmarks.md").read_text("utf-8")
    rows = [f"{median:,} ({low:,} to {high:,})" for median, low, high in drawn["MEASURED"]]
    pairs = zip(drawn["HERE"], drawn["ETHERNET"], strict=True)
    for row in [*rows, *("| {:.2f} | {:.2f} |".format(*pair) for pair in pairs)]:
        if row not in measured:
            yield f"docs/figures.py: {row} is not in benchmarks.md; take its numbers"


def versions() -> Iterator[str]:
    """One version everywhere; the reference has the exit codes of the help."""
    import ddp_mnist
    from ddp_mnist import cli

    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text("utf-8"))
    changelog = (REPOSITORY / "CHANGELOG.md").read_text("utf-8")
    version = ddp_mnist.__version__
    if citation["version"] != version or f"## {version} (" not in changelog:
        yield f"CITATION.cff, CHANGELOG.md: have another version than {version}; bring them along"
    authors = [{"name": "The ddp_mnist developers"}]
    about = {"cff-version": "1.2.0", "license": "Apache-2.0", "authors": authors}
    if {name: citation.get(name) for name in about} != about:
        yield f"CITATION.cff: has not all of {about}; correct it"
    codes = re.findall(r"\b(\d+) ", cli.HELP)
    for name in ("reference.md", "reference.zh-CN.md"):
        text = (REPOSITORY / "docs" / name).read_text("utf-8")
        told = re.findall(r"^\| (\d+) \| [^|]+ \|$", text, re.MULTILINE)
        if told != codes:
            yield f"{name}: its exit codes are not those of --help; copy them"


def worn_phrases() -> Iterator[str]:
    """In docstrings, comments and messages of the package, no worn phrase is frequent."""
    found: dict[str, list[str]] = {pattern: [] for pattern in WORN_PHRASES}
    for path in sorted((REPOSITORY / "ddp_mnist").rglob("*.py")):
        with path.open("rb") as file:
            tokens = [*tokenize.tokenize(file.readline)]
        for token in tokens:
            if tokenize.tok_name[token.type] not in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
                continue
            for pattern, places in found.items():
                for match in re.finditer(pattern, token.string):
                    line = token.start[0] + token.string.count("\n", 0, match.start())
                    places.append(f"{path.relative_to(REPOSITORY)}:{line}: {match[0]!r}")
    for pattern, places in found.items():
        if len(places) > OFTEN_ENOUGH:
            often = f"is one of {len(places)}, at most {OFTEN_ENOUGH} are allowed"
            yield f"{places[OFTEN_ENOUGH]} {often}; write: {WORN_PHRASES[pattern]}"


OF_A_PAGE = (blocks, fences, bold, pictures, links, named_files, translation, chinese)


def pages() -> list[Path]:
    places = ("*.md", "docs/*.md", "docs/course/*.md", "deploy/*.md")
    return sorted(path for place in places for path in REPOSITORY.glob(place))


def faults_of(path: Path) -> list[str]:
    page = Page(path)
    return [fault for check in OF_A_PAGE for fault in check(page)]


def main() -> int:
    faults = [f"{path.relative_to(REPOSITORY)}: {f}" for path in pages() for f in faults_of(path)]
    faults += facts()
    print(*faults, sep="\n", end="\n" * bool(faults))
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
