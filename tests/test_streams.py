"""What a command prints arrives, or its exit code says so; a stream may be closed from the start.

A process that has torch loaded forks for each command, which then takes a second and not five.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local import run_world
from ddp_mnist.data import cache
from tests.commands import Started

FULL, CLOSED = "/dev/full", None
QUICK = ("--dataset", "digits", "--model", "mlp", "--epochs", "1")
COMBINATIONS = list(itertools.product((True, False), repeat=3))


@dataclass
class Forked:
    """How a command ended, and what its files of stdout and stderr hold."""

    code: int
    out: str
    err: str


def run_forked(
    argv: Sequence[str], stdin: str | None, stdout: str | None, stderr: str | None
) -> Forked:
    """One command in a process that was forked; each stream is a file's name, or closed."""
    pid = os.fork()
    if pid == 0:
        for number, file in enumerate((stdin, stdout, stderr)):
            if file is not CLOSED:
                opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                os.dup2(opened, number)
                os.close(opened)
        for number, file in enumerate((stdin, stdout, stderr)):
            if file is CLOSED:
                os.close(number)
        for number, name in enumerate(("stdin", "stdout", "stderr")):  # as Python finds them
            try:
                os.fstat(number)
                stream = os.fdopen(number, "w" if number else "r", closefd=False)
            except OSError:
                stream = None
            setattr(sys, name, stream)
        sys.argv = ["ddp-mnist", *argv]
        from ddp_mnist import cli

        try:
            cli.program()
        finally:  # whatever else comes out of it is a traceback
            import traceback

            traceback.print_exc()
            os._exit(99)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    out, err = (
        Path(file).read_text() if file not in (CLOSED, FULL) else "" for file in (stdout, stderr)
    )
    return Forked(code, out, err)


def run_all(commands: list[tuple[list[str], str | None, str | None, str | None]]) -> list[Forked]:
    """Each after the other, in processes forked from this one."""
    import numpy as np  # noqa: F401
    import PIL.Image  # noqa: F401

    import ddp_mnist.verbs.predict  # noqa: F401

    return [run_forked(*command) for command in commands]


def run_all_without_measuring(commands: list[Any]) -> list[Forked]:
    """`run_all`, but what verify and bench would take minutes for is there at once."""
    from ddp_mnist.bench import benches
    from ddp_mnist.verify import proofs

    proofs.verify = lambda *_: iter(["begins"])
    benches.BENCHES["feed"] = lambda *_: []
    return run_all(commands)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a finished run and an image."""
    import PIL.Image

    place = tmp_path_factory.mktemp("streams")
    images = cache.load("digits")
    PIL.Image.fromarray(images.test_images[0].squeeze().numpy()).save(place / "image.png")
    [[done]] = run_world(
        1, run_all, [(["train", *QUICK, "--run-dir", "run"], "in", "out", "err")], folder=place
    )
    assert done.code == 0, done.err
    return place


def run_there(folder: Path, *commands: Any) -> list[Forked]:
    [ended] = run_world(1, run_all, list(commands), folder=folder)
    return ended


def test_fault_35_streams_that_were_closed_before_the_start(folder: Path) -> None:
    verbs = {
        "train": ["train", *QUICK],
        "predict": ["predict", "run", "image.png"],
        "evaluate": ["evaluate", "run", "--json"],
    }
    commands, cases = [], []
    for verb, (i, o, e) in itertools.product(verbs, COMBINATIONS):
        streams = ("in" if i else CLOSED, "out" if o else CLOSED, "err" if e else CLOSED)
        run_dir = ["--run-dir", f"closed-{i}{o}{e}"] if verb == "train" else []
        commands.append(([*verbs[verb], *run_dir], *streams))
        cases.append((verb, o, e))
    for (verb, out_is_open, err_is_open), (argv, *_), ended in zip(
        cases, commands, run_there(folder, *commands), strict=True
    ):
        said = ended.err.splitlines()
        told = "stdout: cannot be written (Bad file descriptor)"
        if out_is_open:
            assert (ended.code, said) == (0, []), argv
            assert ended.out.count("\n") >= 1
        elif verb == "train":
            assert ended.code == 0, argv
            assert not err_is_open or (len(said) == 1 and told in said[0]), said
        else:
            assert ended.code == 5, argv
            assert not err_is_open or (len(said) == 1 and told in said[0]), said
        if verb == "train":
            status = json.loads((folder / argv[-1] / "status.json").read_text())
            assert (status["state"], status["exit_code"]) == ("finished", 0)
            # nothing that was printed went into a file of the run
            for line in (folder / argv[-1] / "metrics.jsonl").read_text().splitlines():
                json.loads(line)


def test_an_image_on_a_closed_stdin_is_an_error_of_data(folder: Path) -> None:
    [ended] = run_there(folder, (["predict", "run", "-"], CLOSED, "out", "err"))
    assert ended.code == 3
    assert ended.err.startswith("ddp-mnist: error: -: bad file descriptor; give")


def test_a_process_that_was_really_started_with_nothing_open(folder: Path) -> None:
    command = f"{sys.executable} -m ddp_mnist predict run image.png"
    codes = {"<&- >&- 2>&-": 5, "<&- 2>&-": 0}
    started = [
        Started(["bash", "-c", f"{command} {closed}"], folder, program=None) for closed in codes
    ]
    for code, process in zip(codes.values(), started, strict=True):
        done = process.ended()
        assert (done.code, done.out.count("\n"), done.err) == (code, int(code == 0), "")


def test_fault_05_what_cannot_be_written_to_stdout_is_code_5(folder: Path) -> None:
    verbs: list[list[str]] = [
        ["predict", "run", "image.png"],
        ["evaluate", "run"],
        ["evaluate", "run", "--json"],
        ["report", "run", "--out", "page.html"],
        ["export", "run", "--out", "there"],
        ["prepare", "--dataset", "digits"],
        ["doctor", "--dataset", "digits"],
        ["verify", "--save", "proofs.json"],
        ["bench", "feed", "--dataset", "digits"],
        ["train", *QUICK, "--dry-run"],
        ["--help"],
        ["--version"],
    ]
    commands = [(verb, "in", FULL, "err") for verb in verbs]
    [all_ended] = run_world(1, run_all_without_measuring, commands, folder=folder)
    for (verb, *_), ended in zip(commands, all_ended, strict=True):
        line = (
            "ddp-mnist: error: stdout: cannot be written (No space left on device); free space, or"
            " redirect it elsewhere (code 5)\n"
        )
        assert (ended.code, ended.err) == (5, line), verb


def test_fault_05_a_training_goes_on_although_stdout_is_full(folder: Path) -> None:
    command = ["train", *QUICK, "--run-dir", "silent"]
    full, both = run_there(
        folder, (command, "in", FULL, "err"), ([*command[:-1], "mute"], "in", FULL, FULL)
    )
    assert (full.code, both.code) == (0, 0)
    assert full.err == (
        "ddp-mnist: warning: stdout: cannot be written (No space left on device); free space, or"
        " redirect it elsewhere; the run goes on without output; see its folder\n"
    )
    for name in ("silent", "mute"):
        status = json.loads((folder / name / "status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("finished", 0)
        last = (folder / name / "metrics.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["test_accuracy"] > 0.1


def test_an_error_that_cannot_be_written_to_stderr_keeps_its_code(folder: Path) -> None:
    wrong, none = run_there(
        folder,
        (["train", "--lr", "0"], "in", "out", FULL),
        (["predict", "no", "x"], "in", FULL, FULL),
    )
    assert (wrong.code, none.code) == (2, 4)
