"""What `fit` reports, in seven methods: here, lines on rank 0 and one checkpoint."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from . import checkpoint
from .accelerator import broadcast_bytes
from .evaluation import EvalResult, import_evaluate_meanwhile
from .recipe import Recipe
from .state import State
from .wrappers import Normalised


class Run:
    """A plain run. Derive yours to report elsewhere, or more; all ranks call each method.

    `fit` calls the seven methods and reads `log_every`, `checkpoint_every` and `stop_requests`. The
    rest is how this run does it.
    """

    log_every = 100  # optimizer steps between lines
    checkpoint_every: int | None = 100  # optimizer steps; None: by the clock, see meter.py

    def __init__(
        self, accelerator: Accelerator, recipe: Recipe, seed: int, file: Path, resume: bool
    ) -> None:
        """Save to `file`, on rank 0. `resume`, the same on all ranks, begins from what it holds."""
        self.accelerator, self.recipe, self.file, self.resume = accelerator, recipe, file, resume
        self.settings = {"seed": seed, **asdict(recipe)}  # by which a run goes on as it began
        if accelerator.is_main_process:
            file.parent.mkdir(parents=True, exist_ok=True)
        # This rank's requests: `fit` adds up each over the ranks, and stops if any sum is not 0.
        self.stop_requests = [0.0]

    def begin(self, state: State) -> None:
        """Restore the state, which is new, if the run is resumed.

        Raise ValueError for another seed or recipe, of which `epochs` alone may change, and as
        `from_bytes` does.
        """
        if self.resume:
            raw = self.file.read_bytes() if self.accelerator.is_main_process else b""
            content = checkpoint.from_bytes(broadcast_bytes(self.accelerator, raw))
            for name, was in content["settings"].items():
                if name != "epochs" and self.settings[name] != was:
                    raise ValueError(
                        f"{name} was {was} as the run began, not {self.settings[name]}"
                    )
            state.restore(content["state"], self.recipe)
            self.accelerator.print(f"resumed after step {state.progress.step}")
        import_evaluate_meanwhile(self.accelerator)

    def phase(self, name: str) -> None:
        """Report that training, validation or test begins."""

    def step(self) -> None:
        """Report that a step has ended; nothing may wait for the GPU here."""

    def log(self, step: int, line: dict[str, Any], write: bool) -> None:
        """Show the line of a sync point; `write` every `log_every` steps, and as an epoch ends."""
        if write:
            loss = mean_text(line["loss"])
            self.accelerator.print(f"step {step}  loss {loss}  lr {line['lr']:.5f}")

    def log_epoch(self, state: State, means: dict[str, Any], validation: EvalResult | None) -> None:
        """Show the epoch that has ended: its mean loss and score, and its validation, if any."""
        line = f"loss {mean_text(means['loss'])}  score {mean_text(means['score'])}"
        line += f"  validation {mean_text(validation.score)}" if validation else ""
        self.accelerator.print(f"epoch {state.progress.epoch}  {line}")

    def save(self, state: State) -> None:
        """Keep the state of this step."""
        # On all ranks: it may raise Diverged, and would gather what is sharded.
        content = {"settings": self.settings, "state": state.content(self.recipe)}
        if self.accelerator.is_main_process:
            unfinished = self.file.with_name(f"{self.file.name}.tmp")
            unfinished.write_bytes(checkpoint.to_bytes(content))
            os.replace(unfinished, self.file)  # a kill leaves the old file or the new one

    def finish(self, state: State, net: Normalised, test: EvalResult) -> Any:
        """Keep the net's weights next to the checkpoint. Return the metrics, as `fit` then does.

        They are those of the net that `make_net` wraps; mean and deviation are not among them.
        """
        if self.accelerator.is_main_process:
            torch.save(net.net.state_dict(), self.file.with_suffix(".model.pt"))
        result = f"test {test.name} {test.score:.4f} on {test.count:,} images"
        self.accelerator.print(f"{result} after {state.progress.step:,} steps")
        return test


def mean_text(number: float | None) -> str:
    """Return a mean as it is printed; it is None if no loss was finite, as may be in fp16."""
    return "not finite" if number is None else f"{number:.4f}"
