"""The faults that `verify --inject` puts into its runs, to show that the checks can fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A fault, in a sentence, and the name of the check that has to catch it."""

    sentence: str
    caught_by: str


FAULTS = {
    "sampler": Fault("each rank shuffles by a seed of its own", "samples"),
    "gradients": Fault("gradients are summed over the ranks, not averaged", "gradients"),
    "parameter": Fault("one parameter that DDP does not synchronise", "replicas"),
}
