"""The wheel: installed, it works without the clone."""

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
from ddp_mnist.system.files import read_json
from tests.commands import CONFIGS, NOT_EDITABLE, PROOF, REPOSITORY, Started, python_path
from tests.data_sets import of
from tests.run_checks import check_equal

FILES = {path.name: path.read_bytes() for path in CONFIGS.glob("*.yaml")}
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
OFFLINE = ("--no-deps", "--no-index")
# Runs each of its arguments as a command line in one process, as loading torch takes seconds.
EACH = """
import sys
from ddp_mnist import cli
for line in sys.argv[1:]:
    try:
        cli.main(line.split())
    except SystemExit as ended:
        assert not ended.code, line
"""


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
@pytest.mark.timeout(900)
def test_fault_39_fault_40_an_installed_wheel_works_without_the_clone(
    wheel: Path, alone: Path, tmp_path: Path
) -> None:
    """From an empty folder, without a home; in a batch script of four tasks, with a long TMPDIR.

    Without a home, as in some containers, Matplotlib would tell where its cache is.

    The rehearsal finds its launch file and trains as one process does; the other verbs find all.
    """
    site, here, scratch = (tmp_path / name for name in ("site", "here", "späces and " * 8))
    subprocess.run([*PIP, "install", *OFFLINE, "--target", site, wheel], check=True)
    (site / "sitecustomize.py").write_text(NOT_EDITABLE)
    here.mkdir()
    scratch.mkdir()
    programs = [str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    variables: dict[str, str | None] = {"SLURM_JOB_ID": "5", "TMPDIR": str(scratch)}
    variables |= {"HOME": "/proc/none", "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}
    variables |= {"PYTHONPATH": python_path(site), "PATH": os.pathsep.join(programs)}

    def run(line: str, tasks: str | None = None) -> str:
        told = variables | {"SLURM_NTASKS": tasks}
        return Started(shlex.split(line), here, told, program=None).ended(400).succeeds()

    command = "import ddp_mnist.accelerate_configs as c; print(*c.__path__)"
    configs = Path(run(f"python -c '{command}'").strip())
    assert configs == site / "ddp_mnist" / "accelerate_configs"
    assert {path.name: path.read_bytes() for path in configs.glob("*.yaml")} == FILES
    run(f"ddp-mnist multinode -- {PROOF} two")
    check_equal(here / "two", alone, 2, num_machines=2)

    digits, summary = cache.load("digits"), read_json(here / "two" / "summary.json")
    PIL.Image.fromarray(np.asarray(of(digits, "test").images)[0, 0]).save(here / "digit.png")
    verbs = ["predict two digit.png", "evaluate two", "report two", "prepare --dataset digits"]
    verbs += ["export two", "verify --processes 2 --model mlp"]
    said = run(shlex.join(["python", "-c", EACH, *verbs]), tasks="4")
    answer = json.loads(said.splitlines()[0])
    assert answer["label"] == digits.classes[int(of(digits, "test").labels[0])]
    assert f"accuracy {summary['test_accuracy']:.4f} " in said
    assert f"{summary['test_accuracy']:.4f}" in (here / "two" / "report.html").read_text()
