"""What the documents tell people to type works, what they quote is in the code, no link is dead.

A fence may have a mark behind its language. If it names what the commands need (gpu, slurm, hub,
network, hosts, a person's own images, minutes), they are parsed only. `proof` is run by
test_launchers.py, which compares the result. `script` starts a file that the page gives, or one of
docs/, on torch alone; the text behind it is what the ranks print, in any order. The verbs of all
others are run here, and end with 0; a training goes on for two epochs.
"""

import io
import itertools
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import PIL.Image
import pytest
from sklearn.datasets import load_sample_images

from ddp_mnist import cli
from ddp_mnist.cluster.local_world import free_port, run_world
from tests.commands import REPOSITORY, TORCHRUN, Ended, Fence, fences_of, python

pytestmark = pytest.mark.system
NEEDS = ("gpu", "slurm", "hub", "network", "hosts", "images", "minutes")
PAGES = sorted(
    path.relative_to(REPOSITORY)
    for folder in ("", "docs", "deploy")
    for path in (REPOSITORY / folder).glob("*.md")
)
LANGUAGES = ("sh", "python", "text", "diff", "mermaid")
FENCES = [fence for page in PAGES for fence in fences_of(page)]
CHINESE = [page for page in PAGES if page.name.endswith(".zh-CN.md")]  # with the English commands
ENGLISH_FENCES = [fence for fence in FENCES if fence.page not in CHINESE]
START = r"torchrun --nproc-per-node (?P<size>\d) -m ddp_mnist|python -m ddp_mnist|ddp-mnist"
COMMAND = re.compile(rf"(?:{START}) (?P<argv>.*)")
RUN = [fence for fence in ENGLISH_FENCES if fence.language == "sh" and not fence.mark]


def test_the_pages_are_there() -> None:
    names = {str(page) for page in PAGES}
    assert {"README.md", "README.zh-CN.md", "CONTRIBUTING.md", "docs/guide.md"} <= names
    assert len(RUN) >= 6


def test_a_fence_says_what_it_is() -> None:
    for fence in FENCES:
        assert fence.language in LANGUAGES, str(fence)
        if fence.language == "sh":
            assert fence.mark in ("", "proof", "script", *NEEDS), str(fence)
            subprocess.run(["bash", "-n"], input=fence.body, text=True, check=True)


def run_verb(argv: list[str], printed: Path) -> int:
    """Return the exit code of a verb in this process; what it prints goes to a file."""
    with printed.open("a") as file, redirect_stdout(file), redirect_stderr(file):
        try:
            cli.main(argv)
        except SystemExit as ended:
            return int(ended.code or 0)


def write_own_code(folder: Path) -> list[str]:
    """Write the files that a page gives, which begin with their names, and return these."""
    fences = [fence for fence in ENGLISH_FENCES if fence.language == "python" and not fence.mark]
    names = [fence.body.splitlines()[0].removeprefix("# ") for fence in fences]
    for name, fence in zip(names, fences, strict=True):
        (folder / name).write_text(fence.body)
    return names


def write_photos(folder: Path) -> None:
    """Write JPEG files of mixed sizes, pieces of two photographs, for train and test."""
    sizes = [(30, 40), (36, 28), (50, 50), (44, 31)]
    photos = zip(("cat", "dog"), load_sample_images().images, strict=True)
    for (name, photo), (split, top) in itertools.product(photos, (("train", 0), ("test", 210))):
        (folder / split / name).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes * 5):
            piece = photo[top : top + height, 30 * number : 30 * number + width]
            PIL.Image.fromarray(piece).save(folder / split / name / f"{number}.jpg")


