"""What the documents tell people to type works, and prints what they show.

A page is a shell: its commands are run one after another, as its reader types them, in a folder of
the page's own. A fence may have a mark behind its language. If it names what the commands need
(gpu, slurm, hub, network, hosts, a person's own images, minutes), they are parsed only. `proof` is
run by test_launchers.py, which compares the result; `fails` has to end with another code than 0,
and all others with 0.

A `text` fence directly behind commands shows what they print, rank 0 first. Its lines have to occur
in the output in this order, `...` aside; a busy machine may print others between. MASKED takes out
what differs between machines. Where no output is shown, a training has two epochs.
"""

import itertools
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import PIL.Image
import pytest
from sklearn.datasets import load_sample_images

from ddp_mnist.cluster.local_world import free_port, run_world
from tests.commands import PAGES, REPOSITORY, TORCHRUN, Ended, Fence, fences_of, python, run_here

pytestmark = pytest.mark.system
NEEDS = ("gpu", "slurm", "hub", "network", "hosts", "images", "minutes")
ENGLISH = [page for page in PAGES if not page.name.endswith(".zh-CN.md")]  # of equal commands
FENCES = {page: fences_of(page) for page in ENGLISH}
COMMAND = re.compile(
    r"(?:torchrun --nproc-per-node (?P<size>\d) )?"
    r"(?:(?:-m ddp_mnist|python -m ddp_mnist|ddp-mnist) (?P<verb>.*)"
    r"|(?:python )?(?P<file>\S+\.py.*))"
)
MASKED = re.compile(
    r"\d+\.\d{4,}"  # losses, accuracies, probabilities
    r"|[\d,.]+ ?(?:ms\b|us\b|s\b|%|images/s|wrong\b|of\b|threads?\b)"  # speeds and counts
    r"|(?<=precision )\w+|(?<=within )\S+|(?<=digits-)\d+"
)


def shown_by(fence: Fence) -> str:
    """Return the text that stands directly behind a fence."""
    fences = FENCES[fence.page]
    behind = fences[fences.index(fence) + 1 :][:1]
    below = fence.line + fence.body.count("\n") + 3  # a blank line is between
    return (
        behind[0].body if behind and (behind[0].line, behind[0].language) == (below, "text") else ""
    )


def is_run(fence: Fence) -> bool:
    if fence.language != "sh" or fence.mark not in ("", "fails", "proof"):
        return False
    alone = COMMAND.fullmatch(fence.body.strip()) and shown_by(fence)
    return fence.mark != "proof" or bool(alone)


TYPED = [page for page in ENGLISH if any(map(is_run, FENCES[page]))]


def test_a_fence_says_what_it_is() -> None:
    for fence in itertools.chain(*FENCES.values()):
        assert fence.language in ("sh", "python", "text", "diff"), str(fence)
        if fence.language == "sh":
            assert fence.mark in ("", "proof", "fails", *NEEDS), str(fence)
            subprocess.run(["bash", "-n"], input=fence.body, text=True, check=True)


# --- What is typed


def run_line(line: str, shown: str, folder: Path) -> tuple[list[int], str]:
    """Return the exit codes of the processes, which have torch loaded, and what they print."""
    typed = COMMAND.fullmatch(line)
    assert typed, line
    argv = shlex.split(typed["file"] or typed["verb"], comments=True)
    if argv[0] == "train" and "--epochs" not in argv and not shown:
        argv += ["--epochs", "2"]
    if argv[0] in ("doctor", "verify"):  # they start processes, which those of a world cannot
        outcomes = [run_here(argv, file=False)]
    else:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        group |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        alone = group if typed["size"] == "1" else None  # else a world of one is given none
        size = int(typed["size"] or 1)
        outcomes = run_world(
            size, run_here, argv, bool(typed["file"]), folder=folder, variables=alone
        )
    return [code for code, _ in outcomes], "".join(printed for _, printed in outcomes)


def as_compared(text: str) -> str:
    return MASKED.sub("#", " ".join(text.split()))


