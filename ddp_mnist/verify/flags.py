"""Flags of `verify`. Imports no library, for --help."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_mnist.config import NETS
from ddp_mnist.flags import Flags, flag
from ddp_mnist.verify.faults import FAULTS


@dataclass(frozen=True)
class Verify(Flags):
    """The flags of `verify`."""

    processes: int = flag(
        3, "2, 3 ... N processes are compared with one, if they divide 24.", least=2, most=10**4
    )
    model: str = flag("cnn", "The net to train.", choices=tuple(NETS))
    inject: str | None = flag(
        None,
        "A fault to be caught, one of those below; exit code 1.",
        choices={name: fault.sentence for name, fault in FAULTS.items()},
    )
    save: str = flag("verify.json", "Where the results are written.", metavar="FILE")
