"""What the documents tell people to type works, and prints what they show.

A page is a shell: its commands are run one after another, as its reader types them, in a folder of
the page's own. A fence may have a mark behind its language. If it names what the commands need
(gpu, slurm, hub, network, hosts, a person's own images, minutes), they are parsed only. `proof` is
run by test_launchers.py, which compares the result; `fails` has to end with another code than 0,
and all others with 0.

A `text` fence directly behind commands shows what they print, rank 0 first. Its lines have to occur
in the output in this order, `...` aside; a busy machine may print others between. MASKED takes out
what differs between machines. Where no output is shown, a training has one epoch, and takes the
smallest net if it is of patches, whose own is trained by tests/whole/test_patches.py; so does a
proof, on two processes.
"""

import itertools
import re
import shlex
import shutil
from pathlib import Path

import PIL.Image
import pytest
from sklearn.datasets import load_sample_images

from ddp_mnist.cluster.local_world import free_port, preload, run_world
from tests.commands import ENGLISH, REPOSITORY, Fence, fences_of, run_here, write_given

pytestmark = pytest.mark.system
preload("sklearn.datasets")  # of which most programs take the digits
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


# --- What is typed


def run_line(line: str, shown: str, folder: Path) -> tuple[list[int], str]:
    """Return the exit codes of the processes, which have torch loaded, and what they print."""
    typed = COMMAND.fullmatch(line)
    assert typed, line
    command, _, to_file = (typed["file"] or typed["verb"]).partition(" > ")
    argv = shlex.split(command, comments=True)
    if argv[0] == "train" and "--epochs" not in argv and not shown:
        argv += ["--epochs", "1"]
    if argv[0] == "train" and "patches" in argv and "--model" not in argv:
        argv += ["--model", "mlp"]
    if argv[0] == "verify":
        argv += ["--model", "mlp", "--processes", "2"]
    if argv[0] in ("doctor", "verify"):  # they start processes, which those of a world cannot
        outcomes = [run_here(argv, file=False)]
    else:
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        group |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        alone = group if typed["size"] == "1" else None  # else a world of one is given none
        size = int(typed["size"] or 1)
        is_file = bool(typed["file"])
        outcomes = run_world(size, run_here, argv, is_file, folder=folder, variables=alone)
    printed = "".join(each for _, each in outcomes)
    if to_file:
        (folder / to_file).write_text(printed)
    return [code for code, _ in outcomes], printed


def as_compared(text: str) -> str:
    return MASKED.sub("#", " ".join(text.split()))


def write_photos(folder: Path) -> None:
    """Write JPEG files of mixed sizes, pieces of two photographs, for train and test, and new ones.

    These lie beside the folder.
    """
    sizes = [(30, 40), (36, 28), (50, 50), (44, 31)]
    photos = zip(("cat", "dog"), load_sample_images().images, strict=True)
    for (name, photo), (split, top) in itertools.product(photos, (("train", 0), ("test", 210))):
        (folder / split / name).mkdir(parents=True)
        for number, (height, width) in enumerate(sizes * 5):
            piece = photo[top : top + height, 30 * number : 30 * number + width]
            PIL.Image.fromarray(piece).save(folder / split / name / f"{number}.jpg")
    shutil.copytree(folder / "test" / "cat", folder.with_name("new_photos"))


def write_beetles(folder: Path, photos: Path) -> None:
    """Write photos in the folders of two species and two cameras, two of each animal."""
    for number, file in enumerate(sorted(photos.rglob("*.jpg"))):
        species = {"cat": "ant", "dog": "bee"}[file.parent.name]
        place = folder / species / f"CAM0{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, place / f"A{number // 2:03}_{number % 2}.jpg")


@pytest.mark.parametrize("page", TYPED, ids=str)
def test_what_a_page_tells_to_type_works_and_prints_what_it_shows(page: Path, here: Path) -> None:
    (here / "docs").symlink_to(REPOSITORY / "docs")
    write_photos(here / "photos")
    write_beetles(here / "beetles", here / "photos")
    everything = ""
    for fence in FENCES[page]:
        if fence.language == "python" and not fence.mark:
            write_given(fence, here)
        if not is_run(fence):
            continue
        shown, printed = shown_by(fence), ""
        for line in fence.body.splitlines():
            codes, said = run_line(line, shown, here)
            printed += said
            assert any(codes) == (fence.mark == "fails"), f"{fence}: {line}\n{said}"
        everything += printed
        rest = as_compared(printed)
        shown = re.sub(r"\n +", " ", shown)  # an indented line goes on with the one before it
        for part in (line for line in shown.splitlines() if line != "..."):
            assert as_compared(part) in rest, f"{fence}: {part}\n{printed}"
            rest = rest[rest.index(as_compared(part)) + len(as_compared(part)) :]
    said = " ".join(everything.split())  # long lines are broken
    if page.name == "your-photos.md":
        assert "became 30x30" in said  # of the shorter sides 28, 30, 31 and 50 the lower median
    if page.name == "your-data-your-model.md":
        scores = r"f1 0\.\d+, balanced_accuracy 0\.\d+, own_metrics:second_class_missed 0\.\d+"
        assert re.search(scores, said)
        [(_, said)] = run_world(1, run_here, ["from_python.py"], True, folder=here)
        assert re.search(r"[01]\.\d+ \[\[\d+, \d+\], \[\d+, \d+\]\]\n(cat|dog)\n$", said)


def test_commands_and_outputs_are_there() -> None:
    """So that no change of a mark, or of COMMAND, lets all of them go."""
    shown = {str(page): sum(bool(shown_by(f)) for f in FENCES[page] if is_run(f)) for page in TYPED}
    assert sum(count for page, count in shown.items() if "course" in page) >= 28
    assert shown["docs/collectives.md"] == 7
    assert {"docs/acceptance.md", "docs/your-photos.md"} <= shown.keys()
