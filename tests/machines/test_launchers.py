"""Every way of starting, with the real launchers: one training, and always the same.

The course's own lines are among them: a fence marked `proof` is run here, with the proof's flags.
"""

import json
import re
from pathlib import Path

import pytest

from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.system.files import read_json
from tests.commands import (
    ACCELERATE,
    ENGLISH,
    MULTI_CPU,
    PROOF,
    REPOSITORY,
    TRAIN,
    Ended,
    Fence,
    Started,
    all_succeed,
    fences_of,
    shell,
    torchrun,
)
from tests.run_checks import check_equal

pytestmark = pytest.mark.system

# torchrun remarks that it sets OMP_NUM_THREADS, torch.distributed.launch that it is deprecated
HUSH = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning"}
COURSE = [fence for page in ENGLISH if page.match("course/*") for fence in fences_of(page)]
PROOFS = [fence for fence in COURSE if fence.mark == "proof"]
TRAININGS = {fence.body.split()[0]: fence for fence in PROOFS if "evaluate" not in fence.body}


def run_fence(fence: Fence, folder: Path, written: str, instead: str) -> Ended:
    """Run the lines of a fence on free ports, with `instead` for its flags as they are written."""
    ports = {port: str(free_port()) for port in ("29500", "29501")}
    script = re.sub("29500|29501", lambda match: ports[match[0]], fence.body)
    script, replaced = re.subn(written, instead, script)
    assert replaced == script.count("ddp_mnist") or script.startswith("make")
    return shell(script, folder).ended()


# --- One training, whatever starts it


def test_the_course_shows_each_way_of_starting() -> None:
    ways = {"torchrun", "python", "MASTER_ADDR=127.0.0.1", "accelerate", "make"}
    assert set(TRAININGS) == ways
    assert len(PROOFS) == len(ways) + 1  # and an evaluation


@pytest.mark.parametrize("way", TRAININGS)
def test_the_courses_own_line(way: str, alone: Path, tmp_path: Path) -> None:
    flags = rf"{PROOF} {tmp_path / 'run'}"
    written = r"--dataset digits(?: --epochs \d)?(?: --mixed-precision no)?"
    ended = run_fence(TRAININGS[way], tmp_path, written, flags)
    # Of two nodes' launchers the one that serves the store may end first, which the other reports.
    launchers_own = " torch/distributed/elastic/agent/" if way == "make" else "nothing"
    lines = [line for line in ended.err.splitlines() if launchers_own not in line]
    assert (ended.code, lines) == (0, [])
    check_equal(tmp_path / "run", alone, 2, num_machines=2 if way == "make" else 1)
    if way != "python":  # whose processes have no RANK, and are test_openmp.py's
        # OpenMP's threads spin shortly, in each process, from the moment it loads torch
        assert (tmp_path / "openmp").read_text() == "10000 None\n" * 2
    if way == "make":
        assert ended.out.splitlines()[0].startswith("REHEARSAL: 2 nodes on this machine")
        assert ended.out.count("--machine_rank 0") == ended.out.count("--machine_rank 1") == 1


def test_a_config_with_a_compiler_and_affinity_changes_no_weight(
    alone: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(
        "{distributed_type: MULTI_GPU, num_processes: 2, enable_cpu_affinity: true,"
        " dynamo_config: {dynamo_backend: EAGER}}"
    )
    (tmp_path / "flags").write_text("--grad-accum 4")
    words = [*ACCELERATE, "own.yaml", *TRAIN, *PROOF.split(), "run", "@flags"]
    slower = "ignore:Guards may run slower:RuntimeWarning"  # says torch's compiler on Python 3.13.0
    [printed] = all_succeed([Started(words, tmp_path, {"PYTHONWARNINGS": slower})])
    check_equal(tmp_path / "run", alone, 2)
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["grad_accum"], summary["compile"]) == (4, "eager")
    plan = " ".join(printed.split())
    assert "precision fp64, compiled by eager" in plan
    assert "72 images a step = 2 processes x 4 parts x 9" in plan


def test_the_way_of_old_tutorials(alone: Path, tmp_path: Path) -> None:
    """A script, which begins anew as a module, with --local-rank=N as its first argument."""
    train = str(REPOSITORY / "ddp_mnist" / "train.py")
    starts = ["-m", "torch.distributed.launch", *torchrun(2)[2:], train]
    (tmp_path / "flags").write_text(f"{PROOF} run")
    arguments = [*starts, "@flags"]
    all_succeed([Started(arguments, tmp_path, HUSH)])
    check_equal(tmp_path / "run", alone, 2)


def test_our_line_is_the_last_one_under_a_launcher(tmp_path: Path) -> None:
    """The launcher's own traceback and table follow our error; the table ends with it."""
    wrong = [*TRAIN, "--dataset", "nowhere"]
    ended = Started([*torchrun(2), *wrong], tmp_path, HUSH).ended()
    *_, last, rule = ended.err.splitlines()
    assert (ended.code, {*rule}) == (1, {"="})
    assert last.startswith("  traceback : ddp-mnist: error: --dataset nowhere: no such data set")
    assert last.endswith("(code 2)")
    assert ended.err.count("no such data set") == 2  # and once at once


def test_evaluate_under_a_launcher_equals_the_summary(alone: Path, tmp_path: Path) -> None:
    """On three processes, which the 360 images and the batches do not come out even for."""
    [fence] = [fence for fence in PROOFS if "evaluate" in fence.body]
    ended = run_fence(fence, tmp_path, "runs/metrics", f"{alone} --json")
    assert ended.code == 0, ended.err
    found, summary = json.loads(ended.out), read_json(alone / "summary.json")
    assert (found["world_size"], found["count"]) == (3, 360)
    assert found["confusion"] == summary["confusion"]
    assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-12)


@pytest.mark.soak
def test_fifty_runs_end_in_order(tmp_path: Path) -> None:
    """Exit 0, and nothing on stderr: no abort at exit, no warning of a library's."""
    arguments = [*MULTI_CPU, *TRAIN, "--dataset", "digits", "--epochs", "1", "--run-dir"]
    for number in range(50):
        all_succeed([Started([*arguments, f"run-{number}"], tmp_path)])
