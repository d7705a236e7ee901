from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist import cli
from ddp_mnist.cluster.local import LocalWorld, run_world
from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.errors import CheckpointError, DdpMnistError, UsageError
from ddp_mnist.run import checkpoint, resume
from ddp_mnist.run.folder import FIRST_STATUS, read_json
from ddp_mnist.verify.watch import (
    Seen,
    just_train,
    largest_difference,
    proof_config,
    resumed,
    train_and_watch,
    train_until,
    weights_of,
)
from tests.chaos import leftovers, what_stays
from tests.test_sources import write_idx
from tests.training import what_it_says

# All that a checkpoint has to carry: parts of steps, random images, clipping, the best so far.
EVERYTHING: dict[str, Any] = {
    "model": "mlp",
    "epochs": 3,
    "batch_size": 72,
    "grad_accum": 2,
    "augment": True,
    "max_grad_norm": 1.0,
    "patience": 3,
}
STEPS = 45


def config(run_dir: str = "run", **recipe: Any) -> TrainConfig:
    """float32 on the digits, a checkpoint at each eighth step."""
    return TrainConfig(
        Run(dataset="digits", run_dir=run_dir, checkpoint_every=8, log_every=7, quiet=True),
        Recipe(**{**EVERYTHING, **recipe}),
        Distribution(cpu=True, mixed_precision="no", dist_timeout=30),
    )


def stop(told: TrainConfig, folder: Path, step: int, size: int = 1, by: int = 0) -> int:
    """The step at which a run stopped that got SIGTERM on rank `by` at `step`."""
    outcomes = LocalWorld(
        size, train_until, told, step, signal.SIGTERM, by, folder=folder
    ).outcomes()
    assert [getattr(outcome, "code", outcome) for outcome in outcomes] == [143] * size
    run = folder / str(told.run.run_dir)
    status = read_json(run / "status.json")
    assert (status["state"], status["exit_code"]) == ("preempted", 143)
    return checkpoint.step_of(checkpoint.newest_first(run)[0])


# --- Bit for bit


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(size: int, tmp_path: Path) -> None:
    run_world(size, just_train, config("unbroken"), folder=tmp_path)
    told = config("run")
    first = stop(told, tmp_path, step=20, size=size, by=size - 1)
    assert 20 < first <= 28  # they look up at each log line, if not before
    again = dataclasses.replace(resumed(told), typed=frozenset({"quiet"}))
    summaries = run_world(size, just_train, again, folder=tmp_path)
    assert summaries[0]["resumed_from"] == [first]
    assert summaries[0]["steps"] == STEPS
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")
    assert leftovers(tmp_path / "run") == []


@pytest.mark.parametrize(
    "recipe",
    [
        {"model": "cnn"},
        {"model": "cnn_bn", "patience": None},
        {"model": "cnn_deep", "optimizer": "muon"},
    ],
)
def test_the_convolutional_nets_too(recipe: dict[str, Any], tmp_path: Path) -> None:
    recipe = {**recipe, "epochs": 1, "augment": False}
    run_world(2, just_train, config("unbroken", **recipe), folder=tmp_path)
    told = config("run", **recipe)
    stop(told, tmp_path, step=5, size=2)
    run_world(2, just_train, resumed(told), folder=tmp_path)
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")


def test_taken_up_at_every_kind_of_step(tmp_path: Path) -> None:
    """After a few steps, at the last of an epoch, after the last of all: each a resume of one run.

    A checkpoint is put back that the unbroken run wrote, as if it had been killed then.
    """
    every = dataclasses.replace(config("unbroken").run, checkpoint_every=1, keep=STEPS)
    told = dataclasses.replace(config(), run=every)
    run_world(1, just_train, told, folder=tmp_path)
    unbroken = tmp_path / "unbroken"
    expected = what_stays(unbroken)
    kept = {checkpoint.step_of(p): p.read_bytes() for p in checkpoint.newest_first(unbroken)}
    assert sorted(kept) == list(range(1, STEPS + 1))
    status = json.dumps({**FIRST_STATUS})
    for step in (1, 14, 15, 16, 45):
        for path in checkpoint.newest_first(unbroken):
            path.unlink()
        (unbroken / "checkpoints" / f"step-{step:08d}.pt").write_bytes(kept[step])
        (unbroken / "status.json").write_text(status)
        (unbroken / "model.safetensors").unlink()
        [summary] = run_world(1, just_train, resumed(told), folder=tmp_path)
        assert summary["resumed_from"] == [step]
        assert what_stays(unbroken) == expected, f"taken up after step {step}"


