"""Each form gives the model's logits, also where this package is not installed."""

import dataclasses
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL.ExifTags import Base
from safetensors.torch import load_file

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.data.decode import decode_image
from ddp_mnist.data.image_format import ImageFormat, Shape
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.nets.ours import MODELS, Normalised, with_test_time_augmentation
from ddp_mnist.run import weights
from ddp_mnist.verbs import export
from ddp_mnist.verbs.flags import EXPORTS, Export
from ddp_mnist.verify.watch import just_train, proof_config
from tests.commands import Typed, fences_of, python, write_given
from tests.data_sets import GREY

COLOUR = ImageFormat((3, 40, 60), (0.5, 0.4, 0.3), (0.2, 0.3, 0.2), [], False, False)
KINDS = ["ladybird", "寺", 'a "moth"', *map(str, range(7))]
PAGE = Path("docs/your-data-your-model.md")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of float64, whose exports are float32."""
    folder = tmp_path_factory.mktemp("export")
    run_world(1, just_train, proof_config(model="mlp", epochs=1), folder=folder)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run photos-001, of a net for pictures in colour that nobody trained; all forms of it."""
    own = tmp_path_factory.mktemp("colour") / "runs" / "photos-001"
    shutil.copytree(run, own)
    torch.manual_seed(3)
    net = MODELS["cnn"](10, COLOUR.shape)
    for parameter in net.parameters():
        parameter.data *= 3  # an opinion of its own
    content = weights.to_bytes(net.state_dict(), "cnn", KINDS, COLOUR)
    (own / "model.safetensors").write_bytes(content)
    write(own, *EXPORTS)
    return own


def write(run: Path, *formats: str, out: Path | None = None) -> None:
    export.run(Export(str(run), formats, str(out) if out else None))


def untrained(name: str, image_format: ImageFormat) -> weights.Trained:
    net = Normalised(MODELS[name](10, image_format.shape), image_format).eval()
    model = with_test_time_augmentation(net, name)
    return weights.Trained(net, model, name, KINDS, image_format)


