from __future__ import annotations

import dataclasses
import io
import itertools
import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import PIL.Image
import pytest
import torch
from matplotlib.figure import Figure

from ddp_mnist import cli
from ddp_mnist.cluster.launch import Launch
from ddp_mnist.cluster.local import run_world
from ddp_mnist.config import Distribution, Recipe, Run, TrainConfig
from ddp_mnist.data import cache
from ddp_mnist.data.decode import DIGITS, Preparation
from ddp_mnist.errors import CheckpointError, DataError, UsageError
from ddp_mnist.models import MODELS
from ddp_mnist.run import weights
from ddp_mnist.verbs import predict as verb
from ddp_mnist.verbs.evaluate import evaluate_run
from ddp_mnist.verbs.flags import Evaluate, Predict
from ddp_mnist.verbs.predict import as_mnist, as_trained, centred, find_images
from ddp_mnist.verify.watch import just_train

CLASSES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """A net that nobody trained, but with an opinion of its own."""
    torch.manual_seed(3)
    model = MODELS["cnn"](10).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def run(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = Preparation([], bright_on_black=True, digit_photos=True)
    return run_of(tmp_path_factory.mktemp("base") / "run", model, CLASSES, made)


def predict(run: str, images: list[str], digit_photos: bool | None = None) -> Any:
    return verb.predict(Predict(run, tuple(images), digit_photos=digit_photos))


def digits(count: int) -> np.ndarray:
    """uint8 [count, 28, 28]: bright strokes on black."""
    return cache.load("digits").test_images[:count].numpy()


def save(pixels: np.ndarray, path: Path) -> Path:
    PIL.Image.fromarray(pixels).save(path)
    return path


def seven() -> np.ndarray:
    """A large drawing, uint8 [200, 160]: bright on black, far from the middle."""
    frame = np.zeros((200, 160), dtype=np.uint8)
    frame[20:30, 10:70] = 255
    frame[20:120, 60:70] = 255
    return frame


# --- What the net sees


def test_28x28_is_taken_as_it_is_and_dark_strokes_are_inverted(tmp_path: Path) -> None:
    for number, image in enumerate(digits(5)):
        for paper, drawn in (("black", image), ("white", 255 - image)):
            seen = as_mnist(save(drawn, tmp_path / f"{number}-{paper}.png"))
            assert seen.dtype == np.uint8
            assert np.array_equal(seen, image)


def shadow(height: int, width: int) -> np.ndarray:
    return np.linspace(60, 200, height)[:, None] + np.linspace(0, 50, width)


@pytest.mark.parametrize(
    "page",
    [
        *(np.full(shape, 0) for shape in ((28, 28), (100, 60), (1, 1))),
        *(np.full(shape, 255) for shape in ((28, 28), (100, 60))),
        *(shadow(*shape) for shape in ((100, 60), (64, 64), (1, 2), (300, 31))),
    ],
)
def test_neither_a_blank_page_nor_a_shadow_is_a_digit(page: np.ndarray, tmp_path: Path) -> None:
    file = save(page.round().astype(np.uint8), tmp_path / "x.png")
    with pytest.raises(DataError, match=r"x\.png: shows nothing but its ground; give an image of"):
        as_mnist(file)


@pytest.mark.parametrize(("paper", "ink"), [(180, 20), (100, 0), (60, 255), (200, 90), (90, 200)])
def test_paper_and_ink_may_have_any_brightness(paper: int, ink: int, tmp_path: Path) -> None:
    """As a phone sees them, with some noise."""
    drawn = np.where(seven() > 0, float(ink), float(paper))
    noise = np.random.default_rng(0).normal(0, abs(paper - ink) / 25, drawn.shape)
    photo = (drawn + noise).clip(0, 255).round().astype(np.uint8)
    expected = as_mnist(save(seven(), tmp_path / "clean.png"))
    seen = as_mnist(save(photo, tmp_path / "photo.png"))
    assert np.array_equal(seen > 0, expected > 0)
    assert np.abs(seen.astype(int) - expected).mean() < 6


@pytest.mark.parametrize(("left", "right"), [(0.9, 1.05), (0.8, 1.1), (0.55, 1.1), (1.0, 0.5)])
def test_light_may_fall_from_one_side(left: float, right: float, tmp_path: Path) -> None:
    light = np.linspace(left, right, 160) * np.linspace(1.0, 0.95, 200)[:, None]
    photo = np.where(seven() > 0, 40.0, 200.0) * light
    expected = as_mnist(save(seven(), tmp_path / "clean.png"))
    seen = as_mnist(save(photo.clip(0, 255).astype(np.uint8), tmp_path / "photo.png"))
    assert np.array_equal(seen > 0, expected > 0)


def test_a_stroke_may_touch_the_border(tmp_path: Path) -> None:
    drawn = np.where(seven()[20:, 10:] > 0, 30, 180).astype(np.uint8)  # cut close on two sides
    expected = as_mnist(save(seven(), tmp_path / "clean.png"))
    assert np.array_equal(as_mnist(save(drawn, tmp_path / "cut.png")) > 0, expected > 0)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "1", "P", "CMYK", "I;16"])
