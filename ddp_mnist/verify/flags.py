"""Flags of `verify`, and the faults that it can inject. Imports no library, for --help."""

from dataclasses import dataclass

from ddp_mnist.config import NETS
from ddp_mnist.flags import Flags, flag

FAULTS = {  # a sentence of each
    "sampler": "each rank shuffles by a seed of its own",
    "gradients": "gradients are summed over the ranks, not averaged",
    "parameter": "one parameter that DDP does not synchronise",
}
CAUGHT_BY = {"sampler": "samples", "gradients": "gradients", "parameter": "replicas"}  # a check


@dataclass(frozen=True)
class Verify(Flags):
    """The flags of `verify`."""

    processes: int = flag(
        3, "2, 3 ... N processes are compared with one, if they divide 24.", least=2, most=10**4
    )
    model: str = flag("cnn", "The net to train.", choices=tuple(NETS))
    inject: str | None = flag(
        None, "A fault to be caught, one of those below; exit code 1.", choices=FAULTS
    )
    save: str = flag("verify.json", "Where the results are written.", metavar="FILE")
