"""The flags that DDP tutorials and other trainers have: taken, or answered with a whole command."""

import os
import re
import shlex
from collections.abc import Sequence

from ddp_mnist.errors import UsageError

# For each flag our equivalent; or, if there is none, the reason and the words to type instead.
IN_TUTORIALS: dict[str, str | tuple[str, str]] = {
    "--amp": "--mixed-precision auto",  # 16 bits on a GPU; theirs does nothing on a CPU
    "--dist-backend": "--backend",
    "--dist-url": "--init-method",
    "--fp16": "--mixed-precision fp16",
    "--no-cuda": "--cpu",
    "--use-mix-precision": "--mixed-precision auto",
    "--evaluate": ("is another command, ddp-mnist evaluate RUN; to train", ""),
    "--gpu": ("", ""),  # a GPU's number, or several; see _start
    "--gpus": ("", ""),  # how many
    "--nproc-per-node": ("", ""),
    "--num-workers": ("none are needed, the images are in memory", ""),
    "--opt-level": ("is of Apex; with PyTorch's own fp16", "--mixed-precision fp16"),
    "--save-model": ("leave it out, a run always does", ""),
    "--workers": ("none are needed, the images are in memory", ""),
}
TORCHRUN = "torchrun --nproc-per-node {} -m ddp_mnist train"


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Return the words with `-` for `_` in the names of flags, e.g. of --batch_size=64."""
    end = [*argv, "--"].index("--")
    flags = (re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), w) for w in argv[:end])
    return [*flags, *argv[end:]]


def in_our_words(argv: Sequence[str]) -> list[str]:
    """Return train's arguments with our flags for those of tutorials.

    Raise UsageError if one has no equal here; it ends with the whole command to type instead.
    """
    words, ours, as_typed, added = list(argv), list[str](), list[str](), list[str]()
    start, problem = "ddp-mnist train", ""
    while words:
        word = words.pop(0)
        found = re.fullmatch(r"(--[^=]+|-g(?![^=\d]))(?:=?(.*))", word)
        name, value = found.groups() if found else (word, "")
        name = "--gpu" if name == "-g" else name.replace("_", "-")
        here = IN_TUTORIALS.get(name)
        if isinstance(here, tuple):
            while words and re.match(r"[\d,]+$" if value else r"[^-]|-\d", words[0]):
                if value and name != "--gpu":  # which alone may have several: --gpu 0 1
                    break
                value = f"{value} {words[0]}".lstrip()
                word += f" {words.pop(0)}"
            why, more = here
            added += more.split()
            if not why:
                why, start = _start(name, word, value, argv)
            problem = problem or f"{word}: {why}"
            continue
        if value and here and here not in ("--backend", "--init-method"):
            raise UsageError(f"{word}: takes no value; type {name}, or leave it out")
        as_typed.append(word)
        ours += [*here.split(), *filter(None, [value])] if here else [word]
    if problem:
        raise UsageError(f"{problem}: {start} {shlex.join(as_typed + added)}".rstrip())
    return ours


def _start(name: str, word: str, value: str, argv: Sequence[str]) -> tuple[str, str]:
    """Return why `name` is no flag of ours, and what the command begins with instead."""
    if os.environ.keys() & {"LOCAL_RANK", "SLURM_LOCALID"}:
        raise UsageError(f"{word}: each process takes the GPU of its local rank; leave it out")
    if name != "--gpu" and re.fullmatch("0+", value):
        return "the CPU is chosen by a flag of its own", "ddp-mnist train --cpu"
    if name != "--gpu" and re.fullmatch(r"\d+|gpu|cpu|auto|all|-1", value):
        return "a launcher starts the processes", TORCHRUN.format(re.sub("all|-1", "gpu", value))
    gpus = re.findall(r"-?\d+", value) or ["0"]
    alone = f"CUDA_VISIBLE_DEVICES={gpus[0]} ddp-mnist train"
    if len(gpus) == 1:
        return "choose the GPU by the environment", alone
    if any(word.startswith("--rank") for word in argv):
        return "DDP has a process for each GPU, with a --rank of its own", alone
    together = f"CUDA_VISIBLE_DEVICES={','.join(gpus)} {TORCHRUN.format(len(gpus))}"
    return "DDP has a process for each GPU", together