def test_what_the_pages_tell_to_type_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes that have torch loaded; test_launchers.py has the real launchers."""
    assert {"own_net.py", "own_metrics.py", "from_python.py"} <= {*write_own_code(tmp_path)}
    write_photos(tmp_path / "photos")
    lines = [line for fence in RUN for line in fence.body.splitlines()]
    assert len(lines) >= 18
    printed = tmp_path / "printed"
    monkeypatch.chdir(tmp_path)
    for line in lines:
        typed = COMMAND.fullmatch(line)
        assert typed, line
        size, argv = int(typed["size"] or 1), shlex.split(typed["argv"], comments=True)
        if argv[0] == "train" and "--epochs" not in argv:
            argv += ["--epochs", "2"]
        if argv[0] == "doctor":  # it starts processes of its own, which those of a world cannot
            codes = [run_verb(argv, printed)]
        else:
            codes = run_world(size, run_verb, argv, printed, folder=tmp_path)
        assert codes == [0] * size, f"{line}\n{printed.read_text()}"
    with printed.open("a") as file, redirect_stdout(file):
        runpy.run_path("from_python.py")
    assert "96 images a step = 2 processes x 2 parts x 24\n" in printed.read_text()
    said = " ".join(printed.read_text().split())  # long lines are broken
    assert "became 30x30" in said  # of the shorter sides 28, 30, 31 and 50 the lower median
    scores = r"f1 0\.\d+, balanced_accuracy 0\.\d+, own_metrics:second_class_missed 0\.\d+"
    assert re.search(scores, said)
    assert re.search(r"[01]\.\d+ \[\[\d+, \d+\], \[\d+, \d+\]\] (cat|dog)$", said)


def run_script(argv: list[str]) -> str:
    """Return what a script prints, in this process."""
    sys.argv = argv
    with redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(argv[0], run_name="__main__")
    return printed.getvalue()


def as_promised(printed: str) -> list[str]:
    """Return the lines in order, without what differs between CPUs: losses, accuracies."""
    return sorted(re.sub(r"\d+\.\d{4}|\d+(?= of )", "#", line) for line in printed.splitlines())


@pytest.mark.parametrize("script", [f for f in FENCES if f.mark == "script"], ids=str)
def test_what_a_script_prints_is_what_the_page_says(script: Fence, tmp_path: Path) -> None:
    write_own_code(tmp_path)
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    typed = re.fullmatch(r"torchrun --nproc-per-node (\d) (.*)\n", script.body)
    assert typed, script.body
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    alone = group if typed[1] == "1" else None  # a world of one is given no group's variables
    argv = shlex.split(typed[2])
    printed = run_world(int(typed[1]), run_script, argv, folder=tmp_path, variables=alone)
    promised = FENCES[FENCES.index(script) + 1]
    assert (promised.page, promised.language) == (script.page, "text")
    assert as_promised("".join(printed)) == as_promised(promised.body)


def test_the_collectives_page_has_all_seven() -> None:
    scripts = [f for f in FENCES if (f.page.name, f.mark) == ("collectives.md", "script")]
    assert [f.body.split()[-1].removesuffix(".py") for f in scripts] == [
        *("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce"),
        "reduce_scatter",
    ]


def test_the_textbooks_way_stands_alone_and_counts_rows_twice(tmp_path: Path) -> None:
    """Under the real launcher, on 3 processes: it needs nothing of this package."""
    source = (REPOSITORY / "docs" / "textbook_ddp.py").read_text()
    assert len(source.splitlines()) <= 80 and "ddp_mnist" not in source
    (tmp_path / "textbook_ddp.py").write_text(source)
    three = ["--standalone", "--nproc-per-node", "3", "textbook_ddp.py"]
    ended = python(*TORCHRUN, *three, folder=tmp_path, variables={"OMP_NUM_THREADS": "1"})
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.count(" over 1401 rows, ") == 5  # of 1,400
    counts = re.findall(r"(\d+) of (\d+) rows right, accuracy (0\.\d{4})", ended.out)
    assert [int(seen) for _, seen, _ in counts] == [399, 397]
    for correct, seen, accuracy in counts:
        assert float(accuracy) == pytest.approx(int(correct) / int(seen), abs=5e-5)
        assert float(accuracy) > 0.8
    assert 0 <= int(counts[0][0]) - int(counts[1][0]) <= 2


def test_what_a_page_quotes_is_in_the_code() -> None:
    quotes = [fence for fence in FENCES if fence.language == "python" and fence.mark]
    assert len(quotes) >= 5
    for fence in quotes:
        assert fence.body in (REPOSITORY / fence.mark).read_text(), str(fence)


def patched(text: str, hunk: str) -> str:
    """Return `text` with a diff's hunk applied; its old lines have to be there, once."""
    # editors strip the space of a diff's blank lines
    lines = [line if line != "\n" else " \n" for line in hunk.splitlines(keepends=True)]
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(old) == 1, hunk
    return text.replace(old, new)


