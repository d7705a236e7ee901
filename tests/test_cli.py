import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddp_mnist import cli
from ddp_mnist.config import PRESETS, Distribution, Recipe, Run, TrainConfig
from ddp_mnist.errors import CheckpointError, FailedElsewhere, StorageError, UsageError
from ddp_mnist.flags import flag_fields, flag_name
from ddp_mnist.verbs import multinode
from ddp_mnist.verbs.evaluate import metrics_table

PROGRAM = (sys.executable, "-m", "ddp_mnist")
ONE_LINE = re.compile(r"ddp-mnist: error: (.+) \(code 2\)\n")


def run_here(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line, in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


# --- Help


@pytest.mark.parametrize("line", ["--help", "train --help", "train --lr 0", "bench --help"])
def test_no_heavy_package_is_imported_before_there_is_work(line: str) -> None:
    """So a wrong flag and --help answer at once, which other programs do not change."""
    command = [sys.executable, "-X", "importtime", "-m", "ddp_mnist", *line.split()]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "ddp_mnist.cli" in imported
    assert not imported & {"torch", "numpy", "accelerate", "datasets", "evaluate", "PIL"}
    cpu_seconds = sum(after[2:4]) - sum(before[2:4])  # of child processes
    assert cpu_seconds < 0.6


def test_help_lists_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_here(capsys, "--help")
    assert (code, err) == (0, "")
    assert re.findall(r"^    (\w+) +\w", out, re.MULTILINE) == VERBS.split(", ")  # none hidden
    assert "6 peer lost or time-out" in out
    assert run_here(capsys) == (0, out, "")
    assert run_here(capsys, "--version") == (0, "ddp-mnist 0.1.0\n", "")


def test_help_of_train_shows_each_flag_with_its_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, out, _ = run_here(capsys, "train", "--help")
    sections = re.split(r"^(?=\w.*:$)", out, flags=re.MULTILINE)
    for group in (Run, Recipe, Distribution):
        [text] = [part for part in sections if part.startswith(f"{group.__name__}:\n")]
        shown = " ".join(text.split())
        assert str(group.__doc__) in shown
        for field in flag_fields(group):
            assert re.search(rf"{flag_name(field)}\b", shown)
            assert " ".join(field.metadata["help"].split()) in shown
    shown = " ".join(out.split())
    assert "--lr X Highest learning rate. [0.01]" in shown
    assert "--model {cnn,cnn_deep,mlp,resnet18,cnn_bn} The net. [cnn]" in shown
    assert "--augment, --no-augment Rotate" in shown


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if verb != "train"])
def test_help_of_each_verb(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_here(capsys, verb, "--help")
    assert (code, err) == (0, "")
    assert cli.VERBS[verb] in out
    assert ("--dist-timeout" in out) == (verb in ("evaluate", "doctor"))
    assert "--sync-bn" not in out


# --- What is refused

VERBS = "train, evaluate, predict, report, export, prepare, doctor, verify, bench"
NEVER_A_NUMBER = ("''", "abc", "7x", "nan", "1e400", "inf", "½", "数", "1,5", "0x10", "9" * 5000)
# Bounds, choices and contradictions of train's flags are in test_config.py.
REFUSED = {
    **{f"train --lr {text}": "--lr " for text in NEVER_A_NUMBER},
    **{f"train --batch-size {text}": "--batch-size " for text in NEVER_A_NUMBER},
    "train --dist-timeout nan": "--dist-timeout ",
    "train --batch-size 0": "--batch-size 0: must be at least 1 and at most 1,000,000",
    "train --batch-size 1.5": "--batch-size 1.5: must be a whole number, at least 1 and at most",
    "train --lr=-inf": "--lr -inf: must be above 0 and at most 100",
    "train --lr x": "--lr x: must be a number, above 0 and at most 100",
    "train --lr": "--lr: expected one argument; see ddp-mnist train --help",
    "train --preset accurate --lr 0": "--lr 0.0: must be above 0",
    "train --model resnet": "--model resnet: choose from cnn, cnn_deep, mlp, resnet18, cnn_bn; did",
    "train --preset quick": "--preset quick: choose from fast, accurate",
    "train --backend mpi": "--backend mpi: PyTorch's wheels are built without MPI; use g",
    "train --dataset ''": "--dataset '': is empty; give a value or leave it out",
    # no such flag, argument or verb
    "train --batchsize 7": "--batchsize: there is no such flag or argument here; did you mean --ba",
    "train --batch_size=7": "--batch_size: there is no such flag or argument here; did you mean --",
    "train --no-agument": "--no-agument: there is no such flag or argument here; did you mean --no",
    "train --ünïcode": "--ünïcode: there is no such flag or argument here; see ddp-mnist tr",
    "train -e 3": "-e: there is no such flag or argument here",
    "train mnist": "mnist: there is no such flag or argument here",
    "train --quiet=yes": "--quiet: ignored explicit argument 'yes'; see ddp-mnist train",
    "train --no-cuda": "--no-cuda: there is no such flag or argument here; here it is --cpu",
    "train --workers 4": "--workers: there is no such flag or argument here; none are needed",
    "trian": f"trian: choose from {VERBS}; did you mean train?",
    "?": f"?: choose from {VERBS}",
    "''": f": choose from {VERBS}",
    "--epochs 3 train": "--epochs: comes after the verb",
    "--local-rank x train": "--local-rank: comes after the verb",
    # how the processes are joined
    "train --rank 0": "--rank 0: needs --init-method tcp://HOST:PORT beside it",
    # the other verbs
    "evaluate": "evaluate: the following arguments are required: RUN; see ddp-mnist evaluate",
    "evaluate ''": "'': is empty; give a value",
    "evaluate r --split tset": "--split tset: choose from test, validation, train; did you mean te",
    "evaluate r --rank 0": "--rank 0: needs --init-method",
    "evaluate r --mixed-precision no": "--mixed-precision: there is no such flag or argument",
    "predict": "predict: the following arguments are required: RUN, IMAGE",
    "predict r ''": "'': is empty",
    "export r --format onx": "--format onx: choose from safetensors, torch, onnx; did you mean on",
    "prepare mnist": "mnist: there is no such flag or argument here",
    "prepare --refesh": "--refesh: there is no such flag or argument here; did you mean --refresh?",
    "bench none": "none: choose from ",
    "multinode --verb bench": "VERB=bench: choose from train, doctor",
    "multinode --num-machines=two": "NUM_MACHINES=two: must be a whole number, at least 1",
    "restart x -- -m ddp_mnist train": "RESTARTS=x: must be a whole number",
}


@pytest.mark.parametrize(("line", "begins"), REFUSED.items(), ids=[line[:40] for line in REFUSED])
def test_fault_32_a_wrong_command_line_is_one_line_that_begins_with_what_was_typed(
    line: str,
    begins: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_here(capsys, *shlex.split(line))
    assert (code, out) == (2, "")
    match = ONE_LINE.fullmatch(err)
    assert match, err
    assert match[1].startswith(begins)
    assert len(err) < 250
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "argv",
    [
        ["verify", "--save"],
        ["doctor", "--dataset", "digits", "--save"],
        ["report", "RUN", "--out"],
        ["predict", "RUN", "x.png", "--show"],
    ],
    ids=lambda argv: argv[0],
)
def test_where_nothing_can_be_written_is_told_before_the_work(
    argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, pipe = argv[-1], tmp_path / "pipe.png"
    os.mkfifo(pipe)  # as /dev/stdout and /dev/null, it would be replaced by a file
    code, out, err = run_here(capsys, *argv, str(pipe))
    assert (code, out) == (2, "")
    kind = ".png" if flag in ("--show", "--plot") else "file"
    assert f"error: {flag} {pipe}: must be a {kind} in a folder that is there (code 2)" in err
    assert pipe.is_fifo()
    # Not even root can write there.
    code, out, err = run_here(capsys, *argv, "/proc/self/fd/x.png")
    assert (code, out) == (5, "")
    assert f"error: {flag} /proc/self/fd/x.png: cannot be written (" in err
    assert err.endswith("; name another file (code 5)\n")


def test_who_has_no_home_is_told_nothing_about_matplotlib() -> None:
    program = (
        "from ddp_mnist import cli\ntry: cli.main(['--version'])\nexcept SystemExit: pass\n"
        "import matplotlib; matplotlib.get_cachedir()"
    )
    homeless = {"HOME": "/proc/none", "XDG_CONFIG_HOME": "", "XDG_CACHE_HOME": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **homeless}, capture_output=True
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_wrong_environment_is_one_line_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else an environment may contradict is in test_launch.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", "0")
    code, out, err = run_here(capsys, "train", "--dataset", "digits")
    assert (code, out) == (2, "")
    assert err.startswith("ddp-mnist: error: RANK=0: WORLD_SIZE is not set")
    assert ONE_LINE.fullmatch(err)
    assert list(tmp_path.iterdir()) == []


# --- How it ends


@pytest.mark.parametrize("before", ["--local-rank=13", "--local_rank=0", "--local_rank 1"])
def test_local_rank_before_the_verb_is_accepted(
    before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed.launch puts it there."""
    expected = run_here(capsys, "train", "--help")
    assert run_here(capsys, *before.split(), "train", "--help") == expected


def test_a_variable_that_make_was_not_given_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock(return_value=0)
    monkeypatch.setattr(multinode, "run", run)
    empty = ["--machine-rank=", "--main-process-ip=", "--num-machines=", "--nproc-per-node=2"]
    assert cli.multinode([*empty, "--", "--dist-timeout", "7"]) == 0
    [(flags, given, timeout_s, _)] = [call.args for call in run.call_args_list]
    assert flags == multinode.Multinode(nproc_per_node=2)
    assert (given, timeout_s) == (["--dist-timeout", "7"], 7)
    cli.multinode(["--verb", "doctor"])
    assert run.call_args.args[2] == 60  # a person waits for the verdict


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(cli, "run_verb", Mock(side_effect=error))


def test_an_expected_failure_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, CheckpointError("runs/x:\n  is no\x1b[2J run\ud8ff"))
    shown = "ddp-mnist: error: runs/x: is no?[2J run? (code 4)\n"
    assert run_here(capsys, "train") == (4, "", shown)


def test_a_failure_told_elsewhere_is_silent_and_keeps_its_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, FailedElsewhere("rank 0 says it", code=7))
    assert run_here(capsys, "train") == (7, "", "")
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")  # the first of another machine says why it ended
    assert run_here(capsys, "train") == (7, "", "ended      rank 0 says it\n")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_here(capsys, "train") == (7, "", "")


def test_fault_13_control_c_is_one_line_per_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert run_here(capsys, "train") == (130, "", "ddp-mnist: interrupted (code 130)\n")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_here(capsys, "train") == (130, "", "")


@pytest.mark.parametrize(
    ("variables", "agreed", "waits"),
    [
        ({}, False, []),
        ({"LOCAL_RANK": "0"}, False, []),
        ({"LOCAL_RANK": "1"}, False, [3]),
        ({"SLURM_LOCALID": "2"}, False, [3]),
        ({"LOCAL_RANK": "1"}, True, []),
    ],
)
def test_what_all_ranks_meet_is_told_by_local_rank_0_first(
    variables: dict[str, str],
    agreed: bool,
    waits: list[float],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    slept: list[float] = []
    monkeypatch.setattr(cli.time, "sleep", slept.append)
    error = UsageError("--x: no")
    error.agreed = agreed
    failing(monkeypatch, error)
    assert run_here(capsys, "train") == (2, "", "ddp-mnist: error: --x: no (code 2)\n")
    assert slept == waits


def test_the_verb_s_own_error_counts_more_than_stdout_s(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=StorageError("stdout: cannot be written"))
    monkeypatch.setattr(cli, "write_stdout", full)
    assert run_here(capsys, "trian")[0] == 2
    code, _, err = run_here(capsys, "--version")
    assert (code, err) == (5, "ddp-mnist: error: stdout: cannot be written (code 5)\n")


def test_a_bug_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["train"])


def test_fault_35_a_reader_that_went_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([*PROGRAM, "--help"], stdout=writing, stderr=subprocess.PIPE)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def config_of(line: str) -> TrainConfig:
    return cli.train_config(line.split()[1:])


def test_what_is_given_arrives() -> None:
    line = "train --lr 0.5 --epochs 3 --augment --dataset digits --backend gloo --quiet"
    assert config_of(line) == TrainConfig(
        Run(dataset="digits", quiet=True),
        Recipe(lr=0.5, epochs=3, augment=True),
        Distribution(backend="gloo"),
        typed=frozenset({"lr", "epochs", "augment", "dataset", "backend", "quiet"}),
    )
    assert config_of("train") == TrainConfig()


def test_a_typed_flag_beats_the_preset_on_either_side_of_it() -> None:
    preset = PRESETS["accurate"].recipe
    for line in (
        "train --preset accurate --no-augment --seed 7",
        "train --seed 7 --no-augment --preset accurate",
    ):
        config = config_of(line)
        assert config.recipe == Recipe(preset="accurate", **{**preset, "augment": False})
        assert config.run == Run(seed=7)
        # a resumed run keeps its values, whatever the preset stands for
        assert config.typed == {"preset", "augment", "seed"}
    assert config_of("train --preset fast").recipe == Recipe()


# --- The table of `evaluate`


def metrics_of(
    classes: list[str], confusion: list[list[int]], name: str = "set", **more: Any
) -> dict[str, Any]:
    return {
        "split": "test",
        "dataset": {"name": name},
        "count": 1234,
        "accuracy": 0.75,
        "loss": 0.5,
        "classes": classes,
        "class_accuracy": [0.5] * len(classes),
        "confusion": confusion,
    } | more


def test_a_class_without_rows_has_no_accuracy() -> None:
    metrics = metrics_of(["zero", "one"], [[3, 1], [0, 0]], class_accuracy=[0.75, None])
    assert metrics_table(metrics).splitlines() == [
        "test split of set: 1,234 images",
        "accuracy 0.7500   loss 0.5000",
        "rows: what the images are; columns: what they were taken for",
        "class    accuracy    zero   one",
        "zero       0.7500       3     1",
        "one             -       0     0",
    ]


def test_names_that_are_too_wide_for_columns_are_cut_there() -> None:
    names = ["T - shirt / top", "Trouser", "Pullover", "Dress", "Ankle boot"]
    rows = [[7 * (row == column) for column in range(5)] for row in range(5)]
    lines = metrics_table(metrics_of(names, rows)).splitlines()
    assert lines[3:5] == [
        "class           accuracy   T - shirt   Trouser  Pullover     Dress Ankle boo",
        "T - shirt / top   0.5000           7         0         0         0         0",
    ]
    assert max(map(len, lines)) <= 80


def test_names_that_would_steer_a_terminal_are_cleaned() -> None:
    names = ["a\x1b[2Jb", "c\nd\x9b"]
    table = metrics_table(metrics_of(names, [[1, 0], [0, 1]], name="x\x1b[H"))
    assert all(character.isprintable() or character == "\n" for character in table)
    assert table.splitlines()[0] == "test split of x?[H: 1,234 images"
    assert table.splitlines()[3].split() == ["class", "accuracy", "a?[2Jb", "c", "d?"]
