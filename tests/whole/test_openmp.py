"""How OpenMP's threads wait for each other is settled before torch is loaded, however we start."""

import os
import sysconfig
from pathlib import Path

import pytest

from tests import commands

pytestmark = pytest.mark.system

CONSOLE_SCRIPT = str(Path(sysconfig.get_path("scripts")) / "ddp-mnist")
WAYS: dict[str, tuple[list[str], dict[str, str], str]] = {
    "python -m": (commands.TRAIN, {}, "10000 None"),
    "console script": ([CONSOLE_SCRIPT, "train"], {}, "10000 None"),
    "core": (["-m", "ddp_mnist.core"], {}, "10000 None"),
    "import": (["-c", "import ddp_mnist.train"], {}, "10000 None"),
    "a person's count": (commands.TRAIN, {"GOMP_SPINCOUNT": "7"}, "7 None"),
    "a person's policy": (commands.TRAIN, {"OMP_WAIT_POLICY": "active"}, "None active"),
}
NEITHER = {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None}  # which the tests' process has


def test_threads_spin_shortly_unless_a_person_says_otherwise(tmp_path: Path) -> None:
    """However a process is started; test_launchers.py sees the same of launchers' processes."""
    (tmp_path / "sitecustomize.py").write_text(commands.sees_torch(ends_there=True))
    path = commands.python_path(tmp_path, commands.REPOSITORY)
    started = {}
    for way, (command, typed, _) in WAYS.items():
        seen = {commands.OPENMP_SEEN: str(tmp_path / way), "PYTHONPATH": path}
        started[way] = commands.Started(command, commands.REPOSITORY, {**NEITHER, **seen, **typed})
    for way, each in started.items():
        ended = each.ended()
        assert (tmp_path / way).exists(), ended.err
        assert (tmp_path / way).read_text().splitlines() == [WAYS[way][2]], way


def test_fault_48_a_binding_narrows_nothing_and_a_bound_launcher_is_named(tmp_path: Path) -> None:
    """Were it bound, this process would have one thread; torchrun's are, as it is bound itself."""
    plan = [*commands.TRAIN, "--dataset", "digits", "--model", "mlp", "--dry-run"]
    cores, bound = len(os.sched_getaffinity(0)), {"OMP_NUM_THREADS": None, "OMP_PROC_BIND": "close"}
    ways = (plan, [*commands.torchrun(2), *plan])
    alone, both = (commands.Started(words, tmp_path, bound) for words in ways)
    shown = f"ms with {cores}\n" if cores > 1 else ", 1 thread each"  # on trial
    assert shown in alone.ended().out
    line = "OMP_PROC_BIND=close: bound the launcher, and so all 2 processes here, to core "
    assert both.ended().out.count(line) == 1
