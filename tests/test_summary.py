import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.run import ResolvedConfig, RunFlags, TrainConfig
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.training import lines, plan, result
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.training.saved_config import facts
from ddp_mnist.training.versions import code_digest, git_commit
from tests.training import recipe_of


def test_what_has_to_be_equal_on_all_ranks_is_what_is_in_effect() -> None:
    """Not what was asked for, such as `auto`, nor what is each rank's own."""
    images: Any = SimpleNamespace(digest="abc", left_out=[])
    world: Any = SimpleNamespace(backend="gloo", precision="bf16", compiled_by=None)
    own = Distribution(rank=1, world_size=2, local_rank=1, init_method="tcp://h:1")
    first, second = (
        facts(ResolvedConfig(run, distribution, recipe=recipe_of()), world, images)
        for run, distribution in (
            (RunFlags(dataset="digits"), Distribution(mixed_precision="auto", backend="auto")),
            (RunFlags(dataset="/data", run_dir="x", cache_dir="y", quiet=True), own),
        )
    )
    assert first == second
    assert (first["--mixed-precision"], first["--backend"]) == ("bf16", "gloo")


def test_step_line() -> None:
    line: dict[str, Any] = {"epoch": 1, "loss": 0.51234, "lr": 0.0099}
    line["images_per_second"] = 12345.6
    shown = lines.step_line(line, 25, 3810, 44.1)
    assert shown == "step   25/3810  loss 0.5123  lr 0.00990  12,346 images/s  00:44 left"
    assert len(shown) <= 70  # beside a bar, in 80 columns
    shown = lines.step_line(line, 25, 3810, 44.1, "validation")  # a phase, which needs no room
    assert shown == "step   25/3810  loss 0.5123  validation  12,346 images/s  00:44 left"
    line |= {"loss": None, "images_per_second": 0.0}
    assert lines.step_line(line, 1, 10, None) == "step  1/10  loss not finite  lr 0.00990"


def test_the_plan_says_for_what_the_recipe_was_chosen_and_which_flags_were_typed() -> None:
    made = ImageFormat((3, 8, 8), (0.5,) * 3, (0.2,) * 3, [], False, False)
    photos: Any = SimpleNamespace(image_format=made, classes=["a", "b"])
    photos.rows = {"train": range(327)}

    def said(resumes: bool = False, **typed: Any) -> str:
        config = TrainConfig.of(typed)
        recipe = resolve_recipe(config.recipe, 408, 1, 81, pictures=True)
        groups = (config.run, config.distribution, config.typed, resumes)
        return plan.recipe_line(ResolvedConfig(*groups, recipe=recipe), photos)

    assert said(preset="fast") == (
        "fast, chosen for 327 pictures: muon, learning rate up to 0.02 in the first 10% of the"
        " steps, mirrored, cropped, coloured, label smoothing 0.1 (the training loss levels off"
        " near 0.2)"
    )
    on = said(resumes=True, epochs=9, augment=False, seed=1, metrics=["f1", "recall"])
    assert on.startswith("fast, kept for 327 pictures: muon, learning rate up to 0.02 in")
    assert "steps, not augmented, label smoothing 0.1 (the" in on
    assert on.endswith("near 0.2); typed: --epochs 9, --no-augment, --metrics f1,recall")


