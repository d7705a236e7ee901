"""Random streams that are a function of what they are for: nothing to save, nothing to share."""

from __future__ import annotations

import hashlib

import torch


def seed_of(purpose: str, *counters: int) -> int:
    """A 63-bit seed for one purpose, e.g. seed_of("order", seed, epoch); equal on every machine."""
    text = ":".join([purpose, *map(str, counters)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(purpose: str, *counters: int) -> torch.Generator:
    """A CPU generator seeded by `seed_of`."""
    return torch.Generator().manual_seed(seed_of(purpose, *counters))
