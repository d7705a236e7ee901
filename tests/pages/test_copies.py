"""What a person copies from here stands alone: the textbook's file, templates, one's own files."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import urllib.request
from functools import partial
from pathlib import Path

import pytest
import torch

from ddp_mnist.cluster.local_world import preload
from ddp_mnist.verbs.verify.watch import largest_difference
from tests.commands import (
    NOT_EDITABLE,
    REPOSITORY,
    Ended,
    Started,
    fences_of,
    python,
    python_path,
    run_command,
    torchrun,
    write_given,
)
from tests.data_sets import write_parquet

pytestmark = pytest.mark.system
preload("sklearn.datasets")  # of which the templates take the digits


def test_the_commands_of_a_chapter_are_a_script() -> None:
    guide = (REPOSITORY / "docs" / "guide.md").read_text()
    [(command, chapter)] = re.findall(r"`(sed -n .* (docs/course/\S+))`", guide)
    printed = subprocess.check_output(shlex.split(command), cwd=REPOSITORY, text=True)
    commands = [each.body for each in fences_of(Path(chapter)) if each.language == "sh"]
    assert commands and printed == "".join(commands)


def test_a_stand_in_for_the_hub_answers_until_enter(tmp_path: Path) -> None:
    [script] = [each.body for each in fences_of(Path("deploy/README.md")) if "Hub(" in each.body]
    write_parquet(tmp_path / "flowers")
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command, pipe = ["bash", "-c", script], subprocess.PIPE
    hub = subprocess.Popen(command, cwd=tmp_path, env=variables, stdin=pipe, stdout=pipe)
    assert hub.stdout
    printed = b"".join(iter(partial(hub.stdout.read, 1), b")")).decode()
    [endpoint] = re.findall(r"HF_ENDPOINT=(\S+)", printed)
    with urllib.request.urlopen(f"{endpoint}/api/datasets/me/flowers") as answer:
        assert json.load(answer)["id"] == "me/flowers"
    hub.communicate(b"\n", timeout=60)
    assert hub.returncode == 0


def test_the_textbooks_way_stands_alone_and_counts_rows_twice(tmp_path: Path) -> None:
    """Under the real launcher, on 3 processes: it needs nothing of this package."""
    source = (REPOSITORY / "docs" / "textbook_ddp.py").read_text()
    assert len(source.splitlines()) <= 80 and "ddp_mnist" not in source
    (tmp_path / "textbook_ddp.py").write_text(source)
    command = [*torchrun(3), "textbook_ddp.py"]
    ended = python(*command, folder=tmp_path, variables={"OMP_NUM_THREADS": "1"})
    printed = ended.succeeds()
    assert printed.count(" over 1401 rows, ") == 5  # of 1,400
    counts = re.findall(r"(\d+) of (\d+) rows right, accuracy (0\.\d{4})", printed)
    assert [int(seen) for _, seen, _ in counts] == [399, 397]
    for correct, seen, accuracy in counts:
        assert float(accuracy) == pytest.approx(int(correct) / int(seen), abs=5e-5)
    assert 0 <= int(counts[0][0]) - int(counts[1][0]) <= 2


def test_the_courses_spawn_adds_up_its_ranks(tmp_path: Path) -> None:
    printed = python(str(REPOSITORY / "docs/course/spawn.py"), folder=tmp_path).succeeds()
    lines = sorted(printed.splitlines())
    assert lines == [f"rank {rank} of 4: the ranks add up to 6" for rank in range(4)]


TEMPLATES = ("template_ddp", "template_accelerate")
TASK = re.compile(r"# --- Your task.*?(?=# --- )", re.DOTALL)  # the four functions to replace
# Where the brightest point of a noisy image lies, as two numbers.
REGRESSION = """
def make_data():
    rows = torch.Generator().manual_seed(0)
    targets = torch.rand(600, 2, generator=rows)
    at = torch.linspace(0, 1, 8)
    across, down = (torch.exp(-40 * (at - targets[:, i, None]) ** 2) for i in (0, 1))
    images = (down[:, :, None] * across[:, None]).flatten(1)
    images += 0.02 * torch.randn(images.shape, generator=rows)
    rows = TensorDataset(images, targets)
    return Subset(rows, range(500)), Subset(rows, range(500, 600))


def make_net():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.01), nn.Linear(32, 2))


def loss_of(outputs, targets):
    return F.mse_loss(outputs, targets)


def score_of(outputs, targets):
    return (outputs - targets).norm(dim=1).sum()


"""


def run_template(name: str, size: int, folder: Path, *flags: str) -> list[str]:
    """Run a template's copy in `folder` on so many processes; return the lines it printed."""
    argv = [f"{name}.py", "--batch-size", "30", *flags]
    return run_command(argv, folder, size, file=True).splitlines()


def in_double(source: str) -> str:
    """Return a template for float64: in float32, rounding alone sets the weights 1e-5 apart."""
    return source.replace(".float()", ".double()").replace("64, 10))", "64, 10)).double()")


def test_both_templates_train_to_the_same_weights_on_any_number_of_processes(here: Path) -> None:
    tasks = set()
    for name in TEMPLATES:
        source = (REPOSITORY / "docs" / f"{name}.py").read_text()
        assert "ddp_mnist" not in source
        tasks.add(TASK.findall(source)[0])
        Path(f"{name}.py").write_text(in_double(source))
    assert len(tasks) == 1
    nets, printed = [], set()
    for size, name in itertools.product((1, 2, 3), TEMPLATES):
        printed.add(tuple(run_template(name, size, here, "--epochs", "2", "--batch-size", "60")))
        saved = torch.load(f"{name}.pt", weights_only=True)
        assert saved["epoch"] == 2
        nets.append(saved["net"])
    assert len(printed) == 1 and len(printed.pop()) == 2
    assert max(largest_difference(net, nets[0]) for net in nets) < 1e-9
    assert all(torch.equal(nets[0][key], nets[1][key]) for key in nets[0])  # alone, bit for bit


