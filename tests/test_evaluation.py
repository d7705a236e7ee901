from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from ddp_mnist.cluster.local import run_world
from ddp_mnist.config import Distribution
from ddp_mnist.data import cache
from ddp_mnist.data.batches import Rows
from ddp_mnist.errors import UsageError
from ddp_mnist.run.evaluation import Metrics, evaluate_split, prepare_split, summarise
from ddp_mnist.verbs import evaluate

CLASSES = 4


class TableLookup(nn.Module):
    """Logits that are a fixed function of an image's first pixel."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.randn(256, CLASSES, generator=torch.Generator().manual_seed(3))
        self.table = nn.Parameter(table.double())

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.table[images[:, 0, 0].long()]


def make_rows(count: int) -> Rows:
    """`count` images that each carry another first pixel, and labels that the table half gets."""
    images = torch.zeros(count, 28, 28, dtype=torch.uint8)
    images[:, 0, 0] = torch.arange(count)
    return Rows(images, torch.arange(count) * 7 % CLASSES)


def counted_by_hand(count: int) -> tuple[list[list[int]], float]:
    rows, model = make_rows(count), TableLookup()
    logits = model(rows.images)
    confusion = np.zeros((CLASSES, CLASSES), dtype=int)
    for label, prediction in zip(rows.labels.tolist(), logits.argmax(1).tolist(), strict=True):
        confusion[label][prediction] += 1
    picked = logits.log_softmax(1)[torch.arange(count), rows.labels]
    return confusion.tolist(), -picked.mean().item()


def evaluate_all(cells: list[tuple[int, int]]) -> list[Metrics]:
    """One world's Metrics for each (number of rows, images per process and batch)."""
    from ddp_mnist.cluster.launch import find_launch
    from ddp_mnist.cluster.world import join_world

    flags = Distribution(cpu=True, dist_timeout=60)
    with join_world(flags, find_launch(flags)) as world:
        model = TableLookup()
        loaders = [prepare_split(world.accelerator, make_rows(rows), size) for rows, size in cells]
        return [evaluate_split(world.accelerator, model, each, CLASSES) for each in loaders]


def check_cells(processes: int, cells: list[tuple[int, int]], folder: Path) -> None:
    ranks = run_world(processes, evaluate_all, cells, folder=folder, timeout_s=1800)
    assert all(rank == ranks[0] for rank in ranks)
    for cell, metrics in zip(cells, ranks[0], strict=True):
        confusion, loss = counted_by_hand(cell[0])
        assert (metrics.count, metrics.confusion) == (cell[0], confusion), cell
        assert math.isclose(metrics.loss, loss, rel_tol=1e-12)


@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_fault_31_every_row_counts_once(processes: int, tmp_path: Path) -> None:
    """Rows 1..64, each with another batch size of 1..8."""
    check_cells(processes, [(rows, 1 + 3 * rows % 8) for rows in range(1, 65)], tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_fault_31_every_row_counts_once_in_all_cells(processes: int, tmp_path: Path) -> None:
    """Rows 1..64 x batch 1..8: 512 cells on each number of processes."""
    cells = [(rows, size) for rows in range(1, 65) for size in range(1, 9)]
    check_cells(processes, cells, tmp_path)


def test_a_lost_or_repeated_row_is_an_error(tmp_path: Path) -> None:
    for planted in (1, -1):
        with pytest.raises(RuntimeError, match=f"counted {7 + planted} rows of a split of 7"):
            run_world(1, evaluate_with_planted_fault, planted, folder=tmp_path)


def evaluate_with_planted_fault(extra: int) -> None:
    """As gather_for_metrics would, if it kept the padding or dropped a row."""
    from accelerate import Accelerator

    def faulty(_self: Accelerator, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(torch.cat([t, t[:1]]) if extra > 0 else t[:extra] for t in tensors)

    Accelerator.gather_for_metrics = faulty
    evaluate_all([(7, 8)])


def test_a_batch_is_never_larger_than_the_split(tmp_path: Path) -> None:
    """Accelerate would repeat the rows until the last batch is full, in a list."""

    def loader_of(processes: int, rows: int, per_process: int) -> Any:
        fake: Any = SimpleNamespace(num_processes=processes, prepare_data_loader=lambda x: x)
        return prepare_split(fake, make_rows(rows), per_process)

    assert loader_of(2, 7, 10**9).batch_size == 8
    assert loader_of(1, 7, 10**9).batch_size == 7
    assert loader_of(3, 64, 5).batch_size == 15
    assert loader_of(2, 0, 10**9).batch_size == 2
    check_cells(2, [(7, 10**9), (1, 10**9)], tmp_path)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_that_another_data_set_is_too_small_for(split: str) -> None:
    images = cache.load("digits")
    for val_size in (5000, 1437):
        with pytest.raises(UsageError) as told:
            evaluate._rows(images, split, val_size)
        assert str(told.value) == (
            f"--split {split}: digits has 1,437 train images, and the run held {val_size:,} out;"
            " use --split test"
        )
        assert len(evaluate._rows(images, "test", val_size)) == 360
    assert len(evaluate._rows(images, "train", 1436)) == 1
    assert len(evaluate._rows(images, "validation", 1436)) == 1436


def test_no_pickle_travels_between_ranks(tmp_path: Path) -> None:
    """Who could write the store before the group forms could pose as rank 0 and send one."""
    ranks = run_world(3, evaluate_without_pickles, folder=tmp_path)
    assert ranks[0] == ranks[1] == ranks[2]
    metrics, sent, gathered = ranks[0]
    confusion, loss = counted_by_hand(10)
    assert (metrics.count, metrics.confusion) == (10, confusion)
    assert math.isclose(metrics.loss, loss, rel_tol=1e-12)
    assert sent == b"from rank 0"
    assert gathered == [bytes([rank]) * (rank * 1000 + 1) for rank in range(3)]


def evaluate_without_pickles() -> tuple[Metrics, bytes, list[bytes]]:
    import torch.distributed as dist

    from ddp_mnist.cluster.launch import find_launch
    from ddp_mnist.cluster.world import broadcast_bytes, gather_bytes, join_world

    names = ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
    fakes: Any = dict.fromkeys(names)  # None is no function
    flags = Distribution(cpu=True, dist_timeout=60)
    with (
        patch.multiple(dist, **fakes),
        join_world(flags, find_launch(flags)) as world,
    ):
        rank = world.accelerator.process_index
        loader = prepare_split(world.accelerator, make_rows(10), 4)
        return (
            evaluate_split(world.accelerator, TableLookup(), loader, CLASSES),
            broadcast_bytes(world.accelerator, b"from rank 0" if rank == 0 else b""),
            gather_bytes(world.accelerator, bytes([rank]) * (rank * 1000 + 1)),
        )


def test_summarise() -> None:
    labels, predictions = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 1, 0])
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    assert summarise(labels, predictions, losses, classes=4) == Metrics(
        accuracy=0.5,
        loss=2.5,
        count=4,
        confusion=[[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]],
        class_accuracy=[0.5, 1.0, 0.0, None],
    )


def test_the_model_is_left_in_the_mode_it_was_in(tmp_path: Path) -> None:
    assert run_world(1, modes_after_evaluation, folder=tmp_path) == [(True, False)]


def modes_after_evaluation() -> tuple[bool, bool]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = prepare_split(accelerator, make_rows(5), 2)
    modes = []
    for mode in (True, False):
        model = TableLookup().train(mode)
        evaluate_split(accelerator, model, loader, CLASSES)
        modes.append(model.training)
    return modes[0], modes[1]
