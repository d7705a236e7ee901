"""Precision and memory format, where they are open, follow from the net."""

import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_mnist import api
from ddp_mnist.system.files import read_json

NETS = """
import torch.nn.functional as F
from torch import nn

SEEN = []

class Dense(nn.Module):
    groups, view = 1, False

    def __init__(self, classes, shape):
        super().__init__()
        self.first = nn.Conv2d(shape[0], 8, 5, stride=4)
        self.second = nn.Conv2d(8, 8, 3, groups=self.groups)
        self.head = nn.Linear(8 * 4 * 4, classes)

    def forward(self, x):
        if self.training:
            shown = "channels" if self.second.weight.stride()[1] == 1 else "rows"
            SEEN.append((shown, str(self.second(self.first(x)).dtype)))
        x = F.relu(self.second(F.relu(self.first(x))))
        return self.head(x.view(len(x), -1) if self.view else x.flatten(1))

class Depthwise(Dense):
    groups = 8

class Views(Dense):
    view = True
"""


@pytest.mark.parametrize(
    ("net", "layout", "precision"),
    [("Dense", "channels", "bf16"), ("Depthwise", "channels", "no"), ("Views", "rows", "bf16")],
)
def test_the_net_decides(
    net: str, layout: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"nets_{net.lower()}"
    (tmp_path / f"{module}.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddp_mnist.cluster.device.has_native_bf16", lambda _: True)
    flags: dict[str, Any] = {"dataset": "digits", "cpu": True, "quiet": True, "val_size": 0}
    flags |= {"model": f"{module}:{net}", "epochs": 1, "batch_size": 720}

    def dtype_of(precision: str) -> str:
        return {"bf16": "torch.bfloat16", "no": "torch.float32"}[precision]

    for asked in ("auto", "bf16"):  # what is typed counts
        run = tmp_path / asked
        summary = api.train(run_dir=run, mixed_precision=asked, **flags)
        effect = precision if asked == "auto" else asked
        assert summary["precision"] == effect
        assert read_json(run / "config.json")["distribution"]["mixed_precision"] == effect
        seen = sys.modules[module].SEEN
        assert seen[-1] == (layout, dtype_of(effect))
    seen.clear()
    again = api.train(resume=tmp_path / "auto", epochs=2, cpu=True, quiet=True)
    assert again["precision"] == precision
    assert seen[-1] == (layout, dtype_of(precision))
