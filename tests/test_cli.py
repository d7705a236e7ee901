from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from ddp_mnist import cli
from ddp_mnist.config import PRESETS, Distribution, Recipe, Run, TrainConfig
from ddp_mnist.errors import CheckpointError, FailedElsewhere, UsageError
from ddp_mnist.flags import Flags, flag_name
from ddp_mnist.verbs.evaluate import metrics_table

PROGRAM = (sys.executable, "-m", "ddp_mnist")
ONE_LINE = re.compile(r"ddp-mnist: error: (.+) \(code 2\)\n")


def run_here(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command line, in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def seconds_of(*argv: str) -> float:
    """The best of three runs; others may use the machine at the same time."""
    times = []
    for _ in range(3):
        started = time.monotonic()
        subprocess.run([*PROGRAM, *argv], check=True, capture_output=True)
        times.append(time.monotonic() - started)
    return min(times)


# --- Help


@pytest.mark.parametrize("argv", [("--help",), ("train", "--help")])
def test_help_answers_at_once(argv: tuple[str, ...]) -> None:
    assert seconds_of(*argv) < 0.5


@pytest.mark.parametrize("argv", [("--help",), ("train", "--help"), ("train", "--lr", "0")])
def test_no_heavy_package_is_imported_before_there_is_work(argv: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "ddp_mnist", *argv],
        capture_output=True,
        text=True,
    )
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "ddp_mnist.cli" in imported
    heavy = {"torch", "numpy", "accelerate", "datasets", "evaluate", "safetensors", "PIL"}
    assert imported & heavy == set()


def test_help_lists_the_verbs_and_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_here(capsys, "--help")
    assert (code, err) == (0, "")
    for verb in ("train", "evaluate", "predict", "prepare"):
        assert re.search(rf"^    {verb} +\S", out, re.MULTILINE)
    assert "6 peer lost or time-out" in out


def test_no_argument_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(capsys) == run_here(capsys, "--help")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here(capsys, "--version") == (0, "ddp-mnist 0.1.0\n", "")


