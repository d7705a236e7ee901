"""The optimizer and its rate."""

from __future__ import annotations

import torch
import torch._dynamo  # by AdamW at the latest: then for a second in which no signal is obeyed
from torch import nn

from ddp_mnist.config import Recipe


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, 2019); decays matrices and kernels, not gains and biases."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # With a shorter memory of squares than 0.999 (about 1,000 steps), a run of 381 steps gains.
    # Fused is faster on a CPU. On a GPU it would skip an fp16 step that overflowed by itself, and
    # the step would count as taken.
    on_cpu = parameters[0].device.type == "cpu"
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(0.9, 0.98), fused=on_cpu)


def learning_rate(step: int, total_steps: int, peak: float, warmup: float) -> float:
    """The rate of optimizer step `step`, 0 <= step < total_steps.

    Rises in a straight line over the first `warmup` of all steps to `peak`, then falls in a
    straight line to 0, which it would reach one step after the last. A function of the step alone:
    it has no state to save, and no number of processes could step it more than once.
    """
    rising = warmup * total_steps
    up = (step + 1) / rising if rising > 0 else 1.0
    down = (total_steps - step) / max(1.0, total_steps - rising)
    return peak * min(1.0, up, down)
