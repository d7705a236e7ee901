"""A GPU whose memory is full: one line, with flags that need less."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist.cluster import device
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.local_world import LocalWorld, run_world
from ddp_mnist.config.distribution import Distribution
from ddp_mnist.config.recipe import Recipe, resolve_recipe
from ddp_mnist.errors import UsageError
from ddp_mnist.verbs.evaluate import evaluate_run
from ddp_mnist.verbs.flags import Evaluate
from ddp_mnist.verify import watch
from tests.training import net_that, status, with_flags

HUNGRY = """
        if len(x) > int(os.environ.get("MOST_IN_" + str(self.training).upper(), 1000)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0")
"""
IN_TRAINING, IN_EVALUATION = "MOST_IN_TRUE", "MOST_IN_FALSE"  # images that the net can take


def hungry(folder: Path, **flags: Any) -> Any:
    (folder / "hungry.py").write_text(net_that(HUNGRY))
    return with_flags(watch.proof_config(model="hungry:Net", epochs=1), **flags)


def count_evaluated(run: str, batch_size: int | None) -> int:
    found = evaluate_run(Evaluate(run, batch_size=batch_size), Distribution(cpu=True), Launch())
    assert found
    return int(found["count"])


def test_what_the_line_advises_leads_out(tmp_path: Path) -> None:
    """In 9 images a process; two processes take 36 of the 72, which have to be halved twice."""
    flags, most = dict[str, Any](), {IN_TRAINING: "9"}
    for parts in (2, 4):
        told = hungry(tmp_path, run_dir=f"run-{parts}", **flags)
        world = LocalWorld(2, watch.just_train, told, folder=tmp_path, variables=most)
        outcomes = world.outcomes()
        assert [getattr(each, "code", None) for each in outcomes] == [2, 2]
        [line] = {str(each) for each in outcomes if isinstance(each, UsageError)}
        assert line == (
            f"--batch-size 72: needs more memory than there is; add --grad-accum {parts},"
            " or use --batch-size 36"
        )
        assert status(tmp_path / f"run-{parts}") == ("failed", 2)
        flags = {"grad_accum": parts}
    trains = partial(run_world, 2, watch.just_train, folder=tmp_path, variables=most)
    assert trains(hungry(tmp_path, **flags))[0]["steps"] == 15
    smaller_batch = hungry(tmp_path, run_dir="smaller", batch_size=18)
    assert trains(smaller_batch)[0]["global_batch_size"] == 18


def test_an_evaluation_that_does_not_fit(tmp_path: Path) -> None:
    most = {IN_EVALUATION: "120"}
    with pytest.raises(UsageError) as refused:  # 287 validation images at once
        run_world(1, watch.just_train, hungry(tmp_path), folder=tmp_path, variables=most)
    assert str(refused.value) == (
        "--model hungry:Net: needs more memory than there is; use a smaller --image-size, or"
        " another --model"
    )
    run_world(1, watch.just_train, hungry(tmp_path, run_dir="whole"), folder=tmp_path)
    there = partial(run_world, 1, count_evaluated, "whole", folder=tmp_path, variables=most)
    for size, half in ((None, 180), (180, 90)):
        line = f"^--batch-size {2 * half}: needs more memory than there is; use --batch-size {half}"
        with pytest.raises(UsageError, match=line):
            there(size)
    assert there(90) == [360]


@pytest.mark.parametrize(
    ("batch_size", "accum", "processes", "resumes", "words"),
    [
        (144, 1, 1, False, "add --grad-accum 2, or use --batch-size 72"),
        (144, 1, 8, False, "add --grad-accum 2, or use --batch-size 72"),
        (144, 2, 8, False, "add --grad-accum 6, or use --batch-size 64"),
        (144, 1, 1, True, "add --grad-accum 2"),
        (15, 1, 3, False, "add --grad-accum 5, or use --batch-size 6"),
        (8, 1, 8, False, "use a smaller --image-size, or another --model"),
    ],
)
def test_what_takes_less_memory(
    batch_size: int, accum: int, processes: int, resumes: bool, words: str
) -> None:
    """Each is legal for this number of processes, and smaller."""
    recipe = resolve_recipe(Recipe(batch_size=batch_size, grad_accum=accum), 60_000, processes)
    assert recipe.in_less_memory(processes, can_shrink=not resumes) == words
    given = {"batch_size": batch_size, "grad_accum": accum}
    for name, value in re.findall(r"--(batch-size|grad-accum) (\d+)", words):
        smaller = given | {name.replace("-", "_"): int(value)}
        resolve_recipe(Recipe(**smaller), 60_000, processes)  # which it does not refuse
        at_once, before = (each["batch_size"] // each["grad_accum"] for each in (smaller, given))
        assert at_once < before


def test_the_card_is_named_with_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 11e9)
    for free, held in ((4.2e9, ""), (1e9, ", of which other programs hold 3.6 GB")):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 15.6e9))
        line = (
            rf"^--batch-size 9: needs more memory than cuda:0 has \(Tesla T4, 15.6 GB{held}\); x$"
        )
        with (
            pytest.raises(UsageError, match=line),
            device.within_memory(gpu, lambda: ("--batch-size 9", "x")),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def test_a_bug_stays_a_traceback() -> None:
    for error in (RuntimeError("out of memory of what to say"), MemoryError()):
        with (
            pytest.raises(type(error)),
            device.within_memory(torch.device("cpu"), lambda: ("", "")),
        ):
            raise error
