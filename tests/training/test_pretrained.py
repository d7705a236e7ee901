"""Photos are learned from ImageNet's weights where they can be had, and from nothing elsewhere.

A net with random weights lies where torchvision's would be, or on a server of this machine.
"""

import functools
import hashlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torchvision import models

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.config.recipe import PRETRAINED
from ddp_mnist.config.train_config import TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.errors import UsageError
from ddp_mnist.nets.published import find_published
from ddp_mnist.system.files import read_json
from ddp_mnist.training import pretrained
from ddp_mnist.verbs.verify.watch import just_train
from tests.commands import Typed
from tests.data_sets import encoded
from tests.run_checks import with_flags

FILE = "regnet_y_400mf-e6988f5f.pth"
ENTRY = models.RegNet_Y_400MF_Weights.DEFAULT
FROM = "model      torchvision:regnet_y_400mf, seed 0, from RegNet_Y_400MF_Weights.IMAGENET1K_V2"
CANNOT = "RegNet_Y_400MF_Weights.IMAGENET1K_V2 cannot be had"


def test_the_default_is_what_the_tests_lay() -> None:
    assert PRETRAINED == "torchvision:regnet_y_400mf" and ENTRY.url.endswith(FILE)


def lay(folder: Path) -> Path:
    """Write a net with random weights into the folder, under the name of its own hash."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(7)
    torch.save(models.get_model("regnet_y_400mf").state_dict(), folder / "net")
    digest = hashlib.sha256((folder / "net").read_bytes()).hexdigest()[:8]
    return (folder / "net").rename(folder / f"net-{digest}.pth")


def write(folder: Path, colour: bool = True, size: tuple[int, int] = (70, 80)) -> Path:
    """Write six images in each of two classes: noise, or else strokes on black."""
    random = np.random.default_rng(0)
    for number in range(12):
        pixels = np.zeros((*size, 3), np.uint8) if colour else np.zeros(size, np.uint8)
        middle = pixels if colour else pixels[10:-10, 10:-10]
        middle[...] = random.integers(0, 256, middle.shape)
        file = folder / ("one", "two")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(pixels))
    return folder


FLAGS = "--epochs 1 --batch-size 2 --val-size 1 --test-size 3 --dataset"
PLAN = ["train", "--dry-run", *FLAGS.split()]


def test_photos_start_from_the_weights_unless_a_flag_says_otherwise(
    here: Path, typed: Typed, torchvisions: Path
) -> None:
    lay(torchvisions).rename(torchvisions / FILE)
    told = typed(*PLAN, write(here / "photos")).succeeds()
    assert FROM in told and "images of 70x80 became 160x160" in told
    assert FROM in typed(*PLAN, "photos", "--weights", "DEFAULT").succeeds()
    assert "pictures: adamw" in told and "typed: --epochs 1, --batch-size 2, --val-size 1" in told
    for flags in (["--weights", "none"], ["--model", "cnn_deep"]):
        told = typed(*PLAN, "photos", *flags).succeeds()
        assert "model      cnn_deep, seed 0\n" in told and "became" not in told
    small, strokes = write(here / "small", size=(48, 60)), write(here / "strokes", colour=False)
    assert "model      cnn_deep, seed 0\n" in typed(*PLAN, small).succeeds()
    assert "model      cnn, seed 0\n" in typed(*PLAN, strokes).succeeds()


def test_a_run_trains_the_last_layer_alone_and_goes_on_without_the_file(
    here: Path, typed: Typed, torchvisions: Path
) -> None:
    given = torch.load(lay(torchvisions).rename(torchvisions / FILE))
    write(here / "photos")
    ended = typed(*PLAN, "photos", "--weights", "none", "--freeze")
    assert ended.code == 2 and "error: --freeze: keeps weights, and the net would" in ended.err
    flags = [*FLAGS.split(), "photos", "--image-size", 64, "--freeze", "--checkpoint-every", 1]
    told = typed("train", *flags, "--run-dir", "run").succeeds()
    assert "times that in the last layer, the last layer alone is trained" in told
    net = load_file("run/model.safetensors")
    assert {key for key in net if not torch.equal(net[key], given[key])} == {"fc.weight", "fc.bias"}
    summary = read_json(Path("run/summary.json"))
    assert (summary["model"], summary["weights"]) == (PRETRAINED, str(ENTRY))

    (torchvisions / FILE).unlink()
    whole = Path("run/model.safetensors").read_bytes()
    *_, before, last = sorted(Path("run/checkpoints").iterdir())
    last.unlink()
    Path("run/status.json").write_text('{"state": "preempted"}')
    told = typed("train", "--resume", "run").succeeds()
    assert f"after step {int(before.stem[5:])}; nothing changed" in told
    assert Path("run/model.safetensors").read_bytes() == whole  # bit for bit


@pytest.mark.usefixtures("torchvisions")
def test_without_the_weights_photos_are_learned_as_with_none(here: Path, typed: Typed) -> None:
    write(here / "photos")
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    for number, flags in enumerate(([], ["--weights", "none"])):
        told = typed("train", *FLAGS.split(), "photos", *flags, "--run-dir", number).succeeds()
        line = f"{CANNOT} (HF_HUB_OFFLINE is set), so photos are learned from nothing"
        assert (line in told) == (not flags) and "model      cnn_deep, seed 0\n" in told
        assert bool(read_json(Path(f"{number}/summary.json"))["notes"][0].startswith(CANNOT)) == (
            not flags
        )
    ended = typed("train", *FLAGS.split(), "photos", "--freeze")
    assert ended.code == 2 and f"error: --freeze: {CANNOT} (HF_HUB_OFFLINE is set)" in ended.err
    asked, fell_back = (load_file(f"{number}/model.safetensors") for number in range(2))
    assert asked and all(torch.equal(asked[key], fell_back[key]) for key in asked)


def test_a_mistake_of_this_program_is_none_of_the_network(torchvisions: Path) -> None:
    made = find_published(PRETRAINED, "DEFAULT")
    lay(torchvisions).rename(torchvisions / FILE)
    with pytest.raises(TypeError):
        pretrained.why_missing(replace(made, fetch=lambda: {}[[]]))  # type: ignore[index]


def of_one_rank(
    config: TrainConfig, rank: str, model: str | None, dataset: str, torch_home: str
) -> None:
    """Begin a run as on machines of which one has other flags or images; the weights are there."""
    os.environ["TORCH_HOME"] = torch_home
    if os.environ["RANK"] == rank:
        config = with_flags(config, dataset=dataset, model=model)
    patch.object(pretrained, "holds_photos", lambda *_: True).start()
    patch.object(pretrained, "why_missing", lambda _: None).start()
    just_train(config)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(("model", "dataset"), [("cnn", "photos"), (None, "strokes")])
def test_ranks_that_differ_are_told_in_what(
    rank: str, model: str | None, dataset: str, here: Path, torchvisions: Path
) -> None:
    lay(torchvisions).rename(torchvisions / FILE)
    write(here / "photos")
    write(here / "strokes", colour=False)
    flags: dict[str, Any] = {"dataset": "photos", "epochs": 1, "batch_size": 2, "quiet": True}
    flags |= {"cpu": True, "val_size": 1, "test_size": 3.0, "dist_timeout": 30}
    config = with_flags(TrainConfig(), **flags)
    torch_home = os.environ["TORCH_HOME"]
    with pytest.raises(UsageError, match=r"^(--model|the data's digest): rank 0 has "):
        run_world(2, of_one_rank, config, rank, model, dataset, torch_home, folder=here)


# --- A server


@pytest.fixture
def served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Path, str, list[str]]]:
    """Yield a folder that a server of this machine serves, its address, and what was asked for."""
    asked = list[str]()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            asked.append(f"{self.command} {self.path}")

    folder = tmp_path / "served"
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_weights_are_fetched_once_and_used_again_without_a_network(
    here: Path, typed: Typed, torchvisions: Path, served: tuple[Path, str, list[str]]
) -> None:
    folder, address, asked = served
    file = lay(folder)
    write(here / "photos")
    with patch.object(ENTRY.value, "url", f"{address}/net-0123abcd.pth"):
        file.rename(wrong := folder / "net-0123abcd.pth")
        assert f"{CANNOT} (invalid hash value (expected " in typed(*PLAN, "photos").succeeds()
        assert not [*torchvisions.glob("*.pth")]
        wrong.rename(file)
    with patch.object(ENTRY.value, "url", f"{address}/{file.name}"):
        asked.clear()
        assert FROM in typed(*PLAN, "photos").succeeds()
        assert asked == [f"HEAD /{file.name}", f"GET /{file.name}"]
        file.unlink()
        assert FROM in typed(*PLAN, "photos").succeeds() and len(asked) == 2
    assert (torchvisions / file.name).is_file()


def test_a_server_that_does_not_answer_is_not_waited_for(
    here: Path, typed: Typed, torchvisions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(pretrained, "ANSWER_S", 0.2)
    write(here / "photos")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/net-0123abcd.pth"
        with patch.object(ENTRY.value, "url", address):
            told = typed(*PLAN, "photos").succeeds()
    assert re.search(rf"{CANNOT} \((timed out|no answer within 0.2 s)\)", told)
    assert not [*torchvisions.iterdir()]


# --- Which images are photos


def test_a_few_images_tell_whether_they_are_photos_whatever_is_cached(here: Path) -> None:
    options = ImageOptions(test_size=3)
    for name, is_photo, colour, size in (
        ("photos", True, True, (70, 80)),
        ("small", False, True, (48, 200)),
        ("strokes", False, False, (70, 80)),
        ("grey", True, False, (70, 80)),
    ):
        folder = str(write(here / name, colour, size))
        if name == "grey":  # a border neither dark nor bright
            for grey, file in enumerate((here / name).rglob("*.png"), 80):
                file.write_bytes(encoded(np.full(size, grey, np.uint8)))
        for cached_as in (None, (160, 160), (48, 48)):
            assert cache.holds_photos(folder, None, options, 160) == is_photo
            cache.load(folder, None, replace(options, size=cached_as))
        assert not cache.holds_photos(folder, None, replace(options, size=(48, 48)), 160)
    for name, is_photo in (("photos", True), ("grey", False)):  # of writing, if grey
        for old, new in (("one", "猫"), ("two", "狗")):
            (here / name / old).rename(here / name / new)
        assert cache.holds_photos(str(here / name), None, options, 160) == is_photo


@pytest.mark.usefixtures("torchvisions")
def test_strokes_that_were_taken_for_photos_are_trained_on_as_strokes(
    here: Path, typed: Typed
) -> None:
    write(here / "strokes", colour=False)
    taken = patch.multiple(pretrained, holds_photos=lambda *_: True, why_missing=lambda _: None)
    with taken:
        told = typed(*PLAN, "strokes").succeeds()
    assert "model      cnn, seed 0\n" in told and "became" not in told