def check_logits(run: Path, out: Path, folder: Path, more: str = "") -> None:
    """Run the card's snippets without this package; what they load gives the run's logits."""
    trained = weights.from_bytes(weights.read_bytes(str(run)), "")
    images = torch.randint(0, 256, (100, *trained.image_format.shape), dtype=torch.uint8)
    shutil.copytree(out, folder, dirs_exist_ok=True)
    torch.save(images, folder / "images.pt")
    snippets = re.findall(r"```python\n(.*?)```", (out / "README.md").read_text(), re.DOTALL)
    program = f"""import sys
{more}
images = torch.load('images.pt')
given = session.run(None, {{'images': images.numpy()}})[0]
torch.save((model(images).detach(), torch.from_numpy(given)), 'logits.pt')
assert 'ddp_mnist' not in sys.modules"""
    command = [sys.executable, "-W", "ignore", "-c", "\n".join([*snippets, program])]
    done = subprocess.run(command, cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr
    with torch.inference_mode():
        expected = trained.model(images).float()
    for given in torch.load(folder / "logits.pt"):
        assert (given - expected).abs().max() < 1e-4
    state = load_file(out / "model.safetensors")
    shapes = {name: tensor.shape for name, tensor in trained.net.net.state_dict().items()}
    assert {name: tensor.shape for name, tensor in state.items()} == shapes


@pytest.mark.system
def test_the_cards_snippets_for_digits_give_the_models_logits(
    run: Path, tmp_path: Path, typed: Typed
) -> None:
    out = tmp_path / "export"
    ended = typed("export", run, "--format", "safetensors, torch,onnx", "--out", out)
    said = ended.out.splitlines()
    assert ended.code == 0
    assert [line.split(":")[0] for line in said[:3]] == list(EXPORTS.values())
    assert said[3:] == [f"written to {out}", f"to the Hub: hf upload YOUR_NAME/run {out}"]
    check_logits(run, out, tmp_path / "elsewhere")


@pytest.mark.system
def test_the_cards_snippets_give_the_models_logits_and_predicts_shares_without_this_package(
    exported: Path, tmp_path: Path, typed: Typed
) -> None:
    out = exported / "export"
    card = (out / "README.md").read_text()
    assert "In: uint8 images [B, 3, 40, 60], in colour (RGB)." in card
    (folder := tmp_path / "elsewhere").mkdir()
    files = write_files(folder)
    check_recipe(card, COLOUR.shape, files)
    shares = "torch.save(model(images).softmax(1).detach(), 'shares.pt')"
    check_logits(exported, out, folder, shares)
    [answer] = map(json.loads, typed("predict", exported, files[0]).out.splitlines())
    [shown] = torch.load(folder / "shares.pt").tolist()
    assert dict(zip(KINDS, shown, strict=True)) == pytest.approx(answer["probabilities"], abs=2e-6)


def test_the_pages_lines_go_from_a_photo_to_a_word_with_onnxruntime_alone(
    exported: Path, tmp_path: Path, typed: Typed
) -> None:
    [fence] = [f for f in fences_of(PAGE) if f.body.startswith("# from_photo.py")]
    write_given(fence, tmp_path)
    script = tmp_path / "from_photo.py"
    loaded = "import sys\nprint({'torch', 'ddp_mnist'} & {*sys.modules})"
    script.write_text(f"{script.read_text()}\n{loaded}")
    (tmp_path / "runs").symlink_to(exported.parent)
    (photo := tmp_path / "new_photos" / "0.jpg").parent.mkdir()
    (turned := PIL.Image.Exif())[Base.Orientation] = 6
    words = []
    for colours in (("navy", "wheat"), ("white", "red")):
        ramp = PIL.Image.linear_gradient("L").resize((90, 70))
        PIL.ImageOps.colorize(ramp, *colours).save(photo, exif=turned)
        [answer] = map(json.loads, typed("predict", exported, photo).out.splitlines())
        printed = python(script.name, folder=tmp_path).succeeds()
        assert printed.splitlines() == [answer["label"], "set()"]
        words.append(answer["label"])
    assert len({*words}) > 1


def test_the_onnx_file_describes_itself(exported: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported / "export" / "model.onnx")
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == KINDS
    assert told["input"] == "images: uint8 [batch, 3, 40, 60], 0 to 255, RGB"
    assert told["preparation"].endswith(
        "; the middle with the sides' ratio, bilinearly resized to 40x60"
    )
    assert told["output"].startswith("logits: float32 [batch, 10], in the order of classes;")
    of_digits = export.metadata(untrained("mlp", GREY))
    what = "images: uint8 [batch, 1, 28, 28], 0 to 255, grey, bright strokes on black"
    assert of_digits["input"] == what
    assert of_digits["preparation"].startswith("a digit in a photo is cut out first")


def test_the_card_tells_the_runs_own_figures(run: Path, tmp_path: Path) -> None:
    (tmp_path / ".gitattributes").touch()
    write(run, "safetensors", "torch", out=tmp_path)
    _, front, text = (tmp_path / "README.md").read_text().split("---\n", 2)
    summary = json.loads((run / "summary.json").read_text())
    about = yaml.safe_load(front)
    [model] = about["model-index"]
    [result] = model["results"]
    [metric] = result["metrics"]
    assert metric["value"] == summary["test_accuracy"]
    # The fields by which the Hub finds and shows a model
    assert (about["license"], about["library_name"]) == ("unknown", "pytorch")
    assert about["pipeline_tag"] == result["task"]["type"] == "image-classification"
    assert about["tags"] == ["image-classification", "ddp_mnist", "mlp", "safetensors"]
    assert about["metrics"] == [metric["type"]] == ["accuracy"]
    assert result["dataset"] == {"name": "digits", "type": "digits", "split": "test"}
    read = ModelCard.load(tmp_path / "README.md").data
    [its] = read.eval_results or []
    assert (its.metric_value, its.dataset_split) == (summary["test_accuracy"], "test")
    assert f"| test accuracy | {summary['test_accuracy']:.4f} on 360 images |" in text
    count = sum(parameter.numel() for parameter in MODELS["mlp"](10, GREY.shape).parameters())
    assert f"{count:,} parameters" in text
    assert "1,150 images of digits:" in text
    assert summary["dataset"]["digest"] in text
    assert "datasets" not in about  # it is on no Hub
    assert "model.onnx" not in text  # which was not asked for
    assert json.loads((tmp_path / "config.json").read_text())["architecture"] == "mlp"
    dtypes = {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()}
    assert dtypes == {torch.float32}  # of a run in float64
    chosen = Export(str(run), ("safetensors",), str(tmp_path), license="cc-by-4.0")
    export.run(chosen)  # replaces the export as a whole
    assert (tmp_path / "README.md").read_text().startswith('---\nlicense: "cc-by-4.0"\n')
    names = {".gitattributes", "README.md", "config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize("architecture", [name for name in MODELS if name != "cnn"])
def test_every_net_can_be_exported(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "CHECKED_IMAGES", 10)
    torch.manual_seed(0)
    trained = untrained(architecture, GREY)
    for name in ("safetensors", "torch"):
        write, read = export.CONVERTERS[name]
        with export.quiet():
            outputs = read(write(trained))
        apart, limit = export.largest_difference(trained, outputs)
        assert apart <= 1e-4 <= limit


@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_logits_may_differ_by_a_share_of_the_largest(scale: float) -> None:
    trained = untrained("mlp", GREY)
    for parameter in list(trained.net.parameters())[-2:]:
        parameter.data *= 10 * scale
    for share, passes in ((0.5e-4, True), (2e-4, False), (torch.nan, False)):

        def off(images: torch.Tensor, share: float = share) -> torch.Tensor:
            logits = trained.model(images).detach()
            largest = logits.abs().max()
            logits[-1, 3] += share * largest
            return logits

        apart, limit = export.largest_difference(trained, off)
        assert (apart <= limit) == passes
        assert limit > 1e-4 * scale


def test_a_format_that_fails_is_named_and_the_others_are_written(
    run: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A net that is random fails in every format, and nothing is written."""
    out, export_it = tmp_path / "out", ("export", run, "--out", tmp_path / "out")
    assert typed(*export_it).code == 0
    write, read = export.CONVERTERS["torch"]
    far = lambda content: lambda images: 2 * read(content)(images)  # noqa: E731
    monkeypatch.setitem(export.CONVERTERS, "torch", (write, far))
    ended = typed(*export_it)
    fix = "leave that format out, or have the net's forward give the same each time"
    failed = r"ddp-mnist: error: {}: gives logits \S+ from the model's, above \S+; not written, {}"
    line = rf"{failed} \(code 1\)\n"
    assert ended.code == 1 and re.fullmatch(line.format(r"model\.pt2", fix), ended.err)
    assert "model.pt2: removed, of an earlier export" in ended.out
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    assert "model.pt2" not in (out / "README.md").read_text()
    assert typed(*export_it, "--format", "safetensors").code == 0
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *x: forward(*x) + torch.rand(1))
    ended = typed("export", run, "--format", "safetensors", "--out", tmp_path / "none")
    assert ended.code == 1 and re.fullmatch(line.format(r"model\.safetensors", fix), ended.err)
    assert not (tmp_path / "none").exists()


def test_on_a_terminal_a_line_says_what_is_written_as_long_as_it_takes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(shown, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", shown)
    write(run, "safetensors", out=tmp_path / "out")
    assert shown.getvalue() == "writing and checking model.safetensors ...\r\x1b[K"


def test_onnx_without_its_packages_says_what_to_install(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export.importlib.util, "find_spec", lambda name: name == "onnx" or None)
    message = (
        r"^--format onnx: needs onnxscript, onnxruntime; pip install onnxscript onnxruntime, or"
    )
    with pytest.raises(UsageError, match=message):
        write(run, "onnx")


def test_the_card_of_a_run_from_the_hub_names_data_net_and_scores(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, copy := tmp_path / "copy")
    summary = json.loads((run / "summary.json").read_text())
    summary["dataset"] |= {"name": "mnist", "source": "hub:ylecun/mnist"}
    summary["metrics"] = {"f1": 0.5, "own_metrics:undefined": None}
    summary["weights"] = "/home/alice/resnet18.pth"
    (copy / "summary.json").write_text(json.dumps(summary))
    trained = dataclasses.replace(untrained("mlp", GREY), architecture="torchvision:resnet18")
    flags = Export(str(copy), license="apache-2.0")
    text = export.model_card(trained, flags, ["model.safetensors", "model.onnx"])
    about: Any = ModelCard(text).data
    assert about.datasets == ["ylecun/mnist"] and about.license == "apache-2.0"
    names = ["image-classification", "ddp_mnist", "torchvision", "resnet18", "safetensors", "onnx"]
    assert about.tags == names
    assert "| started from | the weights resnet18.pth |\n" in text
    assert "alice" not in text
    assert about.metrics == ["accuracy", "f1"]
    scores = {result.metric_type: result.metric_value for result in about.eval_results or []}
    assert scores == {"accuracy": summary["test_accuracy"], "f1": 0.5}
    assert {result.dataset_type for result in about.eval_results or []} == {"ylecun/mnist"}


def card_of(run: Path, folder: Path, **changes: Any) -> str:
    """The card of a copy of the run, whose images were made otherwise."""
    shutil.copytree(run, copy := folder / "copy")
    trained = weights.from_bytes(weights.read_bytes(str(run)), "")
    image_format = dataclasses.replace(trained.image_format, **changes.pop("image_format", {}))
    classes = changes.pop("classes", trained.classes)
    content = weights.to_bytes(trained.net.net.state_dict(), "mlp", classes, image_format)
    (copy / "model.safetensors").write_bytes(content)
    summary = json.loads((run / "summary.json").read_text())
    summary["dataset"] |= changes
    (copy / "summary.json").write_text(json.dumps(summary))
    write(copy, "safetensors")
    again = (copy / "export" / "model.safetensors").read_bytes()
    assert weights.from_bytes(again, "").image_format == image_format  # it goes on with the weights
    return (copy / "export" / "README.md").read_text()


def write_files(folder: Path) -> list[Path]:
    """Write images whose kinds training and predict treat each in a way of its own."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 70, 4), dtype=np.uint8)
    clear = PIL.Image.fromarray(pixels)
    picture, palette = clear.convert("RGB"), clear.convert("RGB").quantize(16)
    palette.info["transparency"] = 3
    deep = PIL.Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257 + 7)
    (turned := PIL.Image.Exif())[Base.Orientation] = 6
    kinds: dict[str, tuple[PIL.Image.Image, dict[str, Any]]] = {
        "one.jpg": (picture, {"exif": turned}),
        "clear.png": (clear, {}),
        "palette.png": (palette, {}),
        "deep.png": (deep, {}),
        "grey.png": (picture.convert("L"), {}),
        "print.jpg": (picture.convert("CMYK"), {}),
    }
    for name, (image, more) in kinds.items():
        image.save(folder / name, **more)
    return [folder / name for name in kinds]


def check_recipe(card: str, shape: Shape, files: list[Path]) -> None:
    """Do with image files what the card says, and compare with what training does."""
    [recipe] = re.findall(r"```python\n(import numpy\nfrom PIL.*?)```", card, re.DOTALL)
    for file in files:
        made: dict[str, Any] = {}
        exec(recipe.replace("one.jpg", str(file)), made)
        with PIL.Image.open(file) as image:
            expected = decode_image(image, shape)
        assert made["pixels"].dtype == np.uint8
        assert np.array_equal(made["pixels"], expected[None]), file


def test_the_card_says_what_images_these_are(run: Path, tmp_path: Path) -> None:
    write(run, "safetensors", out=tmp_path / "digits")
    digits = " ".join((tmp_path / "digits" / "README.md").read_text().split())
    assert "In: uint8 images [B, 1, 28, 28], grey, bright strokes on black. Out: logits" in digits
    assert "For the training, the 8x8 digits were enlarged to 28x28." in digits
    assert "A digit in a photo has to be cut out and drawn as these are, as `ddp-mnist" in digits
    made: dict[str, Any] = dict.fromkeys(("bright_on_black", "digit_photos"), False)
    made["notes"] = ["images of 64x64 RGB became 28x28 grey"]
    place = {"name": "project", "source": "folder:/home/alice/project"}
    card = card_of(run, tmp_path, image_format=made, **place)
    photos = " ".join(card.split())
    assert "alice" not in photos  # where the data lies is not published
    assert "1,150 images of project," in photos
    assert "In: uint8 images [B, 1, 28, 28], grey. Out: logits" in photos
    assert "bright" not in photos
    assert "For the training, images of 64x64 RGB became 28x28 grey." in photos
    check_recipe(card, (1, 28, 28), write_files(tmp_path))
    assert "digit" not in photos.partition("grey.")[2].partition("| |")[0]


def test_names_in_the_card_are_shown_and_do_nothing(run: Path, tmp_path: Path) -> None:
    names = ["<script>x", "[l](javascript:x)", "`b`", "*a*|", "e\x1b[2J", "$f$", "g_h", *"890"]
    card = card_of(run, tmp_path, classes=names, name="**n**\x9b", source="folder:/a/b")
    assert not {"\x1b", "\x9b"} & set(card)
    assert "trained on \\*\\*n\\*\\*?\n" in card
    assert r"of \<script\>x, \[l\]\(javascript:x\), \`b\`, \*a\*\|, e?\[2J, \$f\$, g\_h, 8" in card
    [listed] = re.findall(r"```json\n(.*)\n```", card)
    assert json.loads(listed) == names  # to be read by programs
    assert "<script>" not in card


def test_nothing_of_others_is_replaced_and_a_file_that_fails_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    (readme := tmp_path / "README.md").write_text("mine")
    (listed := tmp_path / "listed").mkdir()
    (listed / "config.json").write_text("[]")
    places = {run: ".*", tmp_path: "README.md, listed", readme: "a file", listed: "config.json"}
    for out, others in places.items():
        refused = rf"^--out {out}: is or holds other files \({others}\); name a new folder$"
        with pytest.raises(UsageError, match=refused):
            write(run, "safetensors", out=out)
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    assert readme.read_text() == "mine"
    monkeypatch.setattr(export, "LIMIT", -1.0)
    with pytest.raises(CheckFailed):
        write(run, "safetensors", out=tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [readme, listed]
