"""How a net is trained: plain numbers and words, the same on every rank."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a net is trained on one set of rows."""

    epochs: int
    batch_size: int  # GLOBAL: images per optimizer step over all processes
    steps_per_epoch: int  # whole batches in the train rows
    optimizer: str = "muon"  # one of OPTIMIZERS in optim.py
    lr: float = 1e-2  # the highest learning rate
    head_rate: float = 1.0  # of the last layer, as a multiple of the learning rate
    beta2: float = 0.98  # AdamW remembers squared gradients for some 1 / (1 - beta2) steps
    weight_decay: float = 1e-2  # of matrices and kernels
    warmup: float = 0.1  # share of the steps in which the learning rate rises
    augment: str = ""  # strokes, pictures or characters, see augment.py; "": not at all
    grad_accum: int = 1  # micro-batches per step
    kept: str = ""  # what does not change, see `hold_still` in wrappers.py
    max_grad_norm: float | None = None  # each step's gradient is clipped to it
    target_accuracy: float | None = None  # a validation's score that ends the run
    patience: int | None = None  # epochs without a better validation that end it

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def learning_rate(self, step: int) -> float:
        """Return lr * min(1, (step + 1) / rising, (total_steps - step) / max(1, falling)).

        It rises over the first `rising` = warmup * total_steps optimizer steps, and over the other
        `falling` ones falls to 0, which it would reach one step after the last. As a function of
        the step alone, 0 <= step < total_steps, it has no state to save, and several processes
        cannot step it twice.
        """
        rising = self.warmup * self.total_steps
        up = (step + 1) / rising if rising > 0 else 1.0
        down = (self.total_steps - step) / max(1.0, self.total_steps - rising)
        return self.lr * min(1.0, up, down)
