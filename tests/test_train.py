import contextlib
import io
import json
import os
import signal
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.recipe import resolve_recipe
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.errors import DdpMnistError
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify import watch
from tests.commands import Typed
from tests.data_sets import write_idx
from tests.run_checks import apart, check_equal, metrics, what_it_says, with_flags

STEPS = 45
OneProcess = tuple[Path, watch.RankRecord]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """The run that all others are compared with, and what was seen of it."""
    folder = tmp_path_factory.mktemp("alone")
    [seen] = run_world(1, watch.train_and_watch, watch.proof_config(), folder=folder)
    return folder / "run", seen


@pytest.mark.parametrize("size", [2, 3])
def test_n_processes_equal_one(size: int, one_process: OneProcess, tmp_path: Path) -> None:
    reference, alone = one_process
    ranks = run_world(size, watch.train_and_watch, watch.proof_config(), folder=tmp_path)
    assert watch.per_step(ranks) == watch.per_step([alone])
    assert len(alone.images) == STEPS
    assert all(seen.learning_rates == alone.learning_rates for seen in ranks)
    assert [seen.summary["test_count"] for seen in ranks] == [360] * size
    assert ranks[0].summary["confusion"] == alone.summary["confusion"]
    check_equal(tmp_path / "run", reference, size)  # the logged losses are those of all processes


def test_every_rank_tests_with_rank_0s_statistics(here: Path, typed: Typed) -> None:
    """Ranks' BatchNorm differs after the last step, unless a validation's forward has sent it."""
    config = watch.proof_config(model="cnn_bn", epochs=1, val_size=0)
    [summary, _] = run_world(2, watch.just_train, config, folder=here)
    found = json.loads(typed("evaluate", "run", "--json").out)
    assert found["loss"] == pytest.approx(summary["test_loss"], rel=1e-9)


def test_accumulation_changes_no_result_nor_do_augmentation_and_clipping_break_it(
    tmp_path: Path,
) -> None:
    """Three micro-batches per step, on two processes, against whole steps on one; all clipped."""
    runs = {}
    for name, size, recipe in (
        ("whole", 1, {}),
        ("in parts", 2, {"grad_accum": 3}),
        ("without clipping", 1, {"max_grad_norm": None}),
        ("without augmentation", 1, {"augment": False}),
    ):
        both = {"epochs": 1, "augment": True, "max_grad_norm": 0.5}
        config = watch.proof_config(name, model="mlp", **{**both, **recipe})
        runs[name] = run_world(size, watch.train_and_watch, config, folder=tmp_path)
    [whole], parts = runs["whole"], runs["in parts"]
    assert watch.per_step(parts) == watch.per_step([whole])
    assert parts[0].summary["steps"] == 15
    assert parts[0].learning_rates == whole.learning_rates
    assert apart(tmp_path / "in parts", tmp_path / "whole") < 1e-9
    assert apart(tmp_path / "without clipping", tmp_path / "whole") > 1e-2
    assert apart(tmp_path / "without augmentation", tmp_path / "whole") > 1e-2


def test_what_a_comm_hook_sends_is_coarser_and_the_same_for_all(tmp_path: Path) -> None:
    """PowerSGD from step 32 on; two processes, in full precision otherwise."""
    runs = {}
    for hook in ("none", "fp16", "bf16", "powersgd"):
        plain = watch.proof_config(hook, model="mlp")
        config = with_flags(plain, mixed_precision="no", comm_hook=hook)
        ranks = run_world(2, watch.train_and_watch, config, folder=tmp_path)
        assert ranks[0].summary["model_sha256"] == ranks[1].summary["model_sha256"]
        assert ranks[0].summary["test_accuracy"] > 0.8
        runs[hook] = ranks[0].gradient_norms
    first = {}
    for hook, norms in runs.items():
        off = [abs(ours / theirs - 1) for ours, theirs in zip(norms, runs["none"], strict=True)]
        first[hook] = next((step for step, each in enumerate(off) if each > 1e-7), None)
        assert off[0] < 1e-2
    # of PowerSGD's 32 whole exchanges the first was that of the backward which is thrown away
    assert first == {"none": None, "fp16": 0, "bf16": 0, "powersgd": 31}