def test_early_stop_and_best_weights_survive(tmp_path: Path) -> None:
    worse: dict[str, Any] = {
        "epochs": 40,
        "patience": 2,
        "lr": 0.05,
        "warmup": 0.9,
        "grad_accum": 1,
    }
    worse |= {"augment": False, "max_grad_norm": None}
    [unbroken] = run_world(1, just_train, config("unbroken", **worse), folder=tmp_path)
    assert unbroken["stopped_by"] == "--patience"
    told = config("run", **worse)
    assert stop(told, tmp_path, step=unbroken["steps"] - 20) < unbroken["steps"]
    [summary] = run_world(1, just_train, resumed(told), folder=tmp_path)
    for same in ("stopped_by", "steps", "epochs", "val_accuracy", "test_accuracy", "test_loss"):
        assert summary[same] == unbroken[same], same
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")


def test_patience_typed_on_resume_begins_to_look_for_the_best_weights(tmp_path: Path) -> None:
    """None were kept so far, so what is tested in the end is the best from here on."""
    recipe: dict[str, Any] = {"epochs": 8, "patience": None, "lr": 0.05, "warmup": 0.0}
    told = config(**recipe)
    run_world(1, just_train, told, folder=tmp_path)
    again = resumed(told, epochs=30, patience=2)
    [summary] = run_world(1, just_train, again, folder=tmp_path)
    assert summary["stopped_by"] == "--patience"
    lines = what_stays(tmp_path / "run")[1]
    seen = {line["epoch"]: line["val_accuracy"] for line in lines if "val_accuracy" in line}
    since = {epoch: accuracy for epoch, accuracy in seen.items() if epoch >= 8}
    assert len(since) >= 3
    assert summary["val_accuracy"] == max(since.values())
    assert max(since, key=lambda epoch: since[epoch]) == summary["epochs"] - 3


def typed(line: str) -> TrainConfig:
    return cli.train_config(line.split()[1:])


def test_a_preset_typed_again_leaves_the_run_as_it_was() -> None:
    """The run's own values were typed beside it when it began."""
    began = typed("train --preset accurate --dataset digits --model mlp --optimizer adamw")
    found = {
        "path": "run",
        "run": dataclasses.asdict(began.run),
        "recipe": dataclasses.asdict(began.recipe) | {"epochs": 4},
    }
    again = resume.inherit(typed("train --resume run --preset accurate"), found)
    assert (again.recipe.model, again.recipe.optimizer) == ("mlp", "adamw")
    assert again.recipe.epochs == 4
    with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
        resume.inherit(again, {**found, "recipe": {}})


def test_flags_that_contradict_those_of_the_run() -> None:
    began = TrainConfig(recipe=Recipe(model="cnn_bn", val_size=0))
    found: dict[str, Any] = {
        "path": "run",
        "run": dataclasses.asdict(began.run),
        "recipe": dataclasses.asdict(began.recipe),
    }
    again = TrainConfig(Run(resume="run"), distribution=Distribution(sync_bn=True))
    assert resume.inherit(again, found).recipe.model == "cnn_bn"
    found["recipe"]["model"] = "cnn"
    with pytest.raises(UsageError, match="--sync-bn: cnn has no BatchNorm"):
        resume.inherit(again, found)
    again = TrainConfig(
        Run(resume="run"), Recipe(patience=2), typed=frozenset({"resume", "patience"})
    )
    with pytest.raises(UsageError, match="--patience: needs validation images"):
        resume.inherit(again, found)


def test_a_run_of_another_version_is_called_that(tmp_path: Path) -> None:
    told = config(epochs=1)
    run_world(1, just_train, told, folder=tmp_path)
    path = tmp_path / "run" / "config.json"
    written = json.loads(path.read_text())
    path.write_text(json.dumps({**written, "format": 1}))
    again = TrainConfig(Run(resume=str(tmp_path / "run")))
    with pytest.raises(CheckpointError, match=r"another version of ddp_mnist \(format 1, this is"):
        resume.find(again)


