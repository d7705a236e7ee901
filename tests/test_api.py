"""The trainer from Python: keywords, one interpreter for many calls, notebook_launcher."""

import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import random
import re
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from accelerate import notebook_launcher
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.distributed.elastic.multiprocessing.api import SignalException

from ddp_mnist import api
from ddp_mnist.cluster.local_world import free_port, run_world
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.config.train_config import RunFlags
from ddp_mnist.data import cache
from ddp_mnist.errors import DdpMnistError, Preempted, UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify import watch
from tests.commands import Typed
from tests.data_sets import of, split_up, write_noise
from tests.run_checks import apart, check_equal, metrics

# Those of tests.commands.PROOF, as keywords.
PROOF: dict[str, Any] = {"dataset": "digits", "model": "mlp", "epochs": 3, "batch_size": 72}
PROOF |= {"mixed_precision": "fp64", "log_every": 1}

# --- Keywords


def test_an_error_is_the_command_lines(typed: Typed, here: Path) -> None:
    keywords: dict[str, Any]
    for flags, keywords in (
        ("--epochs 2.5", {"epochs": 2.5}),
        ("--dataset no/photos", {"dataset": Path("no/photos")}),
        ("--dataset digits --metrics f2", {"dataset": "digits", "metrics": ["f2"]}),
    ):
        with pytest.raises(DdpMnistError) as raised:
            api.train(quiet=True, **keywords)
        ended = typed("train", "--quiet", *flags.split())
        assert raised.value.code == ended.code
        assert ended.err.startswith(f"ddp-mnist: error: {raised.value}")
    assert list(here.iterdir()) == []


def refused(function: Any, *args: Any, **keywords: Any) -> str:
    with pytest.raises(UsageError) as raised:
        function(*args, **keywords)
    return str(raised.value)


ARRAY = np.zeros((4, 4), dtype=np.uint8)
PATHS = "; save it, and give its path"
NO_COMMAND_LINES: list[tuple[Any, dict[str, Any], str]] = [
    (api.train, {"dogs": 1}, "dogs: unknown keyword; see ddp-mnist VERB --help"),
    (api.train, {"epoch": 1}, "epoch: unknown keyword; did you mean epochs?"),
    (api.train, {"grey": "no"}, "--grey 'no': must be True or False"),
    (api.train, {"weight_decay": None}, "--weight-decay None: must be a number, at least 0 and at"),
    (api.predict, {"images": PIL.Image.fromarray(ARRAY)}, f"images: got Image{PATHS}"),
    (api.predict, {"images": b"\xff\xd8"}, f"images: got bytes{PATHS}"),
    (api.train, {"dataset": ARRAY}, "--dataset [[0 0 0 0]"),
    (api.predict, {"images": np.array(2)}, f"images: got ndarray{PATHS}"),
    (api.train, {"metrics": np.array(2)}, "--metrics 2: scikit-learn has no such metric"),
    (api.train, {"dataset": "a\0b"}, "--dataset a\0b: holds a NUL"),
]


@pytest.mark.parametrize(("function", "keywords", "line"), NO_COMMAND_LINES)
def test_what_a_command_line_cannot_be_given_is_refused_too(
    function: Any, keywords: dict[str, Any], line: str
) -> None:
    run = () if function is api.train else ("a",)
    assert refused(function, *run, **keywords).startswith(line)


def test_another_thread_than_the_main_one_is_refused() -> None:
    with ThreadPoolExecutor(1, "other") as threads:
        told = threads.submit(refused, api.train, dataset="digits").result()
    advice = "call the trainer there, or in a process of its own"
    assert told == f"thread other_0: signals reach the main thread alone; {advice}"


def test_a_class_and_a_function_are_what_would_be_typed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.from_flags({"model": nn.Identity, "metrics": [refused, "f1"]})
    assert recipe.model == "torch.nn.modules.linear:Identity"
    assert recipe.metrics == ("tests.test_api:refused", "f1")
    assert RunFlags.from_flags({"image_size": 64, "dataset": here}) == RunFlags(str(here), "64")
    net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert refused(api.train, model=net).startswith("--model Sequential( (0): Linear(in")
    monkeypatch.setattr(refused, "__module__", "__main__")
    assert refused(api.train, model=refused).startswith("--model refused: exists only in this se")
    assert refused(api.train, metrics=[refused]).endswith("; define it in a file and import it")


# --- What is returned


def test_evaluate_and_predict_return_what_the_command_line_prints(
    alone: Path, typed: Typed, tmp_path: Path
) -> None:
    found = api.evaluate(alone)
    assert found
    assert found == json.loads(typed("evaluate", alone, "--json").out)
    assert found["loss"] == pytest.approx(read_json(alone / "summary.json")["test_loss"], rel=1e-6)
    subset = api.evaluate(alone, split="validation", metrics=["f1"])
    assert subset and (subset["count"], [*subset["scores"]]) == (287, ["f1"])

    digits, folder, seen = cache.load("digits"), tmp_path / "some digits", tmp_path / "seen.png"
    folder.mkdir()
    for number in range(3):
        image = PIL.Image.fromarray(of(digits, "test").images[number, 0].numpy())
        image.save(folder / f"{number}.png")
    labels = [digits.classes[label] for label in of(digits, "test").labels[:3].tolist()]
    answers = api.predict(str(alone), folder, top=2, show=str(seen))
    printed = typed("predict", alone, folder, "--top", 2).out
    assert answers == [json.loads(line) for line in printed.splitlines()]
    assert [answer["label"] for answer in answers] == labels
    with PIL.Image.open(seen) as picture:
        assert picture.width > 500
    with ThreadPoolExecutor(1) as elsewhere:  # as an application on the web would
        again = elsewhere.submit(api.predict, alone, [folder / "1.png", folder / "0.png"], top=2)
    assert again.result() == answers[1::-1]


