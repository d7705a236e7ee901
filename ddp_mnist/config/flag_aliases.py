"""Flags of DDP tutorials and other trainers: translated, or refused with what to do instead."""

import re
from collections.abc import Sequence

from ddp_mnist.errors import UsageError

TRANSLATED = {  # flags without a value
    "--amp": ("--mixed-precision", "auto"),  # 16 bits on a GPU; tutorials' does nothing on a CPU
    "--fp16": ("--mixed-precision", "fp16"),
    "--no-cuda": ("--cpu",),
    "--use-mix-precision": ("--mixed-precision", "auto"),
}
RENAMED = {"--dist-backend": "--backend", "--dist-url": "--init-method"}
CHOOSE_GPU = (
    "each process takes the GPU of its local rank; leave it out, and put CUDA_VISIBLE_DEVICES=0"
    " before the command to choose one, or CUDA_VISIBLE_DEVICES=0,1 and torchrun --nproc-per-node 2"
    " for two"
)
USE_LAUNCHER = (
    "a launcher starts the processes; leave it out, and use torchrun --nproc-per-node N -m"
    " ddp_mnist train, or --cpu"
)
NO_WORKERS = "is not needed, as all images are in memory; leave it out"
REFUSED = {
    "-g": CHOOSE_GPU,
    "--gpu": CHOOSE_GPU,
    "--gpus": USE_LAUNCHER,
    "--nproc-per-node": USE_LAUNCHER,
    "--evaluate": "is a separate command; use ddp-mnist evaluate RUN",
    "--num-workers": NO_WORKERS,
    "--workers": NO_WORKERS,
    "--opt-level": "belongs to Apex; use --mixed-precision fp16",
    "--save-model": "is what a run always does; leave it out",
}


def with_dashes(argv: Sequence[str]) -> list[str]:
    """Return the words with `-` for `_` in the names of flags, e.g. of --batch_size=64."""
    end = [*argv, "--"].index("--")
    flags = (re.sub("^--[^=]+", lambda name: name[0].replace("_", "-"), w) for w in argv[:end])
    return [*flags, *argv[end:]]


def in_our_words(argv: Sequence[str]) -> list[str]:
    """Return train's arguments with our flags for those of tutorials.

    Raise UsageError, with what to do instead, for a flag without an equivalent.
    """
    ours = list[str]()
    for typed, word in zip(argv, with_dashes(argv), strict=True):
        name, equals, value = re.sub(r"^-g(?=[\d,]+$)", "-g=", word).partition("=")
        if name in REFUSED:
            raise UsageError(f"{typed}: {REFUSED[name]}")
        if name in RENAMED:
            typed = f"{RENAMED[name]}{equals}{value}"
        ours += TRANSLATED.get(word, (typed,))
    return ours
