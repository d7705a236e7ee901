import json
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.system.files import read_json
from ddp_mnist.training import result
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.verbs.verify.watch import just_train, proof_config, resumed
from tests.commands import REPOSITORY
from tests.run_checks import metrics, stop, with_flags


def test_runs_can_be_ranked_by_their_summaries(tmp_path: Path) -> None:
    """By the loss of the weights that are kept, and by what was typed, before a stop too."""
    begun = proof_config(model="mlp", lr=0.02, patience=9)
    begun = with_flags(
        begun, typed=frozenset({"lr", "patience", "quiet", "keep", "mixed_precision"})
    )
    stop(begun, tmp_path, step=20)
    again = with_flags(resumed(begun, grad_accum=2), mixed_precision="fp64")
    [summary] = run_world(1, just_train, again, folder=tmp_path)
    assert summary["typed"] == ["--lr 0.02", "--patience 9", "--grad-accum 2"]
    assert summary["lr"] == 0.02
    best = max(metrics(tmp_path / "run", "val_loss"), key=lambda line: line["val_accuracy"])
    for name in ("val_accuracy", "val_loss"):
        assert summary[name] == best[name]
    assert summary == read_json(tmp_path / "run" / "summary.json")


@pytest.mark.usefixtures("here")
def test_the_lines_of_the_reference_rank_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for run, loss in (("a", 0.5), ("b", 0.25), ("c", None)):
        found = {"typed": [f"--lr {loss}"], "lr": loss, "val_loss": loss, "val_accuracy": 1.0}
        (folder := Path("runs", run)).mkdir(parents=True)
        (folder / "summary.json").write_text(json.dumps(found))
    Path("runs", "latest").symlink_to("c")
    page = (REPOSITORY / "docs" / "reference.md").read_text()
    exec(page.partition("```python\n")[2].partition("```")[0], {})
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert shown == ["b", "a", "c"]


def test_without_a_validation_nothing_is_said_of_it(tmp_path: Path) -> None:
    plain = with_flags(proof_config("plain", model="mlp", epochs=1, val_size=0), lr=0.01)
    plain = with_flags(plain, typed=frozenset({"mixed_precision", "val_size"}))
    [summary] = run_world(1, just_train, plain, folder=tmp_path)
    assert (summary["val_accuracy"], summary["val_loss"], summary["lr"]) == (None, None, 0.01)
    assert summary["typed"] == ["--val-size 0", "--mixed-precision fp64"]


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
