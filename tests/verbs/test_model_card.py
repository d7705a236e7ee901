"""What an export says of itself is true where this package is missing, and names no image."""

import contextlib
import html
import io
import json
import re
import shlex
import shutil
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from PIL.ExifTags import Base

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.recipe import Recipe
from ddp_mnist.core.task import Classification
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.system.files import read_json
from ddp_mnist.task import find_task
from ddp_mnist.training import model_file, scores
from ddp_mnist.verbs import model_card
from ddp_mnist.verbs.flags import EXPORTS
from ddp_mnist.verbs.render import markdown
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.commands import REPOSITORY, Typed, python
from tests.data_sets import GREY as DIGITS
from tests.data_sets import noise
from tests.run_checks import own_module, untrained, with_flags

CLASSES = {"moss": "green", "rust": "orange", "sky_temple": "blue"}
KINDS, CLASSIFICATION = [*CLASSES], "image-classification"
COLOUR = ImageFormat((3, 32, 48), (0.5, 0.4, 0.3), (0.2, 0.3, 0.2), [], False, False)
GREY = ImageFormat((1, 32, 32), (0.4,), (0.3,), [], False, False)
# Run the card's own lines for each file, where ddp_mnist cannot be imported
READER = """
import contextlib, io, json, os, re, sys
sys.modules["ddp_mnist"] = None
folders, files = map(json.loads, sys.argv[1:])
found = {}
for folder in folders:
    os.chdir(folder)
    card = open("README.md", encoding="utf-8").read()
    for fence in re.findall(r"^```python\\n(.*?)^```$", card, re.DOTALL | re.MULTILINE):
        names = {}
        with contextlib.redirect_stdout(io.StringIO()):
            exec(fence, names)
        found[f"{folder} {len(found)}"] = [names["answer"](file) for file in files]
print(json.dumps(found))
"""
LENGTH = (
    "from ddp_mnist.core.task import Task\n\n\nclass Length(Task):\n    columns = ('length_mm',)"
)


def tinted(seed: int, colour: str, size: tuple[int, int] = (24, 20)) -> PIL.Image.Image:
    return PIL.ImageOps.colorize(noise(seed, size).convert("L"), "black", colour)


def write_odd(place: Path) -> None:
    """Write images that are prepared with care: turned, transparent, of 16 bits."""
    (turned := PIL.Image.Exif())[Base.Orientation] = 6
    ramp = PIL.Image.linear_gradient("L").resize((60, 44))
    tinted(1, "orange", (90, 70)).save(place / "turned.jpg", exif=turned)
    tinted(2, "blue", (90, 70)).save(place / "turned.tif", exif=turned)
    ramp.save(place / "grey.png")
    clear, white = tinted(3, "green", (44, 60)), PIL.Image.new("RGB", (60, 44), "white")
    for name, image in (("clear", clear), ("white", white), ("clear_grey", ramp.copy())):
        image.putalpha(ramp)
        image.save(place / f"{name}.png")
    tinted(4, "blue").quantize(8).save(place / "palette.png", transparency=2)
    deep = PIL.Image.fromarray(np.arange(3000, dtype=np.uint16).reshape(50, 60) * 20)
    deep.save(place / "deep.png")
    deep.save(place / "deep_clear.png", transparency=400)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of resnet18 on photos, of which one is broken and others are left out."""
    place = tmp_path_factory.mktemp("card")
    for number in range(102):
        (name, colour), split = [*CLASSES.items()][number % 3], "train" if number < 84 else "test"
        (folder := place / "photos" / split / name).mkdir(parents=True, exist_ok=True)
        tinted(number, colour).save(folder / f"{number}.png")
    write_odd(place / "photos" / "test" / "moss")
    (place / "photos" / "train" / "moss" / "secret_broken.png").write_bytes(b"no image")
    tinted(0, "red").save(place / "photos" / "train" / "moss" / ".secret_hidden.png")
    (place / "photos" / "train" / "rust" / "secret_1.secret").write_text("odd")
    (place / "photos" / "train" / "secret_empty").mkdir()
    config = proof_config("my run", model="torchvision:resnet18", epochs=2, batch_size=12)
    flags = {"dataset": str(place / "photos"), "image_size": "32", "mixed_precision": "no"}
    run_world(1, just_train, with_flags(config, lr=1e-3, **flags), folder=place)
    return place / "my run"


def predicted(typed: Typed, run: Path, files: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in typed("predict", run, *files).succeeds().splitlines()]


def test_the_cards_own_lines_give_what_predict_gives_without_this_package(
    run: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For photos of every kind, from each file of an export; over the test split, its accuracy."""
    files = [str(file) for file in sorted((run.parent / "photos" / "test").glob("*/*"))]
    own_module("card_length", LENGTH, tmp_path, monkeypatch)
    kinds, length = Classification(KINDS), find_task("card_length:Length")([20.0], [4.0])
    grey = untrained(run, "torchvision:resnet18", GREY, kinds, tmp_path / "grey")
    deep = untrained(run, "cnn", COLOUR, kinds, tmp_path / "deep")
    numbers = untrained(run, "torchvision:resnet18", COLOUR, length, tmp_path / "numbers")
    whole = untrained(run, "mlp", replace(GREY, fit="pad"), kinds, tmp_path / "whole")
    formats = {run: "safetensors,onnx", grey: "safetensors", deep: "onnx", numbers: "safetensors"}
    formats[whole] = "onnx"
    for each, names in formats.items():
        assert typed("export", each, "--format", names, "--out", each / "export").code == 0
        shutil.copy(files[0], each / "export" / "photo.jpg")
    asked = [json.dumps([str(each / "export") for each in formats]), json.dumps(files)]
    found = [*json.loads(python("-c", READER, *asked, folder=run).succeeds()).values()]
    shutil.rmtree(run / "export")
    numbered = found.pop(4)
    for each, answers in zip([run, run, grey, deep, whole], found, strict=True):
        for answer, right in zip(answers, predicted(typed, each, files), strict=True):
            assert max(answer, key=answer.__getitem__) == right["label"]
            assert answer == pytest.approx(right["probabilities"], abs=1e-4)
        assert np.ptp([[*answer.values()] for answer in answers], axis=0).max() > 0.01
    hits = [max(answer, key=answer.__getitem__) in file for answer, file in zip(found[0], files)]  # noqa: B905
    assert np.mean(hits) == pytest.approx(read_json(run / "summary.json")["test_accuracy"])
    outputs = [each["prediction"]["length_mm"] for each in predicted(typed, numbers, files)]
    assert np.ravel(numbered).tolist() == pytest.approx(outputs, rel=1e-5)
    card = (whole / "export" / "README.md").read_text()
    assert "| seed | 0 |\n| processes | 1, precision " in card
    assert f", torch {torch.__version__.partition('+')[0]}, " in html.unescape(card)
    assert "resized as a whole, and in the middle of grey (127 of 255) if its ratio is" in card
    assert read_json(whole / "export" / "config.json")["fit"] == "pad"
    card = (numbers / "export" / "README.md").read_text()
    assert 'Length predicts from, with mean [20.0] and std [4.0], of ["length_mm"]' in card


