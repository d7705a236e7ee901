import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from ddp_mnist.cluster.launch import find_launch
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.cluster.world import join_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.core import evaluation
from ddp_mnist.core.accelerator import broadcast_bytes
from ddp_mnist.core.batches import Rows
from ddp_mnist.task import Classification
from ddp_mnist.verbs import evaluate
from ddp_mnist.verbs.flags import Evaluate
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.run_checks import net_that

CLASSES = 4
TASK = Classification([*map(str, range(CLASSES))])


class TableLookup(nn.Module):
    """Logits that are a fixed function of an image's first pixel."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(256, CLASSES, generator=torch.Generator().manual_seed(3))
        self.table = nn.Parameter(table.double())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.table[images[:, 0, 0, 0].long()]


def make_rows(count: int) -> Rows:
    """`count` images that each carry another first pixel, and labels that the table half gets."""
    images = torch.zeros(count, 1, 28, 28, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(count)
    return Rows(images, torch.arange(count) * 7 % CLASSES)


def evaluate_cell(accelerator: Accelerator, rows: int, per_process: int) -> evaluation.EvalResult:
    loader = evaluation.make_eval_loader(accelerator, make_rows(rows), per_process)
    model = TableLookup().train(rows % 2 == 0)
    metrics = evaluation.evaluate_split(accelerator, model, loader, TASK)
    assert model.training is (rows % 2 == 0)  # left in the mode that it was in
    return metrics


def evaluate_all(cells: list[tuple[int, int]]) -> tuple[list[evaluation.EvalResult], bytes]:
    """Evaluate each (number of rows, images per process and batch), and send no pickle.

    Who could write the store before the group forms could pose as rank 0 and send one. Return the
    metrics, and what rank 0 sent.
    """
    names = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
    fakes: Any = dict.fromkeys(names)  # None is no function
    flags = Distribution(cpu=True, dist_timeout=60)
    with patch.multiple(dist, **fakes), join_world(flags, find_launch(flags)) as world:
        accelerator, rank = world.accelerator, world.store.rank
        metrics = [evaluate_cell(accelerator, *cell) for cell in cells]
        return metrics, broadcast_bytes(accelerator, b"from rank 0" if rank == 0 else b"")


def check_by_hand(metrics: evaluation.EvalResult, count: int) -> None:
    """Compare what a world made of `make_rows(count)` with sums in one place."""
    rows, model = make_rows(count), TableLookup()
    logits = model(rows.images)
    confusion = np.zeros((CLASSES, CLASSES), dtype=int)
    for label, prediction in zip(rows.targets.tolist(), logits.argmax(1).tolist(), strict=True):
        confusion[label][prediction] += 1
    loss = -logits.log_softmax(1)[torch.arange(count), rows.targets].mean().item()
    found = metrics.as_json()
    assert (found["count"], found["confusion"]) == (count, confusion.tolist())
    right = confusion.diagonal()
    assert metrics.score == found["accuracy"] == right.sum() / count
    classes = zip(right, confusion.sum(1), strict=True)
    assert found["class_accuracy"] == [hits / of if of else None for hits, of in classes]
    assert math.isclose(metrics.loss, loss, rel_tol=1e-12)


FEW_CELLS = [*((rows, 1 + 3 * rows % 8) for rows in range(1, 21)), (7, 10**9), (1, 10**9)]
ALL_CELLS = [*itertools.product(range(1, 65), range(1, 9))]
ALL = [pytest.param(size, ALL_CELLS, marks=pytest.mark.soak) for size in (1, 2, 3, 4)]


@pytest.mark.parametrize(("processes", "cells"), [(3, FEW_CELLS), (4, FEW_CELLS), *ALL])
def test_fault_31_every_row_counts_once(
    processes: int, cells: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Rows 1..20, with batch sizes of 1..8 in turn, or one that is larger than the split.

    Four processes take 32 rows at most in a batch.
    """
    ranks = run_world(processes, evaluate_all, cells, folder=tmp_path, timeout_s=1800)
    assert all(rank == ranks[0] for rank in ranks)
    found, sent = ranks[0]
    assert sent == b"from rank 0"
    for (rows, _), metrics in zip(cells, found, strict=True):
        check_by_hand(metrics, rows)


@pytest.mark.parametrize("kept", [[*range(7), 0], [*range(6)]])
def test_a_lost_or_repeated_row_is_an_error(kept: list[int]) -> None:
    """As if gather_for_metrics kept the padding or dropped a row."""
    fake: Any = SimpleNamespace(
        num_processes=1,
        prepare_data_loader=lambda loader: loader,
        gather_for_metrics=lambda tensors: [tensor[kept] for tensor in tensors],
    )
    message = f"^counted {len(kept)} rows of a split of 7: wrong metrics$"
    with pytest.raises(RuntimeError, match=message):
        evaluate_cell(fake, 7, 8)


def test_large_images_are_evaluated_in_little_memory() -> None:
    small, large = (1, 28, 28), (3, 2000, 2000)
    cases = ("cpu", small, 500), ("cuda", small, 4000), ("cuda", large, 1)
    for device, shape, count in cases:
        fake: Any = SimpleNamespace(
            num_processes=2, prepare_data_loader=lambda loader: loader, device=torch.device(device)
        )
        images = torch.empty(1, dtype=torch.uint8).expand(9000, *shape)
        rows = Rows(images, torch.zeros(9000, dtype=torch.int64))
        assert evaluation.make_eval_loader(fake, rows).batch_size == 2 * count


NOTES = """
        if not torch.is_grad_enabled():
            cudnn = torch.backends.cudnn
            with open("precisions", "a") as file:
                print(cudnn.conv.fp32_precision, file=file)
"""


def train_and_evaluate(config: TrainConfig) -> list[str]:
    """Return how float32 is computed in the validation, in the test, in evaluate, and after it."""
    Path("precisions").write_text("")
    just_train(config)
    trained = Path("precisions").read_text().splitlines()
    Path("precisions").write_text("")
    evaluate.evaluate_run(Evaluate("run"), Distribution(cpu=True))
    [evaluated] = {*Path("precisions").read_text().splitlines()}
    cudnn: Any = torch.backends.cudnn
    return [*trained, evaluated, cudnn.conv.fp32_precision]


def test_evaluation_is_in_full_precision_on_a_gpu_too(tmp_path: Path) -> None:
    """Where float32 convolutions are TF32 by default, as in training."""
    (tmp_path / "notes_it.py").write_text(net_that(NOTES))
    config = proof_config(model="notes_it:Net", epochs=1)
    [found] = run_world(1, train_and_evaluate, config, folder=tmp_path)
    assert found[-4:] == ["ieee", "ieee", "ieee", "tf32"]
