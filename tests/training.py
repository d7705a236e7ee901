"""What a run prints."""

from __future__ import annotations

import contextlib
import io

from ddp_mnist.config import TrainConfig
from ddp_mnist.verify.watch import just_train


def what_it_says(config: TrainConfig) -> str:
    """What this rank prints on stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as console:
        just_train(config)
    return console.getvalue()