def write_photos(folder: Path) -> None:
    """Write JPEG files of mixed sizes, pieces of two photographs, for train and test."""
    sizes = [(30, 40), (36, 28), (50, 50), (44, 31)]
    photos = zip(("cat", "dog"), load_sample_images().images, strict=True)
    for (name, photo), (split, top) in itertools.product(photos, (("train", 0), ("test", 210))):
        (folder / split / name).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes * 5):
            piece = photo[top : top + height, 30 * number : 30 * number + width]
            PIL.Image.fromarray(piece).save(folder / split / name / f"{number}.jpg")


def write_file(fence: Fence, folder: Path) -> None:
    """Write the file that a page gives, which begins with its name."""
    (folder / fence.body.splitlines()[0].removeprefix("# ")).write_text(fence.body)


@pytest.mark.parametrize("page", TYPED, ids=str)
def test_what_a_page_tells_to_type_works_and_prints_what_it_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(REPOSITORY / "docs")
    write_photos(tmp_path / "photos")
    everything = ""
    for fence in FENCES[page]:
        if fence.language == "python" and not fence.mark:
            write_file(fence, tmp_path)
        if not is_run(fence):
            continue
        shown, printed = shown_by(fence), ""
        for line in fence.body.splitlines():
            codes, said = run_line(line, shown, tmp_path)
            printed += said
            assert any(codes) == (fence.mark == "fails"), f"{fence}: {line}\n{said}"
        everything += printed
        rest = as_compared(printed)
        shown = re.sub(r"\n +", " ", shown)  # an indented line goes on with the one before it
        for part in (line for line in shown.splitlines() if line != "..."):
            assert as_compared(part) in rest, f"{fence}: {part}\n{printed}"
            rest = rest[rest.index(as_compared(part)) + len(as_compared(part)) :]
    if page.name == "your-data-your-model.md":
        said = " ".join(everything.split())  # long lines are broken
        assert "became 30x30" in said  # of the shorter sides 28, 30, 31 and 50 the lower median
        scores = r"f1 0\.\d+, balanced_accuracy 0\.\d+, own_metrics:second_class_missed 0\.\d+"
        assert re.search(scores, said)
        [(_, said)] = run_world(1, run_here, ["from_python.py"], True, folder=tmp_path)
        assert re.search(r"[01]\.\d+ \[\[\d+, \d+\], \[\d+, \d+\]\]\n(cat|dog)\n$", said)


def test_commands_and_outputs_are_there() -> None:
    """So that no change of a mark, or of COMMAND, lets all of them go."""
    shown = {str(page): sum(bool(shown_by(f)) for f in FENCES[page] if is_run(f)) for page in TYPED}
    assert shown["docs/guide.md"] >= 20
    assert shown["docs/collectives.md"] == 7
    assert {"docs/acceptance.md", "docs/your-data-your-model.md"} <= shown.keys()


def test_the_collectives_page_has_all_seven() -> None:
    files = [f.body.split()[-1] for f in FENCES[Path("docs/collectives.md")] if is_run(f)]
    assert [name.removesuffix(".py") for name in files] == [
        *("broadcast", "scatter", "gather", "all_gather", "reduce", "all_reduce"),
        "reduce_scatter",
    ]


# --- What stands in files


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


def patched(text: str, hunk: str) -> str:
    """Return `text` with a diff's hunk applied; its old lines have to be there, once."""
    # editors strip the space of a diff's blank lines
    lines = [line if line != "\n" else " \n" for line in hunk.splitlines(keepends=True)]
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    assert text.count(old) == 1, hunk
    return text.replace(old, new)


def test_ones_own_loss_and_net_are_proven_and_some_folders_are_dispensable(tmp_path: Path) -> None:
    """After the edit everything is proven; then train needs none of what the README names."""
    fences = FENCES[Path("docs/your-data-your-model.md")]
    write_file(next(fence for fence in fences if "class Net" in fence.body), tmp_path)
    shutil.copytree(REPOSITORY / "ddp_mnist", tmp_path / "ddp_mnist")
    [edit] = [fence for fence in fences if fence.language == "diff"]
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