# --- On another number of processes


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_the_rest_of_the_samples_in_order_on_another_world_size(
    before: int, after: int, tmp_path: Path
) -> None:
    whole = run_world(1, train_and_watch, proof_config("whole", model="mlp"), folder=tmp_path)[0]
    told = proof_config("run", model="mlp")
    step = stop(told, tmp_path, step=20, size=before)
    ranks: list[Seen] = run_world(after, train_and_watch, resumed(told), folder=tmp_path)
    # Each step's images, dealt out to the ranks, are those of the unbroken run, from there on.
    assert len(ranks[0].images) == 45 - step
    steps = zip(*(rank.images for rank in ranks), strict=True)
    assert [[n for share in shares for n in share] for shares in steps] == whole.images[step:]
    assert ranks[0].learning_rates == whole.learning_rates[step:]
    summary = ranks[0].summary
    assert (summary["world_size"], summary["resumed_from"]) == (after, [step])
    assert largest_difference(weights_of(tmp_path / "run"), weights_of(tmp_path / "whole")) < 1e-9


def test_other_machines_need_no_run_folder(tmp_path: Path) -> None:
    told = config(epochs=2)
    stop(told, tmp_path, step=10, size=2)
    outcomes = LocalWorld(2, _train_elsewhere, resumed(told), folder=tmp_path).results()
    assert outcomes[0]["resumed_from"] == outcomes[1]["resumed_from"] != []
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("rank")] == ["rank1"]
    assert list((tmp_path / "rank1").iterdir()) == []


def _train_elsewhere(told: TrainConfig) -> dict[str, Any]:
    import os

    if os.environ["RANK"] == "1":
        Path("rank1").mkdir()
        os.chdir("rank1")
    return just_train(told)


# --- What may change, and what may not


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, Path]:
    folder = tmp_path_factory.mktemp("stopped")
    told = config(epochs=3)
    stop(told, folder, step=20)
    return told, folder


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ({"model": "cnn"}, "--model cnn: "),
        ({"batch_size": 48}, "--batch-size 48: "),
        ({"lr": 0.02}, "--lr 0.02: "),
        ({"weight_decay": 0.0}, "--weight-decay 0.0: "),
        ({"warmup": 0.5}, "--warmup 0.5: "),
        ({"label_smoothing": 0.0}, "--label-smoothing 0.0: "),
        ({"augment": False}, "--augment False: "),
        ({"val_size": 100}, "--val-size 100: "),
        ({"max_grad_norm": 2.0}, "--max-grad-norm 2.0: "),
    ],
)
def test_fault_08_another_recipe_is_refused_by_name(
    typed: dict[str, Any], shown: str, stopped: tuple[TrainConfig, Path]
) -> None:
    told, folder = stopped
    before = snapshot(folder)
    [error] = LocalWorld(1, just_train, resumed(told, **typed), folder=folder).outcomes()
    assert isinstance(error, CheckpointError)
    assert str(error).startswith(shown)
    assert "was made with" in str(error)
    assert snapshot(folder) == before


def test_fault_08_another_seed_data_set_or_dtype_is_refused_by_name(
    stopped: tuple[TrainConfig, Path], tmp_path: Path
) -> None:
    told, folder = stopped
    again = resumed(told)
    seed = dataclasses.replace(
        again, run=dataclasses.replace(again.run, seed=1), typed=frozenset({"seed"})
    )
    from PIL import Image

    for split in ("train", "test"):
        for label in range(10):
            for number in range(20):
                path = tmp_path / "images" / split / str(label) / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("L", (28, 28), number + label).save(path)
    data = dataclasses.replace(
        again,
        run=dataclasses.replace(again.run, dataset=str(tmp_path / "images")),
        typed=frozenset({"dataset"}),  # of fewer images than the run's --val-size
    )
    double = dataclasses.replace(
        again, distribution=dataclasses.replace(again.distribution, mixed_precision="fp64")
    )
    for other, shown in (
        (seed, "--seed 1: "),
        (data, f"--dataset {tmp_path / 'images'}: "),
        (double, "--mixed-precision fp64: "),
    ):
        [error] = LocalWorld(1, just_train, other, folder=folder).outcomes()
        assert isinstance(error, CheckpointError), error
        assert str(error).startswith(shown), error


