"""A file that changed and shows the same image: a run never counts what it was trained on.

Either the image is known by what it shows, and all stays as it was, or the run says that its images
have changed.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from PIL.ExifTags import Base

from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.system.files import read_json
from tests.commands import Typed
from tests.data_sets import noise
from tests.run_checks import rewrite_config

SIDE = 12  # of the squares to which the images of 20x14 are decoded
Change = Callable[[PIL.Image.Image], PIL.Image.Image]


def lay(place: Path, seed: int = 0) -> None:
    """Write photos of six forms, each of which other programs store otherwise."""
    for number in range(60):
        image, options = noise(100 * seed + number, (14, 20)), dict[str, Any]()
        if number % 6 == 0:
            (exif := PIL.Image.Exif())[Base.Orientation] = 6
            options["exif"] = exif
        elif number % 6 == 1:
            image.putalpha(PIL.Image.new("L", image.size, 120))
        elif number % 6 == 2:
            image = PIL.Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 256 + 7)
        elif number % 6 == 3:
            image = image.quantize(8)
        elif number % 6 == 4:
            image = image.convert("L")
        path = place / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, **options)


def shown(image: PIL.Image.Image) -> PIL.Image.Image:
    """Return an image as a viewer shows it, in RGB."""
    image = PIL.ImageOps.exif_transpose(image)
    if image.mode.startswith("I"):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    layer = image.convert("RGBA")
    white = PIL.Image.new("RGBA", layer.size, "white")
    return PIL.Image.alpha_composite(white, layer).convert("RGB")


def resized(image: PIL.Image.Image) -> PIL.Image.Image:
    return PIL.ImageOps.fit(shown(image), (SIDE, SIDE), PIL.Image.Resampling.BILINEAR)


def larger(image: PIL.Image.Image) -> PIL.Image.Image:
    return shown(image).resize((40, 40))


SEEN, NONE = (
    "run was trained on",
    "none of the images that run was trained on is in its own folder as",
)
# By name: the flag of the run, the change of each file, its new suffix, and why the images that are
# there now are refused; "" if they are known
CHANGES: dict[str, tuple[str, Change, str, str]] = {
    "turned upright": ("", PIL.ImageOps.exif_transpose, ".png", ""),
    "as a viewer shows it": ("", shown, ".png", ""),
    "BMP": ("", shown, ".bmp", ""),
    "TIFF in RGBA": ("", lambda image: shown(image).convert("RGBA"), ".tif", ""),
    "of the size that is decoded": ("", resized, ".png", SEEN),
    "of that size, in WebP": ("", resized, ".webp", SEEN),
    "grey, as decoded": ("--grey", lambda image: shown(image).convert("L"), ".png", SEEN),
    "resized and grey": ("--grey", lambda image: resized(image).convert("L"), ".tif", SEEN),
    "of another size": ("", larger, ".png", NONE),
}


@pytest.mark.parametrize("change", CHANGES)
def test_fault_57_a_run_never_counts_an_image_that_it_was_trained_on(
    change: str, here: Path, typed: Typed
) -> None:
    flag, make, suffix, why = CHANGES[change]
    lay(here / "photos")
    command = ["train", "--dataset", "photos", "--model", "mlp", "--batch-size", "8", "--cpu"]
    command += ["--image-size", str(SIDE), *flag.split()]
    typed(*command, "--epochs", "1", "--run-dir", "run").succeeds()
    before = json.loads(typed("evaluate", "run", "--json").succeeds())
    trained_on = len(np.load("run/trained_on.npy"))
    shutil.copytree("run", "again")
    for path in [*Path("photos").rglob("*.png")]:
        with PIL.Image.open(path) as opened:
            opened.load()
        path.unlink()
        make(opened).save(path.with_suffix(suffix), lossless=True)

    ended = typed("evaluate", "run", "--json")
    on_current = typed("evaluate", "run", "--json", "--dataset", "photos")
    resumed = typed("train", "--resume", "again", "--epochs", "2")
    reported = typed("report", "run")
    if not why:
        same = ("count", "loss", "confusion")
        for now in (json.loads(ended.succeeds()), json.loads(on_current.succeeds())):
            assert [now[key] for key in same] == [before[key] for key in same]
        resumed.succeeds()
        assert len(np.load("again/trained_on.npy")) == trained_on
        assert read_json(Path("again/summary.json"))["test_count"] == before["count"]
        assert reported.code == 0
        return
    assert (ended.code, on_current.code, resumed.code, reported.code) == (3, 3, 4, 3)
    assert "have changed since the run; put them back" in ended.err
    assert f"--dataset photos: {why}" in on_current.err
    assert f"{here}/photos: not the images of again" in resumed.err
    weights = ["--weights", "run/model.safetensors", "--test-size", "30", "--dry-run"]
    assert ("was trained on some: " in typed(*command, *weights).out) == (why == SEEN)


def test_images_that_were_edited_beside_others_are_told(here: Path, typed: Typed) -> None:
    lay(here / "photos")
    command = ["train", "--dataset", "photos", "--model", "mlp", "--batch-size", "8", "--cpu"]
    typed(*command, "--epochs", "1", "--image-size", str(SIDE), "--run-dir", "run").succeeds()
    for path in [*Path("photos").rglob("*.png")][:20]:
        with PIL.Image.open(path) as opened:
            shown(opened).save(path.with_suffix(".jpg"), quality=95)
        path.unlink()
    told = typed("evaluate", "run", "--dataset", "photos").succeeds()
    assert "some images that it was trained on are not there as they were: if their" in told
    lay(here / "new", seed=7)  # no test is drawn from others, of which the run knows one
    shutil.copy(next(Path("photos/a").glob("*.png")), "new/a/known.png")
    ended = typed("evaluate", "run", "--dataset", "new")
    assert "run was trained on 1 of these 61 test images (a/known.png); give images" in ended.err
    Path("new/a/known.png").unlink()
    assert json.loads(typed("evaluate", "run", "--dataset", "new", "--json").out)["count"] == 60
    config = read_json(Path("run/config.json"))  # as an earlier version wrote it
    rewrite_config(Path("run"), json.dumps(config | {"format": 12, "digest": "0"}))
    for verb in ("evaluate", "report"):
        ended = typed(verb, "run")
        assert ended.code == 3
        assert (
            "it was trained by another version of ddp_mnist (format 12), which compares"
            in ended.err
        )
        assert ended.err.endswith("; use that (code 3)\n")


def test_copies_that_decode_alike_are_held_out_together_or_told(here: Path) -> None:
    for number in range(16):
        for label, mode in (("a", "RGB"), ("b", "L")):
            (path := here / "photos" / label / f"{number}.png").parent.mkdir(
                parents=True, exist_ok=True
            )
            noise(number).convert(mode).save(path)
    images = cache.load("photos", options=ImageOptions(grey=True)).hold_out(4)
    parts = [{*images.decoded_keys[rows].tolist()} for rows in images.rows.values()]
    assert len(parts) == 3 and sum(map(len, parts)) == len(set.union(*parts)) == 16
    assert "32 images lie in two classes or more" in images.caveats[0]


def test_what_weights_have_seen_stays_unknown(here: Path, typed: Typed) -> None:
    for name in ("first", "second", "third"):
        lay(here / name, seed=len(name))
    train = ["train", "--model", "mlp", "--image-size", str(SIDE), "--epochs", "1", "--cpu"]
    typed(*train, "--dataset", "first", "--run-dir", "a").succeeds()
    shutil.copytree("a", "swapped")
    weights = ["--weights", "swapped/model.safetensors"]
    typed(*train, "--dataset", "third", "--run-dir", "other", "--seed", "1").succeeds()
    shutil.copy("other/model.safetensors", "swapped")
    told = "without a trained_on.npy of this version next to it"
    assert told in typed(*train, "--dataset", "second", *weights, "--run-dir", "b").succeeds()
    again = ["--weights", "b/model.safetensors", "--dry-run"]
    assert told in typed(*train, "--dataset", "third", *again).succeeds()
    ended = typed("evaluate", "b", "--dataset", "third")
    assert ended.code == 0
    assert "b: which images its --weights had seen is unknown, perhaps some of these" in ended.err