def test_the_settings_that_a_card_names_are_flags() -> None:
    assert {*model_card.SETTINGS.split()} <= {field.name for field in fields(Recipe)}


def test_digits_are_inverted_or_refused_and_a_net_of_ours_needs_the_package(
    run: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = untrained(run, "cnn_deep", DIGITS, Classification(KINDS), tmp_path / "digits")
    assert typed("export", digits, "--format", "safetensors,onnx").code == 0
    monkeypatch.chdir(digits / "export")
    (black := PIL.Image.new("L", (28, 28))).paste(200, (9, 5, 14, 22))
    black.save("photo.jpg", quality=100)
    PIL.ImageOps.invert(black).save("paper.png")
    black.resize((60, 60)).save("large.png")
    card, names = Path("README.md").read_text(), dict[str, Any]()
    weights, onnx = re.findall(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(weights, {})
        exec(onnx, names)
    [told, *_] = printed.getvalue().splitlines()
    for photo in ("photo.jpg", "paper.png"):
        [right] = predicted(typed, digits, [photo])
        assert names["answer"](photo) == pytest.approx(right["probabilities"], abs=1e-4)
        assert photo != "photo.jpg" or told == str([right])
    with pytest.raises(ValueError, match="is not 28x28; cut the digit out first"):
        names["answer"]("large.png")
    assert "the mean over nine views of an image" in card
    assert "; a digit in a photo that is not 28x28 is cut out first" in card


def test_an_export_names_no_image_and_no_place(run: Path, tmp_path: Path, typed: Typed) -> None:
    (out := tmp_path / "out").mkdir()
    (out / "config.json").write_text('{"architecture": "cnn", "classes": []}')  # an older export
    (out / "trained_on.npy").write_bytes(b"")
    said = typed("export", run, "--format", "safetensors,onnx", "--out", out).succeeds()
    assert "trained_on.npy: removed, as hashes of the images are not for others\n" in said
    exported = {path.name: path.read_bytes() for path in out.iterdir()}
    assert exported.keys() == {"README.md", "config.json", *EXPORTS.values()}
    for private in ("secret", str(run.parent), str(REPOSITORY), "site-packages"):
        assert [name for name in exported if private.encode() in exported[name]] == []
    kept = " ".join(read_json(run / "summary.json")["notes"])
    assert all(name in kept for name in ("secret_broken", "secret_hidden", "secret_empty"))
    card = exported["README.md"].decode()
    assert "- For the training, 1 of 113 images were left out\n" in card
    assert "- For the training, 1 of 112 images cannot be read and were left out\n" in card
    [told] = shlex.split(said.splitlines()[-1].removeprefix("to the Hub: "))[3:]
    assert told == str(out) and "hf upload YOUR_NAME/my-run " in said
    assert typed("export", run, "--out", out).code == 0  # over a new one too


def test_an_export_of_an_earlier_versions_run_does_not_name_its_weights(
    run: Path, tmp_path: Path, typed: Typed
) -> None:
    notes = ["normalised as for /home/anna/run/model.safetensors", "normalised as for ImageNet"]
    made = untrained(
        run, "cnn", replace(COLOUR, notes=notes), Classification(KINDS), tmp_path / "a"
    )
    typed("export", made).succeeds()
    written = b"".join(path.read_bytes() for path in (made / "export").iterdir())
    assert b"anna" not in written and b"normalised as for ImageNet" in written


def test_the_head_of_the_card_is_what_the_hub_reads(
    run: Path, tmp_path: Path, typed: Typed
) -> None:
    summary, heads = read_json(run / "summary.json"), list[Any]()
    shutil.copytree(run, copy := tmp_path / "copy")
    changed = {"weights": "ResNet18_Weights.IMAGENET1K_V1", "metrics": {"f1": 0.25}}
    changed["dataset"] = summary["dataset"] | {"name": "**m**\x9b", "source": "hub:me/moths:few@v1"}
    (copy / "summary.json").write_text(json.dumps(summary | changed))
    for each in (run, copy):
        assert typed("export", each, "--license", "mit").code == 0
        heads.append(ModelCard(card := (each / "export" / "README.md").read_text()).data)
    own, hub = heads
    assert (own.library_name, own.license, own.pipeline_tag) == ("timm", "mit", CLASSIFICATION)
    assert own.datasets is own.base_model is None
    assert (hub.datasets, hub.base_model) == (["me/moths"], "timm/resnet18.tv_in1k")
    [result] = own.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", summary["test_accuracy"])
    assert (result.dataset_name, result.metric_name) == ("photos", "accuracy on 27 images")
    assert [(r.metric_type, r.metric_value) for r in hub.eval_results][1:] == [("f1", 0.25)]
    about = {(r.dataset_type, r.dataset_config, r.dataset_revision) for r in hub.eval_results}
    assert about == {("me/moths", "few", "v1")}
    rows = ["| --lr | 0.001 |", "| started from | ResNet18_Weights.IMAGENET1K_V1 |"]
    right = round(6 * summary["class_accuracy"][2])
    rows.append(f"| sky_temple | 6 | {scores.share_text(right, 6)} |")
    assert {*rows} <= {*card.splitlines()}
    assert f"Test accuracy {summary['test_accuracy']:.4f} on 27 images; " in card
    assert "trained on \\*\\*m\\*\\*?\n" in card


def test_timm_and_transformers_load_an_export_as_it_is(
    run: Path, tmp_path: Path, typed: Typed
) -> None:
    assert typed("export", run, "--out", tmp_path / "out").code == 0
    config = read_json(tmp_path / "out" / "config.json")
    assert (config["architecture"], config["num_classes"]) == ("resnet18", 3)
    assert config["label_names"] == config["classes"] == KINDS
    image_format = model_file.from_bytes(model_file.read_bytes(str(run)), "").image_format
    assert config["mean"] == config["pretrained_cfg"]["mean"] == [*image_format.mean]
    timm, photo = pytest.importorskip("timm"), tmp_path / "photo.png"
    tinted(9, "orange", (32, 32)).save(photo)
    [expected] = predicted(typed, run, [str(photo)])
    net = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    prepare = timm.data.create_transform(**timm.data.resolve_model_data_config(net))
    shares = net(prepare(PIL.Image.open(photo))[None]).softmax(1)[0].tolist()
    right = pytest.approx(expected["probabilities"], abs=1e-4)
    assert dict(zip(KINDS, shares, strict=True)) == right
    transformers = pytest.importorskip("transformers")
    classify = transformers.pipeline("image-classification", model=str(tmp_path / "out"))
    answers = {each["label"]: each["score"] for each in classify(str(photo))}
    assert answers == right


def test_names_are_escaped_only_where_markdown_would_take_them_for_marks() -> None:
    odd = ["__init__", "a_b", "_a_", "*b*", "[l](x)", "`c`", "a|b", "&amp;", "R&D", "C# 1", "<b>x"]
    odd += ["~~d~~", "a\\b", "# e #", "$f$", "black & white", "x__y", "![i](j)", "-", "1) k", "(m)"]
    read = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for name in odd:
        shown = re.sub(r"<[^>]+>", "", read.renderInline(f"Classes: {markdown(name)}, b"))
        assert html.unescape(shown) == f"Classes: {name}, b"
    plain = ["sky_temple", "R&D", "(m)", "St. John's-wort", "a+b!"]
    assert [markdown(name) for name in plain] == plain


def test_the_page_and_the_card_describe_the_preparation_in_the_same_words() -> None:
    page = " ".join((REPOSITORY / "docs" / "in-other-programs.md").read_text().split())
    facts = {"colour": "RGB", "fitted": model_card.FITTED["crop"], "height": 96, "width": 128}
    assert model_card.PREPARATION.format(**facts) in page