def of_classes(tests: int = 0, **counts: int) -> Any:
    """Return images of these classes; the first of each is held out, and so many as a test."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor([*counts.values()]))
    first = [labels.tolist().index(label) for label in range(len(counts))]
    train = np.delete(np.arange(len(labels)), first)
    rows = {"train": train, "validation": np.array(first), "test": np.arange(tests)}
    return SimpleNamespace(
        classes=[*counts], targets=labels, rows=rows, test_share=tests, split=rows.get
    )


def test_the_plan_shows_the_train_images_of_each_class_in_a_line() -> None:
    found = plan.by_class(of_classes(ladybird=129, moth=91, ant=21, bee=20, fly=3))
    assert found == {
        "classes": "ladybird: 128, moth: 90, ant: 20, bee: 19, fly: 2",
        "hint": "few train images of fly 2, bee 19: below 20 a class is hard to learn; add some",
    }
    rare = of_classes(ladybird=129, moth=60, bee=12)
    hint = "few train images of bee 11: below 20 a class is hard to learn; add some"
    more = ", or let rare classes count more by --class-weights balanced"
    assert plan.by_class(rare)["hint"] == hint + more
    assert plan.by_class(rare, "balanced")["hint"] == hint
    many = plan.by_class(of_classes(0, **{f"c{number:03}": number + 2 for number in range(100)}))
    assert many == {
        "classes": "1 (c000) to 100 (c099) train images each",
        "hint": "few train images of c000 1, c001 2, c002 3, 16 more: below 20 a class is hard"
        " to learn; add some",
    }


def test_where_most_images_are_held_out_the_hint_names_the_flag() -> None:
    """The plan has to say it, as one of each class always stays to train on."""
    few = "few train images of bee 4, fly 12: below 20 a class is hard to learn; "
    for tests, fix in ((15, "add some"), (17, "give a smaller --test-size")):
        assert plan.by_class(of_classes(tests, fly=13, bee=5))["hint"] == few + fix


def test_epoch_line() -> None:
    means = {"loss": 0.51234, "score": 0.97, "images_per_second": 12345.6}
    decided: Any = SimpleNamespace(score=0.99139, scores={"f1": 0.98761, "recall": None})
    assert lines.epoch_line(1, 10, means, decided, "accuracy") == (
        "epoch  2/10  loss 0.5123  accuracy 0.9700  12,346 images/s  validation 0.9914  f1 0.9876"
        "  recall undefined"
    )


def test_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome: dict[str, Any] = {"test_accuracy": 0.9912, "test_count": 10_000, "test_loss": 0.03456}
    outcome |= {"dataset": {"name": "mnist"}, "world_size": 2, "images_per_second": 8617.3}
    outcome |= {"metrics": {}, "train_seconds": 12.34, "total_seconds": 15.67, "inject": None}
    outcome |= {"steps": 300, "score_name": "accuracy", "classes": [*"0123456789"]}
    outcome |= {"images_per_class": {"test": [1000] * 10}, "loss_function": "cross_entropy"}
    monkeypatch.setattr(result, "program", lambda: "ddp-mnist")
    folder = RunFolder()
    folder.path = Path("run")
    scored = {**outcome, "metrics": {"f1": 0.98761, "own:score": 0.5}}
    assert result.last_lines(scored, folder).splitlines() == [
        "test accuracy 0.9912 on 10,000 images of mnist (88 wrong), loss 0.0346",
        "and        f1 0.9876, own:score 0.5000",
        "trained    12.3 s on 2 processes, 8,617 images/s; 15.7 s in all",
        "written to run",
        "see        ddp-mnist report run",
    ]
    for accuracy, images, is_guessed in (
        (0.11, [1000] * 10, True),
        (0.5, [1000] * 10, False),
        (0.905, [9000, 1000], True),  # all are taken for the larger of two
        (0.99, [5000, 5000], False),
    ):
        changed = {**outcome, "test_accuracy": accuracy, "images_per_class": {"test": images}}
        assert ("careful    " in result.last_lines(changed, folder)) is is_guessed


def test_the_codes_digest_changes_with_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddp_mnist.training.versions.__file__", str(tmp_path / "a" / "b.py"))
    (tmp_path / "train.py").write_text("a = 1\n")
    before = code_digest()
    (tmp_path / "train.py").write_text("a = 2\n")
    assert code_digest() != before


def test_the_commit_is_that_of_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    code = tmp_path / "ddp_mnist" / "summary.py"
    code.parent.mkdir()
    code.write_text("a = 1\n")
    monkeypatch.setattr("ddp_mnist.training.versions.__file__", str(code))
    assert git_commit() is None  # no checkout
    git("init", "-q")
    git("add", "ddp_mnist")
    git("commit", "-qm", "ours")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert git_commit() == commit
    code.write_text("a = 2\n")
    assert git_commit() == commit + "+"