# --- One interpreter, as a notebook has it


def what_may_change() -> list[Any]:
    kinds = (PartialState, AcceleratorState, GradientState)
    states = [dict(kind._shared_state) for kind in kinds]
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    library = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    drawn = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    found = [dict(os.environ), torch.get_num_threads(), states, handlers, sys.path[:]]
    return [*found, library, drawn, random.getstate(), repr(np.random.get_state())]


def interrupt_at_step_20(optimizer: torch.optim.Optimizer, _: list[torch.Tensor]) -> None:
    """Send what Ctrl-C sends: to the whole group of processes, once."""
    taken = max((int(state["step"]) for state in optimizer.state.values()), default=0)
    if taken == 20 and os.environ.get("RANK", "0") == "0":
        os.killpg(0, signal.SIGINT)


def train_until_interrupted(run_dir: str) -> None:
    with watch.before_each_step(interrupt_at_step_20):
        api.train(run_dir=run_dir, **PROOF)


def train_and_evaluate(times: int) -> None:
    """Train as one of the processes that a launcher forks."""
    for number in range(times):
        summary = api.train(run_dir=f"run-{number}", **PROOF)
        written = read_json(Path(f"run-{number}", "summary.json"))
        same = ("test_loss", "confusion", "steps", "world_size")  # times are each rank's own
        assert [summary[key] for key in same] == [written[key] for key in same]
        found = api.evaluate(f"run-{number}")
        assert (found is not None) == (os.environ["RANK"] == "0")
    Path(f"rank-{os.environ['RANK']}").touch()


def in_one_interpreter() -> None:
    """Do all that a person may do in a notebook, one after the other; write what came of it."""
    os.setsid()  # an interrupt is for this test's processes alone
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "flock not supported on this filesystem")
    with open("err.txt", "wb") as file:
        os.dup2(file.fileno(), 2)
    before, told = what_may_change(), dict[str, Any]()
    told["planned"] = api.train(dry_run=True, **PROOF)
    with contextlib.suppress(UsageError):
        api.train(dataset="digits", batch_size=5000)
    Path("own_count.py").write_text("def count(labels, predictions):\n    return len(labels)\n")
    write_noise(Path("photos"), *split_up(2))
    own = {"dataset": "photos", "cache_dir": "cache", "metrics": "own_count:count"}
    short = {"epochs": 1, "val_size": 0, "model": "mlp", "mixed_precision": "no"}
    told["photos"] = api.train(run_dir="photos-run", **own, **short)
    api.predict("photos-run", [])
    told["first"] = api.train(run_dir=Path("first"), **PROOF)
    told["again"] = api.train(resume="first", epochs=None, patience=None)
    try:
        train_until_interrupted("stopped")
    except Preempted as error:
        told["stopped"] = [str(error), error.code]
    told["resumed"] = api.train(resume=Path("stopped"), mixed_precision="fp64")["resumed_from"]
    changed = [was != now for was, now in zip(before, what_may_change(), strict=True)]
    told["changed"] = changed
    Path("told.json").write_text(json.dumps(told))

    # OpenMP's threads, which a forked process lacks, have been started, and are asked for there.
    os.environ["OMP_NUM_THREADS"] = "4"
    torch.set_num_threads(4)
    torch.randn(4000, 4000).relu().sum()
    port = str(free_port())
    notebook_launcher(train_and_evaluate, args=(2,), num_processes=2, use_port=port)
    logging.disable(logging.WARNING)  # the launcher's words on what it does
    try:
        notebook_launcher(train_until_interrupted, args=("both",), num_processes=2, use_port=port)
    except SignalException as error:
        Path("signalled").write_text(error.sigval.name)
    api.train(resume="both", mixed_precision="fp64")  # on one process now


def test_many_calls_in_one_interpreter(alone: Path, tmp_path: Path) -> None:
    run_world(1, in_one_interpreter, folder=tmp_path)
    assert (tmp_path / "err.txt").read_text() == 2 * "ddp-mnist: stopping after this step\n"
    told = read_json(tmp_path / "told.json")
    assert told["planned"] == {}
    assert told["photos"]["metrics"] == {"own_count:count": 2}
    assert told["photos"]["precision"] == "no"
    assert told["first"] == told["again"] == read_json(tmp_path / "first" / "summary.json")
    sentence, code = told["stopped"]
    match = r"SIGINT: stopped after step (\d+) and saved; to go on, add --resume stopped to the .*"
    stopped = re.fullmatch(match, sentence)
    assert stopped
    assert told["resumed"] == [int(stopped[1])]
    assert code == 130
    # without a launcher bit for bit what the command line does
    expected = watch.what_stays(alone)
    for name in ("first", "stopped"):
        assert watch.what_stays(tmp_path / name) == expected, name
    assert not any(told["changed"])
    assert (tmp_path / "signalled").read_text() == "SIGINT"
    assert read_json(tmp_path / "both" / "summary.json")["resumed_from"] == [21]
    assert len(metrics(tmp_path / "both")) == 45
    assert apart(tmp_path / "both", alone) < 1e-9
    for number in (0, 1):
        assert (tmp_path / f"rank-{number}").exists()
        check_equal(tmp_path / f"run-{number}", alone, 2)
