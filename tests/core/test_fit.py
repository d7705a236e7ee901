"""`fit` as it is given to others: plain arguments, and whatever prepares the net for many ranks."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.core.accelerator import make_accelerator
from ddp_mnist.core.augment import augmentation_table
from ddp_mnist.core.evaluation import EvalResult
from ddp_mnist.core.fit import fit
from ddp_mnist.core.nets import MNIST, MODELS
from ddp_mnist.core.run import Run
from ddp_mnist.core.state import State
from ddp_mnist.core.task import Classification, balanced
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.data import cache
from ddp_mnist.data.splits import rows_of_splits
from ddp_mnist.verbs.verify.watch import largest_difference
from tests.run_checks import fit_recipe


class Shares:
    """This rank's part of each batch, cut out by hand."""

    def __init__(self, loader: Any, rank: int, size: int) -> None:
        self.loader, self.rank, self.size = loader, rank, size

    def __iter__(self) -> Iterator[list[Tensor]]:
        for batch in self.loader:
            yield [part.chunk(self.size)[self.rank] for part in batch]


def prepare_plainly(accelerator: Accelerator) -> None:
    """Let torch's own DDP do what `Accelerator.prepare` does."""
    rank, size = accelerator.process_index, accelerator.num_processes

    def prepare(net: nn.Module, optimizer: Any, loader: Any) -> tuple[nn.Module, Any, Shares]:
        return DistributedDataParallel(net), optimizer, Shares(loader, rank, size)

    accelerator.prepare = prepare


class Silent(Run):
    def __init__(self) -> None:
        self.stop_requests, self.lines = [0.0], list[Any]()

    def begin(self, state: State) -> None:
        pass

    def log(self, step: int, line: dict[str, Any], write: bool) -> None:
        if write:
            self.lines.append((step, line["loss"]))

    def log_epoch(self, *_: Any) -> None:
        pass

    def save(self, state: State) -> None:
        self.saved = state.progress.step

    def finish(self, _: State, net: Normalised, test: EvalResult) -> Any:
        weights = {name: tensor.numpy().copy() for name, tensor in net.state_dict().items()}
        return weights, test.as_json(), self.lines, self.saved


def hinge(logits: Tensor, labels: Tensor) -> Tensor:
    return F.multi_margin_loss(logits, labels, reduction="none")


def train(model: str, own: bool, plainly: bool, epochs: int = 1) -> Any:
    """Train on the digits in float64; with `own`, by a loss of one's own and rare classes up."""
    torch.set_num_threads(1)
    accelerator = make_accelerator(cpu=True, mixed_precision="no")
    if plainly:
        prepare_plainly(accelerator)
    rows = rows_of_splits(cache.load("digits").hold_out(287))
    names, weights = [*"0123456789"], balanced(rows[0].targets[rows[0].rows])
    task = Classification(names, hinge, weights=weights) if own else Classification(names)
    recipe = fit_recipe(optimizer="adamw", augment="strokes" if own else "", lr=1e-2, epochs=epochs)

    def make_net() -> Normalised:
        return Normalised(MODELS[model](10, MNIST).double(), [0.13], [0.31])

    result = fit(accelerator, rows, make_net, task, recipe, 0, Silent())
    accelerator.free_memory()
    accelerator.end_training()
    return result


@pytest.mark.parametrize(("model", "own"), [("cnn", False), ("mlp", True)])
def test_the_loop_with_and_without_accelerates_prepare(
    model: str, own: bool, tmp_path: Path
) -> None:
    """The same weights and sums on two processes; all that `prepare` adds is what stands here."""
    ours, plain = (run_world(2, train, model, own, how, folder=tmp_path) for how in (False, True))
    weights, test, lines, saved = ours[0]
    assert test["count"] == 360 and test["accuracy"] > 0.5 and saved == 15
    assert [step for step, _ in lines] == [15]
    for others, result, logged, last in (ours[1], *plain):
        tensors, first = ({k: torch.from_numpy(x) for k, x in w.items()} for w in (others, weights))
        assert largest_difference(tensors, first) < 1e-9
        assert (result["confusion"], last) == (test["confusion"], saved)
        assert logged == [(15, pytest.approx(lines[0][1], rel=1e-9))]


def test_every_epoch_is_augmented_anew_and_every_step_clipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The steps between two log lines too, whose norms nobody reads."""
    epochs, norms = list[int](), list[float]()
    draw = augmentation_table

    def draws(*arguments: Any) -> Tensor:
        epochs.append(arguments[-1])
        return draw(*arguments)

    def measures(optimizer: Any, *_: Any) -> None:
        every = [p.grad.norm() for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.stack(every).norm()))

    monkeypatch.setitem(fit.__globals__, "augmentation_table", draws)
    flags = {"augment": "strokes", "epochs": 2, "max_grad_norm": 1e-3}
    recipe = fit_recipe(optimizer="adamw", lr=1e-3, **flags)
    accelerator = make_accelerator(cpu=True, mixed_precision="no")
    rows = rows_of_splits(cache.load("digits").hold_out(287))
    task = Classification([*"0123456789"])

    def make_net() -> Normalised:
        return Normalised(MODELS["mlp"](10, MNIST), [0.13], [0.31])

    measured = register_optimizer_step_pre_hook(measures)
    try:
        fit(accelerator, rows, make_net, task, recipe, 0, Silent())
    finally:
        measured.remove()
        accelerator.free_memory()
    assert epochs == [0, 1]
    assert norms == [pytest.approx(1e-3, rel=1e-3)] * 30


def test_what_a_validation_takes_is_not_the_trainings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs, and after the first a validation of 100 s by the clock."""
    clock, seconds = [0.0], list[float]()

    class Slow(Silent):
        def log_epoch(self, state: State, *_: Any) -> None:
            clock[0] += 100
            seconds.append(state.progress.train_seconds)

    monkeypatch.setattr("ddp_mnist.core.meter.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(sys.modules[__name__], "Silent", Slow)
    train("mlp", own=False, plainly=False, epochs=2)
    assert seconds == [0.0, 0.0]


def test_a_checkpoint_that_is_not_written_to_its_end_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator: Any = SimpleNamespace(is_main_process=True)
    run = Run(accelerator, fit_recipe(), 0, tmp_path / "checkpoint.pt", resume=False)
    state: Any = SimpleNamespace(content=lambda _: {"step": 1})
    run.save(state)
    first = run.file.read_bytes()

    def fills_the_disk(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fills_the_disk)
    with pytest.raises(OSError, match="disk full"):
        run.save(state)
    assert run.file.read_bytes() == first