@pytest.mark.parametrize("group", [Run, Recipe, Distribution])
def test_help_of_train_shows_each_flag_with_its_sentence(
    group: type[Flags], capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, _ = run_here(capsys, "train", "--help")
    section = re.split(r"^(?=\w.*:$)", out, flags=re.MULTILINE)
    [text] = [part for part in section if part.startswith(f"{group.__name__}:\n")]
    said = " ".join(text.split())
    assert str(group.__doc__) in said
    for field in dataclasses.fields(group):  # type: ignore[arg-type]
        assert re.search(rf"{flag_name(field)}\b", said)
        assert " ".join(field.metadata["help"].split()) in said


def test_help_shows_defaults_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run_here(capsys, "train", "--help")
    said = " ".join(out.split())
    assert "--lr X Highest learning rate. [0.01]" in said
    assert "--model {cnn,cnn_deep,mlp,resnet18,cnn_bn} The net. [cnn]" in said
    assert "--augment, --no-augment Rotate" in said


# --- What is refused

NEVER_A_NUMBER = ("", "abc", "7x", "nan", "1e400", "inf", "½", "数", "1,5", "0x10", "9" * 5000)
REFUSED: list[tuple[list[str], str]] = [
    *[(["train", "--lr", text], "--lr ") for text in NEVER_A_NUMBER],
    *[(["train", "--batch-size", text], "--batch-size ") for text in NEVER_A_NUMBER],
    *[(["train", "--dist-timeout", text], "--dist-timeout ") for text in ("", "nan", "1e400")],
    (["train", "--batch-size", "0"], "--batch-size 0: must be at least 1 and at most 10,000,000"),
    (["train", "--batch-size", "-1"], "--batch-size -1: must be at least 1"),
    (["train", "--batch-size", "1.5"], "--batch-size 1.5: must be a whole number"),
    (["train", "--batch-size", "1e3"], "--batch-size 1e3: must be a whole number"),
    (["train", "--batch-size", "9" * 30], "--batch-size 999999999999999999999999999999: must"),
    (["train", "--epochs", "0"], "--epochs 0: must be at least 1"),
    (["train", "--epochs", "1000001"], "--epochs 1000001: must be at least 1 and at most 1,000,0"),
    (["train", "--lr", "0"], "--lr 0.0: must be more than 0 and at most 100"),
    (["train", "--lr", "-1"], "--lr -1.0: must be more than 0"),
    (["train", "--lr=-inf"], "--lr -inf: must be a finite number more than 0"),
    (["train", "--lr", "101"], "--lr 101.0: must be"),
    (["train", "--lr"], "--lr: needs a value; see ddp-mnist train --help"),
    (["train", "--lr", "--quiet"], "--lr: needs a value"),
    (["train", "--weight-decay", "-0.1"], "--weight-decay -0.1: must be at least 0"),
    (["train", "--warmup", "1"], "--warmup 1.0: must be at least 0 and less than 1"),
    (["train", "--label-smoothing", "1"], "--label-smoothing 1.0: must be"),
    (["train", "--target-accuracy", "0"], "--target-accuracy 0.0: must be more than 0"),
    (["train", "--target-accuracy", "99"], "--target-accuracy 99.0: must be more than 0 and at mo"),
    (["train", "--patience", "0"], "--patience 0: must be at least 1"),
    (["train", "--grad-accum", "0"], "--grad-accum 0: must be at least 1"),
    (["train", "--max-grad-norm", "0"], "--max-grad-norm 0.0: must be more than 0"),
    (["train", "--val-size", "-1"], "--val-size -1: must be at least 0"),
    (["train", "--log-every", "0"], "--log-every 0: must be at least 1"),
    (["train", "--seed", "-1"], "--seed -1: must be at least 0"),
    (
        ["train", "--seed", "2147483649"],
        "--seed 2147483649: must be at least 0 and at most 2,147,4",
    ),
    (["train", "--dist-timeout", "0"], "--dist-timeout 0.0: must be at least 1"),
    (["train", "--rank", "-1"], "--rank -1: must be at least 0"),
    (["train", "--world-size", "0"], "--world-size 0: must be at least 1"),
    # words
    (["train", "--model", "CNN"], "--model CNN: choose from cnn, cnn_deep, mlp, resnet18, cnn_bn;"),
    (
        ["train", "--model", "resnet"],
        "--model resnet: choose from cnn, cnn_deep, mlp, resnet18, cnn_bn; did ",
    ),
    (["train", "--preset", "quick"], "--preset quick: choose from fast, accurate"),
    (["train", "--preset", "accurate", "--lr", "0"], "--lr 0.0: must be more than 0"),
    (["train", "--model", ""], "--model: the value is empty"),
    (["train", "--model", "数字"], "--model 数字: choose from cnn"),
    (["train", "--backend", "ncll"], "--backend ncll: choose from auto, nccl, gloo, mpi; did you"),
    (["train", "--backend", "mpi"], "--backend mpi: PyTorch's wheels are built without MPI; use g"),
    (["train", "--mixed-precision", "fp8"], "--mixed-precision fp8: choose from auto, no, fp16"),
    (["train", "--comm-hook", "fp32"], "--comm-hook fp32: choose from none, fp16, bf16, powersgd"),
    (["train", "--dataset", ""], "--dataset: the value is empty; give one or leave it out"),
    (["train", "--run-dir", ""], "--run-dir: the value is empty"),
    (["train", "--cache-dir", ""], "--cache-dir: the value is empty"),
    # no such flag, argument or verb
    (["train", "--batchsize", "7"], "--batchsize: there is no such flag or argument here; did you"),
    (["train", "--batch_size=7"], "--batch_size: there is no such flag or argument here; did you "),
    (["train", "--learning-rte", "1"], "--learning-rte: there is no such flag or argument here"),
    (["train", "--epoch", "1"], "--epoch: there is no such flag or argument here; did you mean --"),
    (["train", "--ünïcode"], "--ünïcode: there is no such flag or argument here; see ddp-mnist tr"),
    (["train", "-e", "3"], "-e: there is no such flag or argument here"),
    (["train", "mnist"], "mnist: there is no such flag or argument here"),
    (["train", "--quiet=yes"], "--quiet: takes no value"),
    (["train", "--no-quiet"], "--no-quiet: there is no such flag or argument here"),
    (["evaluate", "runs/x", "--mixed-precision", "no"], "--mixed-precision: there is no such fl"),
    (
        ["trian"],
        "trian: choose from train, evaluate, predict, report, export, prepare, doctor, verify,",
    ),
    (
        ["TRAIN"],
        "TRAIN: choose from train, evaluate, predict, report, export, prepare, doctor, verify,",
    ),
    (["?"], "?: choose from train"),
    ([""], ": choose from train"),
    (["--epochs", "3", "train"], "--epochs: comes after the verb"),
    (["--local-rank", "x", "train"], "--local-rank: comes after the verb"),
    (["train", "--no-cuda"], "--no-cuda: there is no such flag or argument here; here it is --cpu"),
    (["train", "--workers", "4"], "--workers: there is no such flag or argument here; none are ne"),
    # what goes together
    (["train", "--rank", "0"], "--rank 0: needs --init-method tcp://HOST:PORT beside it"),
    (["train", "--world-size", "2"], "--world-size 2: needs --init-method tcp://HOST:PORT"),
    (["train", "--local-rank", "1"], "--local-rank 1: the world size is 1; ranks are 0 to 0"),
    (["train", "--init-method", "env://"], "--init-method env://: RANK and WORLD_SIZE are not set"),
    (["train", "--init-method", "tcp://h:1"], "--init-method tcp://h:1: --rank is missing"),
    (["train", "--sync-bn"], "--sync-bn: cnn has no BatchNorm; use --model cnn_bn or leave it out"),
    (["train", "--patience", "3", "--val-size", "0"], "--patience: needs validation images; give"),
    (
        ["train", "--target-accuracy", ".9", "--val-size", "0"],
        "--target-accuracy: needs validation images; give --val-size, e.g. 5000",
    ),
    # the other verbs
    (["evaluate"], "evaluate: RUN is missing; see ddp-mnist evaluate --help"),
    (["evaluate", ""], "RUN: the value is empty"),
    (["evaluate", "r", "--split", "tset"], "--split tset: choose from test, validation, train; d"),
    (["evaluate", "r", "--batch-size", "x"], "--batch-size x: must be a whole number at least 1"),
    (["evaluate", "r", "--dataset", ""], "--dataset: the value is empty"),
    (["evaluate", "r", "--rank", "0"], "--rank 0: needs --init-method"),
    (["predict"], "predict: RUN, IMAGE is missing"),
    (["predict", "r"], "predict: IMAGE is missing"),
    (["predict", "r", ""], "IMAGE: the value is empty"),
    (["predict", "r", "a.png", "--split", "test"], "--split: there is no such flag or argument"),
    (["prepare", "mnist"], "mnist: there is no such flag or argument here"),
    (["prepare", "--refesh"], "--refesh: there is no such flag or argument here; did you mean --r"),
]


@pytest.mark.parametrize(("argv", "begins"), REFUSED, ids=lambda value: str(value)[:40])
def test_fault_32_a_wrong_command_line_is_one_line_that_begins_with_what_was_typed(
    argv: list[str],
    begins: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_here(capsys, *argv)
    assert (code, out) == (2, "")
    line = ONE_LINE.fullmatch(err)
    assert line, err
    assert line[1].startswith(begins)
    assert len(err) < 250
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_wrong_command_lines_is_no_shorter_than_it_was() -> None:
    assert len(REFUSED) >= 80


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--batchsize", "--batch-size"),
        ("--batch_size=7", "--batch-size"),
        ("--epoch", "--epochs"),
        ("--no-agument", "--no-augment"),
        ("--resum", "--resume"),
    ],
)
def test_a_typo_names_the_nearest_flag(
    typed: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, err = run_here(capsys, "train", typed)
    assert ("did you mean" in err) == (meant is not None)
    assert meant is None or f"did you mean {meant}? (code 2)" in err


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--batch-size", "0"],
        ["train", "--lr", "1e400"],
        ["train", "--modle", "cnn"],
        ["train", "--rank", "0"],
        ["predict", "runs/none"],
    ],
)
def test_fault_32_a_wrong_command_line_ends_within_a_second(
    argv: list[str], tmp_path: Path
) -> None:
    started = time.monotonic()
    done = subprocess.run([*PROGRAM, *argv], cwd=tmp_path, capture_output=True, text=True)
    assert time.monotonic() - started < 1
    assert (done.returncode, done.stdout) == (2, "")
    assert ONE_LINE.fullmatch(done.stderr)
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


