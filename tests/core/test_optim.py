import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch

from ddp_mnist.core.nets import MNIST, MODELS
from ddp_mnist.core.optim import KERNEL_STEP, MOMENTUM, OPTIMIZERS, make_optimizer, orthogonal
from ddp_mnist.core.recipe import Recipe
from ddp_mnist.core.wrappers import Normalised, hold_still
from tests.run_checks import fit_recipe


def scheduled(total_steps: int, peak: float, warmup: float) -> Recipe:
    return fit_recipe(steps_per_epoch=total_steps, lr=peak, warmup=warmup)


def rates(total_steps: int, peak: float, warmup: float) -> list[float]:
    return [*map(scheduled(total_steps, peak, warmup).learning_rate, range(total_steps))]


def test_the_rate_rises_to_the_peak_and_falls() -> None:
    # 15 steps up, 85 steps down
    for step, share in [(0, 1 / 15), (6, 7 / 15), (14, 1), (15, 1), (99, 1 / 85), (100, 0)]:
        rate = scheduled(100, 0.02, 0.15).learning_rate(step)
        assert rate == pytest.approx(0.02 * share, rel=1e-12)
    assert rates(4, 0.5, 0.0) == [0.5, 0.375, 0.25, 0.125]
    assert rates(2, 0.5, 0.999) == pytest.approx([0.5 / 1.998, 0.5])  # it never falls
    assert rates(1, 0.01, 0.5) == [0.01]


OWN: dict[str, dict[str, Any]] = {  # options of each optimizer
    "adamw": {"betas": (0.9, 0.98)},
    "muon": {"betas": (0.9, 0.98)},
    "sgd": {"momentum": 0.9},
}


@pytest.mark.parametrize("name", ["cnn", "cnn_deep", "mlp", "cnn_bn"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_matrices_and_kernels_decay_and_nothing_else(name: str, optimizer: str) -> None:
    model = MODELS[name](10, MNIST)
    made = make_optimizer(model, fit_recipe(optimizer=optimizer, lr=0.3, weight_decay=0.25))
    names = {parameter: name for name, parameter in model.named_parameters()}
    decaying, other = ({names[p] for p in group["params"]} for group in made.param_groups)
    assert decaying == {n for n in names.values() if n.endswith("weight") and "norm" not in n}
    assert other == set(names.values()) - decaying
    assert [group["weight_decay"] for group in made.param_groups] == [0.25, 0.0]
    for group in made.param_groups:
        assert group.items() >= {"lr": 0.3, **OWN[optimizer]}.items()


def test_without_a_loss_scaler_the_step_is_fused() -> None:
    """With one it would pass over an fp16 overflow by itself; False would be the slowest."""
    for scaler, fused in ((None, True), (torch.amp.GradScaler("cpu"), None)):
        optimizer = make_optimizer(MODELS["mlp"](10, MNIST), fit_recipe(optimizer="adamw"), scaler)
        assert [group["fused"] for group in optimizer.param_groups] == [fused, fused]


def test_a_layer_whose_name_begins_as_that_of_the_last_is_not_the_head() -> None:
    layers = {"fc_in": torch.nn.Linear(4, 3), "fc": torch.nn.Linear(3, 2)}
    net = Normalised(torch.nn.Sequential(OrderedDict(layers)), (0.5,), (0.5,))
    for kept, rates in (("", [1.0, 1.0, 10.0, 10.0]), ("body", [10.0, 10.0])):
        optimizer = make_optimizer(hold_still(net, kept), fit_recipe(head_rate=10.0))
        assert [group["rate"] for group in optimizer.param_groups] == rates
        assert sum(len(group["params"]) for group in optimizer.param_groups) == len(rates)


# --- Muon


@pytest.mark.parametrize("shape", [(32, 36), (64, 288), (8, 3), (1, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonal_keeps_the_directions_and_evens_out_their_lengths(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    stream = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=stream).double(), full_matrices=False)
    lengths = torch.logspace(0, -2, len(v), dtype=torch.float64)  # 1 down to 0.01
    [result] = orthogonal([(1e3 * u * lengths @ v).to(dtype)])
    assert (result.shape, result.dtype) == (shape, dtype)
    within = u.T @ result.double() @ v.T
    assert within.diagonal().min() > 0.67
    assert within.diagonal().max() < 1.21
    assert (within - within.diagonal().diag()).abs().max() < 1e-4
    nothing = torch.zeros(shape, dtype=dtype)
    assert torch.equal(orthogonal([nothing])[0], nothing)


def test_muon_moves_kernels_by_its_own_rule_and_all_else_as_adamw() -> None:
    torch.manual_seed(0)
    net = MODELS["cnn"](10, MNIST).double().to(memory_format=torch.channels_last)
    steps = [[torch.randn_like(p) for p in net.parameters()] for _ in range(3)]
    moved = {}
    for name in ("muon", "adamw"):
        moved[name] = copy.deepcopy(net)
        recipe = fit_recipe(optimizer=name, lr=0.1, weight_decay=0.5)
        optimizer = make_optimizer(moved[name], recipe)
        for gradients in steps:
            for parameter, gradient in zip(moved[name].parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            for parameter, gradient in zip(moved[name].parameters(), gradients, strict=True):
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradient)  # for whoever looks after the step
    for number, (name, before) in enumerate(net.named_parameters()):
        after = moved["muon"].get_parameter(name)
        if not name.startswith("conv") or name.endswith("bias"):
            assert torch.equal(after, moved["adamw"].get_parameter(name)), name
            continue
        momentum, expected = torch.zeros_like(before), before.detach()
        for gradients in steps:
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradients[number]
            ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradients[number]
            [direction] = orthogonal([ahead])
            expected = expected * (1 - 0.1 * 0.5) - KERNEL_STEP * 0.1 * direction
        assert torch.allclose(after, expected, rtol=1e-9, atol=1e-9), name
