"""How OpenMP's threads wait for each other is settled before torch is loaded, however we start."""

import os
import sysconfig
from pathlib import Path

import pytest

from ddp_mnist.cluster.local import run_world
from tests.commands import REPOSITORY, TORCHRUN, TRAIN, Started

pytestmark = pytest.mark.system

# Python imports it before all else. A launcher, which is none of this package, gets the real torch.
STAND_IN = """
import importlib.abc, os, sys

class Torch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch" and ("RANK" in os.environ or os.environ["ASK"] == "all"):
            names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
            print("torch finds", *(os.environ.get(name) for name in names), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Torch())
"""
DIRECTLY = {
    "python -m": TRAIN,
    "console script": [str(Path(sysconfig.get_path("scripts")) / "ddp-mnist"), "train"],
    "plain_ddp": ["-m", "ddp_mnist.plain_ddp"],
    "import": ["-c", "import ddp_mnist.train"],
}
LAUNCHED = {
    "torchrun": [*TORCHRUN, "--nproc-per-node", "2", *TRAIN],
    "accelerate, by the rehearsal": ["-m", "ddp_mnist", "multinode", "--", "--dataset", "digits"],
}


NEITHER = {"GOMP_SPINCOUNT": None, "OMP_WAIT_POLICY": None}  # which the tests' process has


def found_by_torch(
    ways: dict[str, list[str]], folder: Path, ask: str, **typed: str
) -> dict[str, str]:
    """Return what each way's processes print as they come to torch, side by side."""
    (folder / "sitecustomize.py").write_text(STAND_IN)
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    variables = {**NEITHER, "ASK": ask, "PYTHONPATH": path, **typed}
    started = {way: Started(command, REPOSITORY, variables) for way, command in ways.items()}
    found = {}
    for way, each in started.items():
        ended = each.ended()
        lines = [line for line in ended.out.splitlines() if line.startswith("torch finds ")]
        assert len(set(lines)) == 1, f"{way}: {ended.out}{ended.err}"
        found[way] = f"{len(lines)} x {lines[0].removeprefix('torch finds ')}"
    return found


def test_threads_spin_shortly_however_a_process_is_started(tmp_path: Path) -> None:
    found = found_by_torch(DIRECTLY, tmp_path, "all")
    assert found == dict.fromkeys(DIRECTLY, "1 x 10000 None")
    found = found_by_torch(LAUNCHED, tmp_path, "workers")
    assert found.pop("torchrun") == "2 x 10000 None"
    [rehearsal] = found.values()  # which ends the other node as soon as one has ended
    assert rehearsal in ("1 x 10000 None", "2 x 10000 None")


def test_what_a_person_set_stays(tmp_path: Path) -> None:
    ways = {"python -m": TRAIN}
    found = found_by_torch(ways, tmp_path, "all", GOMP_SPINCOUNT="7")
    assert found == {"python -m": "1 x 7 None"}
    found = found_by_torch(ways, tmp_path, "all", OMP_WAIT_POLICY="active")
    assert found == {"python -m": "1 x None active"}


def test_the_runtime_takes_it() -> None:
    """GNU's tells what it read as it was loaded, which is what counts."""
    show = {**NEITHER, "OMP_DISPLAY_ENV": "verbose"}
    ended = Started(["-c", "import ddp_mnist.models"], REPOSITORY, show).ended()
    assert ended.code == 0
    if "GOMP_SPINCOUNT" not in ended.err:
        pytest.skip("this torch comes with another OpenMP")
    assert "GOMP_SPINCOUNT = '10000'" in ended.err


def spin_count() -> str | None:
    return os.environ.get("GOMP_SPINCOUNT")


def test_processes_of_a_local_world_inherit_it(tmp_path: Path) -> None:
    assert run_world(1, spin_count, folder=tmp_path) == [os.environ["GOMP_SPINCOUNT"]] == ["10000"]
