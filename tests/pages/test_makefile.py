"""The set-up, with a stand-in for python that fails where a file says so."""

import shutil
from pathlib import Path

import pytest

from tests.commands import REPOSITORY, Ended, Started

STAND_IN = """#!/bin/sh
# Fails at the step that the file `broken` names; notes each step in `steps`.
here='{folder}'
case "$*" in
    *version_info*) step=version ;;
    "-m venv"*) step=venv; for target in "$@"; do :; done ;;
    "-m pip"*) step=pip ;;
    *torchvision*) step=pair ;;
    *gpus_for_make*) step=other; cat "$here/gpus" ;;
    *ddp_mnist*) step=run; echo "$@" ;;
    *) step=other ;;
esac
[ $step = other ] || echo $step >>"$here/steps"
[ "$(cat "$here/broken" 2>/dev/null)" = $step ] && exit 1
if [ $step = venv ]; then mkdir -p "$target/bin"; cp "$0" "$target/bin/python"; fi
exit 0
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(REPOSITORY / name, tmp_path)
    python = tmp_path / "python-stand-in"
    python.write_text(STAND_IN.format(folder=tmp_path))
    python.chmod(0o755)
    return tmp_path


def make(checkout: Path, *arguments: str) -> Ended:
    command = ["make", "--no-print-directory", *arguments, f"PYTHON={checkout}/python-stand-in"]
    return Started(command, checkout, program=None).ended(20)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("version", "older than Python 3.11; name one: make PYTHON=python3.12"),
        ("venv", "apt install python3-venv"),
        ("pip", "existing environment: make train-single PYTHON=/path/to/python VENV="),
        ("pair", "torch and torchvision do not fit together (see above); make clean"),
    ],
)
def test_a_set_up_that_failed_says_where_and_is_mended_once(
    broken: str, message: str, checkout: Path
) -> None:
    (checkout / "broken").write_text(broken)
    failed = make(checkout, "train-single")
    assert failed.code != 0
    assert message in failed.err
    assert not (checkout / ".venv" / ".ready").exists()
    assert "run" not in (checkout / "steps").read_text()

    (checkout / "broken").unlink()
    mended = make(checkout, "train-single")
    assert mended.code == 0, mended.err
    assert "make train-single PYTHON=/path/to/python VENV=" in mended.out.splitlines()[0]
    assert (checkout / "steps").read_text().split()[-3:] == ["pip", "pair", "run"]
    (checkout / "steps").unlink()
    assert make(checkout, "train-single").code == 0  # and is not set up again
    assert (checkout / "steps").read_text().split() == ["run"]


def test_the_python_is_a_path_with_spaces_or_a_command(checkout: Path, tmp_path: Path) -> None:
    (spaced := tmp_path / "my programs").mkdir()
    shutil.copy(checkout / "python-stand-in", spaced / "python")
    for number, python in enumerate((f"{spaced}/python", "env -u NONE ./python-stand-in"), 1):
        command = ["make", "--no-print-directory", "train-single", "VENV=", f"PYTHON={python}"]
        assert Started(command, checkout, program=None).ended(20).code == 0
        assert (checkout / "steps").read_text().split() == ["run"] * number


def test_a_flag_that_was_given_as_a_variable_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, says in {
        "EPOCHS=3": 'EPOCHS=3: is a flag, not a variable; make train ARGS="--epochs 3"',
        "batch_size=3": 'batch_size=3: is a flag, not a variable; make train ARGS="--batch-size 3"',
        "PROCESSES=0": "PROCESSES=0: must be a whole number of at least 1",
    }.items():
        refused = make(checkout, "train-single", given)
        assert refused.code != 0
        assert says in refused.err
    monkeypatch.setenv("EPOCHS", "3")  # of something else
    assert make(checkout, "train-single").code == 0


def test_make_train_takes_all_gpus_or_else_processes_on_the_cpu(checkout: Path) -> None:
    launch = "-m accelerate.commands.launch --main_process_port 0 --config_file accelerate_configs"
    train = "-m ddp_mnist train --dataset auto --mixed-precision auto --epochs 5"
    for gpus, config in {
        "0": "multi_cpu.yaml --num_processes 3",
        "1": "single_gpu.yaml",
        "8": "multi_gpu.yaml --num_processes 8",
    }.items():
        (checkout / "gpus").write_text(gpus)
        launched = make(checkout, "train", "VENV=", "PROCESSES=3", "ARGS=--epochs 5").succeeds()
        assert launched == f"{launch}/{config} {train}\n"
    assert not (checkout / ".venv").exists()


def test_what_another_launcher_left_in_the_shell_changes_no_target(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PET_NNODES", "ACCELERATE_USE_FSDP", "PET_SIGNALS_TO_HANDLE"):
        monkeypatch.setenv(name, "2")
    (checkout / "env").write_text("#!/bin/sh\nenv | grep -E '^(PET|ACCELERATE)_'\n")
    for target in ("train", "train-single", "train-multinode", "doctor"):
        command = ["make", "-s", target, "VENV=", "PYTHON=sh env", "MAKELEVEL="]
        printed = Started(command, checkout, program=None).ended(20).out
        assert {*printed.split()} == {"PET_SIGNALS_TO_HANDLE=2"}


def test_make_alone_lists_the_targets(checkout: Path) -> None:
    listed = [line.split()[1] for line in make(checkout).out.splitlines()]
    wanted = "venv train train-single train-multi train-multinode evaluate test test-system soak"
    assert {*wanted.split(), "check", "fmt"} <= {*listed}
