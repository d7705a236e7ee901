"""A command that is printed can be pasted into a shell, whatever the names of the folders."""

import html
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_mnist.core.errors import StopRequested
from ddp_mnist.training import set_up
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.training.recorded_run import RecordedRun
from tests.commands import Typed
from tests.data_sets import flat, noise, write_noise

RUN = "runs/it's my run"


def pasted(text: str, flag: str) -> str:
    """Return the value of the flag, if the rest of the line from there is typed into a shell."""
    [rest] = re.findall(rf"({flag} .*)", text)
    (words := shlex.shlex(rest, posix=True, punctuation_chars=";,()")).whitespace_split = True
    return [next(words) for _ in range(2)][1]


def test_each_leads_to_the_folder_that_it_names(here: Path, typed: Typed) -> None:
    write_noise(here / "my photos", *flat(40))
    train = ["train", "--dataset", "my photos", "--model", "mlp", "--epochs", 1, "--cpu"]
    said = typed(*train, "--run-dir", RUN).succeeds()
    [see] = re.findall(r"^see +(.*)$", said, re.MULTILINE)
    command = shlex.split(see)
    assert command[-2:] == ["report", RUN] and typed(*command[-2:]).code == 0
    page = html.unescape(Path(RUN, "report.html").read_text())
    predict, export = map(shlex.split, re.findall(r"<code>ddp-mnist (.*?)</code>", page)[:2])
    assert predict == ["predict", RUN, "IMAGE", "..."]
    assert typed("predict", RUN, "my photos/cat/0.png").code == typed(*export).code == 0
    assert pasted(typed(*train, "--run-dir", RUN).err, "--resume") == RUN
    Path(RUN, "model.safetensors").write_bytes(b"damaged")
    assert pasted(typed(*predict[:2], "a.png").err, "--resume") == RUN
    Path(RUN, "model.safetensors").unlink()
    assert typed("train", "--resume", RUN, "--cpu").code == 0  # writes it again
    for number in range(4):
        noise(99 + number).save(f"my photos/cat/new{number}.png")
    assert pasted(typed("evaluate", RUN).err, "--dataset") == str(here / "my photos")
    another = typed("train", "--resume", RUN, "--epochs", 2, "--cpu").err
    assert Path(pasted(another, "--weights")).samefile(Path(RUN, "model.safetensors"))


@pytest.mark.usefixtures("here")
def test_so_do_those_of_a_run_that_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder()
    folder.path = Path(RUN)
    (folder.path / "checkpoints").mkdir(parents=True)
    (folder.path / "checkpoints" / "step-00000007.pt").touch()
    set_up.report_last_checkpoint(folder)
    assert pasted(capfd.readouterr().err, "--resume") == RUN
    ending: Any = SimpleNamespace(ending=lambda _requests, done, _is_rank0: ValueError(done))
    run: Any = SimpleNamespace(where=RUN, stop=ending, is_rank0=True)
    with pytest.raises(ValueError) as stopped, RecordedRun.as_errors(run):
        raise StopRequested(7, [])
    assert pasted(str(stopped.value), "--resume") == RUN
