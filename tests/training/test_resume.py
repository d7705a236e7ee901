import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ddp_mnist import api, cli
from ddp_mnist.cluster import device
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.flag_fields import flag_values
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import CheckpointError, DdpMnistError, UsageError
from ddp_mnist.system.files import CHANGED, read_json
from ddp_mnist.training import checkpoint, resume
from ddp_mnist.training.folder import STARTING
from ddp_mnist.verbs.verify import watch
from ddp_mnist.verbs.verify.watch import RankRecord, just_train, resumed
from tests.chaos import leftovers, what_stays
from tests.commands import Typed
from tests.data_sets import few_digits, write_idx
from tests.run_checks import apart, metrics, stop, what_it_says, with_flags

# All that a checkpoint has to carry: parts of steps, random images, clipping, the best so far.
EVERYTHING: dict[str, Any] = {"model": "mlp", "epochs": 2, "batch_size": 72, "grad_accum": 2}
EVERYTHING |= {"augment": True, "max_grad_norm": 1.0, "patience": 3}
STEPS = 30


def config(run_dir: str = "run", **recipe: Any) -> TrainConfig:
    """Return a run in float32 on the digits, with a checkpoint at each eighth step."""
    run = {"dataset": "digits", "run_dir": run_dir, "checkpoint_every": 8, "log_every": 7}
    world = {"cpu": True, "mixed_precision": "no", "dist_timeout": 30, "quiet": True}
    return with_flags(TrainConfig(), **run, **world, **{**EVERYTHING, **recipe})


def refusals(configs: list[TrainConfig], folder: Path, untouched: bool = True) -> list[str]:
    """Return the lines with which one process refuses each, with code 4, and changes no file."""
    before = snapshot(folder)
    [outcomes] = run_world(1, train_each, configs, folder=folder)
    assert {type(outcome) for outcome in outcomes} == {CheckpointError}, outcomes
    assert not untouched or snapshot(folder) == before
    return [str(outcome) for outcome in outcomes]


def train_each(configs: list[TrainConfig]) -> list[DdpMnistError | None]:
    """Return the error that each ends with."""
    errors: list[DdpMnistError | None] = []
    for config in configs:
        try:
            just_train(config)
            errors.append(None)
        except DdpMnistError as error:
            errors.append(error.with_traceback(None))
    return errors


