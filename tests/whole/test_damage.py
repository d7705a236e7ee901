"""Whatever happened to a file that is read again: the same result, or an error that names it.

Each trial damages one file of a run or of the cache, and gives one command. HITS=1500 in the
environment makes so many.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.commands import Typed, run_command
from tests.data_sets import split_up, write_noise

HITS, AT_ONCE = int(os.environ.get("HITS", "60")), 30
TRAIN = ["train", "--model", "mlp", "--batch-size", "8", "--cpu", "--log-every", "1", "--cache-dir"]
TRAIN += ["cache", "--checkpoint-every", "3"]
COMMANDS = {
    "resume": "train --resume run --epochs 3",
    "evaluate": "evaluate run --json",
    "evaluate other images": "evaluate run --json --dataset new",
    "predict": "predict run new/test/cat/0.png",
    "report": "report run --out page.html",
    "export": "export run --out out",
}
WORDS = re.compile("error: |warning: |damaged|lacks")
RESULTS = ("run/model.safetensors", "page.html", "out/model.safetensors", "out/README.md")
RUN_FILES = ("config.json", "status.json", "summary.json", "metrics.jsonl", "model.safetensors")
CACHED = ["about.json", "files.json", "images", "targets", "keys", "decoded_keys"]
CACHED += ["groups", "part", "sums"]


def lay(folder: Path) -> None:
    """Write a run, another one, and images that neither has seen."""
    for name, seed in (("photos", 1), ("others", 2)):
        write_noise(folder / name, *split_up(24), seed=seed)
        flags = ["--dataset", name, "--epochs", "2", "--seed", str(seed), "--lr", f"0.0{seed}"]
        run = ["--run-dir", "run" if name == "photos" else "other"]
        run_command([*TRAIN, *flags, *run], folder)
    write_noise(folder / "new", *split_up(8), seed=3)


def files_of(folder: Path) -> dict[Path, Path]:
    """Return the files that are read again, with another run's of the same kind."""
    found = {Path("run", name): Path("other", name) for name in (*RUN_FILES, "trained_on.npy")}
    saved = [sorted(folder.glob(f"{run}/checkpoints/*")) for run in ("run", "other")]
    pairs = zip(*saved, strict=True)
    found |= {ours.relative_to(folder): theirs.relative_to(folder) for ours, theirs in pairs}
    [ours], [theirs] = (folder.glob(f"cache/folder-{name}-*/") for name in ("photos", "others"))
    for name in CACHED:
        name += "" if "." in name else ".npy"
        found[(ours / name).relative_to(folder)] = (theirs / name).relative_to(folder)
    return found


def flip_bit(raw: bytearray, draw: np.random.Generator) -> bytearray:
    raw[draw.integers(len(raw))] ^= 1 << int(draw.integers(8))
    return raw


def change_digit(raw: bytearray, draw: np.random.Generator) -> bytearray:
    digits = [place for place, byte in enumerate(raw) if chr(byte).isdigit()]
    raw[digits[draw.integers(len(digits))]] = ord("0") + int(draw.integers(10))
    return raw


def zero_a_block(raw: bytearray, draw: np.random.Generator) -> bytearray:
    start = int(draw.integers(len(raw)))
    raw[start : start + 512] = bytes(len(raw[start : start + 512]))
    return raw


DAMAGES: dict[str, Callable[[bytearray, np.random.Generator], bytes | bytearray]] = {
    "a bit": flip_bit,
    "a digit": change_digit,
    "a block of zeros": zero_a_block,
    "cut": lambda raw, draw: raw[: draw.integers(len(raw))],
    "empty": lambda *_: b"",
    "noise": lambda raw, draw: draw.bytes(len(raw)),
    "more behind it": lambda raw, draw: raw + draw.bytes(20),
    "a line more": lambda raw, _: raw + raw[-30:],
}


def link_or_copy(source: str, target: str) -> None:
    """Link what commands replace as a whole, which is most of the bytes, and copy the rest."""
    whole = Path(source).suffix in (".npy", ".pt", ".safetensors")
    (os.link if whole else shutil.copy2)(source, target)


def result_of(command: str, typed: Typed) -> tuple[int, str, list[str]]:
    """Return the exit code, all that was said, and what the command gives."""
    ended = typed(*COMMANDS[command].split())
    answers = [ended.out] if command.startswith(("evaluate", "predict")) else []
    written = [path.read_bytes() for path in map(Path, RESULTS) if path.exists()]
    answers += [hashlib.sha256(content).hexdigest() for content in written]
    return ended.code, ended.out + ended.err, answers


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=pytest.mark.soak if n >= 60 else ()) for n in range(0, HITS, AT_ONCE)],
)
def test_fault_55_a_damaged_file_changes_no_result_in_silence(
    first: int, once: Callable[[str, Callable[[Path], None]], Path], typed: Typed
) -> None:
    whole = once("to-damage", lay)
    files, wrong = files_of(whole), list[str]()

    def try_once(
        place: str, command: str, file: Path | None, content: bytes | bytearray | None
    ) -> tuple[int, str, list[str]]:
        shutil.copytree(whole, place, copy_function=link_or_copy)
        os.chdir(place)
        if file:
            file.unlink()
        if file and content is not None:
            file.write_bytes(content)
        found = result_of(command, typed)
        os.chdir("..")
        shutil.rmtree(place)
        return found

    expected = {command: try_once("trial", command, None, b"") for command in COMMANDS}
    assert {code for code, *_ in expected.values()} == {0}, expected
    for number in range(first, first + AT_ONCE):
        draw = np.random.default_rng([0xBAD, number])
        command = [*COMMANDS][number % len(COMMANDS)]
        file = [*files][draw.integers(len(files))]
        damage = str(draw.choice([*DAMAGES, "another run's", "removed"]))
        if damage == "removed" and file.suffix == ".pt":
            continue  # the one before it is taken
        raw = (whole / file).read_bytes()
        if damage == "another run's":
            content: bytes | bytearray | None = (whole / files[file]).read_bytes()
        elif damage == "removed":
            content = None
        else:
            content = DAMAGES[damage](bytearray(raw), draw)
        code, said, answers = try_once("trial", command, file, content)
        is_named = any(file.name in x and WORDS.search(x) for x in said.splitlines())
        is_right = code == 0 and (answers == expected[command][2] or is_named)
        if not (is_right or (code in (3, 4) and is_named)) or "Traceback" in said:
            wrong.append(f"{number} {command}: {file}, {damage}: code {code}: {said[-300:]}")
    assert wrong == []


def test_files_of_an_earlier_part_of_the_run_and_a_cache_of_other_images_are_not_taken(
    once: Callable[[str, Callable[[Path], None]], Path], here: Path, typed: Typed
) -> None:
    shutil.copytree(once("to-damage", lay), here, dirs_exist_ok=True)
    shutil.copytree("run", "before")
    typed(*COMMANDS["resume"].split()).succeeds()
    for file in ("config.json", "summary.json"):
        now = Path("run", file).read_bytes()
        shutil.copy(Path("before", file), "run")
        for command in ("resume", "evaluate", "predict", "report", "export"):
            ended = typed(*COMMANDS[command].split())
            assert ended.code == 4, command
            assert (
                "run: config.json, summary.json, status.json are not of one run, or not"
                in ended.err
            )
        Path("run", file).write_bytes(now)
    right = typed(*COMMANDS["evaluate"].split()).out
    ours, theirs = (next(here.glob(f"cache/folder-{name}-*/")) for name in ("photos", "others"))
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    assert typed(*COMMANDS["evaluate"].split()).out == right
