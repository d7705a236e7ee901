"""timm's nets by name, and their weights: from a Hub, kept in its cache, and used without one.

The Hub is one of this machine, and the weights are random.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from ddp_mnist.errors import UsageError
from ddp_mnist.nets.build import factory_of
from ddp_mnist.nets.initial_weights import find_weights
from ddp_mnist.system.files import read_json
from tests.commands import REPOSITORY, Typed
from tests.data_sets import flat, write_noise
from tests.hub import Answer, Hub, commit_of

COMMIT = commit_of("main")
NET, REPO = "timm:test_resnet", "timm/test_resnet.r160_in1k"
FOLDER = "models--timm--test_resnet.r160_in1k"
FROM = f"model      {NET}, seed 0, from timm:test_resnet.r160_in1k"
FLAGS = f"--dataset photos --model {NET} --weights DEFAULT --epochs 1 --batch-size 4"
FLAGS += " --val-size 1 --test-size 3"
PLAN = ["train", "--dry-run", *FLAGS.split()]


class Models(Hub):
    """Serves one file as that of the net REPO."""

    def __init__(self, file: Path) -> None:
        super().__init__(REPO, file.parent)
        self.content = file.read_bytes()

    def answer(self, path: str) -> Answer:
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(self.content).hexdigest()}"'}
        if path == f"/{REPO}/resolve/main/model.safetensors":
            return 200, headers, self.content
        return 404, {"X-Error-Code": "EntryNotFound"}, b""


def lay(file: Path) -> dict[str, torch.Tensor]:
    """Write weights of the net with 1,000 classes, and return them."""
    torch.manual_seed(3)
    weights: dict[str, torch.Tensor] = timm.create_model("test_resnet").state_dict()
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, file)
    return weights


@pytest.fixture
def photos(here: Path) -> Path:
    """Return a folder of 12 photos of noise, in two classes."""
    return write_noise(here / "photos", *flat(classes="one two"), size=(40, 50))


def test_a_name_that_is_not_timms_is_one_line() -> None:
    with pytest.raises(UsageError, match=r"^--model timm:resnet_18: timm has no such net; did "):
        factory_of("timm:resnet_18")
    for name, weights, known in (
        ("test_resnet", "IMAGENET1K_V1", "test_resnet.r160_in1k"),
        ("test_resnet.foo", "DEFAULT", "test_resnet.r160_in1k"),
        ("vovnet39a", "DEFAULT", "none"),
    ):
        line = f"--weights {weights}: timm:{name} has none of that name; give --weights DEFAULT and"
        with pytest.raises(UsageError, match=f"^{line} one of these nets: {known}$"):
            find_weights(f"timm:{name}", weights)
    name = "timm:deit_tiny_distilled_patch16_224"
    line = f"^--weights DEFAULT: {name} has several last layers, head and head_dist; name a net "
    with pytest.raises(UsageError, match=line):
        find_weights(name, "DEFAULT")
    with torch.device("meta"):
        grey = factory_of(NET)(3, (1, 64, 64))
    assert [*grey.state_dict()][-1] == "net.fc.bias"


@pytest.mark.usefixtures("photos")
def test_weights_come_from_a_hub_once_and_from_its_cache_without_a_network(here: Path) -> None:
    lay(here / "served" / "model.safetensors")
    command = [sys.executable, "-m", "ddp_mnist", *PLAN, "--cache-dir", "cache"]
    given = {"HF_HOME": str(here / "hf"), "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "0"}
    with Models(here / "served" / "model.safetensors").running() as hub:
        variables = os.environ | given | {"HF_ENDPOINT": hub.endpoint}
        said = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
        assert (said.returncode, said.stderr) == (0, "") and FROM in said.stdout
        assert "whole); normalised as for timm:" in said.stdout
        assert f"GET /{REPO}/resolve/main/model.safetensors" in hub.requests
    variables["HF_HUB_OFFLINE"] = "1"
    said = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stderr) == (0, "") and FROM in said.stdout


@pytest.mark.usefixtures("photos")
def test_a_run_is_used_and_exported_without_timms_file(typed: Typed) -> None:
    ended = typed(*PLAN)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    line = f"ddp-mnist: error: --weights DEFAULT, for {cache}: "
    assert ended.code == 2 and ended.err.startswith(line)
    fix = f"bring its folder {FOLDER} there from a machine that has fetched it, or set HF_ENDPOINT"
    assert f"; {fix} to a mirror of the Hub;" in ended.err

    place = cache / FOLDER
    lay(place / "snapshots" / COMMIT / "model.safetensors")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    typed("train", *FLAGS.split(), "--image-size", 64, "--run-dir", "run").succeeds()
    place.rename(place.with_name("away"))
    assert read_json(Path("run/config.json"))["world"]["timm"] == timm.__version__
    assert read_json(Path("run/summary.json"))["weights"] == "timm:test_resnet.r160_in1k"
    [answer] = typed("predict", "run", "photos/one/0.png", "--json").succeeds().splitlines()
    assert '"label": "' in answer
    typed("export", "run").succeeds()
    about = read_json(Path("run/export/config.json"))
    assert (about["architecture"], about["num_classes"]) == ("test_resnet", 2)
    net = timm.create_model("test_resnet", num_classes=2)
    net.load_state_dict(load_file("run/export/model.safetensors"))
    card = Path("run/export/README.md").read_text()
    assert "library_name: timm" in card and f"base_model: {REPO}\n" in card
    assert "from timm import create_model\n" in card
