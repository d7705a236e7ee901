"""Weights that torchvision has by name: which there are, their file, and how images are prepared.

torchvision's own files are not here: a net with random weights is laid where they would be.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision import models
from torchvision.transforms import v2

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import UsageError
from ddp_mnist.nets import initial_weights, published
from ddp_mnist.nets.build import build_net, factory_of
from ddp_mnist.system.files import read_json
from ddp_mnist.task import Classification
from ddp_mnist.training import model_file
from tests.commands import Typed
from tests.data_sets import COLOUR, GREY, flat, write_noise

NET, FILE = "torchvision:squeezenet1_1", "squeezenet1_1-b8a52dc0.pth"
ENTRY = models.SqueezeNet1_1_Weights.IMAGENET1K_V1
PLAIN = ImageFormat((3, 64, 64), (0.1, 0.2, 0.3), (0.4, 0.4, 0.4), ["a note"], False, False)


def load(net: nn.Module, name: str, typed: str, task: Classification) -> str:
    """Load what --weights names into the net `name`; return its origin."""
    weights = initial_weights.find_weights(name, typed)
    assert weights
    return initial_weights.load_weights(net, weights, task)


def begun(name: str, task: Classification, image_format: ImageFormat, typed: str) -> Normalised:
    """Return a net that begins with what --weights names."""
    net = build_net(name, task, image_format)
    load(net.net, name, typed, task)
    return net


def prepared_for(name: str, image_format: ImageFormat) -> ImageFormat:
    """Return the format of images for the net `name` and its own weights."""
    weights = initial_weights.find_weights(name, "DEFAULT")
    assert weights
    return initial_weights.normalised_for(weights, name, image_format)


def lay(file: Path, net: str = "squeezenet1_1", **options: Any) -> dict[str, torch.Tensor]:
    """Write a net with random weights, for ImageNet's classes, and return them."""
    torch.manual_seed(7)
    state = models.get_model(net, **options).state_dict()
    torch.save(state, file)
    return state


# --- Names


def test_a_name_that_the_net_does_not_have_is_one_line_with_those_it_has() -> None:
    for net, name in (
        ("resnet50", "V3"),
        ("resnet18", "ResNet50_Weights.DEFAULT"),
        ("vgg16", "IMAGENET1K_FEATURES"),  # a part of a net, whose classifier is NaN
    ):
        line = f"--weights {name}: torchvision:{net} has none of that name; choose from DEFAULT, "
        with pytest.raises(UsageError, match=f"^{line}") as raised:
            initial_weights.find_weights(f"torchvision:{net}", name)
        assert "FEATURES" not in str(raised.value).partition("; ")[2]


# --- The file


def fetch_from(url: str) -> str:
    """Return the SHA-256 of the file; note a download in the file `downloads`."""
    ENTRY.value.url, download = url, torch.hub.download_url_to_file

    def noted(*arguments: Any, **options: Any) -> None:
        with open("downloads", "a") as file:
            file.write("one ")
        time.sleep(0.3)  # long enough for another process to begin as well
        download(*arguments, **options)

    with patch.object(torch.hub, "download_url_to_file", noted):
        made = published.find_published(NET, "DEFAULT")
        made.fetch()
    return hashlib.sha256(Path(made.place).read_bytes()).hexdigest()


def test_one_of_the_processes_of_a_machine_fetches_the_file(
    tmp_path: Path, torchvisions: Path
) -> None:
    lay(tmp_path / "net")
    digest = hashlib.sha256((tmp_path / "net").read_bytes()).hexdigest()
    file = (tmp_path / "net").rename(tmp_path / f"net-{digest[:8]}.pth")
    home = {"TORCH_HOME": os.environ["TORCH_HOME"]}  # the processes' server may be older
    assert run_world(2, fetch_from, file.as_uri(), folder=tmp_path, variables=home) == [digest] * 2
    assert (tmp_path / "downloads").read_text() == "one "
    left = {each.name for each in torchvisions.iterdir()}
    assert left - {f"{file.name}.lock"} == {file.name}


@pytest.mark.usefixtures("here")
def test_a_file_that_cannot_be_had_or_holds_something_else_is_one_line(torchvisions: Path) -> None:
    (damaged := Path("net-0123abcd.pth").absolute()).touch()  # what a broken connection leaves
    line = f"^--weights DEFAULT, for {torchvisions / damaged.name}: RuntimeError: invalid hash"
    url = patch.object(ENTRY.value, "url", damaged.as_uri())
    with url, pytest.raises(UsageError, match=line):
        begun(NET, Classification([*"ab"]), PLAIN, "DEFAULT")
    assert not [file for file in torchvisions.iterdir() if file.suffix != ".lock"]
    torch.save(Path("x"), torchvisions / FILE)
    with pytest.raises(UsageError, match=f"^--weights DEFAULT, for {torchvisions / FILE}: "):
        begun(NET, Classification([*"ab"]), PLAIN, "DEFAULT")


