"""Flags of `doctor`, beside those of Distribution. Imports no library, for --help."""

from dataclasses import dataclass

from ddp_mnist.flags import Flags, flag


@dataclass(frozen=True)
class Doctor(Flags):
    """The flags of `doctor`."""

    processes: int | None = flag(
        None, "To start here, without a launcher [one per GPU, else 2].", least=1, most=10**4
    )
    minutes: float = flag(0.0, "Burn-in: repeat collectives and training for so long.", least=0)
    dataset: str = flag("mnist", "The data set to look for.")
    cache_dir: str | None = flag(None, "Folder of decoded data sets.")
    run_dir: str = flag("runs", "Where runs would be made.")
    json: bool = flag(False, "One JSON object on stdout.")
    save: str | None = flag(None, "The same into a file.", metavar="FILE")
    against: str | None = flag(
        None, "Compare speeds with what another machine of the same type saved.", metavar="FILE"
    )
    tolerance: float = flag(0.5, "Share by which a speed may be worse than there.", least=0)