def test_ones_own_loss_and_net_are_proven_and_some_folders_are_dispensable(
    tmp_path: Path,
) -> None:
    """After the edit everything is proven; then train needs none of what the README names."""
    write_own_code(tmp_path)
    shutil.copytree(REPOSITORY / "ddp_mnist", tmp_path / "ddp_mnist")
    [edit] = [fence for fence in ENGLISH_FENCES if fence.language == "diff"]
    head, _, hunk = edit.body.partition("@@\n")
    file = tmp_path / head.splitlines()[1].removeprefix("+++ b/")
    file.write_text(patched(file.read_text(), hunk))

    def run(*arguments: str) -> Ended:
        command = ["-m", "ddp_mnist", *arguments]
        return python(*command, folder=tmp_path, variables={"PYTHONPATH": str(tmp_path)})

    ended = run("verify", "--model", "own_net:Net", "--processes", "2")
    assert "all 10 checks passed" in ended.out, ended.out + ended.err

    for folder in ("verify", "doctor", "bench", "verbs"):
        shutil.rmtree(tmp_path / "ddp_mnist" / folder)
    # an editable install would find the folders where they still are
    finders = "[each for each in sys.meta_path if '__editable__' not in str(each)]"
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.meta_path[:] = {finders}\n")
    ended = run("train", "--model", "own_net:Net", "--dataset", "digits", "--epochs", "5")
    accuracy = re.search(r"test accuracy (0\.\d+)", ended.out)
    assert (ended.code, bool(accuracy)) == (0, True), ended.err
    assert accuracy and float(accuracy[1]) > 0.8
    assert run("--help").code == 0
    ended = run("evaluate")  # the flags of all verbs but train are in verbs/
    assert ended.code == 1
    missing = "ModuleNotFoundError: No module named 'ddp_mnist.verbs'"
    assert ended.err.splitlines()[-1] == missing


def anchor(heading: str) -> str:
    """Return the anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    text = prose((REPOSITORY / page).read_text())
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        place, _, fragment = link.partition("#")
        target = (REPOSITORY / page).parent / place if place else REPOSITORY / page
        assert target.exists(), link
        if fragment:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), link


def english(page: Path) -> Path:
    return page.with_name(page.name.replace(".zh-CN", ""))


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_a_chinese_page_has_the_sections_commands_links_and_figures_of_the_english_one(
    page: Path,
) -> None:
    pages = [english(page), page]
    texts = [(REPOSITORY / page).read_text(encoding="utf-8") for page in pages]
    levels = [re.findall(r"^(#+) ", text, re.MULTILINE) for text in texts]
    assert levels[0] == levels[1]
    fences = [[fence for fence in FENCES if fence.page == page] for page in pages]
    commands = [
        [re.sub(" *#.*", "", f.body) for f in each if f.language == "sh"] for each in fences
    ]
    assert commands[0] == commands[1]
    code = [[f.body for f in each if f.language in ("python", "diff")] for each in fences]
    assert code[0] == code[1]
    texts = [re.sub(r"\.zh-CN(?=\.md)|\.(en|zh)(?=\.svg)", "", text) for text in texts]
    for pattern in (
        *(r"\]\(([^)#]*)", r"^\| `(ddp-mnist [a-z]+)", r"(?:^|`)(make [a-z-]+)"),  # links, commands
        *(r"--[a-z][a-z-]+", r"(?<![\w.])\d+(?:[,.]\d+)+"),  # flags, figures
    ):
        found = [sorted(set(re.findall(pattern, text, re.MULTILINE))) for text in texts]
        assert found[0] == found[1], pattern


@pytest.mark.parametrize("page", CHINESE, ids=str)
def test_a_chinese_page_leads_to_chinese_ones_and_has_no_stray_space(page: Path) -> None:
    """A link to a page in English alone says so. Browsers show a line break as a space."""
    text = prose((REPOSITORY / page).read_text(encoding="utf-8"))
    for place, remark in re.findall(r"\]\(([^)#]+)\.md[^)]*\)(.英文.)?", text):
        target = (REPOSITORY / page).parent / f"{place}.md"
        if target.resolve() != REPOSITORY / english(page) and not place.endswith(".zh-CN"):
            assert bool(remark) != target.with_suffix(".zh-CN.md").exists(), place
    wide = r"[\u3000-\u9fff\uff00-\uffef]"
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