def test_run_folder_of_a_finished_run(one_process: OneProcess) -> None:
    run, seen = one_process
    names = "checkpoints config.json metrics.jsonl model.safetensors status.json summary.json"
    names += " trained_on.npy"
    assert {path.name for path in run.iterdir()} == set(names.split())
    summary = read_json(run / "summary.json")
    assert summary == seen.summary
    assert summary["versions"]["torch"] == version("torch")
    assert (summary["precision"], summary["device"]) == ("fp64", "cpu")
    assert summary["test_count"] == 360 == sum(map(sum, summary["confusion"]))
    assert summary["test_accuracy"] == sum(summary["confusion"][c][c] for c in range(10)) / 360
    assert (summary["dataset"]["train_rows"], summary["dataset"]["test_rows"]) == (1437, 360)

    expected = {"state": "finished", "exit_code": 0, "phase": "done", "step": STEPS, "error": None}
    run_id = read_json(run / "config.json")["run_id"]
    assert read_json(run / "status.json") == expected | {"run_id": run_id}

    steps, validations = metrics(run), metrics(run, "val_accuracy")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert [line["lr"] for line in steps] == seen.learning_rates
    _, recipe = resolve_recipe(watch.proof_config().recipe, 1437, 1)
    assert seen.learning_rates == [*map(recipe.learning_rate, range(STEPS))]
    assert [line["step"] for line in validations] == [15, 30, 45]
    assert validations[-1]["val_accuracy"] == summary["val_accuracy"]
    assert read_json(run / "config.json")["recipe"]["val_size"] == 287


def of_a_folder(**changes: Any) -> TrainConfig:
    config = watch.proof_config(model="mlp", epochs=2, batch_size=4, val_size=0)
    return with_flags(config, dataset="data/set", cache_dir="cache", **changes)


def test_a_folder_given_relative_to_here_is_found_from_elsewhere(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By evaluate, report and --resume, each in another working directory."""
    here, there = tmp_path / "here", tmp_path / "there"
    write_idx(here / "data" / "set")
    there.mkdir()
    run_world(1, watch.just_train, of_a_folder(), folder=here)
    told = read_json(here / "run" / "config.json")["run"]
    assert (told["dataset"], told["cache_dir"]) == (f"{here}/data/set", f"{here}/cache")
    monkeypatch.chdir(there)
    assert json.loads(typed("evaluate", "../here/run", "--json").succeeds())["count"] == 5
    typed("report", "../here/run").succeeds()
    more = watch.resumed(of_a_folder(run_dir="../here/run"), epochs=3)
    [summary] = run_world(1, watch.just_train, more, folder=there)
    assert summary["resumed_from"] == [6]
    assert list(there.iterdir()) == []


def test_dry_run_says_all_and_writes_nothing(tmp_path: Path) -> None:
    flags = {"dataset": "digits", "dry_run": True, "cpu": True, "mixed_precision": "no"}
    config = with_flags(TrainConfig(), **flags)
    shown, silent = run_world(2, what_it_says, config, folder=tmp_path)
    assert silent == ""
    assert list(tmp_path.iterdir()) == []
    for part in (
        "digits: 1,150 train, 287 validation, 360 test images",
        "2 on 1 machine, backend gloo, device cpu",
        "72 images a step = 2 processes x 36",
        "300 = 20 epochs x 15",
        "70 images are left out",
        "nothing but the cache of images (--dry-run)",
    ):
        assert part in " ".join(shown.split())


# --- Other machines


def on_two_machines(told: TrainConfig, stop_at: int | None = None) -> tuple[str, int]:
    """What one process on a machine of its own prints, and its exit code."""
    rank = os.environ["RANK"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    code = 0
    with (
        patch("ddp_mnist.cluster.rendezvous.host_id", lambda: f"box{rank}/boot/net"),
        contextlib.redirect_stdout(io.StringIO()) as console,
    ):
        try:
            if stop_at is None:
                watch.just_train(told)
            else:
                watch.train_until(told, stop_at, signal.SIGTERM, by=1)
        except DdpMnistError as error:
            code = error.code
    return console.getvalue(), code


def test_the_second_machine_says_who_reports_and_where_the_result_is(tmp_path: Path) -> None:
    loud = with_flags(watch.proof_config("done", model="mlp", epochs=1), quiet=False)
    joined = "joined     as rank 1 of 2; rank 0 on box0 reports"
    [(first, _), (second, _)] = run_world(2, on_two_machines, loud, folder=tmp_path)
    assert "joined" not in first
    assert second.splitlines() == [joined, "done       the result is on box0, in done"]

    stopped = with_flags(loud, run_dir="stopped")
    both = run_world(2, on_two_machines, stopped, 5, folder=tmp_path)
    assert [code for _, code in both] == [143, 143]
    assert both[1][0].splitlines() == [joined]