@pytest.mark.parametrize(
    ("variables", "begins"),
    [
        ({"RANK": "0"}, "RANK=0: WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE=two: must be a whole number"),
        ({"SLURM_NTASKS": "abc"}, "SLURM_NTASKS=abc: must be a whole number"),
        ({"SLURM_NTASKS": "4"}, "SLURM_NTASKS=4: this process was not started by srun"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2: mpirun is not supported"),
    ],
)
def test_a_wrong_environment_is_one_line_too(
    variables: dict[str, str],
    begins: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code, out, err = run_here(capsys, "train", "--dataset", "digits")
    assert (code, out) == (2, "")
    line = ONE_LINE.fullmatch(err)
    assert line
    assert line[1].startswith(begins)
    assert list(tmp_path.iterdir()) == []


# --- How it ends


@pytest.mark.parametrize(
    "before", ["--local-rank=0", "--local_rank=0", "--local-rank=13", "--local_rank 1"]
)
def test_local_rank_before_the_verb_is_accepted(
    before: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch.distributed.launch puts it there."""
    assert run_here(capsys, *before.split(), "train", "--help") == run_here(
        capsys, "train", "--help"
    )


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


def test_each_preset_holds_legal_values() -> None:
    for name, preset in PRESETS.items():
        assert Recipe(preset=name, **preset.recipe).preset == name


def test_evaluate_prints_a_table_in_which_a_class_without_rows_has_no_accuracy() -> None:
    metrics = {
        "split": "test",
        "dataset": {"name": "digits"},
        "count": 1234,
        "accuracy": 0.75,
        "loss": 0.5,
        "classes": ["zero", "one"],
        "class_accuracy": [0.75, None],
        "confusion": [[3, 1], [0, 0]],
    }
    assert metrics_table(metrics).splitlines() == [
        "test split of digits: 1,234 images",
        "accuracy 0.7500   loss 0.5000",
        "rows: what the images are; columns: what they were taken for",
        "class    accuracy    zero   one",
        "zero       0.7500       3     1",
        "one             -       0     0",
    ]


def metrics_of(classes: list[str], confusion: list[list[int]]) -> dict[str, Any]:
    return {
        "split": "test",
        "dataset": {"name": "set"},
        "count": 10,
        "accuracy": 0.5,
        "loss": 0.5,
        "classes": classes,
        "class_accuracy": [0.5] * len(classes),
        "confusion": confusion,
    }


def test_evaluate_shows_the_names_of_classes_whole() -> None:
    names = ["blue_square", "red_circle", "red_square"]
    table = metrics_table(metrics_of(names, [[3, 0, 1], [0, 2, 0], [0, 0, 123456]]))
    assert table.splitlines()[2:] == [
        "rows: what the images are; columns: what they were taken for",
        "class       accuracy   blue_square  red_circle  red_square",
        "blue_square   0.5000             3           0           1",
        "red_circle    0.5000             0           2           0",
        "red_square    0.5000             0           0      123456",
    ]


def test_names_that_are_too_wide_for_columns_have_numbers() -> None:
    names = ["T - shirt / top", "Trouser", "Pullover", "Dress", "Ankle boot"]
    rows = [[7 * (row == column) for column in range(5)] for row in range(5)]
    lines = metrics_table(metrics_of(names, rows)).splitlines()
    assert lines[2:5] == [
        "rows: what the images are; columns: what they were taken for, by number",
        "class             accuracy       0     1     2     3     4",
        "0 T - shirt / top   0.5000       7     0     0     0     0",
    ]
    assert lines[-1] == "4 Ankle boot        0.5000       0     0     0     0     7"
    assert max(map(len, lines)) <= 80


def test_names_that_would_steer_a_terminal_are_cleaned() -> None:
    table = metrics_table(
        metrics_of(["a\x1b[2Jb", "c\nd\x9b"], [[1, 0], [0, 1]]) | {"dataset": {"name": "x\x1b[H"}}
    )
    assert all(character.isprintable() or character == "\n" for character in table)
    assert table.splitlines()[0] == "test split of x?[H: 10 images"
    assert table.splitlines()[3].split() == ["class", "accuracy", "a?[2Jb", "c", "d?"]