def test_fewer_epochs_than_are_done_are_refused(stopped: tuple[TrainConfig, Path]) -> None:
    told, folder = stopped
    before = snapshot(folder)
    [error] = LocalWorld(1, just_train, resumed(told, epochs=1), folder=folder).outcomes()
    assert isinstance(error, UsageError)
    assert str(error).startswith("--epochs 1: the run is beyond them, at step ")
    assert str(error).endswith("ask for at least 2")
    assert snapshot(folder) == before


def test_processes_that_do_not_divide_the_batch_are_refused(
    stopped: tuple[TrainConfig, Path],
) -> None:
    told, folder = stopped
    outcomes = LocalWorld(5, just_train, resumed(told), folder=folder).outcomes()
    assert {error.code for error in outcomes} == {2}
    [told_by] = [error for error in outcomes if error.agreed]
    assert str(told_by) == (
        "--resume run: its batch of 72 does not divide by 10, for 5 processes x --grad-accum 2;"
        " use 1, 2, 3, 4, 6, 9, 12, 18, 36 processes"
    )


def test_fault_08_what_changed_is_said_in_one_line(tmp_path: Path) -> None:
    told = config(epochs=2, patience=None)
    step = stop(told, tmp_path, step=10)
    loud = resumed(told, epochs=3, grad_accum=1)
    loud = dataclasses.replace(loud, run=dataclasses.replace(loud.run, quiet=False, log_every=5))
    loud = dataclasses.replace(loud, typed=loud.typed | {"log_every"})
    console, silent = run_world(2, what_it_says, loud, folder=tmp_path)
    assert silent == ""
    [line] = [line for line in console.splitlines() if line.startswith("resumed ")]
    for part in (
        f"after step {step}; changed: --log-every 7 -> 5",
        "--epochs 2 -> 3 (another schedule of the rate from here on)",
        "--grad-accum 2 -> 1",
        "world size 1 -> 2",
        "--backend none -> gloo",
    ):
        assert part in line
    # the checkpoints' step and what was not typed stayed: no other flag is named
    assert "--lr" not in line
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["epochs"], summary["steps"]) == (3, 45)


# --- Which folder, and whether there is anything to do


def test_a_finished_run_is_one_line_and_untouched(tmp_path: Path) -> None:
    told = config(epochs=1)
    run_world(1, just_train, told, folder=tmp_path)
    before = snapshot(tmp_path)
    auto = dataclasses.replace(told, run=dataclasses.replace(told.run, resume="auto", quiet=False))
    named = resumed(auto)
    for again in (
        auto,
        dataclasses.replace(named, run=dataclasses.replace(named.run, quiet=False)),
    ):
        [console] = run_world(1, what_it_says, again, folder=tmp_path)
        [line] = console.splitlines()
        assert line.startswith("run: finished already, after epoch 1, test accuracy 0.")
        assert line.endswith("; to go on, change --epochs")
        assert snapshot(tmp_path) == before