@pytest.mark.parametrize("name", TEMPLATES)
def test_class_weights_are_one_loss_on_two_processes_only_as_the_docstring_writes_it(
    here: Path, name: str
) -> None:
    """PyTorch's own `weight` divides by the weights of a rank's rows: it must stay warned of."""
    source = in_double((REPOSITORY / "docs" / f"{name}.py").read_text())
    [advice] = re.findall(r"^ +(\(F\.cross_entropy\(.*\)\.mean\(\))$", source, re.MULTILINE)
    plain = "return F.cross_entropy(outputs, targets)"
    assert source.count(plain) == 1
    apart = []
    for loss in ("F.cross_entropy(outputs, targets, weight=w)", advice):
        weighted = f"w = torch.linspace(0.2, 5, 10).double()\n    return {loss}"
        Path(f"{name}.py").write_text(source.replace(plain, weighted))
        nets = []
        for size in (1, 2):
            run_template(name, size, here, "--epochs", "1")
            nets.append(torch.load(f"{name}.pt", weights_only=True)["net"])
        apart.append(largest_difference(*nets))
    assert apart[0] > 1e-3 and apart[1] < 1e-9, apart


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_learns_another_task_by_four_functions_and_resumes(
    here: Path, name: str
) -> None:
    source = (REPOSITORY / "docs" / f"{name}.py").read_text()
    Path(f"{name}.py").write_text(TASK.sub(lambda _: REGRESSION, source))
    flags = ("--epochs", "16", "--checkpoint")
    whole = run_template(name, 2, here, *flags, "whole.pt")
    parts = run_template(name, 2, here, *flags, "parts.pt", "--stop-after", "6")
    parts += run_template(name, 2, here, *flags, "parts.pt", "--resume")
    assert [line for line in parts if line[0] != "r"] == whole
    assert parts[6] == "resumed from parts.pt, which has 6 of 16 epochs"
    parts_net, whole_net = (torch.load(f"{file}.pt")["net"] for file in ("parts", "whole"))
    assert all(torch.equal(parts_net[key], whole_net[key]) for key in whole_net)
    error = float(re.findall(r"score (0\.\d+) over 100 rows", whole[-1])[0])
    assert error < 0.05  # a net that guesses the middle is 0.38 away


def test_the_plain_template_learns_in_half_precision_under_its_launcher(tmp_path: Path) -> None:
    """On the CPU; a finished run has nothing left to do."""

    def arguments(precision: str, *more: str) -> list[str]:
        flags = ["--epochs", "1", "--precision", precision, "--checkpoint", f"{precision}.pt"]
        return [str(REPOSITORY / "docs" / "template_ddp.py"), *flags, *more]

    command = [*torchrun(2), *arguments("fp16")]
    launched = Started(command, tmp_path, {"OMP_NUM_THREADS": "1"})
    forked = run_command(arguments("bf16"), tmp_path, file=True)
    for out in (forked, launched.ended().succeeds()):
        [right] = re.findall(r"^epoch 1: loss [\d.]+, score (0\.\d+) over 397 rows$", out, re.M)
        assert float(right) >= 0.83
    for size, precision in ((2, "fp16"), (1, "bf16")):
        file = tmp_path / f"{precision}.pt"
        before = file.read_bytes()
        out = run_command(arguments(precision, "--resume"), tmp_path, size, file=True)
        assert out == f"resumed from {file.name}, which has 1 of 1 epochs\n"
        assert file.read_bytes() == before


def test_ones_own_loss_and_net_are_proven_and_some_folders_are_dispensable(tmp_path: Path) -> None:
    """Both are proven without an edit; then train needs none of what the README names."""
    fences = fences_of(Path("docs/your-data-your-model.md"))
    for fence in fences:
        if fence.body.startswith(("# own_net.py", "# own_loss.py")):
            write_given(fence, tmp_path)
    shutil.copytree(REPOSITORY / "ddp_mnist", tmp_path / "ddp_mnist")

    def run(*arguments: str) -> Ended:
        command = ["-m", "ddp_mnist", *arguments]
        return python(*command, folder=tmp_path, variables={"PYTHONPATH": python_path(tmp_path)})

    own = ("--model", "own_net:Net", "--loss", "own_loss:focal")
    ended = run("verify", *own, "--processes", "2")
    assert "all 10 checks passed" in ended.out, ended.out + ended.err

    shutil.rmtree(tmp_path / "ddp_mnist" / "verbs")
    (tmp_path / "ddp_mnist" / "api.py").unlink()  # it imports verbs
    (tmp_path / "sitecustomize.py").write_text(NOT_EDITABLE)
    ended = run("train", *own, "--dataset", "digits", "--epochs", "10")
    accuracy = re.search(r"test accuracy (0\.\d+)", ended.out)
    assert (ended.code, bool(accuracy)) == (0, True), ended.err
    assert accuracy and float(accuracy[1]) > 0.8
    ended = run("evaluate")  # the flags of all verbs but train are in verbs/
    assert ended.code == 1
    assert "evaluate: ModuleNotFoundError: No module named 'ddp_mnist.verbs'" in ended.err
