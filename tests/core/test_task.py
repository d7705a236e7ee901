import pytest
import torch
import torch.nn.functional as F

from ddp_mnist.core.task import Classification


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_training_loss_is_the_cross_entropy_of_smoothed_labels(
    smoothing: float, weighted: bool
) -> None:
    stream = torch.Generator().manual_seed(0)
    outputs = torch.randn((9, 4), generator=stream, dtype=torch.float64, requires_grad=True)
    labels = torch.arange(9) % 4
    weights = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    task = Classification([*"abcd"], smoothing=smoothing, weights=weights if weighted else None)
    losses = F.cross_entropy(outputs, labels, reduction="none", label_smoothing=smoothing)
    expected = (losses * weights[labels]).mean() if weighted else losses.mean()
    found = task.training_loss(outputs, labels)
    assert torch.allclose(found, expected, rtol=1e-14)
    of_found, of_expected = (torch.autograd.grad(each, outputs)[0] for each in (found, expected))
    assert torch.allclose(of_found, of_expected, rtol=1e-13)