def test_other_modes_of_the_same_image_look_the_same(mode: str, tmp_path: Path) -> None:
    image = digits(1)[0]
    if mode in ("1", "CMYK"):
        image = np.where(image > 127, 255, 0).astype(np.uint8)
    if mode == "I;16":
        picture = PIL.Image.fromarray(image.astype(np.uint16) * 257)
    else:
        picture = PIL.Image.fromarray(image).convert(mode)
    path = tmp_path / ("x.tif" if mode == "CMYK" else "x.png")
    picture.save(path)
    with PIL.Image.open(path) as opened:
        assert opened.mode == mode
    assert np.array_equal(as_mnist(path), image)


def test_transparent_is_paper(tmp_path: Path) -> None:
    """Black strokes on nothing: all pixels are black, and only the opacity draws."""
    image = digits(1)[0]
    picture = np.zeros((28, 28, 4), dtype=np.uint8)
    picture[..., 3] = image
    assert np.array_equal(as_mnist(save(picture, tmp_path / "x.png")), image)
    picture[..., :3] = 255  # white strokes on nothing
    assert np.array_equal(as_mnist(save(picture, tmp_path / "x.png")), image)


def test_a_large_digit_lands_in_the_middle_at_mnists_size(tmp_path: Path) -> None:
    drawn = as_mnist(save(255 - seven(), tmp_path / "x.png"))
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    assert rows[-1] - rows[0] + 1 == 20  # its longer side
    assert columns[-1] - columns[0] + 1 == 12
    mass = drawn.astype(float) / drawn.sum()
    assert (mass.sum(1) * np.arange(28)).sum() == pytest.approx(13.5, abs=0.5)
    assert (mass.sum(0) * np.arange(28)).sum() == pytest.approx(13.5, abs=0.5)
    assert drawn.max() == 255
    assert drawn[rows[0], columns].min() > 200  # the bar of the seven


@pytest.mark.parametrize("scale", [1, 2, 5])
@pytest.mark.parametrize(("down", "right"), [(0, 0), (60, 80), (80, 0)])
def test_place_and_size_of_a_drawing_do_not_matter(scale: int, down: int, right: int) -> None:
    expected = centred(seven())
    moved = np.roll(seven(), (down, right), axis=(0, 1)).repeat(scale, 0).repeat(scale, 1)
    assert np.abs(centred(moved).astype(int) - expected).max() <= 60
    assert np.abs(centred(moved).astype(int) - expected).mean() < 2


def test_a_small_drawing_a_dot_and_a_line_fit() -> None:
    small = np.zeros((12, 9), dtype=np.uint8)
    small[3:8, 4] = 200
    drawn = centred(small)
    assert np.flatnonzero(drawn.any(1)).tolist() == list(range(4, 24))
    assert set(np.unique(drawn)) == {0, 200}
    dot = np.zeros((300, 300), dtype=np.uint8)
    dot[299, 299] = 255
    assert centred(dot).sum() == 20 * 20 * 255
    line = np.zeros((300, 40), dtype=np.uint8)
    line[:, 39] = 255
    assert np.flatnonzero(centred(line).any(0)).size == 1


def with_exif(entries: bytes, count: int) -> bytes:
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", count) + entries + b"\0\0\0\0"


