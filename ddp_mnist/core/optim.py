"""The optimizers by name. The learning rate is the recipe's: see `Recipe.learning_rate`."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._dynamo  # AdamW would import it mid-run, delaying signals by a second
from torch import Tensor, nn

from .recipe import Recipe
from .wrappers import last_layer

MOMENTUM = 0.9
KERNEL_STEP = 5.0  # the spectral norm of a kernel's step, in units of the learning rate
# An iteration takes a singular value x to A x + B x^3 + C x^5 (Jordan et al.). With the four of
# Amsel et al., The Polar Express, 2025, N processes differ from one 2000 times more after 45 steps.
ITERATIONS, A, B, C = 5, 3.4445, -4.7750, 2.0315


class Muon(torch.optim.AdamW):
    """AdamW, except that convolution kernels move along their orthogonalised momentum.

    Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024. torch.optim.Muon
    takes no kernels, and computes in bfloat16, in which N processes would not train as one; this
    class computes in the dtype of the weights.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        gradients = dict[Tensor, Tensor]()
        for group in self.param_groups:
            kernels = [p for p in group["params"] if p.ndim == 4 and p.grad is not None]
            if not kernels:
                continue
            for kernel in kernels:
                if not self.state[kernel]:  # AdamW wants a "step" in what it loads
                    new = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(kernel)}
                    self.state[kernel].update(new)
            grads = [kernel.grad for kernel in kernels]
            momenta = [self.state[kernel]["exp_avg"] for kernel in kernels]
            torch._foreach_lerp_(momenta, grads, 1 - MOMENTUM)
            ahead = torch._foreach_lerp(grads, momenta, MOMENTUM)  # Nesterov's
            torch._foreach_mul_(kernels, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(kernels, orthogonal(ahead), alpha=-KERNEL_STEP * group["lr"])
            gradients |= zip(kernels, grads, strict=True)
        for kernel in gradients:
            kernel.grad = None  # so that AdamW skips it
        super().step(closure)
        for kernel, gradient in gradients.items():
            kernel.grad = gradient


def orthogonal(matrices: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    """Return approximately U V' of the singular value decomposition U S V' of each matrix.

    A kernel [out, in, height, width] counts as a matrix [out, in x height x width]. Singular values
    from 0.002 of a matrix's norm on end between 0.68 and 1.21, zeros stay zeros. Matrices of one
    shape are computed together.
    """
    by_shape = defaultdict[torch.Size, list[int]](list)
    for index, matrix in enumerate(matrices):
        by_shape[matrix.shape].append(index)
    norms = torch._foreach_add(torch._foreach_norm(matrices), 1e-7)
    found = [*torch._foreach_div(matrices, norms)]
    for shape, indices in by_shape.items():
        x = torch.stack([found[index] for index in indices]).flatten(2)
        is_tall = x.shape[1] > x.shape[2]
        x = x.mT if is_tall else x  # the smaller product
        for _ in range(ITERATIONS):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
        x = x.mT if is_tall else x
        for index, direction in zip(indices, x.reshape(-1, *shape).unbind(), strict=True):
            found[index] = direction
    return found


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,  # Loshchilov and Hutter, 2019
    "muon": Muon,
    "sgd": partial(torch.optim.SGD, momentum=MOMENTUM),
}


def make_optimizer(
    model: nn.Module, recipe: Recipe, scaler: torch.amp.GradScaler | None = None
) -> torch.optim.Optimizer:
    """Return the recipe's optimizer, one of OPTIMIZERS; only matrices and kernels decay.

    Each group learns at its `rate` times the learning rate. `scaler` is the loss scaler if training
    is in fp16.
    """
    last = f"{last_layer(model)}."
    body, head = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_head = recipe.head_rate != 1 and name.startswith(last)
            (head if is_head else body).append(parameter)
    shared = {"betas": (MOMENTUM, recipe.beta2)}  # which SGD passes over
    groups = list[dict[str, Any]]()
    for rate, parameters in ((1.0, body), (recipe.head_rate, head)):
        matrices = [each for each in parameters if each.ndim >= 2]
        others = [each for each in parameters if each.ndim < 2]
        for params, decay in ((matrices, recipe.weight_decay), (others, 0.0)):
            if params:
                groups.append(shared | {"params": params, "weight_decay": decay, "rate": rate})
    # Fused is the fastest. But with a loss scaler, a fused optimizer itself skips a step that
    # overflowed, and the step would count as taken; None lets torch choose the next fastest.
    fused = None if scaler else True
    return OPTIMIZERS[recipe.optimizer](groups, lr=recipe.lr, fused=fused)  # all take `fused`