# --- Into the net, and before it


def test_a_net_computes_on_an_image_what_torchvision_computes(torchvisions: Path) -> None:
    """Normalisation and weights, with the head, as the classes are the same; googlenet's input."""
    for net, file, options in (
        ("squeezenet1_1", FILE, {}),
        ("googlenet", "googlenet-1378be20.pth", {"aux_logits": True, "init_weights": False}),
    ):
        lay(torchvisions / file, net, **options)
        name = f"torchvision:{net}"
        entry = models.get_model_weights(net).DEFAULT
        prepared = prepared_for(name, PLAIN)
        ours = begun(name, Classification(entry.meta["categories"]), prepared, "DEFAULT").eval()
        theirs = models.get_model(net, weights=entry).eval()
        images = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
        normalise = v2.Normalize(entry.transforms().mean, entry.transforms().std)
        with torch.no_grad():
            expected, found = theirs(normalise(images / 255)), ours(images)
        assert torch.allclose(found, expected, atol=1e-4), net
        other = begun(name, Classification([*"ab"]), prepared, "DEFAULT").net.state_dict()
        given = theirs.state_dict()
        differ = [key for key in given if not torch.equal(given[key], other[key])]
        assert len(differ) == 2 and [*given][-2:] == differ, net


def test_grey_images_have_the_mean_of_three_colours() -> None:
    grey = ImageFormat((1, 28, 28), (0.1,), (0.3,), [], True, True)
    prepared = prepared_for(NET, grey)
    assert prepared.mean == pytest.approx((0.449,)) and prepared.std == pytest.approx((0.226,))
    assert (prepared.shape, prepared.digit_photos) == (grey.shape, grey.digit_photos)


def test_the_notes_name_no_file_of_an_earlier_run() -> None:
    """They are in an export, which is for others."""
    about = {"preparation": {"mean": [0.4], "std": [0.2]}}
    weights = initial_weights.InitialWeights("/home/anna/run/model.safetensors", None, about)
    prepared = initial_weights.normalised_for(weights, NET, PLAIN)
    assert prepared.mean == (0.4,) * 3
    assert prepared.notes == ["a note", "normalised as for the run of --weights"]


def test_mnasnet_takes_its_weights_for_grey_images_too(torchvisions: Path) -> None:
    """It refuses tensors without the version of its layers."""
    new = lay(torchvisions / "mnasnet0.5_top1_67.823-3ffadce67e.pth", "mnasnet0_5")
    grey = ImageFormat((1, 64, 64), (0.1,), (0.3,), [], False, False)
    begins = begun("torchvision:mnasnet0_5", Classification([*"abc"]), grey, "DEFAULT")
    net = begins.net.state_dict()
    assert [key for key in new if not torch.equal(net[f"net.{key}"], new[key])] == [*new][-2:]


def test_a_vision_transformer_is_made_for_the_images_it_gets() -> None:
    """Those of the weights of 384x384, too; other sizes than whole patches are refused."""
    with torch.device("meta"):
        for size, patches in ((384, 24 * 24), (64, 4 * 4), (100, 14 * 14)):
            net: Any = factory_of("torchvision:vit_b_16")(3, (3, size, size))
            assert net.encoder.pos_embedding.shape == (1, patches + 1, 768)


# --- A run


def test_a_run_begins_with_the_weights_and_goes_on_without_their_file(
    typed: Typed, torchvisions: Path, here: Path
) -> None:
    write_noise(here / "photos" / "train", *flat(8), size=(40, 50))
    write_noise(here / "photos" / "test", *flat(4), size=(40, 50), seed=1)
    given = lay(torchvisions / FILE)
    flags = f"--dataset photos --model {NET} --weights DEFAULT --lr 1e-9 --epochs 1 --batch-size 4"
    command = ["train", *flags.split(), "--val-size", 0, "--checkpoint-every", 1]
    printed = typed(*command, "--run-dir", "run").succeeds()
    said = " ".join(printed.split())
    assert f"weights SqueezeNet1_1_Weights.IMAGENET1K_V1, from {torchvisions / FILE};" in said
    note = "normalised as for SqueezeNet1_1_Weights.IMAGENET1K_V1"
    assert "images of 40x50 became 160x160, cut to their middle" in said and f"; {note}" in said
    assert "10 times that in the last layer, BatchNorm keeps its statistics" in said
    (torchvisions / FILE).unlink()

    trained = model_file.from_bytes(model_file.read_bytes("run"), "run")
    assert trained.image_format.shape == (3, 160, 160)
    assert trained.image_format.mean == (0.485, 0.456, 0.406)
    assert trained.image_format.std == (0.229, 0.224, 0.225)
    state = trained.net.net.state_dict()
    body = [key for key in given if key.startswith("features")]
    assert all(torch.allclose(state[key], given[key], atol=1e-5) for key in body)
    summary, config = read_json(Path("run/summary.json")), read_json(Path("run/config.json"))
    assert summary["weights"] == "SqueezeNet1_1_Weights.IMAGENET1K_V1"  # whatever DEFAULT becomes
    assert note in summary["notes"] and config["run"]["image_size"] == "160"

    shutil.copytree("run", "broken")
    Path("broken/checkpoints/step-00000002.pt").unlink()
    Path("broken/status.json").write_text('{"state": "preempted"}')
    printed = typed(*command, "--resume", "broken").succeeds()
    assert "after step 1" in printed
    assert model_file.read_bytes("broken") == model_file.read_bytes("run")  # bit for bit
    assert read_json(Path("broken/summary.json"))["weights"] == summary["weights"]


