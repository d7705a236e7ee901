"""How OpenMP's threads wait for each other is settled before torch is loaded, however we start."""

import importlib.util
import os
import sysconfig
from pathlib import Path

import pytest

from ddp_mnist.cluster.local_world import run_world
from tests.commands import OPENMP_SEEN, REPOSITORY, TRAIN, Started, python_path, sees_torch

pytestmark = pytest.mark.system

CONSOLE_SCRIPT = str(Path(sysconfig.get_path("scripts")) / "ddp-mnist")
WAYS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "python -m": (TRAIN, {}, "10000 None"),
    "console script": ([CONSOLE_SCRIPT, "train"], {}, "10000 None"),
    "plain_ddp": (["-m", "ddp_mnist.plain_ddp"], {}, "10000 None"),
    "import": (["-c", "import ddp_mnist.train"], {}, "10000 None"),
    "a person's count": (TRAIN, {"GOMP_SPINCOUNT": "7"}, "7 None"),
    "a person's policy": (TRAIN, {"OMP_WAIT_POLICY": "active"}, "None active"),
}
NEITHER = {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None}  # which the tests' process has


def test_threads_spin_shortly_unless_a_person_says_otherwise(tmp_path: Path) -> None:
    """However a process is started; test_launchers.py sees the same of launchers' processes."""
    (tmp_path / "sitecustomize.py").write_text(sees_torch(ends_there=True))
    path = python_path(tmp_path, REPOSITORY)
    started = {}
    for way, (command, typed, _) in WAYS.items():
        seen = {OPENMP_SEEN: str(tmp_path / way), "PYTHONPATH": path}
        started[way] = Started(command, REPOSITORY, {**NEITHER, **seen, **typed})
    for way, each in started.items():
        ended = each.ended()
        assert (tmp_path / way).exists(), ended.err
        assert (tmp_path / way).read_text().splitlines() == [WAYS[way][2]], way


def test_the_runtime_takes_it() -> None:
    """GNU's tells what it read as it was loaded, which is what counts."""
    torch = importlib.util.find_spec("torch")
    assert torch and torch.origin
    libraries = sorted(Path(torch.origin).parent.glob("lib/libgomp*.so*"))
    if not libraries:
        pytest.skip("this torch comes with another OpenMP")
    load = f"import ctypes, ddp_mnist; ctypes.CDLL({str(libraries[0])!r})"
    show = {**NEITHER, "OMP_DISPLAY_ENV": "verbose"}
    ended = Started(["-c", load], REPOSITORY, show).ended()
    assert ended.code == 0
    assert "GOMP_SPINCOUNT = '10000'" in ended.err


def test_processes_of_a_local_world_inherit_it(tmp_path: Path) -> None:
    assert os.environ["GOMP_SPINCOUNT"] == "10000"
    assert run_world(1, os.getenv, "GOMP_SPINCOUNT", folder=tmp_path) == ["10000"]
