from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ddp_mnist.config import Recipe, ResolvedRecipe, resolve_recipe
from ddp_mnist.models import MODELS
from ddp_mnist.optim import KERNEL_STEP, MOMENTUM, learning_rate, make_optimizer, orthogonal


def resolved(**recipe: Any) -> ResolvedRecipe:
    return resolve_recipe(Recipe(**recipe), rows=1437, world_size=1)


def rates(total_steps: int, peak: float, warmup: float) -> list[float]:
    return [learning_rate(step, total_steps, peak, warmup) for step in range(total_steps)]


def test_the_rate_at_chosen_steps() -> None:
    # 15 steps up, 85 steps down
    for step, share in [(0, 1 / 15), (6, 7 / 15), (14, 1), (15, 1), (16, 84 / 85), (99, 1 / 85)]:
        assert learning_rate(step, 100, 0.02, 0.15) == pytest.approx(0.02 * share, rel=1e-12)


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.15, 0.5, 0.99])
@pytest.mark.parametrize("total_steps", [1, 2, 3, 10, 45, 1000])
def test_the_rate_rises_to_the_peak_and_falls(total_steps: int, warmup: float) -> None:
    values = rates(total_steps, 0.5, warmup)
    assert 0 < min(values) <= max(values) <= 0.5
    top = values.index(max(values))
    assert values[: top + 1] == sorted(values[: top + 1])
    assert values[top:] == sorted(values[top:], reverse=True)
    assert top <= warmup * total_steps
    if total_steps >= 10:
        assert max(values) > 0.5 * 0.85


def test_the_peak_is_reached_where_it_falls_on_a_step() -> None:
    assert max(rates(100, 0.5, 0.15)) == 0.5
    assert rates(20, 1.0, 0.5) == pytest.approx(
        [i / 10 for i in [*range(1, 11), *range(10, 0, -1)]]
    )


def test_the_last_step_is_one_part_of_the_fall() -> None:
    values = rates(100, 1.0, 0.2)
    assert values[-1] == pytest.approx(1 / 80)
    assert learning_rate(100, 100, 1.0, 0.2) == 0


def test_without_warm_up_it_begins_at_the_peak() -> None:
    assert rates(4, 0.5, 0.0) == [0.5, 0.375, 0.25, 0.125]


def test_a_run_of_one_step_takes_it_at_the_peak() -> None:
    for warmup in (0.0, 0.15, 0.999):
        assert learning_rate(0, 1, 0.01, warmup) == 0.01


@pytest.mark.parametrize("name", ["cnn", "cnn_deep", "mlp", "cnn_bn"])
def test_matrices_and_kernels_decay_and_nothing_else(name: str) -> None:
    model = MODELS[name]()
    optimizer = make_optimizer(model, resolved(optimizer="adamw", lr=0.3, weight_decay=0.25))
    decaying, other = optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert {names[p] for p in decaying["params"]} == {
        n for n, p in model.named_parameters() if n.endswith("weight") and "norm" not in n
    }
    assert {names[p] for p in other["params"]} == {
        n for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n
    }
    assert (decaying["weight_decay"], other["weight_decay"]) == (0.25, 0.0)
    assert decaying["lr"] == other["lr"] == 0.3


def test_two_steps_are_those_of_adamw() -> None:
    """By the paper's formula: decay, then the mean gradient over the root of the mean square."""
    model = torch.nn.Linear(2, 1).double()
    weight, bias = (p.detach().clone() for p in model.parameters())
    optimizer = make_optimizer(model, resolved(optimizer="adamw", lr=0.1, weight_decay=0.5))
    mean = square = 0.0
    for step, gradient in enumerate([4.0, -1.0], start=1):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.98 * square + 0.02 * gradient**2
        move = (mean / (1 - 0.9**step)) / ((square / (1 - 0.98**step)) ** 0.5 + 1e-8)
        weight = weight * (1 - 0.1 * 0.5) - 0.1 * move
        bias = bias - 0.1 * move
    assert torch.allclose(model.weight, weight, rtol=1e-9)
    assert torch.allclose(model.bias, bias, rtol=1e-9)


