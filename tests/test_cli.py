import os
import re
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from ddp_mnist import __version__, cli
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.flag_fields import flag_fields, flag_name
from ddp_mnist.config.recipe import PRESETS, Recipe
from ddp_mnist.config.train_config import RunFlags, TrainConfig
from ddp_mnist.errors import CheckpointError, FailedElsewhere, UsageError
from ddp_mnist.verbs import multinode
from tests.commands import Ended, Typed

# --- Help


@pytest.mark.parametrize("line", ["--help", "train --help", "train --lr 0", "report --help"])
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


def test_help_lists_the_verbs_and_the_exit_codes(typed: Typed) -> None:
    shown = typed("--help")
    assert (shown.code, shown.err) == (0, "")
    listed = re.findall(r"^    (\w+) +\w", shown.out, re.MULTILINE)
    assert listed == VERBS.split(", ")  # none hidden
    assert "6 peer lost or time-out" in shown.out
    assert typed() == shown
    assert typed("--version") == Ended(0, f"ddp-mnist {__version__}\n", "")


def test_help_of_train_shows_each_flag_with_its_sentence(typed: Typed) -> None:
    out = typed("train", "--help").out
    assert "the flags that are used most:\n  --dataset TEXT " in out
    shown = " ".join(out.split())
    for group in (RunFlags, Recipe, Distribution):
        assert f"{group.__name__}: {group.__doc__}" in shown
        for field in flag_fields(group):
            assert re.search(rf"{flag_name(field)}\b", shown)
            assert " ".join(field.metadata["help"].split()) in shown
    assert "--warmup X Share of steps with a rising learning rate. [0.1]" in shown
    assert "--augment, --no-augment Mirror, crop and colour pictures [yes]; rotate," in shown


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_each_verb_ends_with_examples_that_are_right(verb: str, typed: Typed) -> None:
    printed = typed(verb, "--help").succeeds()
    seconds = re.findall(r"--dist-timeout X\s+Seconds to wait for another process. (.*)", printed)
    shown = {"train": ["[300]"], "evaluate": ["[300]"], "doctor": ["[60]"]}
    assert seconds == shown.get(verb, [])
    assert re.search(r"--debug\s+Show the traceback of an error\.", printed)
    examples = printed.partition("\nfor example:\n  ")[2].splitlines()
    assert examples
    for line in map(str.strip, examples):
        before, _, flags = line.partition(f" {verb} ")
        assert before in ("ddp-mnist", "torchrun --nproc-per-node 2 -m ddp_mnist")
        (cli.train_config if verb == "train" else partial(cli.parse_verb, verb))(flags.split())


# --- What is refused