def test_a_finished_run_is_not_taken_for_another_one(tmp_path: Path) -> None:
    told = config(epochs=1)
    run_world(1, just_train, told, folder=tmp_path)
    before = snapshot(tmp_path)

    def typed(**flags: Any) -> TrainConfig:
        again = resumed(told)
        names = {field.name for field in dataclasses.fields(Run)}
        run = {name: value for name, value in flags.items() if name in names}
        recipe = {name: value for name, value in flags.items() if name not in names}
        return dataclasses.replace(
            again,
            run=dataclasses.replace(again.run, **{"dataset": "auto", "quiet": False, **run}),
            recipe=dataclasses.replace(again.recipe, **recipe),
            typed=frozenset(flags),
        )

    others = {
        "--lr 0.02: run was made with 0.01; leave": typed(lr=0.02),
        "--seed 1: run was made with 0; leave": typed(seed=1),
        "--preset accurate: run was made with fast; leave": typed(preset="accurate"),
        "--augment False: run was made with True; leave": typed(augment=False),
        "--dataset mnist: run was made with digits; leave": typed(dataset="mnist"),
        f"--dataset {tmp_path / 'other'}: its images are not": typed(
            dataset=str(write_idx(tmp_path / "other"))
        ),
    }
    for begins, other in others.items():
        [error] = LocalWorld(1, just_train, other, folder=tmp_path).outcomes()
        assert isinstance(error, CheckpointError), begins
        assert str(error).startswith(begins)
    # The same data under another name, be it gone since, is not looked at again.
    assert [resume._same_place(name, "ylecun/mnist") for name in ("mnist", "digits")] == [
        True,
        False,
    ]
    home = Path.home() / "gone"
    assert resume._same_place("~/gone", str(home)) and resume._same_place(str(home), str(home))
    assert resume._same_place(os.path.relpath(home), str(home)) and not resume._same_place(
        "gone", str(home)
    )
    same = typed(lr=0.01, seed=0, dataset="digits", batch_size=72, log_every=3, epochs=1)
    [console] = run_world(1, what_it_says, same, folder=tmp_path)
    assert console.startswith("run: finished already, after epoch 1")
    shutil.rmtree(tmp_path / "other")
    assert snapshot(tmp_path) == before


def test_more_epochs_go_on_with_a_finished_run(tmp_path: Path) -> None:
    told = config(epochs=1)
    run_world(1, just_train, told, folder=tmp_path)
    [summary] = run_world(1, just_train, resumed(told, epochs=2), folder=tmp_path)
    assert (summary["epochs"], summary["steps"], summary["resumed_from"]) == (2, 30, [15])