TURNED = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)  # by 90 degrees
WIDTH_OF_1_5 = struct.pack("<HHIf", 0x0100, 11, 1, 1.5)


@pytest.mark.parametrize(
    ("exif", "turned"),
    [
        (with_exif(TURNED, 1), True),
        (with_exif(WIDTH_OF_1_5 + TURNED, 2), True),
        (with_exif(TURNED[:5], 1), False),
        (with_exif(TURNED.replace(b"\6", b"\x63"), 1), False),
        (b"Exif\0\0nothing", False),
    ],
)
@pytest.mark.parametrize("form", ["png", "jpg", "webp"])
def test_a_turned_photo_is_upright_and_damaged_exif_costs_no_answer(
    exif: bytes, turned: bool, form: str, tmp_path: Path
) -> None:
    drawn = PIL.Image.fromarray(255 - seven())
    stored = drawn.rotate(90, expand=True) if turned else drawn
    stored.save(tmp_path / f"x.{form}", exif=exif, quality=95)
    seen = as_mnist(tmp_path / f"x.{form}").astype(int)
    lossy = 0 if form == "png" else 3
    assert np.abs(seen - as_mnist(save(255 - seven(), tmp_path / "y.png"))).mean() <= lossy


def test_a_large_photo_is_seen_as_a_small_one_is(tmp_path: Path) -> None:
    drawn = PIL.Image.fromarray(255 - seven())
    large = drawn.resize((3200, 4000), PIL.Image.Resampling.BICUBIC)
    expected = as_mnist(save(255 - seven(), tmp_path / "small.png")).astype(int)
    for form, mode in (("png", "RGB"), ("jpg", "RGB"), ("png", "P"), ("png", "1")):
        large.convert(mode).save(tmp_path / f"large.{form}")
        assert np.abs(as_mnist(tmp_path / f"large.{form}") - expected).mean() < 4


# --- As training prepared it


def write_images(
    folder: Path, split: str, images: list[PIL.Image.Image], labels: list[str]
) -> None:
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = folder / split / label
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number:04d}.png")


def photos(labels: np.ndarray) -> list[PIL.Image.Image]:
    """64x64, in colour: dark, light, and bright in the left, right or upper half."""
    random = np.random.default_rng(len(labels))
    images = []
    for label in labels:
        pixels = np.full((64, 64, 3), 200 if label == 1 else 60)
        if label >= 2:
            bright = [pixels[:, :32], pixels[:, 32:], pixels[:32]][label - 2]
            bright[:] = (230, 180, 150)
        pixels = pixels + random.integers(-40, 40, pixels.shape)
        images.append(PIL.Image.fromarray(pixels.clip(0, 255).astype(np.uint8)))
    return images


def digit_files(kind: str, pixels: np.ndarray) -> list[PIL.Image.Image]:
    images = [PIL.Image.fromarray(image) for image in pixels]
    if kind.startswith("dark"):
        images = [PIL.Image.fromarray(255 - image) for image in pixels]
    if kind.endswith("96"):
        images = [image.resize((96, 96), PIL.Image.Resampling.BICUBIC) for image in images]
    return images


def train_and_answer(folders: list[str]) -> list[dict[str, Any]]:
    """Return for each data set what evaluate counts and what predict answers for its test files."""
    outcomes = []
    for folder in folders:
        run = f"{folder}-run"
        config = TrainConfig(
            Run(dataset=folder, run_dir=run, quiet=True),
            Recipe(epochs=8, batch_size=50, val_size=0),
            Distribution(cpu=True, mixed_precision="no"),
        )
        just_train(config)
        counted = evaluate_run(Evaluate(run), config.distribution, Launch())
        trained = weights.from_bytes(weights.read_bytes(run), run)
        images = cache.load(folder)
        with torch.inference_mode():
            guesses = trained.model(images.test_images).argmax(1).tolist()
        files = [str(file) for file in sorted((Path(folder) / "test").rglob("*.png"))]
        outcomes.append(
            {
                "counted": counted,
                "labels": images.test_labels.tolist(),
                "guesses": [images.classes[guess] for guess in guesses],
                "answers": [line["label"] for line, _ in predict(run, files)],
            }
        )
    return outcomes


