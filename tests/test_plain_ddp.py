import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist import plain_ddp
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.verbs.verify import watch
from tests.commands import REPOSITORY, python, run_here

OWN = """
import torch.nn.functional as F

loss = lambda logits, labels: F.multi_margin_loss(logits, labels, reduction="none")
"""


def train_plainly(recipe: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """The plain loop in float64; MASTER_ADDR and the rest are set by the world."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    digits, resolved = plain_ddp.load("digits", Recipe(**{**watch.PROOF, **recipe}), 2)
    model, _ = plain_ddp.train_plain(digits, resolved, 0, torch.float64)
    accuracy = plain_ddp.test_accuracy(model, digits)
    dist.destroy_process_group()
    weights = model.get_submodule("net").state_dict()  # without what normalises the pixels
    return {name: tensor.numpy() for name, tensor in weights.items()}, accuracy


OF_ONES_OWN = {"augment": True, "model": "mlp", "loss": "own:loss", "class_weights": "balanced"}


@pytest.mark.parametrize("recipe", [{"epochs": 1}, OF_ONES_OWN])
def test_the_trainer_equals_the_plain_loop(recipe: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    [trained, _] = run_world(2, watch.just_train, watch.proof_config(**recipe), folder=tmp_path)
    plain = run_world(2, train_plainly, recipe, folder=tmp_path)
    for weights, accuracy in plain:
        tensors = {name: torch.from_numpy(array) for name, array in weights.items()}
        assert watch.largest_difference(watch.weights_of(tmp_path / "run"), tensors) < 1e-9
        assert accuracy == trained["test_accuracy"]


def test_started_plainly_it_trains_alone(tmp_path: Path) -> None:
    typed = [f"{REPOSITORY}/ddp_mnist/plain_ddp.py", "--dataset", "digits", "--epochs", "1"]
    [(code, printed)] = run_world(1, run_here, typed, True, folder=tmp_path)
    assert code == 0
    assert re.match(r"test accuracy 0\.\d{4} on 360 images, ", printed)


@pytest.mark.parametrize("typed", [["--dataset", "/none"], ["--epochs", "0"], []])
def test_what_cannot_be_is_one_line(typed: list[str], monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["plain_ddp", "--dataset", "digits", *typed])
    monkeypatch.setenv("WORLD_SIZE", "2000")
    with pytest.raises(SystemExit) as ended:
        plain_ddp.main()
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), ended.value.code) == ("", 1, 3 if "/none" in typed else 2)
    assert err.startswith(f"ddp-mnist: error: {' '.join(typed) or '--batch-size'}: ")


@pytest.mark.system
def test_the_two_loops_are_timed_by_the_tool_of_make_bench(tmp_path: Path) -> None:
    measure = [str(REPOSITORY / "tools" / "bench.py"), "--dataset", "digits", "--repeats", "2"]
    ratios = re.findall(r" (\d\.\d{3})  \(", python(*measure, folder=tmp_path).succeeds())
    assert len(ratios) == 2 and all(0.1 < float(ratio) < 9 for ratio in ratios)