def test_auto_begins_and_begins_again_where_nothing_was_saved(tmp_path: Path) -> None:
    told = config("run", epochs=1)
    auto = dataclasses.replace(told, run=dataclasses.replace(told.run, resume="auto"))
    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text(json.dumps(FIRST_STATUS))
    (run / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    (run / ".config.json.1-2.tmp").write_text("{")
    [summary] = run_world(1, just_train, auto, folder=tmp_path)
    assert (summary["resumed_from"], summary["steps"]) == ([], 15)
    steps = [line["step"] for line in what_stays(run)[1]]
    assert steps == [7, 14, 15, 15, 15]  # three of its epoch, validation, test
    assert leftovers(run) == []


def test_latest_may_lead_elsewhere_meanwhile(tmp_path: Path) -> None:
    told = config("runs/a", epochs=2)
    stop(told, tmp_path, step=5)
    latest = tmp_path / "runs" / "latest"
    assert latest.readlink() == Path("a")
    by_link = resumed(dataclasses.replace(told, run=dataclasses.replace(told.run, run_dir="x")))
    by_link = dataclasses.replace(
        by_link, run=dataclasses.replace(by_link.run, resume="runs/latest")
    )
    world = LocalWorld(1, _move_latest_then_train, by_link, folder=tmp_path)
    assert world.results()[0]["steps"] == 30
    assert sorted(path.name for path in (tmp_path / "runs" / "b").iterdir()) == []
    assert read_json(tmp_path / "runs" / "a" / "status.json")["state"] == "finished"


def _move_latest_then_train(told: TrainConfig) -> dict[str, Any]:
    from unittest.mock import patch

    from ddp_mnist import train

    build = train.build_model

    def move(*args: Any) -> Any:
        if not Path("runs/b").exists():
            Path("runs/b").mkdir()
            Path("runs/latest").unlink()
            Path("runs/latest").symlink_to("b")
        return build(*args)

    with patch.object(train, "build_model", move):
        return just_train(told)


def test_a_folder_is_found_under_any_spelling(tmp_path: Path) -> None:
    told = config(epochs=1)
    stop(told, tmp_path, step=5)
    again = resumed(told)
    spelt = dataclasses.replace(again, run=dataclasses.replace(again.run, resume="./run/"))
    [summary] = run_world(1, just_train, spelt, folder=tmp_path)
    assert summary["steps"] == 15


def test_one_command_begins_goes_on_and_is_done(tmp_path: Path) -> None:
    """What a scheduler does that queues a preempted job again."""
    told = config("run", epochs=2)
    auto = dataclasses.replace(told, run=dataclasses.replace(told.run, resume="auto"))
    auto = dataclasses.replace(auto, typed=frozenset({"dataset", "epochs", "batch_size"}))
    first = stop(auto, tmp_path, step=3, size=2)
    second = stop(auto, tmp_path, step=20, size=2, by=1)
    [summary, _] = run_world(2, just_train, auto, folder=tmp_path)
    assert summary["resumed_from"] == [first, second]
    assert run_world(2, just_train, auto, folder=tmp_path) == [{}, {}]
    run_world(2, just_train, config("unbroken", epochs=2), folder=tmp_path)
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")


def test_times_are_summed_over_the_parts(tmp_path: Path) -> None:
    told = config(epochs=2)
    stop(told, tmp_path, step=10)
    run = tmp_path / "run"
    newest = checkpoint.newest_first(run)[0]
    content = checkpoint.from_bytes(newest.read_bytes(), newest)
    content["state"]["progress"] |= {"train_seconds": 1000.0, "total_seconds": 3000.0}
    newest.write_bytes(checkpoint.to_bytes(content))
    [summary] = run_world(1, just_train, resumed(told), folder=tmp_path)
    assert 1000 < summary["train_seconds"] < 1060
    assert 3000 < summary["total_seconds"] < 3060


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"resume": "auto"}, "--resume auto: needs --run-dir"),
        ({"resume": "a", "run_dir": "b"}, "--resume a: goes on in that folder; leave out"),
    ],
)
def test_flags_that_contradict_each_other(flags: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        TrainConfig(Run(**flags))  # type: ignore[arg-type]


def test_fault_07_no_run_or_a_damaged_one(tmp_path: Path) -> None:
    told = config(epochs=1)
    outcomes = [LocalWorld(1, just_train, resumed(told), folder=tmp_path).outcomes()[0]]
    run_world(1, just_train, told, folder=tmp_path)
    run = tmp_path / "run"
    (run / "status.json").write_text(json.dumps(FIRST_STATUS))
    good = (run / "config.json").read_text()
    for damage in ("", "{}", "[]", '{"run": 1, "recipe": {}, "run_id": "x"}', good[:100]):
        (run / "config.json").write_text(damage)
        outcomes += LocalWorld(1, just_train, resumed(told), folder=tmp_path).outcomes()
    (run / "config.json").write_text(good)
    newest, *_ = checkpoint.newest_first(run)
    for path in checkpoint.newest_first(run):
        path.write_bytes(path.read_bytes()[:-1])
    outcomes += LocalWorld(1, just_train, resumed(told), folder=tmp_path).outcomes()
    for path in run.glob("checkpoints/*"):
        path.unlink()
    outcomes += LocalWorld(1, just_train, resumed(told), folder=tmp_path).outcomes()
    assert len(outcomes) == 8
    for error in outcomes:
        assert isinstance(error, DdpMnistError), error
        assert error.code == 4, error
    assert str(outcomes[0]).startswith("--resume run: run holds no run to go on with")
    assert str(outcomes[-2]).startswith(f"run/checkpoints/{newest.name}: is damaged or cut short")
    assert "holds no complete checkpoint" in str(outcomes[-1])


def test_fault_07_a_checkpoint_of_another_run_or_step_is_never_taken(tmp_path: Path) -> None:
    for name, epochs in (("run", 2), ("other", 2)):
        told = config(name, epochs=epochs)
        stop(told, tmp_path, step=10)
    told = config("run", epochs=2)
    newest = checkpoint.newest_first(tmp_path / "run")[0]
    theirs = checkpoint.newest_first(tmp_path / "other")[0]
    own = newest.read_bytes()
    newest.with_name(theirs.name).write_bytes(theirs.read_bytes())
    if newest.name != theirs.name:
        newest.unlink()
    [error] = LocalWorld(1, just_train, resumed(told), folder=tmp_path).outcomes()
    assert isinstance(error, CheckpointError)
    assert "belongs to another run" in str(error)
    newest.with_name("step-00000029.pt").write_bytes(own)
    [error] = LocalWorld(1, just_train, resumed(told), folder=tmp_path).outcomes()
    assert isinstance(error, CheckpointError)
    assert "is that of another step" in str(error)
