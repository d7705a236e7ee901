"""Each form gives the model's logits, the ONNX file where this package is not installed too."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from hashlib import sha256
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageOps
import pytest
import torch
from huggingface_hub import ModelCard
from PIL.ExifTags import Base
from safetensors.torch import load_file

from ddp_mnist.cluster.local_world import free_port, run_world
from ddp_mnist.core.nets import MODELS
from ddp_mnist.core.wrappers import Normalised, as_tested
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import CheckFailed, UsageError
from ddp_mnist.system.files import read_json
from ddp_mnist.task import Classification
from ddp_mnist.training import model_file
from ddp_mnist.verbs import export
from ddp_mnist.verbs.flags import EXPORTS, Export
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.commands import Typed, fences_of, python, write_given
from tests.data_sets import GREY

COLOUR = ImageFormat((3, 40, 60), (0.5, 0.4, 0.3), (0.2, 0.3, 0.2), [], False, False)
KINDS = ["ladybird", "寺", 'a "moth"', *map(str, range(7))]
PAGE = Path("docs/your-photos.md")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of float64, whose exports are float32."""
    folder = tmp_path_factory.mktemp("export")
    run_world(1, just_train, proof_config(model="mlp", epochs=1), folder=folder)
    return folder / "run"


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run photos-001, of a net for pictures in colour that nobody trained; both forms of it."""
    own = tmp_path_factory.mktemp("colour") / "runs" / "photos-001"
    shutil.copytree(run, own)
    torch.manual_seed(3)
    net = MODELS["cnn"](10, COLOUR.shape)
    for parameter in net.parameters():
        parameter.data *= 3  # an opinion of its own
    content = model_file.to_bytes(net.state_dict(), "cnn", Classification(KINDS), COLOUR)
    (own / "model.safetensors").write_bytes(content)
    summary = read_json(own / "summary.json") | {"model_sha256": sha256(content).hexdigest()}
    (own / "summary.json").write_text(json.dumps(summary))
    write(own, *EXPORTS)
    return own


def write(run: Path, *formats: str, out: Path | None = None) -> None:
    export.run(Export(str(run), formats, str(out) if out else None))


def untrained(name: str, image_format: ImageFormat) -> model_file.TrainedModel:
    net = Normalised(
        MODELS[name](10, image_format.shape),
        image_format.mean,
        image_format.std,
        shifted_views=name == "cnn_deep",
    ).eval()
    task = Classification(KINDS)
    model = as_tested(net)
    return model_file.TrainedModel(net, model, name, task, image_format)


def test_both_files_give_the_models_logits_and_replace_an_earlier_export(
    run: Path, tmp_path: Path, typed: Typed
) -> None:
    ended = typed("export", run, "--format", "safetensors, onnx", "--out", tmp_path)
    said = [line for line in ended.succeeds().splitlines() if not line.startswith("writing ")]
    assert [line.split(":")[0] for line in said[:2]] == list(EXPORTS.values())
    assert said[2:] == [f"written to {tmp_path}", f"to the Hub: hf upload YOUR_NAME/run {tmp_path}"]
    trained = model_file.from_bytes(model_file.read_bytes(str(run)), "")
    images = torch.randint(0, 256, (100, *GREY.shape), dtype=torch.uint8)
    with torch.inference_mode():
        expected = trained.model(images).float()
    given = export.read_onnx((tmp_path / "model.onnx").read_bytes())(images)
    assert (given - expected).abs().max() < 1e-4
    state = load_file(tmp_path / "model.safetensors")
    for name, tensor in trained.net.net.state_dict().items():
        assert torch.equal(state[name], tensor.float())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}  # of a run in float64
    write(run, "safetensors", out=tmp_path)
    names = {"README.md", "config.json", "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == names


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


def test_the_pages_service_answers_as_predict_does(
    exported: Path, tmp_path: Path, typed: Typed
) -> None:
    [fence] = [f for f in fences_of(PAGE) if f.body.startswith("# service.py")]
    port, photo = free_port(), tmp_path / "0.png"
    (tmp_path / "service.py").write_text(fence.body.replace("8000", str(port)))
    (tmp_path / "runs").symlink_to(exported.parent)
    PIL.Image.linear_gradient("L").resize((90, 70)).convert("RGB").save(photo)
    [answer] = map(json.loads, typed("predict", exported, photo).out.splitlines())
    with subprocess.Popen([sys.executable, "-u", "service.py"], cwd=tmp_path, stdout=-1) as service:
        assert service.stdout and b"listening" in service.stdout.readline()
        where = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(where, photo.read_bytes()) as reply:
            found = json.loads(reply.read())
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(where, b"no image")
        service.terminate()
    assert found["probability"] == pytest.approx(answer["probability"], abs=1e-4)
    assert found["label"] == (answer["label"] if answer["probability"] >= 0.8 else "not sure")


def test_the_onnx_file_and_the_card_describe_the_images(exported: Path) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(exported / "export" / "model.onnx")
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == KINDS
    pixels = "images: uint8 [batch, 3, 40, 60], 0 to 255, RGB"
    assert told["input"] == f"{pixels}; the model itself normalises the pixels"
    assert told["preparation"].endswith("bilinearly resized to 40x60 (height x width)")
    assert told["output"].startswith("logits: float32 [batch, 10], in the order of classes;")
    card = (exported / "export" / "README.md").read_text()
    assert f"- Preparation of an image: {told['preparation']}\n" in card
    assert f"- Output: {told['output']}\n" in card
    assert f"It takes {told['input']}.\n" in card
    weights = "(pixels / 255 - mean) / std, with mean 0.5, 0.4, 0.3 and std 0.2, 0.3, 0.2 for"
    assert weights in card
    digits = export.metadata(untrained("mlp", GREY))
    assert "; a digit in a photo that is not 28x28 is cut out first" in digits["preparation"]


def test_the_card_has_the_runs_accuracy_and_names_in_it_do_nothing(
    run: Path, tmp_path: Path
) -> None:
    shutil.copytree(run, copy := tmp_path / "copy")
    summary = read_json(run / "summary.json")
    summary["dataset"] |= {"name": "**n**\x9b", "source": "folder:/home/alice/project"}
    (copy / "summary.json").write_text(json.dumps(summary))
    names = ["<script>x", "[l](javascript:x)", "`b`", "*a*|", "e\x1b[2J", "$f$", "g_h", *"890"]
    notes = ["images of 64x64 RGB became 28x28 grey"]
    trained = untrained("mlp", dataclasses.replace(GREY, notes=notes))
    flags = Export(str(copy), license="cc-by-4.0")
    card = export.model_card(dataclasses.replace(trained, task=Classification(names)), flags)
    about: Any = ModelCard(card).data  # as the Hub reads it
    assert (about.license, about.pipeline_tag) == ("cc-by-4.0", "image-classification")
    assert f"Test accuracy {summary['test_accuracy']:.4f} on 360 images; " in card
    assert "- For the training, images of 64x64 RGB became 28x28 grey\n" in card
    assert not {"\x1b", "\x9b"} & set(card)
    assert "alice" not in card  # where the data lies is not published
    assert "trained on \\*\\*n\\*\\*?\n" in card
    assert r": \<script>x, \[l\](javascript:x), \`b\`, \*a\*\|, e?\[2J, \$f\$, g_h, 8" in card


def test_a_format_that_fails_is_named_and_nothing_is_written(
    run: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier export stays as it was. A net that is random fails in every format."""
    out = tmp_path / "out"
    failed = r"ddp-mnist: error: {}: gives outputs \S+ from the .*; nothing is written, .*\n"
    export_it = ("export", run, "--format", "safetensors,onnx", "--out", out)
    assert typed(*export_it).code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    write, read = export.CONVERTERS["onnx"]
    far = lambda content: lambda images: 2 * read(content)(images)  # noqa: E731
    monkeypatch.setitem(export.CONVERTERS, "onnx", (write, far))
    ended = typed(*export_it)
    assert ended.code == 1 and re.fullmatch(failed.format(r"model\.onnx"), ended.err)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert typed("export", run, "--out", out).out.count("model.onnx: removed, of an earlier") == 1
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *x: forward(*x) + torch.rand(1))
    ended = typed("export", run, "--out", tmp_path / "none")
    assert ended.code == 1 and re.fullmatch(failed.format(r"model\.safetensors"), ended.err)
    assert not (tmp_path / "none").exists()


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
