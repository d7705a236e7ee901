"""Whatever goes wrong, in whatever verb: one line that begins with what was typed, and a code.

If the words are a library's, the line names the file that holds the whole traceback.
"""

import os
import re
import shutil
from pathlib import Path

import torch

from ddp_mnist.cluster.local_world import run_world
from tests.commands import run_command, run_here
from tests.data_sets import flat, write_noise

OWN_NETS = {  # by module, what its Net does
    "no_python": "class Net(",
    "ends": "import sys; sys.exit(0)",
    "takes_more": "class Net(MLP):\n    def __init__(self, a, b, c): pass",
    "fails": "def one(*_): raise ValueError('of many\\nlines')\n"
    "class Net(MLP):\n    def forward(self, x): return x @ x.flatten()",
    "fails_later": "class Net(MLP):\n    calls = 0\n    def forward(self, x):\n"
    "        Net.calls += 1\n        assert Net.calls < 39, 'enough'\n"
    "        return super().forward(x)",
    "leaves_later": "class Net(MLP):\n    calls = 0\n    def forward(self, x):\n"
    "        Net.calls += 1\n        if Net.calls > 39: raise GeneratorExit('left')\n"
    "        return super().forward(x)",
    "ends_later": "class Net(MLP):\n    calls = 0\n    def forward(self, x):\n"
    "        Net.calls += 1\n        if Net.calls > 39: exit(0)\n        return super().forward(x)",
}
LONG = "a" * 300  # which the system refuses as a name
DIGITS = "train --dataset digits --epochs 1 --run-dir new"
# By exit code: command lines; an asterisk marks those whose traceback a file keeps.
COMMANDS = {
    1: f"""
        * {DIGITS} --model fails_later:Net
        * {DIGITS} --model ends_later:Net
        * {DIGITS} --model leaves_later:Net
        """,
    2: f"""
        {DIGITS} --mixed-precision fp16
        {DIGITS} --init-method tcp://here
        {DIGITS} --trackers wandb
        {DIGITS} --metrics f2
        {DIGITS} --profile 900
        * {DIGITS} --model nowhere:Net
        * {DIGITS} --model no_python:Net
        * {DIGITS} --model ends:Net
        * {DIGITS} --model takes_more:Net
        * {DIGITS} --model fails:Net
        * {DIGITS} --loss fails:one
        * {DIGITS} --metrics fails:one
        {DIGITS} --weights none.pth
        {DIGITS} --weights {LONG}
        {DIGITS} --weights pipe
        * {DIGITS} --weights pickle.pth
        evaluate run --metrics f2
        export run --out run
        doctor --processes 1
        verify --model resnet
        prepare --dataset none
        """,
    3: f"""
        {DIGITS} --dataset ./none
        {DIGITS} --dataset pickle.pth
        {DIGITS} --dataset photos
        * {DIGITS} --dataset tables
        * {DIGITS} --dataset idx
        predict run none.png
        predict run pickle.pth
        predict run {LONG}
        predict run pipe
        prepare --dataset ./none
        """,
    4: f"""
        train --resume none
        train --resume broken
        train --resume {LONG}
        evaluate {LONG}
        predict {LONG} seen.png
        report {LONG}
        export {LONG}
        evaluate piped
        report piped
        evaluate none
        evaluate broken
        predict none seen.png
        * predict broken seen.png
        report none
        report broken
        export none
        * export broken
        """,
    5: f"""
        {DIGITS} --run-dir pickle.pth/new
        {DIGITS} --cache-dir pickle.pth
        export run --out {LONG}
        prepare --dataset digits --cache-dir pickle.pth
        """,
}
CASES = [
    (code, line.removeprefix("* ").split(), line.startswith("*"))
    for code, lines in COMMANDS.items()
    for line in map(str.strip, lines.strip().splitlines())
]


def lay(folder: Path) -> None:
    """Write a finished run, a broken one, and files that are not what they seem."""
    for name, text in OWN_NETS.items():
        (folder / f"{name}.py").write_text(f"from ddp_mnist.core.nets import MLP\n{text}\n")
    torch.save(Path("x"), folder / "pickle.pth")
    write_noise(folder / "photos" / "train", *flat(4))
    write_noise(folder / "photos" / "test", *flat(4))
    next((folder / "photos").rglob("*.png")).write_bytes(b"no image")
    for name in ("train.parquet", "test.parquet"):
        (folder / "tables").mkdir(exist_ok=True)
        (folder / "tables" / name).write_bytes(b"PAR1 and no more PAR1")
    os.mkfifo(folder / "pipe")
    (folder / "idx").mkdir()
    for split in ("train", "t10k"):
        for kind in ("images-idx3", "labels-idx1"):
            (folder / "idx" / f"{split}-{kind}-ubyte.gz").write_bytes(b"no gzip")
    trains = ["train", "--dataset", "digits", "--model", "mlp", "--epochs", "1"]
    run_command([*trains, "--run-dir", "run"], folder)
    shutil.copytree(folder / "run", folder / "broken")
    shutil.copytree(folder / "run", folder / "piped")
    (folder / "piped" / "config.json").unlink()
    os.mkfifo(folder / "piped" / "config.json")
    for file in ("config.json", "summary.json", "status.json", "model.safetensors"):
        (folder / "broken" / file).write_text("{")


def all_of(cases: list[tuple[int, list[str], bool]]) -> list[tuple[int, str]]:
    """Return each command's exit code, and what it prints but for the answers of predict."""
    found = []
    for number, (_, words, _) in enumerate(cases):
        own = [f"new-{number}" if word == "new" else word for word in words]
        quiet = ["--quiet"] if words[0] == "train" else []
        code, printed = run_here([*own, *quiet], False)
        lines = [line for line in printed.splitlines() if not line.startswith(("{", "reading"))]
        found.append((code, "\n".join(lines)))
    return found


def test_every_failure_is_one_line_with_its_code(tmp_path: Path) -> None:
    lay(tmp_path)
    [ended] = run_world(1, all_of, CASES, folder=tmp_path)
    for (code, words, keeps), (found, printed) in zip(CASES, ended, strict=True):
        typed = f"{' '.join(words)}: {printed}"
        assert (found, printed.count("\n")) == (code, 0), typed
        assert printed.startswith("ddp-mnist: error: "), typed
        assert printed.endswith(f" (code {code})"), typed
        where = re.search(r"; (?:the traceback is in (.+)|--debug shows .+) \(code", printed)
        assert bool(where) == keeps, typed
        if where and where[1]:
            assert "Traceback (most recent call last):" in (tmp_path / where[1]).read_text(), typed
