"""What could be lost without a word: results, images, a run's own files. Each says so, or is right.

The run of one process that all tests use has no steps but those of an epoch on the digits.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from ddp_mnist.data import cache
from ddp_mnist.data.decode import as_seen, pixels_of
from ddp_mnist.data.held_out import key_of
from ddp_mnist.errors import StorageError
from ddp_mnist.system.files import read_json
from ddp_mnist.training.folder import RunFolder
from tests.commands import Typed, run_command
from tests.data_sets import write_noise
from tests.run_checks import metrics

TRAIN = ["train", "--dataset", "digits", "--model", "mlp", "--epochs", "1", "--run-dir", "run"]


@pytest.fixture
def run(once: Callable[..., Path], here: Path) -> Path:
    """Return a copy of a finished run, as ./run."""
    made = once("one-epoch", lambda folder: run_command(TRAIN, folder))
    shutil.copytree(made / "run", here / "run")
    return here / "run"


# --- Files of a run


def test_fault_52_another_model_than_the_summarys_is_refused_and_written_again(
    run: Path, typed: Typed
) -> None:
    right = (run / "model.safetensors").read_bytes()
    damaged = right[:-1000] + bytes(1000)
    (run / "model.safetensors").write_bytes(damaged)
    for verb in ("evaluate", "report", "export"):
        ended = typed(verb, "run")
        assert ended.code == 4 or verb == "report"  # whose other figures are worth having
        assert "run: model.safetensors is damaged, or not that of summary.json; remove" in ended.err
    (run / "model.safetensors").unlink()
    assert typed("train", "--resume", "run").code == 0
    assert (run / "model.safetensors").read_bytes() == right


def test_fault_53_a_folder_that_another_run_took_is_not_written(here: Path) -> None:
    first, second = RunFolder(), RunFolder()
    first.create("run", "digits")
    shutil.rmtree("run")
    second.create("run", "digits")
    second.log(1, {"loss": 1.0})
    for write in (lambda: first.log(7, {"loss": 7.0}), first.status, first.check_ours):
        with pytest.raises(StorageError, match="run: was removed, and is another run's folder now"):
            write()
    assert [line["step"] for line in metrics(here / "run")] == [1]
    shutil.rmtree("run")
    with pytest.raises(StorageError, match=r"run/\.lock: cannot be written \(No such file"):
        second.log(2, {"loss": 2.0})
    assert not Path("run").exists()


def test_fault_54_a_run_that_saved_does_not_begin_again_because_its_disk_is_gone(
    run: Path, typed: Typed
) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    shutil.rmtree(run / "checkpoints")
    status = read_json(run / "status.json")
    (run / "status.json").write_text(json.dumps(status | {"state": "preempted"}))
    ended = typed(*TRAIN, "--resume", "auto")
    assert ended.code == 2
    assert "--run-dir run: holds a run that saved at step 15, but no checkpoint;" in ended.err
    assert (run / "metrics.jsonl").read_bytes() == before
    (run / "status.json").write_text(json.dumps(status | {"state": "failed"}))
    ended = typed(*TRAIN, "--resume", "auto")
    assert ended.code == 0
    assert "run: begins again, as no checkpoint of its 15 steps is there" in ended.err


def test_lines_that_metrics_jsonl_has_lost_are_counted(run: Path, typed: Typed) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-3]))
    lost = len(lines) - 1 - len(lines[:-3])  # the test's line is written after the last save
    ended = typed("train", "--resume", "run", "--epochs", "2")
    assert f"run/metrics.jsonl: lacks {lost} lines of earlier steps\n" in ended.out


# --- Images and classes


def test_classes_that_vanish_are_named(here: Path) -> None:
    classes = ("train/cat", "train/dog", "train/emu", "test/cat", "test/dog")
    write_noise(here / "photos", *(f"{name}/{number}.png" for name in classes for number in "0123"))
    (here / "photos" / "train" / "fox").mkdir()
    for file in ("status.json", "config.json"):  # not a run's: it has no id
        (here / "photos" / "train" / "cat" / file).write_text("{}")
    images = cache.load("photos")
    assert images.classes == ["cat", "dog", "emu"]
    assert len(images.rows["train"]) == 12
    assert "without an image: train/fox" in images.image_format.notes
    assert images.caveats == ['the test has no image of "emu": add images']


def key_in(file: Path) -> int:
    with PIL.Image.open(file) as opened:
        return key_of(pixels_of(as_seen(opened)))


def test_different_images_of_16_bits_are_no_copies_though_a_value_is_clear(tmp_path: Path) -> None:
    """Pillow's own conversion to RGBA would make all values above 255 white."""
    steps = np.arange(64, dtype=np.uint16).reshape(8, 8)
    for number in (900, 1000):
        deep = PIL.Image.fromarray(steps * number + 300)
        deep.save(tmp_path / f"{number}.png", transparency=300)
    assert key_in(tmp_path / "900.png") != key_in(tmp_path / "1000.png")


def test_an_image_of_16_bits_is_the_same_in_every_format_that_holds_it(tmp_path: Path) -> None:
    values = np.arange(0, 64_000, 1_000, dtype=np.uint16).reshape(8, 8)
    little = PIL.Image.fromarray(values)
    names = ["deep.png", "deep.tif", "deep.pgm", "big.tif"]
    for name in names[:3]:
        little.save(tmp_path / name)
    PIL.Image.frombytes("I;16B", (8, 8), values.astype(">u2").tobytes()).save(tmp_path / "big.tif")
    assert len({key_in(tmp_path / name) for name in names}) == 1