def snapshot(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- Bit for bit


def test_a_resumed_run_is_the_unbroken_one_bit_for_bit(tmp_path: Path) -> None:
    """On three processes, whose sums of gradients depend on DDP's buckets.

    The tests below are of one and of two.
    """
    run_world(3, just_train, config("unbroken"), folder=tmp_path)
    first = stop(config(), tmp_path, step=10, size=3, by=2)
    assert 10 < first <= 18  # there is a sync point at each log line, if not before
    again = with_flags(resumed(config()), typed=frozenset({"quiet"}))
    summaries = run_world(3, just_train, again, folder=tmp_path)
    assert (summaries[0]["resumed_from"], summaries[0]["steps"]) == ([first], STEPS)
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")
    assert leftovers(tmp_path / "run") == []


def test_a_resumed_run_keeps_a_precision_that_it_is_not_given_again(tmp_path: Path) -> None:
    """As make resumes it, where auto means bf16; and then in another that is typed."""
    run_world(2, just_train, config("unbroken"), folder=tmp_path)
    stop(config(), tmp_path, step=10, size=2)
    again = with_flags(resumed(config()), mixed_precision="auto")
    [summary, _] = run_world(2, _where_bf16_is, again, folder=tmp_path)
    assert summary["precision"] == read_json(tmp_path / "run/summary.json")["precision"] == "no"
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")
    typed = {"mixed_precision": "bf16", "quiet": False}
    longer = with_flags(resumed(config(), epochs=3), **typed)
    shown, _ = run_world(2, what_it_says, longer, folder=tmp_path)
    assert "--mixed-precision no -> bf16" in shown
    assert read_json(tmp_path / "run/config.json")["distribution"]["mixed_precision"] == "bf16"


def _where_bf16_is(config: TrainConfig) -> dict[str, Any]:
    with patch.object(device, "has_native_bf16", lambda _: True):
        assert device.choose_device(config.distribution, Launch()).precision == "bf16"
        return just_train(config)


def test_one_command_begins_goes_on_twice_and_is_done_bit_for_bit(tmp_path: Path) -> None:
    """A scheduler that queues a preempted job of two processes again needs no other command.

    The first attempt was killed before it had saved anything.
    """
    run = tmp_path / "run"
    run.mkdir()
    (run / "status.json").write_text(json.dumps(STARTING))
    (run / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    (run / ".config.json.1-2.tmp").write_text("{")
    auto = with_flags(config(), resume="auto", typed=frozenset({"dataset", "epochs", "batch_size"}))
    first = stop(auto, tmp_path, step=3, size=2)
    second = stop(auto, tmp_path, step=14, size=2, by=1)
    [summary, _] = run_world(2, just_train, with_flags(auto, run_dir="./run/"), folder=tmp_path)
    assert summary["resumed_from"] == [first, second]
    assert run_world(2, just_train, auto, folder=tmp_path) == [{}, {}]
    run_world(2, just_train, config("unbroken"), folder=tmp_path)
    assert what_stays(run) == what_stays(tmp_path / "unbroken")
    assert leftovers(run) == []


def test_resumed_after_every_kind_of_step(tmp_path: Path) -> None:
    """After the first step, at the last of an epoch, after the last of all.

    A checkpoint is put back that the unbroken run wrote, as if it had been killed then, after more
    seconds than it took: those of the parts are added up.
    """
    every = with_flags(config("unbroken"), checkpoint_every=1, keep=STEPS)
    run_world(1, just_train, every, folder=tmp_path)
    unbroken = tmp_path / "unbroken"
    expected, lines = what_stays(unbroken), (unbroken / "metrics.jsonl").read_bytes()
    kept = {checkpoint.step_of(p): p.read_bytes() for p in checkpoint.newest_first(unbroken)}
    assert sorted(kept) == list(range(1, 31))
    for step in (1, 15, 30):
        for path in checkpoint.newest_first(unbroken):
            path.unlink()
        content = checkpoint.from_bytes(kept[step], step)
        content["state"]["progress"] |= {"train_seconds": 1000.0, "total_seconds": 3000.0}
        checkpoint.save(unbroken, step, content, keep=1)
        (unbroken / "status.json").write_text(json.dumps(STARTING))
        (unbroken / "metrics.jsonl").write_bytes(lines)
        (unbroken / "model.safetensors").unlink()
        [summary] = run_world(1, just_train, resumed(every), folder=tmp_path)
        assert summary["resumed_from"] == [step]
        assert 1000 <= summary["train_seconds"] < 1060
        assert 3000 < summary["total_seconds"] < 3060
        assert what_stays(unbroken) == expected, f"resumed after step {step}"


def test_early_stop_and_best_weights_survive(tmp_path: Path) -> None:
    worse: dict[str, Any] = {"epochs": 40, "patience": 2, "lr": 0.05, "warmup": 0.9}
    worse |= {"grad_accum": 1, "augment": False, "max_grad_norm": None}
    [unbroken] = run_world(1, just_train, config("unbroken", **worse), folder=tmp_path)
    assert unbroken["stopped_by"] == "--patience"
    accuracies = [line["val_accuracy"] for line in metrics(tmp_path / "unbroken", "val_accuracy")]
    assert len(accuracies) == accuracies.index(max(accuracies)) + 3
    assert unbroken["val_accuracy"] == max(accuracies)
    for split, accuracy in (("validation", max(accuracies)), ("test", unbroken["test_accuracy"])):
        found = api.evaluate(tmp_path / "unbroken", split=split)
        assert found and found["accuracy"] == accuracy
    last = unbroken["steps"]
    assert stop(config(**worse), tmp_path, step=last - 20) < last
    [summary] = run_world(1, just_train, resumed(config(**worse)), folder=tmp_path)
    for same in ("stopped_by", "epochs", "val_accuracy"):
        assert summary[same] == unbroken[same], same
    assert what_stays(tmp_path / "run") == what_stays(tmp_path / "unbroken")


# --- What is inherited


def test_a_preset_typed_again_leaves_the_run_as_it_was() -> None:
    """The run's own values were typed beside it when it began."""
    line = "--preset accurate --dataset digits --model mlp --optimizer adamw"
    began = cli.train_config(line.split())
    saved = {"run": flag_values(began.run), "recipe": flag_values(began.recipe) | {"epochs": 4}}
    again = cli.train_config(["--resume", "run", "--preset", "accurate"])
    recipe = resume.inherit(again, resume.EarlierRun("run", saved)).recipe
    assert (recipe.model, recipe.optimizer, recipe.epochs) == ("mlp", "adamw", 4)


# --- On another number of processes


in_float64 = partial(watch.proof_config, model="mlp", epochs=2)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RankRecord]:
    """Return an unbroken run of one process in float64, and what was seen of it."""
    folder = tmp_path_factory.mktemp("watched")
    [seen] = run_world(1, watch.train_and_watch, in_float64(), folder=folder)
    return folder / "run", seen


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_the_rest_of_the_samples_in_order_on_another_world_size(
    before: int, after: int, watched: tuple[Path, RankRecord], tmp_path: Path
) -> None:
    unbroken, whole = watched
    began = in_float64()
    step = stop(began, tmp_path, step=20, size=before)
    ranks: list[RankRecord] = run_world(after, _watch_elsewhere, resumed(began), folder=tmp_path)
    assert watch.per_step(ranks) == watch.per_step([whole])[step:]
    assert ranks[0].learning_rates == whole.learning_rates[step:]
    summary = ranks[0].summary
    assert (summary["world_size"], summary["resumed_from"]) == (after, [step])
    assert apart(tmp_path / "run", unbroken) < 1e-9
    assert len([*tmp_path.glob("rank*")]) == after - 1
    assert [*tmp_path.glob("rank*/*")] == []


def _watch_elsewhere(config: TrainConfig) -> RankRecord:
    """Train as on machines of their own: only rank 0 finds the run folder, and writes it."""
    if rank := int(os.environ.get("RANK", 0)):
        Path(f"rank{rank}").mkdir()
        os.chdir(f"rank{rank}")
    return watch.train_and_watch(config)


# --- What may change, and what may not


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that stopped after step 20 of 30."""
    folder = tmp_path_factory.mktemp("stopped")
    stop(config(), folder, step=20)
    return folder


def test_fault_08_another_recipe_seed_data_set_or_dtype_is_refused_by_name(
    stopped: Path, tmp_path: Path
) -> None:
    others = {"model": "cnn", "batch_size": 48, "lr": 0.02, "weight_decay": 0.0, "warmup": 0.5}
    others |= {"label_smoothing": 0.0, "val_size": 100, "max_grad_norm": 2.0, "augment": False}
    others |= {"seed": 1, "mixed_precision": "fp64", "preset": "accurate", "inject": "epoch"}
    others |= {"dataset": str(write_idx(tmp_path / "images"))}  # fewer than the run's --val-size
    again = resumed(config())
    typed = [with_flags(again, **{n: v}, typed=frozenset({n})) for n, v in others.items()]
    for (name, value), line in zip(others.items(), refusals(typed, stopped), strict=True):
        flag = "--no-augment" if name == "augment" else f"--{name.replace('_', '-')} {value}"
        assert line.startswith(f"{flag}: ")
        assert "was made with" in line or name == "dataset"
    [[error]] = run_world(1, train_each, [resumed(config(), epochs=1)], folder=stopped)
    assert isinstance(error, UsageError)
    assert str(error).startswith("--epochs 1: the run is already beyond that, at step ")
    assert str(error).endswith("ask for at least 2")


def test_fault_08_what_changed_is_said_in_one_line(tmp_path: Path) -> None:
    began = config(epochs=1, patience=None)
    step = stop(began, tmp_path, step=5)
    loud = resumed(began, epochs=2, grad_accum=1)
    loud = with_flags(loud, quiet=False, log_every=5, typed=loud.typed | {"log_every"})
    shown, silent = run_world(2, what_it_says, loud, folder=tmp_path)
    assert silent == ""
    [line] = [line for line in shown.splitlines() if line.startswith("resumed ")]
    for part in (
        f"after step {step}; changed: --log-every 7 -> 5",
        "--epochs 1 -> 2 (another learning-rate schedule from here on)",
        "--grad-accum 2 -> 1",
        "world size 1 -> 2",
        "--backend none -> gloo",
    ):
        assert part in line
    assert "--lr" not in line  # what was not typed stayed
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (summary["epochs"], summary["steps"]) == (2, 30)


def test_a_run_from_before_a_flag_was_added_goes_on_without_it(
    stopped: Path, tmp_path: Path
) -> None:
    """So a new flag makes no earlier run unreadable; its default has to mean: as before."""
    run = Path(shutil.copytree(stopped / "run", tmp_path / "run"))
    saved = read_json(run / "config.json")
    for group, name in (("recipe", "class_weights"), ("recipe", "task"), ("run", "grey")):
        del saved[group][name]
    (run / "config.json").write_text(json.dumps(saved))
    said = run_world(1, what_it_says, with_flags(resumed(config()), quiet=False), folder=tmp_path)
    assert re.search(r"^resumed    after step \d+; nothing changed$", said[0], re.MULTILINE)
    assert read_json(run / "config.json")["recipe"]["class_weights"] == "none"
    [_] = run_world(1, just_train, config("unbroken"), folder=tmp_path)
    assert what_stays(run) == what_stays(tmp_path / "unbroken")


# --- Which folder, and whether there is anything to do


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a finished run, which `--resume auto` began where there was none."""
    folder = tmp_path_factory.mktemp("finished")
    auto = with_flags(config(epochs=1), resume="auto")
    [summary] = run_world(1, just_train, auto, folder=folder)
    assert (summary["resumed_from"], summary["steps"]) == ([], 15)
    return folder


def test_a_finished_run_is_one_line_and_untouched(finished: Path) -> None:
    """A link is read once: from there on the run is the folder that it led to."""
    (finished / "latest").symlink_to("run")
    before = snapshot(finished)
    auto = with_flags(config(epochs=1), resume="auto", quiet=False)
    named = with_flags(resumed(auto), quiet=False)
    typed = {"lr": 0.01, "seed": 0, "batch_size": 72, "log_every": 3, "epochs": 1}
    same = with_flags(named, **typed, typed=frozenset(typed))
    for again in (auto, named, with_flags(named, resume="latest"), same):
        [line] = run_world(1, what_it_says, again, folder=finished)[0].splitlines()
        assert line.startswith("run: finished already, after epoch 1, test accuracy 0.")
        assert line.endswith("; to train longer, change --epochs")
    assert snapshot(finished) == before


# --- Folders that hold no run to resume


def test_fault_07_no_run_or_a_damaged_one(finished: Path, tmp_path: Path) -> None:
    again = [resumed(config(epochs=1))]
    [line] = refusals(again, tmp_path)
    assert line.startswith("--resume run: run holds no run to resume (config.json: ")
    run = Path(shutil.copytree(finished / "run", tmp_path / "run"))
    (run / "status.json").write_text(json.dumps(STARTING))
    no_run = "run holds no run to resume"
    good, unsealed = (run / "config.json").read_text(), json.dumps(read_json(run / "config.json"))
    for damage, line in {
        "": f"{no_run} (config.json: is damaged, or not a JSON object; put it back); there is",
        "{}": f"{no_run} (run: 'format'); ",
        "[]": f"{no_run} (config.json: is damaged, or not a JSON object; put it back); ",
        good[:100]: f"{no_run} (config.json: is damaged, or not a JSON object; put it back); ",
        good.replace('"seed": 0', '"seed": 1'): f"{no_run} (config.json: {CHANGED}; put it back)",
    }.items():
        (run / "config.json").write_text(damage)
        assert refusals(again, tmp_path)[0].startswith(f"--resume run: {line}")
    of_others = {
        '"format": 1': "--resume run: is of another version of ddp_mnist (format 1); resume it",
        '"rl"': "--resume run: is of another version of ddp_mnist (--rl); resume it with that",
    }
    for (theirs, line), ours in zip(of_others.items(), ('"format": 13', '"lr"'), strict=True):
        (run / "config.json").write_text(unsealed.replace(ours, theirs))
        assert refusals(again, tmp_path)[0].startswith(line)
    (run / "config.json").write_text(good)
    newest, *_ = saved = checkpoint.newest_first(run)
    for path in saved:
        path.write_bytes(path.read_bytes()[:-1])
    [line] = refusals(again, tmp_path, untouched=False)
    assert line.startswith(f"run: holds no complete checkpoint ({newest.name} is damaged or cut ")


def test_fault_07_a_checkpoint_of_another_run_or_step_is_never_taken(
    stopped: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(stopped / "run", tmp_path / "run"))
    newest = checkpoint.newest_first(run)[0]
    step, own = checkpoint.step_of(newest), newest.read_bytes()
    again = [resumed(config())]
    newest.with_name("step-00000025.pt").write_bytes(own)
    [line] = refusals(again, tmp_path, untouched=False)
    told = "run/checkpoints/step-00000025.pt: belongs to another run, or to another step; move it "
    assert line.startswith(told)
    theirs = checkpoint.from_bytes(own, newest) | {"run_id": "of another run"}
    checkpoint.save(run, 25, theirs | {"state": {"progress": {"step": 25}}}, keep=9)
    assert refusals(again, tmp_path, untouched=False) == [line]
    checkpoint.save(run, 25, {"weights": 1}, keep=9)
    [line] = refusals(again, tmp_path, untouched=False)
    assert line.startswith("run/checkpoints/step-00000025.pt: is not from ddp_mnist: KeyError")
    assert step < 25


def test_a_finished_run_knows_its_images_in_a_folder_that_was_moved(
    here: Path, typed: Typed
) -> None:
    """As the run read them: flags that are not typed are its own."""
    few_digits(here / "few", 150, 20)
    command = ["train", "--dataset", "few", "--model", "mlp", "--epochs", "1", "--quiet"]
    assert typed(*command, "--image-size", "20", "--run-dir", "run").code == 0
    Path("few").rename("moved")
    printed = typed("train", "--dataset", "moved", "--resume", "run").succeeds()
    assert "run: finished already" in printed
    ended = typed("train", "--dataset", "moved", "--image-size", "24", "--resume", "run")
    assert ended.err.startswith("ddp-mnist: error: --image-size 24: run was made with 20; leave it")
    few_digits(here / "other", 151, 20)
    ended = typed("train", "--dataset", "other", "--resume", "run", "--epochs", "2")
    assert ended.err.startswith("ddp-mnist: error: --dataset other: not the images of run; name ")
