"""Each form gives the model's logits, the ONNX file where this package is not installed too."""

import io
import json
import os
import re
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from PIL.ExifTags import Base
from safetensors.torch import load_file

from ddp_mnist.cluster.local_world import free_port
from ddp_mnist.data.decode import decode_image
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import UsageError
from ddp_mnist.system.text import quoted
from ddp_mnist.task import Classification
from ddp_mnist.training import model_file
from ddp_mnist.verbs import export
from ddp_mnist.verbs.flags import EXPORTS, Export
from tests.commands import Typed, fences_of, python, write_given
from tests.data_sets import POSTSCRIPT, fake_ghostscript
from tests.run_checks import untrained

COLOUR = ImageFormat((3, 40, 60), (0.5, 0.4, 0.3), (0.2, 0.3, 0.2), [], False, False)
KINDS = ["ladybird", "寺", 'a "moth"', "<b>[l](x)", "*a*|", "e\x1b[2J", *"6789"]
PAGE = Path("docs/in-other-programs.md")


@pytest.fixture(scope="module")
def exported(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run photos-001, of a net for pictures in colour that nobody trained; both forms of it."""
    place = tmp_path_factory.mktemp("colour") / "runs" / "photos-001"
    own = untrained(alone, "cnn", COLOUR, Classification(KINDS), place)
    write(own, *EXPORTS)
    return own


def write(run: Path, *formats: str, out: Path | None = None) -> None:
    export.run(Export(str(run), formats, str(out) if out else None))


def test_both_files_are_of_the_model(alone: Path, tmp_path: Path, typed: Typed) -> None:
    ended = typed("export", alone, "--format", "safetensors, onnx", "--out", tmp_path)
    said = [line for line in ended.succeeds().splitlines() if not line.startswith("writing ")]
    assert [line.split(":")[0] for line in said[:2]] == list(EXPORTS.values())
    upload = f"to the Hub: hf upload YOUR_NAME/run {quoted(tmp_path)}"
    assert said[2:] == [f"written to {tmp_path}", upload]
    trained = model_file.from_bytes(model_file.read_bytes(str(alone)), "")
    state = load_file(tmp_path / "model.safetensors")
    for name, tensor in trained.net.net.state_dict().items():
        assert torch.equal(state[name], tensor.float())
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}  # of a run in float64


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


def test_the_pages_tell_how_images_are_padded() -> None:
    photo, width, height = PIL.Image.linear_gradient("L").resize((90, 40)).convert("RGB"), 60, 40
    expected = decode_image(photo, (3, height, width), "pad").transpose(1, 2, 0)
    names = {"ImageOps": PIL.ImageOps, "Image": PIL.Image, "photo": photo}
    for page in (PAGE, PAGE.with_suffix(".zh-CN.md")):
        [told] = re.findall(r"`(ImageOps\.pad\(.*?)`", page.read_text())
        assert np.array_equal(eval(told, names | {"width": width, "height": height}), expected)
        assert page.read_text().count("ImageOps.fit(photo, (width, height),") == 2


def bad_requests() -> dict[str, bytes]:
    """Return what the service refuses: the content by its headers."""
    PIL.Image.new("1", (8000, 8000)).save(bomb := io.BytesIO(), "PNG")
    sent = {"Content-Length: -1": b"", "X: no length": b"", "Content-Length: 99999999999": b""}
    sent |= {"Content-Length: x": b"", "Transfer-Encoding: chunked": b"1\r\nx\r\n0\r\n\r\n"}
    sent |= {"Content-Length: 99": b"and no more"}
    whole = (b"no image", POSTSCRIPT, bomb.getvalue())
    return sent | {f"Content-Length: {len(each)}": each for each in whole}


def test_the_pages_service_answers_as_predict_does(
    exported: Path, tmp_path: Path, typed: Typed
) -> None:
    [fence] = [f for f in fences_of(PAGE) if f.body.startswith("# service.py")]
    port, photo = free_port(), tmp_path / "0.png"
    body = fence.body.replace("8000", str(port)).replace("timeout = 10", "timeout = 1")
    (tmp_path / "service.py").write_text(body)
    (tmp_path / "runs").symlink_to(exported.parent)
    PIL.Image.linear_gradient("L").resize((90, 70)).convert("RGB").save(photo)
    [answer] = map(json.loads, typed("predict", exported, photo).out.splitlines())
    words, path = [sys.executable, "-u", "service.py"], fake_ghostscript(tmp_path)
    streams: dict[str, Any] = {"stdout": -1, "stderr": -1, "env": os.environ | {"PATH": path}}
    with subprocess.Popen(words, cwd=tmp_path, **streams) as service:
        assert service.stdout and b"listening" in service.stdout.readline()
        where = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(where, photo.read_bytes()) as reply:
            found = json.loads(reply.read())
        for head, sent in bad_requests().items():
            with socket.create_connection(("127.0.0.1", port)) as client:
                client.sendall(f"POST / HTTP/1.0\r\n{head}\r\n\r\n".encode() + sent)
                assert client.recv(1000).startswith(b"HTTP/1.0 400 "), head
        with socket.create_connection(("127.0.0.1", port)) as client:  # it leaves
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            raw = photo.read_bytes()
            client.sendall(f"POST / HTTP/1.0\r\nContent-Length: {len(raw)}\r\n\r\n".encode() + raw)
        with urllib.request.urlopen(where, photo.read_bytes()) as reply:
            assert json.loads(reply.read()) == found
        service.terminate()
        assert service.stderr and b"Traceback" not in service.stderr.read()
    assert not (tmp_path / "started").exists()
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
    assert r'- Classes: ladybird, 寺, a "moth", \<b>\[l\](x), \*a\*\|, e?\[2J, 6, ' in card


def test_a_format_that_fails_is_named_and_nothing_is_written(
    alone: Path, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier export stays as it was. A net that is random fails in every format."""
    out = tmp_path / "out"
    failed = r"ddp-mnist: error: {}: gives outputs \S+ from the .*; nothing is written, .*\n"
    export_it = ("export", alone, "--format", "safetensors,onnx", "--out", out)
    assert typed(*export_it).code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    write, read = export.CONVERTERS["onnx"]
    far = lambda content: lambda images: 2 * read(content)(images)  # noqa: E731
    monkeypatch.setitem(export.CONVERTERS, "onnx", (write, far))
    ended = typed(*export_it)
    assert ended.code == 1 and re.fullmatch(failed.format(r"model\.onnx"), ended.err)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert typed("export", alone, "--out", out).out.count("model.onnx: removed, of an earlier") == 1
    names = {path.name for path in out.iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}
    forward = torch.nn.Linear.forward
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda *x: forward(*x) + torch.rand(1))
    ended = typed("export", alone, "--out", tmp_path / "none")
    assert ended.code == 1 and re.fullmatch(failed.format(r"model\.safetensors"), ended.err)
    assert not (tmp_path / "none").exists()


def test_nothing_of_others_is_replaced(alone: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in alone.iterdir() if path.is_file()}
    (readme := tmp_path / "README.md").write_text("mine")
    (listed := tmp_path / "listed").mkdir()
    (listed / "config.json").write_text("[]")
    places = {alone: ".*", tmp_path: "README.md, listed", readme: "a file", listed: "config.json"}
    for out, others in places.items():
        refused = rf"^--out {out}: is or holds other files \({others}\); name a new folder$"
        with pytest.raises(UsageError, match=refused):
            write(alone, "safetensors", out=out)
    assert {path: path.read_bytes() for path in alone.iterdir() if path.is_file()} == before
    assert readme.read_text() == "mine"