# --- A file of one's own


def test_what_is_guessed_for_a_file_of_ones_own_net_is_told(here: Path, typed: Typed) -> None:
    own = "from torch import nn\n\nclass Net(nn.Sequential):\n    def __init__(self, n, shape):\n"
    own += "        pool = nn.AdaptiveAvgPool2d(8), nn.Flatten()\n"
    own += "        super().__init__(*pool, nn.Linear(64 * shape[0], n))\n"
    (here / "guessed.py").write_text(own)
    save_file({"2.weight": torch.zeros(9, 64), "2.bias": torch.zeros(9)}, "own.safetensors")
    plan = ["train", "--dry-run", "--dataset", "digits", "--weights", "own.safetensors", "--model"]
    told = " ".join(typed(*plan, "guessed:Net").succeeds().split())
    line = "careful --weights own.safetensors: does not tell how its images were made, so 160x160"
    assert f"{line} and ImageNet's mean and deviation are a guess" in told
    known = initial_weights.find_weights(NET, "own.safetensors")
    assert known and not initial_weights.guess_of(known, NET, PLAIN)


ABC, XYZ = Classification([*"abc"]), Classification([*"xyz"])
Tensors = dict[str, torch.Tensor]
ENDINGS = pytest.mark.parametrize("ending", [".pth", ".safetensors"])
AGAIN = "head.weight and head.bias are initialised again: made for other classes or sizes"
OTHER_MODEL = "name the --model that it was made for$"


def write_weights(file: Path, tensors: Tensors) -> None:
    torch.save(tensors, file) if file.suffix == ".pth" else save_file(tensors, file)


def state(image_format: ImageFormat = COLOUR) -> Tensors:
    return build_net("cnn", ABC, image_format).net.state_dict()


@ENDINGS
def test_weights_come_from_a_file_and_only_the_last_layer_may_differ(
    ending: str, tmp_path: Path
) -> None:
    file, given, five = tmp_path / f"weights{ending}", state(), Classification([*"abcde"])
    write_weights(file, given)
    same = begun("cnn", XYZ, COLOUR, str(file)).net.state_dict()
    assert all(torch.equal(same[name], given[name]) for name in given)
    net = build_net("cnn", five, COLOUR).net
    assert load(net, "cnn", str(file), five) == f"from {file}; {AGAIN}"
    new_head = net.state_dict()
    differ = [name for name in given if not torch.equal(new_head[name], given[name])]
    assert differ == ["head.weight", "head.bias"]


# What is written in the place of a cnn's tensors for images in colour, and the line.
NOT_LOADED: dict[str, tuple[Callable[[Path], object], str]] = {
    "of grey images": (
        lambda file: write_weights(file, state(GREY)),
        rf"RuntimeError: .*size mismatch for conv1.weight: .*; {OTHER_MODEL}",
    ),
    "damaged": (lambda file: file.write_bytes(b"x" * 99), "(.*Error: |it holds more than ten)"),
    "a checkpoint": (lambda file: torch.save({"model": state(), "epoch": 3}, file), ".*Error: "),
    "what runs code": (lambda file: torch.save(Path("x"), file), "(.*Error: |it holds more )"),
}


@ENDINGS
@pytest.mark.parametrize("kind", NOT_LOADED)
def test_a_file_that_holds_no_weights_of_this_net_is_refused(
    kind: str, ending: str, tmp_path: Path
) -> None:
    write, line = NOT_LOADED[kind]
    file = tmp_path / f"weights{ending}"
    write(file)
    with pytest.raises(UsageError, match=rf"^--weights {file}: {line}") as raised:
        begun("cnn", ABC, COLOUR, str(file))
    assert "weights_only" not in str(raised.value)  # torch's advice to run what is in the file


@pytest.mark.usefixtures("here")
def test_weights_of_a_run_keep_the_last_layer_only_for_the_same_classes() -> None:
    trained = state()
    Path("w.safetensors").write_bytes(model_file.to_bytes(trained, "cnn", ABC, COLOUR))
    net = build_net("cnn", ABC, COLOUR).net
    assert load(net, "cnn", "w.safetensors", ABC) == "from w.safetensors"
    assert torch.equal(net.state_dict()["head.bias"], trained["head.bias"])
    assert load(net, "cnn", "w.safetensors", XYZ).endswith(AGAIN)