KINDS = ("digits 28", "dark 28", "dark 96", "bright 96", "photos")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Train on each kind of files, in one process."""
    base, images = tmp_path_factory.mktemp("kinds"), cache.load("digits")
    names = ["dark", "light", "left", "right", "top"]
    for kind, (split, rows) in itertools.product(KINDS, {"train": 500, "test": 100}.items()):
        if kind == "photos":
            numbers = np.arange(rows) % 5
            write_images(base / kind, split, photos(numbers), [names[n] for n in numbers])
        else:
            pixels = getattr(images, f"{split}_images")[:rows].numpy()
            labels = getattr(images, f"{split}_labels")[:rows].tolist()
            write_images(base / kind, split, digit_files(kind, pixels), [str(n) for n in labels])
    [outcomes] = run_world(1, train_and_answer, [str(base / kind) for kind in KINDS], folder=base)
    return dict(zip(KINDS, outcomes, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_a_data_set_have_the_labels_that_evaluate_counts(
    kind: str, answers: dict[str, dict[str, Any]]
) -> None:
    outcome = answers[kind]
    counted = outcome["counted"]
    assert counted["accuracy"] > 0.8  # and not by chance
    assert outcome["answers"] == outcome["guesses"]
    confusion = np.zeros_like(counted["confusion"])
    for label, answer in zip(outcome["labels"], outcome["answers"], strict=True):
        confusion[label][counted["classes"].index(answer)] += 1
    assert confusion.tolist() == counted["confusion"]


def run_of(folder: Path, model: torch.nn.Module, classes: list[str], made: Preparation) -> str:
    folder.mkdir()
    content = weights.to_bytes(model.state_dict(), "cnn", classes, made)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def test_photos_of_digits_are_cut_out_on_request(model: torch.nn.Module, tmp_path: Path) -> None:
    """The net alone knows what it was trained on, and so says what photos are made into."""
    page = save(np.pad(255 - digits(1)[0], 30, constant_values=255), tmp_path / "x.png")
    as_it_is, cut_out = as_trained(page), as_mnist(page)
    bright = Preparation([], bright_on_black=True, digit_photos=False)
    dark = dataclasses.replace(bright, bright_on_black=False)
    letters = run_of(tmp_path / "letters", model, list("abcdefghij"), bright)
    own = run_of(tmp_path / "own", model, DIGITS, dark)

    def seen(run: str, digit_photos: bool | None) -> Any:
        [(_, image)] = predict(run, [str(page)], digit_photos)
        return image

    assert np.array_equal(seen(letters, None), as_it_is)
    assert np.array_equal(seen(letters, True), cut_out)
    assert np.array_equal(seen(letters, False), as_it_is)
    assert np.array_equal(seen(own, None), as_it_is)
    with pytest.raises(UsageError, match=f"^--digit-photos: {own} .*; leave it out$"):
        seen(own, True)


# --- Which files


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpeg", "10.png", "9.png", "notes.txt", ".hidden", "._9.png"):
        (tmp_path / name).touch()
    (tmp_path / "folder.png").mkdir()
    assert [p.name for p in find_images(str(tmp_path))] == ["10.png", "9.png", "a.jpeg", "b.PNG"]
    assert find_images("what/ever.xyz") == [Path("what/ever.xyz")]


def test_files_that_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "x.png"
    text.write_text("no picture")
    cut = save(seven(), tmp_path / "cut.png")
    cut.write_bytes(cut.read_bytes()[:60])
    large = save(seven(), tmp_path / "large.png")

    def refused(file: Path) -> str:
        for prepare in (as_mnist, as_trained):
            with pytest.raises(DataError) as error:
                prepare(file)
        return str(error.value)

    none = tmp_path / "none.png"
    assert refused(none) == f"{none}: no such file or directory; give a PNG or JPEG file"
    for file in (text, cut):
        assert refused(file) == f"{file}: no image that Pillow reads; give a PNG or JPEG file"
    with monkeypatch.context() as patched:
        patched.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 100)
        assert refused(large) == f"{large}: no image that Pillow reads; give a PNG or JPEG file"
    monkeypatch.setattr(PIL.Image, "open", Mock(side_effect=struct.error("bad char")))
    assert refused(large) == f"{large}: no image that Pillow reads; give a PNG or JPEG file"


# --- Labels


def test_labels_are_the_nets_own(run: str, model: torch.nn.Module, tmp_path: Path) -> None:
    images = digits(300)  # more than one batch
    files = [str(save(image, tmp_path / f"{n:03d}.png")) for n, image in enumerate(images)]
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).softmax(1)
    assert len(set(expected.argmax(1).tolist())) > 1
    found = [line for line, _ in predict(run, files)]
    assert [line["file"] for line in found] == files
    assert [line["label"] for line in found] == [CLASSES[i] for i in expected.argmax(1)]
    for line, row in zip(found, expected.tolist(), strict=True):
        assert list(line["probabilities"]) == CLASSES
        assert list(line["probabilities"].values()) == pytest.approx(row, abs=1e-5)
        assert line["probability"] == max(line["probabilities"].values())
        assert line["probability"] == line["probabilities"][line["label"]]
    assert [line for line, _ in predict(run, [str(tmp_path)])] == found


def typed(capsys: pytest.CaptureFixture[str], *argv: Any) -> tuple[Any, str, str]:
    """Return exit code, stdout and stderr of `ddp-mnist predict ARGV`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["predict", *map(str, argv)])
    return ended.value.code, *capsys.readouterr()


