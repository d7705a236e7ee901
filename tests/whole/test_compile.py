"""--compile: what torch.compile is asked for."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.verify import watch
from tests.run_checks import with_flags


def graphs_of(config: Any, in_eager: bool = False) -> list[tuple[bool, int | str]]:
    """Return of each graph whether it has gradients, and for how many images it is."""
    found = list[tuple[bool, int | str]]()

    def record(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        [images] = [each for each in inputs if getattr(each, "dtype", None) == torch.uint8]
        size = images.shape[0] if isinstance(images.shape[0], int) else "any"
        found.append((torch.is_grad_enabled(), size))
        return graph.forward

    if in_eager:
        torch.compiler.set_stance("force_eager")
    compiles = nn.Module.compile
    with patch.object(nn.Module, "compile", lambda net, **_: compiles(net, backend=record)):
        watch.just_train(config)
    return found


def test_training_compiles_one_graph_for_one_size(tmp_path: Path) -> None:
    plain = watch.proof_config(model="mlp", epochs=1, grad_accum=3)
    config = with_flags(plain, compile=True, mixed_precision="no")
    for graphs in run_world(2, graphs_of, config, folder=tmp_path):
        assert [images for trains, images in graphs if trains] == [72 // 2 // 3]
    assert read_json(tmp_path / "run/summary.json")["compile"] == "inductor"
    [none] = run_world(1, graphs_of, with_flags(config, run_dir="eager"), True, folder=tmp_path)
    assert none == []
    assert read_json(tmp_path / "eager/summary.json")["compile"] == "no (inductor compiled nothing)"
