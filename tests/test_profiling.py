import json
from pathlib import Path

import pytest

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.verbs.verify.watch import just_train, proof_config, resumed, weights_of
from tests.training import stop, with_flags

STEPS = 3


def test_each_rank_leaves_a_trace_of_its_steps_and_computes_the_same(tmp_path: Path) -> None:
    plain = proof_config("plain", model="mlp", epochs=1)
    run_world(2, just_train, with_flags(plain, run_dir="run", profile=STEPS), folder=tmp_path)
    run_world(2, just_train, plain, folder=tmp_path)
    for rank in (0, 1):
        trace = json.loads((tmp_path / "run" / "profile" / f"rank-{rank}.json").read_text())
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("DistributedDataParallel.forward") == STEPS
        assert names.count("Optimizer.step#AdamW.step") == STEPS
        assert "gloo:all_reduce" in names
    watched, unwatched = weights_of(tmp_path / "run"), weights_of(tmp_path / "plain")
    assert all((watched[name] == unwatched[name]).all() for name in watched)


def test_a_resumed_run_with_too_few_steps_left_ends_well_without_a_trace(tmp_path: Path) -> None:
    config = proof_config(model="mlp")
    stop(config, tmp_path, step=40)
    again = with_flags(resumed(config), profile=STEPS, typed=frozenset({"resume", "profile"}))
    assert run_world(1, just_train, again, folder=tmp_path)[0]["steps"] == 45
    assert not (tmp_path / "run" / "profile").exists()


def test_more_steps_than_a_run_has_are_refused_and_nothing_begun(tmp_path: Path) -> None:
    config = with_flags(proof_config(model="mlp", epochs=1), profile=5)
    with pytest.raises(Exception, match=r"^--profile 5: the run has 15 steps, .* first 11 are not"):
        run_world(1, just_train, config, folder=tmp_path)
    assert not (tmp_path / "run").exists()
