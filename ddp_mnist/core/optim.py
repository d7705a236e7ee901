"""The optimizers by name. The learning rate is the recipe's: see `Recipe.learning_rate`."""

from collections.abc import Callable
from functools import partial

import torch
import torch._dynamo  # AdamW would import it mid-run, delaying signals by a second
from torch import Tensor, nn

from .recipe import Recipe

MOMENTUM = 0.9
KERNEL_STEP = 5.0  # the spectral norm of a kernel's step, in units of the learning rate


class Muon(torch.optim.AdamW):
    """AdamW, except that convolution kernels move along their orthogonalised momentum.

    Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024. A kernel [out, in,
    height, width] is a matrix [out, in x height x width]. torch.optim.Muon takes no kernels, and
    computes in bfloat16, in which N processes would not train as one; this class computes in the
    dtype of the weights.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = {}
        for group in self.param_groups:
            for kernel in group["params"]:
                if kernel.ndim != 4 or kernel.grad is None:
                    continue
                state = self.state[kernel]
                if not state:  # AdamW wants a "step" in what it loads
                    state["step"], state["exp_avg"] = torch.zeros(()), torch.zeros_like(kernel)
                state["exp_avg"].lerp_(kernel.grad, 1 - MOMENTUM)
                ahead = kernel.grad.lerp(state["exp_avg"], MOMENTUM)  # Nesterov's
                direction = orthogonal(ahead.flatten(1)).reshape(kernel.shape)
                kernel.mul_(1 - group["lr"] * group["weight_decay"])
                kernel.sub_(direction, alpha=KERNEL_STEP * group["lr"])
                gradients[kernel], kernel.grad = kernel.grad, None  # so that AdamW skips it
        super().step(closure)
        for kernel, gradient in gradients.items():
            kernel.grad = gradient


def orthogonal(matrix: Tensor) -> Tensor:
    """Return approximately U V' of the singular value decomposition U S V' of [rows, columns].

    Five steps of a Newton-Schulz iteration whose polynomial (Jordan et al.) raises small singular
    values quickly and leaves them between 0.7 and 1.2. Zeros stay zeros.
    """
    rows, columns = matrix.shape
    x = matrix / (matrix.norm() + 1e-7)
    if rows > columns:  # the smaller product
        x = x.T
    for _ in range(5):
        gram = x @ x.T
        weights = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, weights, x, beta=3.4445)
    return x.T if rows > columns else x


# The second beta is a memory of some 50 steps: better than 0.999 on validation images.
BETAS = (0.9, 0.98)
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=BETAS),  # Loshchilov and Hutter, 2019
    "muon": partial(Muon, betas=BETAS),
    "sgd": partial(torch.optim.SGD, momentum=MOMENTUM),
}


def make_optimizer(
    model: nn.Module, recipe: Recipe, scaler: torch.amp.GradScaler | None = None
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer, one of OPTIMIZERS; only matrices and kernels decay.

    `scaler` is the loss scaler if training is in fp16.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # Fused is the fastest. But with a loss scaler, a fused optimizer itself skips a step that
    # overflowed, and the step would count as taken; None lets torch choose the next fastest.
    fused = None if scaler else True
    return OPTIMIZERS[recipe.optimizer](groups, lr=recipe.lr, fused=fused)  # all take `fused`
