"""The verb `configs`, and the wheel that it is for: installed, it works without the clone."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from ddp_mnist.data import cache
from ddp_mnist.run.folder import read_json
from tests.commands import CONFIGS, PROOF, REPOSITORY, Ended, Started, Typed, python_path
from tests.training import check_equal

FILES = {path.name: path.read_bytes() for path in CONFIGS.glob("*.yaml")}
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
OFFLINE = ("--no-deps", "--no-index")


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_configs_writes_the_files_and_says_what_each_is_for(typed: Typed, here: Path) -> None:
    shown = typed("configs")
    assert (shown.code, shown.err, len(FILES)) == (0, "", 6)
    assert files_in(here / "accelerate_configs") == FILES
    *lines, written, command = shown.out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(FILES)
    assert "multi_cpu.yaml       Two processes on this machine's CPU. Backend: gloo." in lines
    assert written == "written to accelerate_configs; to use one:"
    assert f"#   {command}".encode() in FILES["multi_cpu.yaml"].splitlines()
    assert typed("configs") == shown  # what is there already is right
    out = typed("configs", "my own/files").out
    assert files_in(here / "my own" / "files") == FILES
    assert "accelerate launch --config_file 'my own/files/multi_cpu.yaml' -m ddp_mnist" in out


def test_configs_replaces_no_file_of_ones_own(typed: Typed, tmp_path: Path) -> None:
    own = tmp_path / "single_gpu.yaml"
    own.write_text("mine")
    refused = typed("configs", tmp_path)
    message = f"{own}: exists with other content; move it away, or name another DIR (code 2)"
    assert refused == Ended(2, "", f"ddp-mnist: error: {message}\n")
    assert files_in(tmp_path) == {own.name: b"mine"}  # nothing is written before all are looked at
    refused = typed("configs", own)
    assert (refused.code, refused.out) == (5, "")
    assert refused.err.startswith(f"ddp-mnist: error: {own}: cannot be written (File exists); ")


# --- The wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it in a copy: setuptools leaves files behind where it builds."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("ddp_mnist", "accelerate_configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    flags = (*OFFLINE, "--no-build-isolation", "--wheel-dir", str(built))
    subprocess.run([*PIP, "wheel", *flags, str(source)], check=True)
    [wheel] = built.iterdir()
    return wheel


def installed(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Return the folder in which the wheel is installed, and an empty one."""
    site, here = folder / "site", folder / "here"
    subprocess.run([*PIP, "install", *OFFLINE, "--target", site, wheel], check=True)
    # an editable install would find what is missing in the clone
    finders = "[each for each in sys.meta_path if '__editable__' not in str(each)]"
    (site / "sitecustomize.py").write_text(f"import sys; sys.meta_path[:] = {finders}\n")
    here.mkdir()
    return site, here


def environment(site: Path) -> dict[str, str | None]:
    programs = [str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    return {"PYTHONPATH": python_path(site), "PATH": os.pathsep.join(programs)}


@pytest.mark.system
def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    package = REPOSITORY / "ddp_mnist"
    paths = [*package.rglob("*.py"), *package.glob("verbs/templates/*")]
    expected = {path.relative_to(REPOSITORY).as_posix(): path.read_bytes() for path in paths}
    expected |= {f"ddp_mnist/accelerate_configs/{name}": data for name, data in FILES.items()}
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    assert {name: data for name, data in found.items() if ".dist-info/" not in name} == expected


@pytest.mark.system
def test_an_installed_wheel_works_without_the_clone(wheel: Path, tmp_path: Path) -> None:
    """From an empty folder; two processes train as one does, and the other verbs find all."""
    site, here = installed(wheel, tmp_path)
    variables = environment(site)

    def run(line: str) -> str:
        return Started(shlex.split(line), here, variables, program=None).ended().succeeds()

    place = run("python -c 'import ddp_mnist; print(ddp_mnist.__file__)'")
    assert Path(place.strip()) == site / "ddp_mnist" / "__init__.py"
    run(f"ddp-mnist train {PROOF} one")
    run("ddp-mnist configs")
    launch = "accelerate launch --main_process_port 0 --config_file accelerate_configs"
    run(f"{launch}/multi_cpu.yaml -m ddp_mnist train {PROOF} two")
    check_equal(here / "two", here / "one", 2)
    one, two = (read_json(here / name / "summary.json") for name in ("one", "two"))
    assert one["test_accuracy"] == two["test_accuracy"] > 0.8

    digits = cache.load("digits")
    PIL.Image.fromarray(np.asarray(digits.test_images)[0, 0]).save(here / "digit.png")
    said = json.loads(run("ddp-mnist predict two digit.png"))
    assert said["label"] == digits.classes[int(digits.test_labels[0])]
    run("ddp-mnist report two")
    figure = f'<data value="{two["test_accuracy"]}" data-run="two"'
    assert figure in " ".join((here / "two" / "report.html").read_text().split())


@pytest.mark.system
@pytest.mark.timeout(900)
def test_fault_39_fault_40_every_other_verb_of_an_installed_wheel_in_a_batch_job(
    wheel: Path, tmp_path: Path
) -> None:
    """In a batch script of four tasks, and with the long TMPDIR of a scheduler."""
    site, here = installed(wheel, tmp_path)
    scratch = tmp_path / ("späces and " * 8)
    scratch.mkdir()
    job = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "4", "TMPDIR": str(scratch)}
    alone = {"SLURM_NTASKS": None}  # for what a batch script has to start by srun
    for line, variables in (
        ("multinode -- --dataset digits --epochs 1 --run-dir run", alone),
        ("prepare --dataset digits", {}),
        ("evaluate run", alone),
        ("export run --format safetensors", {}),
        ("doctor --dataset digits", alone),
        ("verify --processes 2 --model mlp", {}),
        ("bench loop --dataset digits --repeats 5", {}),
    ):
        told = environment(site) | job | variables
        ended = Started(["-m", "ddp_mnist", *line.split()], here, told).ended(400)
        assert ended.code == 0, (line, ended.out, ended.err)
    assert json.loads((here / "verify.json").read_text())["passed"]