VERBS = "train, evaluate, predict, report, export, prepare, doctor, verify"
ONE_GPU = "each process takes the GPU of its local rank; leave it out, and put CUDA_VISIBLE_DEVI"
NEVER_A_NUMBER = ("''", "abc", "7x", "nan", "1e400", "inf", "½", "数", "1,5", "0x10", "9" * 5000)
# Bounds, choices and empty words of train's flags are in test_recipe.py.
REFUSED = {
    **{f"train --lr {text}": "--lr " for text in NEVER_A_NUMBER},
    "train --batch-size 1e3": "--batch-size ",
    "train --lr": "--lr: expected one argument; see ddp-mnist train --help",
    "train --backend mpi": "--backend mpi: choose from auto, nccl, gloo",
    # flags that contradict each other
    "train --val-size 0 --patience 2": "--patience: needs validation images; give --val-size",
    "train --val-size 0 --target-accuracy 0.9": "--target-accuracy: needs validation images",
    "train --model mlp --optimizer muon": "--optimizer muon: mlp has no convolutions; use",
    "train --resume auto": "--resume auto: needs --run-dir",
    "train --resume a --run-dir b": "--resume a: resumes the run in that folder; leave out",
    "train --loss my_loss:f --label-smoothing 0.1": "--label-smoothing 0.1: has no part in --loss",
    # of the images or of own code, which is looked at before any image is
    "train --dataset digits --test-size 0.3 --quiet": "--test-size 0.3: --dataset digits already",
    "train --dataset ./none --loss no_module:f --quiet": "--loss no_module:f: ModuleNotFoundError",
    "train --dataset ./none --model no_module:N --quiet": "--model no_module:N: ModuleNotFoundErr",
    # an address, where this machine's disk is meant
    "train --run-dir s3://b/x": "--run-dir s3://b/x: is an address; give a path on this machine",
    "train --resume hf://a/b": "--resume hf://a/b: is an address",
    "train --weights https://a/b.pth": "--weights https://a/b.pth: is an address",
    "DDP_MNIST_CACHE=gs://b prepare --dataset digits": "DDP_MNIST_CACHE gs://b: is an address",
    "prepare --cache-dir file:/tmp": "--cache-dir file:/tmp: is an address",
    "report r --out s3://b/a.html": "--out s3://b/a.html: is an address",
    "predict r a.png --show s3://b/a.png": "--show s3://b/a.png: is an address",
    "verify --save s3://b/a": "--save s3://b/a: is an address",
    "evaluate s3://b/run": "s3://b/run: is an address",
    "doctor --run-dir s3://b": "--run-dir s3://b: is an address",
    # no such flag, argument or verb
    "train --bath_size=7": "--bath_size: unknown flag or argument; did you mean --ba",
    "train --no-agument": "--no-agument: unknown flag or argument; did you mean --no",
    "train --ünïcode": "--ünïcode: unknown flag or argument; see ddp-mnist tr",
    "train -g0,1 --epochs 3": f"-g0,1: {ONE_GPU}",
    "trian": f"trian: choose from {VERBS}; did you mean train?",
    "''": f": choose from {VERBS}",
    "--local-rank x train": f"--local-rank: choose from {VERBS}",
    # a file of flags
    "train @none": "@none: No such file or directory; give a file of flags, one a line; a value",
    "predict r @.": "@.: Is a directory; give a file of flags",
    # how the processes are joined; what else an environment may contradict is in test_launch.py
    "train --rank 0": "--rank 0: needs --init-method tcp://HOST:PORT too",
    "RANK=0 train --dataset digits": "RANK=0: WORLD_SIZE is not set",
    # the other verbs
    "evaluate": "evaluate: the following arguments are required: RUN; see ddp-mnist evaluate",
    "evaluate ''": "'': is empty; give a value",
    "evaluate r --split tset": "--split tset: choose from test, validation, train; did you mean te",
    "predict": "predict: the following arguments are required: RUN, IMAGE",
    "predict r x.png --show x.jpg": "--show x.jpg: must be a .png",
    "export r --format onyx": "--format onyx: choose from safetensors, onnx; did you mean onnx?",
    "predict r x.png --show no/x.png": "--show no/x.png: ",
    "verify --inject seed": "--inject seed: choose from sampler, gradients, parameter,",
    # what the Makefile calls
    "multinode --verb bench": "VERB=bench: choose from train, doctor",
    "multinode --machine-rank 0": "MACHINE_RANK=0: MAIN_PROCESS_IP is missing; give it too, or",
    "multinode --main-process-ip a": "MAIN_PROCESS_IP=a: MACHINE_RANK is missing; give it too",
    "multinode --machine-rank 2 --main-process-ip a": "MACHINE_RANK=2: must be below NUM",
}