def test_only_a_cpu_takes_the_fused_step() -> None:
    """On a GPU it would pass over an fp16 overflow by itself; False would be the slowest there."""
    for device, fused in (("cpu", True), ("meta", None)):
        optimizer = make_optimizer(MODELS["mlp"]().to(device), resolved(optimizer="adamw"))
        assert [group["fused"] for group in optimizer.param_groups] == [fused, fused]


# --- Muon


@pytest.mark.parametrize("shape", [(32, 36), (64, 288), (8, 3), (1, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_orthogonal_keeps_the_directions_and_evens_out_their_lengths(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    stream = torch.Generator().manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=stream).double(), full_matrices=False)
    lengths = torch.logspace(0, -1.5, len(v), dtype=torch.float64)  # 1 down to 0.03
    result = orthogonal((1e3 * u * lengths @ v).to(dtype))
    assert (result.shape, result.dtype) == (shape, dtype)
    within = u.T @ result.double() @ v.T
    assert within.diagonal().min() > 0.6
    assert within.diagonal().max() < 1.3
    assert (within - within.diagonal().diag()).abs().max() < 1e-4


def test_orthogonal_of_nothing_is_nothing() -> None:
    assert torch.equal(orthogonal(torch.zeros(3, 5)), torch.zeros(3, 5))


Gradients = list[torch.Tensor]


def steps_with(name: str, net: torch.nn.Module, steps: list[Gradients]) -> torch.nn.Module:
    """A copy of the net after steps along these gradients, at rate 0.1, decay 0.5."""
    net = copy.deepcopy(net)
    optimizer = make_optimizer(net, resolved(optimizer=name, lr=0.1, weight_decay=0.5))
    for gradients in steps:
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return net


def test_muon_moves_kernels_by_its_own_rule_and_all_else_as_adamw() -> None:
    torch.manual_seed(0)
    net = MODELS["cnn"]().double().to(memory_format=torch.channels_last)
    steps = [[torch.randn_like(p) for p in net.parameters()] for _ in range(3)]
    by_muon, by_adamw = (steps_with(name, net, steps) for name in ("muon", "adamw"))
    for number, (name, before) in enumerate(net.named_parameters()):
        after = by_muon.get_parameter(name)
        if not name.startswith("conv") or name.endswith("bias"):
            assert torch.equal(after, by_adamw.get_parameter(name)), name
            continue
        momentum, expected = torch.zeros_like(before), before.detach()
        for gradients in steps:
            momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradients[number]
            ahead = MOMENTUM * momentum + (1 - MOMENTUM) * gradients[number]
            direction = orthogonal(ahead.reshape(len(ahead), -1)).reshape(before.shape)
            expected = expected * (1 - 0.1 * 0.5) - KERNEL_STEP * 0.1 * direction
        assert torch.allclose(after, expected, rtol=1e-9, atol=1e-9), name


def test_muon_remembers_its_momentum_through_a_checkpoint() -> None:
    torch.manual_seed(0)
    recipe, unbroken = resolved(optimizer="muon"), MODELS["cnn_deep"]()
    gradients = [[torch.randn_like(p) for p in unbroken.parameters()] for _ in range(2)]

    def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for parameter, gradient in zip(net.parameters(), gradients[number], strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()

    optimizer = make_optimizer(unbroken, recipe)
    step(unbroken, optimizer, 0)
    resumed, forgetful = copy.deepcopy(unbroken), copy.deepcopy(unbroken)
    loaded = make_optimizer(resumed, recipe)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(unbroken, optimizer, 1)
    step(resumed, loaded, 1)
    step(forgetful, make_optimizer(forgetful, recipe), 1)
    for name, expected in unbroken.named_parameters():
        assert torch.equal(resumed.get_parameter(name), expected), name
        assert not torch.equal(forgetful.get_parameter(name), expected), name
