import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_mnist.core.nets import MODELS
from ddp_mnist.core.wrappers import ShiftedViews
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import CheckpointError
from ddp_mnist.system.text import quoted
from ddp_mnist.task import Classification
from ddp_mnist.training import model_file
from ddp_mnist.training.model_file import NETS_VERSION

CLASSES = [str(digit) for digit in range(10)]
PREPARED = ImageFormat((1, 28, 28), (0.1307,), (0.3081,), ["3x3 became 28x28"], True, False)


def state(name: str = "cnn", classes: int = 10) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return MODELS[name](classes, PREPARED.shape).state_dict()


@pytest.fixture(scope="module")
def content() -> bytes:
    return model_file.to_bytes(state("mlp"), "mlp", Classification(CLASSES), PREPARED)


def after_length(length: int, header: bytes) -> bytes:
    return struct.pack("<Q", length) + header


def with_metadata(content: bytes, metadata: dict[str, str]) -> bytes:
    """Return the same tensors under other metadata."""
    [size] = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size]) | {"__metadata__": metadata}
    text = json.dumps(header).encode()
    return after_length(len(text), text) + content[8 + size :]


def test_the_deep_nets_views_are_averaged_in_the_model_alone() -> None:
    about = "cnn_deep", Classification(CLASSES), PREPARED
    trained = model_file.from_bytes(model_file.to_bytes(state("cnn_deep"), *about), "run")
    assert type(trained.model) is ShiftedViews and not trained.model.training
    assert (trained.architecture, trained.image_format) == ("cnn_deep", PREPARED)


def test_equal_weights_give_equal_bytes() -> None:
    """The memory format changes no byte; a weight does. test_resume.py compares processes."""
    about = "cnn", Classification(CLASSES), PREPARED
    contents = {model_file.to_bytes(state(), *about) for _ in range(20)}
    spread, last = state(), torch.channels_last
    spread |= {name: w.to(memory_format=last) for name, w in spread.items() if w.ndim == 4}
    assert contents == {model_file.to_bytes(spread, *about)}
    spread["head.bias"][3] += 1e-6
    assert model_file.to_bytes(spread, *about) not in contents


def described(**changes: Any) -> str:
    """Return the metadata of an mlp, with changes."""
    about = {"architecture": "mlp", "classes": CLASSES, "code": "", "version": NETS_VERSION}
    about["preparation"] = asdict(PREPARED)
    return json.dumps({**about, **changes}, sort_keys=True)


def test_what_is_damaged_cut_short_or_no_model_of_ours_is_refused(content: bytes) -> None:
    ends = [0, 8, 100, *(len(content) * n // 15 for n in range(1, 15)), len(content) - 1]
    abouts = [
        *("", "[]", "{}"),
        described(architecture=["mlp"], classes=["0"]),
        described(classes=10),
        described(classes=["0", "1"]),
        described(architecture="cnn"),
        described(preparation={"notes": []}),
    ]
    for damaged in (
        *(b"not a model", after_length(2, b"[]"), after_length(2**62, b"{}")),
        *(after_length(5000, b"[" * 5000), after_length(3, b"\xff\xfe\xfd")),
        model_file.to_bytes({}, "mlp", Classification(CLASSES), PREPARED),
        *(content[:end] for end in ends),
        *(with_metadata(content, {"ddp_mnist": about}) for about in abouts),
        with_metadata(content, {}),
    ):
        with pytest.raises(CheckpointError, match=r"^runs/x: "):
            model_file.from_bytes(damaged, "runs/x")


def test_a_net_that_this_code_does_not_have_is_named(content: bytes) -> None:
    other = "^runs/x: holds a net of version {}, these are of version {}; use the code that trained"
    for about, message in (
        (described(architecture="vgg:A"), "^runs/x: --model vgg:A: ModuleNotFoundError: "),
        (described(architecture="torchvision:vg"), "^runs/x: --model torchvision:vg: torchvision"),
        (described(version=1), other.format(1, NETS_VERSION)),
        (described(version=NETS_VERSION + 1), other.format(NETS_VERSION + 1, NETS_VERSION)),
    ):
        with pytest.raises(CheckpointError, match=message):
            model_file.from_bytes(with_metadata(content, {"ddp_mnist": about}), "runs/x")


def test_what_a_run_without_a_model_is(here: Path) -> None:
    stopped = here / "stopped"
    stopped.mkdir()
    (stopped / "status.json").write_text('{"state": "preempted", "step": 33}')
    missing = "no final model.safetensors: No such file or directory"
    for folder, fix in (
        (here, "there is none here yet, so train first"),
        (Path("runs/latest"), "there is none here yet, so train first"),
        (here / "none", "name one, e.g. runs/latest"),
    ):
        with pytest.raises(CheckpointError, match=f"^{folder}: {missing}; {fix}$"):
            model_file.read_bytes(str(folder))
        if folder.name == "latest":
            folder.mkdir(parents=True)
            (folder / "status.json").touch()
    line = f"^{stopped}: {missing}; state preempted, step 33; let it finish"
    resume = quoted(stopped)
    with pytest.raises(CheckpointError, match=rf"{line}, or add --resume {resume} to the command"):
        model_file.read_bytes(str(stopped))


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (
            '{"state": "running", "step": 50}',
            "from before the run was resumed (state running, step 50)",
        ),
        ('{"state": "finished", "step": 45}', ""),
        ("", "perhaps from before the run was resumed (status.json is damaged)"),
    ],
)
def test_fault_52_a_model_of_before_more_epochs_is_returned_with_a_warning(
    status: str, told: str, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert model_file.read_bytes(str(tmp_path)) == content
    (tmp_path / "status.json").write_text(status)
    assert model_file.read_bytes(str(tmp_path)) == content
    assert capsys.readouterr().err == ""  # a run that has not ended yet, or a copy of its model
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 45}))
    assert model_file.read_bytes(str(tmp_path)) == content
    expected = (
        f"ddp-mnist: warning: {tmp_path}: this is the model of step 45, {told}; let it finish, or"
        f" add --resume {quoted(tmp_path)} to the command that started it\n"
    )
    assert capsys.readouterr().err == (expected if told else "")
