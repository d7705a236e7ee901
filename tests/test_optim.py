from __future__ import annotations

import pytest
import torch

from ddp_mnist.config import Recipe
from ddp_mnist.models import MODELS
from ddp_mnist.optim import learning_rate, make_optimizer


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
    optimizer = make_optimizer(model, Recipe(lr=0.3, weight_decay=0.25))
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


def test_a_step_is_that_of_adamw() -> None:
    """The first one: each element moves by the rate against its gradient's sign, then decays."""
    model = torch.nn.Linear(2, 1).double()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make_optimizer(model, Recipe(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 4.0)
    optimizer.step()
    weight, bias = model.parameters()
    assert torch.allclose(weight, before[0] * (1 - 0.1 * 0.5) - 0.1, atol=1e-8)
    assert torch.allclose(bias, before[1] - 0.1, atol=1e-8)
