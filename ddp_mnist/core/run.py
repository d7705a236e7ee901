"""What `fit` tells the outside, in seven methods: here, lines on rank 0 and one checkpoint."""

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from . import checkpoint
from .accelerator import broadcast_bytes
from .evaluation import EvalResult
from .recipe import Recipe
from .state import State
from .wrappers import Normalised


class Run:
    """A plain run. Derive yours from it, and say more, or elsewhere; all ranks call each method."""

    log_every = 100  # optimizer steps between lines
    checkpoint_every: int | None = 100  # optimizer steps; None: as many as take some seconds

    def __init__(self, accelerator: Accelerator, recipe: Recipe, file: Path, resume: bool) -> None:
        """Save to `file`; `resume` begins from what it holds. Both matter on rank 0 alone."""
        self.accelerator, self.recipe, self.file, self.resume = accelerator, recipe, file, resume
        if accelerator.is_main_process:
            file.parent.mkdir(parents=True, exist_ok=True)
        # This rank's wishes: `fit` adds up each of them over the ranks, and stops if any is not 0.
        self.stop_requests = [0.0]

    def begin(self, state: State) -> None:
        """Restore the state, which is new, if the run is resumed. Raise as `from_bytes` does."""
        if self.resume:
            raw = self.file.read_bytes() if self.accelerator.is_main_process else b""
            content = checkpoint.from_bytes(broadcast_bytes(self.accelerator, raw))
            state.restore(content, self.recipe)
            self.accelerator.print(f"resumed after step {state.progress.step}")

    def phase(self, name: str) -> None:
        """Note that training, validation or test begins."""

    def step(self) -> None:
        """Note that a step has ended; nothing may wait for the GPU here."""

    def log(self, step: int, line: dict[str, Any], write: bool) -> None:
        """Show the line of a sync point; `write` every `log_every` steps, and as an epoch ends."""
        if write:
            self.accelerator.print(f"step {step}  loss {line['loss']:.4f}  lr {line['lr']:.5f}")

    def log_epoch(self, state: State, means: dict[str, Any], validation: EvalResult | None) -> None:
        """Show the epoch that has ended: its mean loss and score, and its validation, if any."""
        judged = f"  validation {validation.score:.4f}" if validation else ""
        epoch, loss, score = state.progress.epoch, means["loss"], means["score"]
        self.accelerator.print(f"epoch {epoch}  loss {loss:.4f}  score {score:.4f}{judged}")

    def save(self, state: State) -> None:
        """Keep the state of this step."""
        content = state.content(self.recipe)  # on all ranks: what is sharded would be gathered here
        if self.accelerator.is_main_process:
            unfinished = self.file.with_name(f"{self.file.name}.tmp")
            unfinished.write_bytes(checkpoint.to_bytes(content))
            os.replace(unfinished, self.file)  # a kill leaves the old file or the new one

    def finish(self, state: State, net: Normalised, test: EvalResult) -> Any:
        """Keep the net's weights beside the checkpoint. Return what `fit` returns: the metrics."""
        if self.accelerator.is_main_process:
            torch.save(net.net.state_dict(), self.file.with_name("model.pt"))
        result = f"test {test.name} {test.score:.4f} on {test.count:,} images"
        self.accelerator.print(f"{result} after {state.progress.step:,} steps")
        return test