def test_the_verb_prints_json_lines(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = save(digits(1)[0], tmp_path / "數.png")
    code, out, err = typed(capsys, run, image, image)
    assert (code, err) == (0, "")
    first, second = (json.loads(line) for line in out.splitlines())
    assert first == second
    assert first["file"] == str(image)
    assert first["label"] in CLASSES


def test_a_reader_that_went_away_is_no_error(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = save(digits(1)[0], tmp_path / "x.png")
    monkeypatch.setattr("builtins.print", Mock(side_effect=BrokenPipeError))
    assert typed(capsys, run, image, image)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "begins"),
    [
        (["{run}", "{tmp}/none.png"], 3, "{tmp}/none.png: no such file or directory; give a PNG"),
        (["{run}", "{tmp}"], 3, "{tmp}: holds no images"),
        (["{tmp}/none", "x.png"], 4, "{tmp}/none: there is no model of a finished run"),
        (["{tmp}", "x.png"], 4, "{tmp}: there is no model of a finished run (model.saf"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    arguments: list[str],
    code: int,
    begins: str,
    run: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places: dict[str, Any] = {"run": run, "tmp": tmp_path}
    given, out, err = typed(capsys, *(a.format(**places) for a in arguments))
    assert given == code
    assert "label" not in out
    assert err.startswith(f"ddp-mnist: error: {begins.format(**places)}")
    assert err.endswith(f" (code {code})\n")
    assert err.count("\n") == 1


def test_files_beside_one_that_cannot_be_read_have_their_answers(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, image in enumerate(digits(3)):
        save(image, tmp_path / f"{number}.png")
    (tmp_path / "1a.png").write_text("no picture")
    picture = tmp_path / "seen.png"
    code, out, err = typed(capsys, run, tmp_path, "--show", picture)
    lines = [json.loads(line) for line in out.splitlines()]
    assert [Path(line["file"]).name for line in lines] == ["0.png", "1.png", "1a.png", "2.png"]
    assert ["label" in line for line in lines] == [True, True, False, True]
    assert lines[2]["error"] == "no image that Pillow reads; give a PNG or JPEG file"
    assert code == 3
    assert err == f"ddp-mnist: error: {tmp_path}/1a.png: {lines[2]['error']} (code 3)\n"
    assert picture.exists()
    (tmp_path / "2.png").write_text("no picture")
    with pytest.raises(DataError, match=r"1a\.png: .* \(2 of 5 files have no answer\)$"):
        list(predict(run, [str(tmp_path)]))


def test_a_damaged_model_is_refused(run: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(weights.read_bytes(run)[:1000])
    with pytest.raises(CheckpointError, match=f"^{tmp_path}: model.safetensors is damaged"):
        list(predict(str(tmp_path), ["x.png"]))


def test_one_image_comes_on_stdin(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = save(digits(1)[0], tmp_path / "x.png")
    [(expected, _)] = predict(run, [str(image)])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(image.read_bytes())))
    code, out, _ = typed(capsys, run, "-")
    assert (code, json.loads(out)) == (0, {**expected, "file": "-"})
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    with pytest.raises(
        DataError, match=r"^-: no image that Pillow reads; give a PNG or JPEG file$"
    ):
        list(predict(run, ["-"]))


def test_what_the_model_saw_is_drawn(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, image in enumerate(digits(70)):
        save(255 - image, tmp_path / f"{number:02d}_$^$.png")  # no formula
    picture = tmp_path / "seen.png"
    drawn: list[Figure] = []

    def save_and_keep(figure: Figure, *arguments: Any, **named: Any) -> None:
        drawn.append(figure)
        savefig(figure, *arguments, **named)

    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", save_and_keep)
    answers = [line for line, _ in predict(run, [str(tmp_path)])]
    assert typed(capsys, run, tmp_path, "--show", picture)[0] == 0
    with PIL.Image.open(picture) as shown:
        assert shown.size == (1040, 1434)  # eight rows of eight
    [figure] = drawn
    assert figure.get_suptitle() == "64 of 70 images"
    for axis, answer, image in zip(figure.axes, answers, digits(64), strict=False):
        name = Path(answer["file"]).name
        assert axis.get_title() == f"{name}\n{answer['label']} ({answer['probability']:.2f})"
        assert np.array_equal(np.asarray(axis.get_images()[0].get_array()), image)
    for wrong in ("seen.jpg", "none/seen.png"):
        code, _, err = typed(capsys, run, tmp_path, "--show", tmp_path / wrong)
        assert code == 2
        assert err.startswith(f"ddp-mnist: error: --show {tmp_path / wrong}: ")


# --- The real MNIST


def test_1000_test_images_are_labelled_as_evaluate_does(
    mnist: Path, mnist_run: Path, tmp_path: Path
) -> None:
    """As they are; and inverted, enlarged and moved about on a larger page, nearly as well."""
    images = cache.load(str(mnist))
    pixels, labels = images.test_images[:1000], images.test_labels[:1000].tolist()
    trained = weights.from_bytes(weights.read_bytes(str(mnist_run)), "")
    with torch.inference_mode():
        expected = [str(label) for label in trained.model(pixels).argmax(1).tolist()]
    right = sum(int(guess) == label for guess, label in zip(expected, labels, strict=True))
    assert right > 980

    (tmp_path / "same").mkdir()
    (tmp_path / "other").mkdir()
    for number, image in enumerate(pixels.numpy()):
        save(image, tmp_path / "same" / f"{number:04d}.png")
        size = 60 + number % 7 * 40  # 60 to 300 pixels
        page = PIL.Image.new("L", (size + 50, size + 20 + number % 3 * 30), 255)
        drawn = PIL.Image.fromarray(255 - image).resize((size, size), PIL.Image.Resampling.BICUBIC)
        page.paste(drawn, (number % 50, number % 20))
        page.save(tmp_path / "other" / f"{number:04d}.png")
    found = [line["label"] for line, _ in predict(str(mnist_run), [str(tmp_path / "same")])]
    assert found == expected
    others = [line["label"] for line, _ in predict(str(mnist_run), [str(tmp_path / "other")])]
    also_right = sum(int(guess) == label for guess, label in zip(others, labels, strict=True))
    assert also_right >= 0.95 * right


def test_what_a_run_prints_fits_a_log(mnist_run: Path) -> None:
    """No control characters, and 80 columns are enough, but for the name of a folder."""
    printed = (mnist_run.parent.parent / "out.txt").read_text()
    assert all(character.isprintable() or character == "\n" for character in printed)
    lines = printed.splitlines()
    assert [line for line in lines if len(line) > 80 and "/" not in line] == []
    assert lines[0] == "loading    PyTorch and Accelerate"
    summary = json.loads((mnist_run / "summary.json").read_text())
    assert summary["test_accuracy"] >= 0.988  # with bf16 a little below 0.99
    assert lines[-4].startswith(f"test accuracy {summary['test_accuracy']:.4f} on 10,000 images")
    assert lines[-2] == "written to runs/mnist-001"
    assert re.fullmatch(r"see        .*ddp.mnist report runs/mnist-001", lines[-1])