@pytest.mark.parametrize(("line", "begins"), REFUSED.items(), ids=[line[:40] for line in REFUSED])
def test_fault_32_fault_68_a_wrong_command_line_is_one_line_that_begins_with_what_was_typed(
    line: str, begins: str, typed: Typed, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(line)
    while re.match("[A-Z_]+=", words[0]):  # as a shell reads it
        monkeypatch.setenv(*words.pop(0).split("="))
    ended = typed(*words)
    assert (ended.code, ended.out) == (2, "")
    match = re.fullmatch(r"ddp-mnist: error: (.+) \(code 2\)\n", ended.err)
    assert match, ended.err
    assert match[1].startswith(begins)
    assert len(ended.err.replace(str(here), "")) < 250
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("verb", ["predict", "report", "export"])
def test_what_one_process_does_is_not_done_by_each(
    verb: str, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    [line] = typed(verb, "runs/latest").error_lines
    assert f"{verb}: every process would do all of it; start it without a launcher" in line
    monkeypatch.delenv("WORLD_SIZE")  # what is left is no launcher's
    [line] = typed(verb, *["runs/none"] * (1 + (verb == "predict"))).error_lines
    assert "runs/none" in line


@pytest.mark.parametrize("line", ["verify --save", "report RUN --out", "predict RUN x.png --show"])
def test_where_nothing_can_be_written_is_told_before_the_work(
    line: str, tmp_path: Path, typed: Typed
) -> None:
    flag, ending = line.split()[-1], "html" if "report" in line else "png"
    pipe = tmp_path / f"pipe.{ending}"
    os.mkfifo(pipe)  # as /dev/stdout and /dev/null, it would be replaced by a file
    no_file = typed(*line.split(), pipe)
    assert (no_file.code, no_file.out) == (2, "")
    assert f"error: {flag} {pipe}: must be a " in no_file.err
    assert pipe.is_fifo()
    refused = typed(*line.split(), f"/proc/self/fd/x.{ending}")  # not even root can write there
    assert (refused.code, refused.out) == (5, "")
    assert f"error: {flag} /proc/self/fd/x.{ending}: No such file or directory" in refused.err


# --- How it ends


def test_local_rank_before_the_verb_is_accepted(typed: Typed) -> None:
    """torch.distributed.launch puts it there."""
    for before in ("--local-rank=13", "--local_rank 1"):
        assert typed(*before.split(), "train", "--help") == typed("train", "--help")


def test_a_variable_that_make_was_not_given_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Mock(return_value=0)
    monkeypatch.setattr(multinode, "run", run)
    empty = ["--machine-rank=", "--main-process-ip=", "--num-machines=", "--nproc-per-node=2"]
    assert cli.multinode([*empty, "--", "--dist-timeout", "7"]) == 0
    [(flags, given, timeout_s)] = [call.args for call in run.call_args_list]
    assert flags == multinode.Multinode(nproc_per_node=2)
    assert (given, timeout_s) == (["--dist-timeout", "7"], 7)
    cli.multinode(["--verb", "doctor"])
    assert run.call_args.args[2] == 60  # a person waits for the verdict


def test_fault_66_a_folder_or_a_python_in_which_nothing_can_run(tmp_path: Path) -> None:
    start = "import os, sys; {}; from ddp_mnist import cli; cli.main(sys.argv[1:])"
    no_folder, no_torch = "os.rmdir(os.getcwd())", "sys.modules['torch'] = None"
    gone = "the working folder: No such file or directory; cd to one that exists"
    torch = f"torch: is not installed for {sys.executable}; activate the environment that has it"
    torch += " (source .venv/bin/activate), or make venv"
    for lacks, words, line in (
        (no_folder, "train --quiet", gone),
        (no_folder, "report runs/x", gone),
        (no_torch, "train --quiet", torch),
    ):
        tmp_path.mkdir(exist_ok=True)
        command = [sys.executable, "-c", start.format(lacks), *words.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"ddp-mnist: error: {line} (code 2)\n"


def test_fault_66_files_in_the_working_folder_stand_in_for_no_library(tmp_path: Path) -> None:
    """Not those of Python, nor of a package; of those that it starts see test_local_world.py."""
    for name in ("random", "logging", "torch", "evaluate", "accelerate", "datasets", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__file__} was run')")
    (tmp_path / "own.py").write_text("from ddp_mnist.core.nets import MLP as Net")
    train = "train --dataset digits --epochs 1 --quiet --model"
    for words, code, line in (
        (f"{train} own:Net --run-dir a", 0, ""),
        (f"{train} random:Net", 2, "--model random:Net: is Python's own; name a module of yours"),
        (f"{train} psutil:Net", 2, f"Python takes {psutil.__file__}, not {tmp_path}/psutil.py; re"),
    ):
        command = [sys.executable, "-m", "ddp_mnist", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, line in done.stderr) == (code, True), done.stderr


NO_RUN, NO = CheckpointError("runs/x:\n  is no\x1b[2J run\ud8ff"), UsageError("--x: no")
AGREED, ELSEWHERE = UsageError("--x: no"), FailedElsewhere("rank 0 says it", 7)
AGREED.agreed = True
THERE = FailedElsewhere("no data", 3)
THERE.where = "rank 1 (b)"
NO_LINE = "ddp-mnist: error: --x: no (code 2)\n"


@pytest.mark.parametrize(
    ("variables", "error", "code", "line", "waits"),
    [
        ("", NO_RUN, 4, "ddp-mnist: error: runs/x: is no?[2J run? (code 4)\n", False),
        # told elsewhere, but that the first of another machine says why it ended
        ("", ELSEWHERE, 7, "", False),
        ("RANK=2 LOCAL_RANK=0", ELSEWHERE, 7, "ended      rank 0 says it\n", False),
        ("RANK=2 LOCAL_RANK=1", ELSEWHERE, 7, "", False),
        ("RANK=0", THERE, 3, "ended      rank 1 (b): no data\n", False),
        ("", KeyboardInterrupt(), 130, "ddp-mnist: error: interrupted (code 130)\n", False),
        # what all ranks meet is told by local rank 0 first
        ("LOCAL_RANK=0", NO, 2, NO_LINE, False),
        ("LOCAL_RANK=1", NO, 2, NO_LINE, True),
        ("SLURM_LOCALID=2", NO, 2, NO_LINE, True),
        ("LOCAL_RANK=1", AGREED, 2, NO_LINE, False),
        # torchrun --virtual-local-rank
        ("LOCAL_RANK=0 TORCHELASTIC_ERROR_FILE=/no/attempt_0/1/error.json", NO, 2, NO_LINE, True),
    ],
)
def test_fault_13_a_failure_is_one_line_per_machine(
    variables: str, error: Any, code: int, line: str, waits: bool, typed: Typed, monkeypatch: Any
) -> None:
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    monkeypatch.setattr(cli.time, "sleep", sleep := Mock())
    monkeypatch.setattr(cli, "run_verb", Mock(side_effect=error))
    assert typed("train") == Ended(code, "", line)
    assert [call.args for call in sleep.call_args_list] == [(3,)] * waits


def test_what_nobody_foresaw_is_one_line_and_debug_shows_its_traceback(
    typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "run_verb", Mock(side_effect=ZeroDivisionError("x\ny")))
    line = "ddp-mnist: error: train --model 'a b'{}: ZeroDivisionError: x"
    shown = typed("train", "--model", "a b")
    assert shown == Ended(1, "", f"{line.format('')}; --debug shows the traceback (code 1)\n")
    shown = typed("train", "--model", "a b", "--debug")
    assert shown.code == 1
    head, *_, last = shown.err.splitlines()
    assert head == "Traceback (most recent call last):"
    assert last == f"{line.format(' --debug')}; --debug shows the traceback (code 1)"


def config_of(line: str) -> TrainConfig:
    return cli.train_config(line.split())


def test_what_is_given_arrives() -> None:
    line = "--lr 0.5 --epochs 3 --augment --dataset digits --backend gloo --quiet"
    assert config_of(line) == TrainConfig(
        RunFlags(dataset="digits", quiet=True),
        Recipe(lr=0.5, epochs=3, augment=True),
        Distribution(backend="gloo"),
        typed=frozenset({"lr", "epochs", "augment", "dataset", "backend", "quiet"}),
    )
    assert config_of("") == config_of("--debug") == TrainConfig()
    mixed = config_of("--use_mix_precision --batch_size=64 --no_augment")
    assert mixed == config_of("--mixed-precision auto --batch-size 64 --no-augment")


def test_flags_in_a_file_are_as_if_typed(here: Path, typed: Typed) -> None:
    (here / "more").write_text("--no_augment\n")
    lines = ("# a comment: it's none", "", "--lr 0.5", "  # --lr 1", "--run-dir 'a b#1'", "@more")
    (here / "flags").write_text("\n".join(lines))
    given = ["--lr=0.5", "--run-dir", "a b#1", "--no-augment"]
    assert cli.train_config(["@flags"]) == cli.train_config(given)
    later = ["--lr", "0.25", "--group=@x"]  # beats the file; and a value that begins with @
    assert cli.train_config(["@flags", *later]) == cli.train_config([*given, *later])
    assert cli.parse_verb("predict", ["run", "./@x"])[0].images == ("./@x",)
    (here / "picture").write_bytes(b"\x89PNG")
    for text, begins in (
        ("--bath_size 3", "--bath-size: unknown flag or argument; did you mean --batch-size?"),
        ("--run-dir 'a", "@it: ValueError: No closing quotation; give a file of flags"),
        ("@it", "@it: RecursionError: "),
        ("@none", "@it: none: No such file or directory; give a file"),
        ("@picture", "@it: UnicodeDecodeError: "),
    ):
        (here / "it").write_text(text)
        ended = typed("train", "@it")
        assert (ended.code, ended.out) == (2, "")
        assert ended.err.startswith(f"ddp-mnist: error: {begins}")


def test_a_typed_flag_beats_the_preset_on_either_side_of_it() -> None:
    preset, typed = PRESETS["accurate"].recipe, "--no-augment --seed 7"
    for config in map(config_of, (f"--preset accurate {typed}", f"{typed} --preset accurate")):
        assert config.recipe == Recipe(preset="accurate", **{**preset, "augment": False})
        assert config.run == RunFlags(seed=7)
        # a resumed run keeps its values, whatever the preset stands for
        assert config.typed == {"preset", "augment", "seed"}
    assert config_of("--preset fast").recipe == Recipe()
