import json
from pathlib import Path

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.verbs.verify.watch import just_train, proof_config, weights_of
from tests.run_checks import with_flags

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
