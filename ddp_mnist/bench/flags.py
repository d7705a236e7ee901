"""Flags of `bench`. Imports no library, for --help."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_mnist.flags import Flags, argument, flag

BENCHES = {
    "feed": "train.py's loop against the same step on one batch that lies ready (a minute)",
    "loop": "train.py's loop against plain_ddp.py's (a minute)",
    "evaluation": "exact metrics of a split, against training on as many images (a minute)",
    "scaling": "1 to N processes against as many independent ones, and where time goes (minutes)",
    "strategies": "one process, DataParallel and DDP with several hooks (minutes)",
    "startup": "command to first optimizer step, against a ten-line program's (minutes)",
    "memory": "a process's private memory at its highest, against that program's (minutes)",
}


@dataclass(frozen=True)
class Bench(Flags):
    """The flags of `bench`."""

    what: str = argument("WHAT", "One of those below.", choices=BENCHES)
    dataset: str = flag("mnist", "The data set to train on.")
    cache_dir: str | None = flag(None, "Folder of decoded data sets.")
    processes: int | None = flag(
        None,
        "One per GPU, else with one CPU thread [GPUs, else 2; loop, strategies: at least 2].",
        least=1,
        most=10**4,
    )
    repeats: int | None = flag(None, "Rounds [11; memory: 5].", least=5, most=10**4)
    check: bool = flag(False, "Exit code 1 where a goal is missed.")
