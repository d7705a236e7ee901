"""What predict sees in an image file, what it answers, and how it shows that."""

import csv
import io
import json
import operator
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from matplotlib.figure import Figure
from PIL.ExifTags import Base
from tqdm.utils import disp_len

from ddp_mnist.core.nets import CNN
from ddp_mnist.core.wrappers import Normalised
from ddp_mnist.data import cache
from ddp_mnist.data.image_format import ImageFormat
from ddp_mnist.errors import CheckpointError, DataError, UsageError
from ddp_mnist.system import console
from ddp_mnist.system.files import read_json
from ddp_mnist.task import Classification, find_task
from ddp_mnist.training import model_file
from ddp_mnist.verbs import predict as verb
from ddp_mnist.verbs import spreadsheet
from ddp_mnist.verbs.flags import Predict
from tests.commands import TRAIN, Typed, python
from tests.data_sets import GREY, of
from tests.run_checks import own_module

TAGS = """
from ddp_mnist.task import Task


class Tags(Task):
    columns = ("length", "winged")
"""
CLASSES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
UNREADABLE = "damaged, or of no format that is read here: save it as PNG"


@pytest.fixture(scope="module")
def model() -> Normalised:
    """A net that nobody trained, but with an opinion of its own."""
    torch.manual_seed(3)
    model = Normalised(CNN(10, GREY.shape), GREY.mean, GREY.std).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def run(model: Normalised, tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_of(tmp_path_factory.mktemp("base") / "run", model, CLASSES, GREY)


def run_of(folder: Path, model: Normalised, classes: list[str], made: ImageFormat) -> str:
    folder.mkdir()
    content = model_file.to_bytes(model.net.state_dict(), "cnn", Classification(classes), made)
    (folder / "model.safetensors").write_bytes(content)
    return str(folder)


def predict(run: str, *images: object, **more: Any) -> list[dict[str, Any]]:
    flags = Predict(run, tuple(map(str, images)), **more)
    return list(verb.answer(flags, verb.load(flags)))


def shares_of(model: Normalised, image: np.ndarray) -> Any:
    """The probabilities of the classes, in their order, of uint8 [C, H, W]."""
    with torch.inference_mode():
        shares = model(torch.tensor(image[None])).softmax(1)[0].tolist()
    return pytest.approx(dict(zip(CLASSES, shares, strict=True)), abs=1e-5)


def as_mnist(file: Path) -> np.ndarray:
    """uint8 [28, 28] of a photo of a digit."""
    [drawn] = verb.read_image(file, GREY, digit_photos=True)
    return drawn


def digits(count: int) -> np.ndarray:
    """uint8 [count, 28, 28]: bright strokes on black."""
    return of(cache.load("digits"), "test").images[:count, 0].numpy()


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
    """Transparent is paper: of pixels that are all black, or all white, the opacity draws."""
    for image in digits(5):
        by_opacity = (np.dstack([*[np.full_like(image, ink)] * 3, image]) for ink in (0, 255))
        for drawn in (image, 255 - image, *by_opacity):
            seen = as_mnist(save(drawn, tmp_path / "x.png"))
            assert seen.dtype == np.uint8
            assert np.array_equal(seen, image)
    image[0, :15] = image[-1, :15] = image[:15, 0] = 255  # bright_on_black, see test_decode.py
    assert np.array_equal(as_mnist(save(image, tmp_path / "x.png")), image)


def test_neither_a_blank_page_nor_a_shadow_is_a_digit(tmp_path: Path) -> None:
    shapes = (28, 28), (100, 60), (1, 1)
    pages: list[np.ndarray] = [np.full(shape, ink) for shape in shapes for ink in (0, 255)]
    for height, width in ((100, 60), (1, 2), (300, 31)):
        pages.append(np.linspace(60, 200, height)[:, None] + np.linspace(0, 50, width))
    for page in pages:
        file = save(page.round().astype(np.uint8), tmp_path / "x.png")
        with pytest.raises(DataError, match=r"^shows nothing but background; give an image of a"):
            as_mnist(file)


def test_paper_ink_and_light_may_differ(tmp_path: Path) -> None:
    """As a phone sees them, with some noise, and cut so that a stroke touches the border."""
    expected = as_mnist(save(seven(), tmp_path / "clean.png"))
    for paper, ink, left, right in (
        *((paper, ink, 1, 1) for paper, ink in ((180, 20), (100, 0), (60, 255), (200, 90))),
        *((200, 40, left, right) for left, right in ((0.9, 1.05), (0.55, 1.1), (1.0, 0.5))),
    ):
        light = np.linspace(left, right, 160) * np.linspace(1.0, 0.95, 200)[:, None]
        noise = np.random.default_rng(0).normal(0, abs(paper - ink) / 25, light.shape)
        photo = (np.where(seven() > 0, ink, paper) * light + noise).clip(0, 255).astype(np.uint8)
        for seen in (photo, photo[20:, 10:]):
            found = as_mnist(save(seen, tmp_path / "photo.png"))
            assert np.array_equal(found > 0, expected > 0), (paper, ink, left, right)


def test_a_large_digit_lands_in_the_middle_at_mnists_size(tmp_path: Path) -> None:
    drawn = as_mnist(save(255 - seven(), tmp_path / "x.png"))
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    assert (np.ptp(rows), np.ptp(columns)) == (19, 11)  # 20 pixels high, 12 wide
    for axis in (0, 1):
        mass = np.average(np.arange(28), weights=drawn.sum(axis))
        assert mass == pytest.approx(13.5, abs=0.5)
    assert drawn.max() == 255
    assert drawn[rows[0], columns].min() > 200  # the bar of the seven


def test_a_turned_photo_is_upright(tmp_path: Path) -> None:
    """Damaged EXIF costs no answer: test_own_images.py."""
    drawn = PIL.Image.fromarray(255 - seven())
    (exif := PIL.Image.Exif())[Base.Orientation] = 6
    drawn.rotate(90, expand=True).save(tmp_path / "x.png", exif=exif)
    drawn.save(tmp_path / "y.png")
    assert np.array_equal(as_mnist(tmp_path / "x.png"), as_mnist(tmp_path / "y.png"))


def test_a_large_photo_is_seen_as_a_small_one_is(tmp_path: Path) -> None:
    drawn = PIL.Image.fromarray(255 - seven())
    large = drawn.resize((3200, 4000), PIL.Image.Resampling.BICUBIC)
    expected = as_mnist(save(255 - seven(), tmp_path / "small.png")).astype(int)
    for form, mode in (("jpg", "RGB"), ("png", "P"), ("png", "1")):
        large.convert(mode).save(tmp_path / f"large.{form}")
        assert np.abs(as_mnist(tmp_path / f"large.{form}") - expected).mean() < 4


LETTERS = replace(GREY, digit_photos=False)


def test_photos_of_digits_are_cut_out_on_request(model: Normalised, tmp_path: Path) -> None:
    """The net alone knows what it was trained on, and so says what photos are made into."""
    drawn = np.pad(255 - digits(1)[0], 30, constant_values=255)  # dark on a bright page
    page = save(drawn, tmp_path / "x.png")
    as_it_is = shares_of(model, verb.read_image(page, GREY, digit_photos=False))
    cut_out = shares_of(model, as_mnist(page)[None])
    assert as_it_is.expected != cut_out
    runs = ("letters", LETTERS, as_it_is, cut_out), ("digits", GREY, cut_out, as_it_is)
    for name, made, default, other in runs:
        run = run_of(tmp_path / name, model, CLASSES, made)
        for asked, expected in ((None, default), (not made.digit_photos, other)):
            [line] = predict(run, page, digit_photos=asked)
            assert line["probabilities"] == expected
    dark = run_of(tmp_path / "dark", model, CLASSES, replace(LETTERS, bright_on_black=False))
    with pytest.raises(UsageError, match=f"^--digit-photos: {dark} .*; leave it out$"):
        predict(dark, page, digit_photos=True)


# --- Which files


def test_a_folder_is_read_in_the_order_of_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "a" / ".b").mkdir(parents=True)
    for name in ("b.PNG", "a.jpeg", "10.png", "9.png", "notes.txt", ".hidden", "._9.png", "x.RAW"):
        (tmp_path / name).touch()
    for name in ("a/1.png", "a/.b/2.png"):
        (tmp_path / name).touch()
    found = [str(path.relative_to(tmp_path)) for path in verb.find_images(str(tmp_path))]
    assert found == ["10.png", "9.png", "a/1.png", "a.jpeg", "b.PNG"]
    assert "without the suffix of an image were left out: .RAW (1)\n" in capsys.readouterr().err
    assert verb.find_images("what/ever.xyz") == [Path("what/ever.xyz")]
    with pytest.raises(DataError, match=r"folder\.png: holds no images; give files or a folder"):
        verb.find_images(str(tmp_path / "folder.png"))
    with pytest.raises(
        CheckpointError, match=f"^{tmp_path}: no final model.safetensors: No such file"
    ):
        predict(str(tmp_path), "x.png")


def test_files_that_are_no_images(tmp_path: Path) -> None:
    """What training refuses too is in test_own_images.py."""

    def refused(file: Path) -> str:
        for digit_photos in (True, False):
            with pytest.raises(DataError) as error:
                verb.read_image(file, GREY, digit_photos)
        return str(error.value)

    assert refused(tmp_path / "none") == "No such file or directory"
    PIL.Image.new("F", (9, 9)).save(tmp_path / "x.tif")
    assert refused(tmp_path / "x.tif") == "mode F has no fixed range: save 8-bit images"
    os.mkfifo(tmp_path / "pipe")
    pipe = "not a regular file; give one, or - and the image on stdin"
    assert refused(tmp_path / "pipe") == pipe


def test_one_image_comes_on_stdin(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    image = save(digits(1)[0], tmp_path / "x.png")
    [expected] = predict(run, image)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(image.read_bytes())))
    assert json.loads(typed("predict", run, "-").succeeds()) == {**expected, "file": "-"}


# --- Answers


def test_labels_are_the_nets_own(run: str, model: Normalised, tmp_path: Path) -> None:
    images = digits(40)
    files = [save(image, tmp_path / f"{n:03d}.png") for n, image in enumerate(images)]
    found = predict(run, *files)
    assert predict(run, tmp_path) == found
    assert [line["file"] for line in found] == list(map(str, files))
    assert len({line["label"] for line in found}) > 1
    for line, image in zip(found, images, strict=True):
        likely = line["probabilities"]
        assert likely == shares_of(model, image[None])
        assert list(likely.values()) == sorted(likely.values(), reverse=True)
        assert (line["label"], line["probability"]) == next(iter(likely.items()))
    for top in (1, 3, 99):
        [line] = predict(run, files[-1], top=top)
        assert list(line["probabilities"].items()) == list(likely.items())[:top]


def test_an_answer_that_is_no_number_is_an_error(tmp_path: Path, typed: Typed) -> None:
    net = CNN(10, GREY.shape)
    net.head.bias.data.fill_(torch.nan)
    run = run_of(tmp_path / "run", Normalised(net, GREY.mean, GREY.std), CLASSES, GREY)
    ended = typed("predict", run, save(digits(1)[0], tmp_path / "x.png"))
    assert ended.code == 3
    assert json.loads(ended.out)["error"].startswith("the model's outputs for it are not finite")


def test_files_beside_one_that_cannot_be_read_have_answers_which_a_terminal_shows_as_a_table(
    run: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its columns are straight, as a Chinese letter takes two."""
    for name, image in zip(("0.png", "很长的.png", "22.png"), digits(3), strict=True):
        save(image, tmp_path / name)
    (tmp_path / "broken.png").write_text("no picture")
    failed = 3, f"ddp-mnist: error: {tmp_path}/broken.png: {UNREADABLE} (code 3)\n"
    ended = typed("predict", run, tmp_path)
    assert (ended.code, ended.err) == failed
    answers = [json.loads(line) for line in ended.out.splitlines()]
    assert ["label" in answer for answer in answers] == [True, True, False, True]
    assert answers[2] == {"file": f"{tmp_path}/broken.png", "error": UNREADABLE}
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    ended = typed("predict", run, tmp_path)
    assert (ended.code, ended.err) == failed
    head, *rows = ended.out.splitlines()
    assert head.split() == ["file", "label", "probability", "next"]
    for row, answer in zip(rows, answers, strict=True):
        if "error" in answer:
            assert row == f"{answer['file']}   {UNREADABLE}"
            continue
        [(best, share), *others] = list(answer["probabilities"].items())[:3]
        likely = [f"{name} {each:.2f}" for name, each in others]
        assert re.split(" {2,}", row) == [answer["file"], best, f"{share:.2f}", *likely]
        for cell, title in ((f"{best} ", "label"), (f"{share:.2f}", "probability")):
            assert disp_len(row.partition(f"   {cell}")[0]) == head.index(title) - 3
    told = ("predict", run, tmp_path / "0.png", "--show", tmp_path / "seen.png")
    assert typed(*told).out.splitlines()[2:] == [f"written to {told[-1]}"]
    assert json.loads(typed(*told, "--json").out) == answers[0]


def test_below_a_limit_it_is_not_sure_in_every_form(run: str, tmp_path: Path, typed: Typed) -> None:
    """At the limit it is sure; JSON keeps the probabilities, and has what it would have said."""
    files = [save(image, tmp_path / f"{n}.png") for n, image in enumerate(digits(8))]
    plain = predict(run, *files)
    limit = sorted(line["probability"] for line in plain)[4]
    found = predict(run, *files, sure=limit, show=str(tmp_path / "seen.png"))
    unsure = [line["probability"] < limit for line in plain]
    assert sum(unsure) == 4
    for line, before, is_unsure in zip(found, plain, unsure, strict=True):
        changed = {"label": "not sure", "guess": before["label"]} if is_unsure else {}
        assert line == before | changed
    table = list(verb.table(found, list(map(str, files)), Classification(CLASSES)))
    row, line = table[1 + unsure.index(True)], found[unsure.index(True)]
    label, share, first, *_ = re.split(" {2,}", row)[1:]
    assert (label, share) == ("not sure", f"{line['probability']:.2f}")
    assert first == f"{line['guess']} {line['probability']:.2f}"
    short = verb.in_short(line, Classification(CLASSES))
    assert short == f"not sure ({line['probability']:.2f})"
    printed = typed("predict", run, *files, "--sure", limit).succeeds()
    assert [json.loads(each) for each in printed.splitlines()] == found
    for wrong in ("0", "1", "x"):
        [told] = typed("predict", run, files[0], "--sure", wrong).error_lines
        assert told.startswith(f"ddp-mnist: error: --sure {wrong}") and ": must be " in told


def test_csv_has_a_column_for_each_class_and_one_for_errors(
    run: str, tmp_path: Path, typed: Typed
) -> None:
    files = [save(image, tmp_path / f"{n}.png") for n, image in enumerate(digits(3))]
    (broken := tmp_path / "=broken.png").write_text("no picture")
    plain = predict(run, *files)
    limit = min(line["probability"] for line in plain) + 1e-6
    ended = typed("predict", run, *files, broken, "--csv", "--sure", limit)
    assert ended.code == 3
    rows = pandas.read_csv(io.StringIO(ended.out.removeprefix("\ufeff")))
    assert ended.out.startswith("\ufefffile,answer,probability,zero,")
    assert rows.columns.tolist() == ["file", "answer", "probability", *CLASSES, "error"]
    assert rows["file"].tolist() == [*map(str, files), str(broken)]
    assert rows["error"].tolist()[3] == UNREADABLE
    assert rows.iloc[3, 1:-1].isna().all() and rows["error"][:3].isna().all()
    for (_, row), line in zip(rows[:3].iterrows(), plain, strict=True):
        is_sure = line["probability"] >= limit
        assert row["answer"] == (line["label"] if is_sure else "not sure")
        assert row["probability"] == line["probability"]
        assert {name: row[name] for name in CLASSES} == line["probabilities"]
    for other, told in (("--json", "--json"), ("--top=2", "--top 2")):
        refused = typed("predict", run, files[0], "--csv", other)
        assert f"{told}: has no part in --csv; leave one of them out" in refused.error_lines[0]


def test_numbers_have_no_limit_and_labels_two_decimals(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON and CSV keep all digits of a column of 0 and 1."""
    own_module("tags", TAGS, tmp_path, monkeypatch)
    task = find_task("tags:Tags")([20.0, 0.25], [4.0, 0.1875**0.5])
    task.are_labels = [False, True]
    torch.manual_seed(0)
    net = CNN(2, GREY.shape)
    (folder := tmp_path / "run").mkdir()
    content = model_file.to_bytes(net.state_dict(), "cnn", task, GREY)
    (folder / "model.safetensors").write_bytes(content)
    image = save(digits(1)[0], tmp_path / "x.png")
    [line] = predict(str(folder), image)
    length, winged = line["prediction"].values()
    [_, row] = verb.table([line], [str(image)], task)
    assert row.removeprefix(str(image)).split() == [f"{length:.4g}", f"{winged:.2f}"]
    assert verb.in_short(line, task) == f"length {length:.4g}, winged {winged:.2f}"
    printed = typed("predict", folder, image, "--csv").succeeds()
    assert printed.startswith("\ufefffile,length,winged,error\r\n")
    [_, cells] = csv.reader(printed.splitlines())
    assert cells == [str(image), str(length), str(winged), ""]
    [told] = typed("predict", folder, image, "--sure", "0.5").error_lines
    assert "--sure 0.5: " in told and "numbers, which have no probability; leave it out" in told


# --- The picture


def test_a_title_breaks_after_an_underscore() -> None:
    titled = verb.titled("_A0123_04_kopie.jpg", "Cicindela_campestris (0.97)").splitlines()
    assert titled == ["A0123_04_kopie.jpg", "Cicindela_", "campestris (0.97)"]


def test_what_the_model_saw_is_drawn(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: Typed
) -> None:
    for number, image in enumerate(digits(12)):
        name = os.fsdecode(b"%02d_$^$\xe9.png" % number)  # no formula, no UTF-8
        save(255 - image, tmp_path / name)
    answers = predict(run, tmp_path)
    picture = tmp_path / "seen.png"
    savefig = Mock(side_effect=Figure.savefig)
    monkeypatch.setattr(Figure, "savefig", lambda *given, **named: savefig(*given, **named))
    monkeypatch.setattr(verb, "MOST_SHOWN", 10)
    assert typed("predict", run, tmp_path, "--show", picture).code == 0
    with PIL.Image.open(picture) as shown:
        assert shown.size == (1040, 381)  # two rows of eight
    figure = savefig.call_args.args[0]
    assert figure.get_suptitle() == "10 of 12 images"
    for axis, answer, image in zip(figure.axes, answers, digits(10), strict=False):
        name = Path(answer["file"]).name.replace("\udce9", "?")
        assert axis.get_title() == f"{name}\n{answer['label']} ({answer['probability']:.2f})"
        assert np.array_equal(np.asarray(axis.get_images()[0].get_array()), image)


# --- The real MNIST

ROWS = 300


@pytest.mark.system
def test_photos_of_test_images_are_labelled_as_the_images(mnist: Path, tmp_path: Path) -> None:
    """They are inverted, of any size and place, in uneven light, with noise."""
    images, run = cache.load(str(mnist)), str(tmp_path / "run")
    one_thread = {"OMP_NUM_THREADS": "1"}  # waits for no other
    command = [*TRAIN, "--dataset", str(mnist), "--run-dir", run]
    assert python(*command, folder=tmp_path, variables=one_thread).code == 0
    assert read_json(Path(run, "summary.json"))["test_accuracy"] >= 0.99
    trained = model_file.from_bytes(model_file.read_bytes(run), "")
    pixels, labels = of(images, "test").images[:ROWS], of(images, "test").labels[:ROWS].tolist()
    with torch.inference_mode():
        of_images = trained.model(pixels).argmax(1).tolist()
    random = np.random.default_rng(0)
    (photos := tmp_path / "photos").mkdir()
    for number, image in enumerate(pixels[:, 0].numpy()):
        size = 60 + number % 7 * 40  # 60 to 300 pixels
        page = PIL.Image.new("L", (size + 50, size + 20 + number % 3 * 30), 240)
        drawn = PIL.Image.fromarray(255 - image).resize((size, size), PIL.Image.Resampling.BICUBIC)
        page.paste(drawn.point(lambda grey: 20 + grey * 220 // 255), (number % 50, number % 20))
        photo = np.asarray(page) * np.linspace(1, 0.5, page.width)
        photo += random.normal(0, 5, photo.shape)
        save(photo.clip(0, 255).astype(np.uint8), photos / f"{number:04d}.png")
    of_photos = [int(line["label"]) for line in predict(run, photos)]
    correct = sum(map(operator.eq, of_images, labels))
    assert correct > 0.98 * ROWS
    assert sum(map(operator.eq, of_photos, labels)) >= 0.97 * correct


@pytest.mark.parametrize("csv", [False, True])
@pytest.mark.parametrize("show", [None, "seen.png"])
def test_nothing_is_computed_for_a_reader_who_has_left(
    csv: bool, show: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless a picture is to be drawn of it."""
    asked = map(str, range(3))
    monkeypatch.setattr(verb, "answer", lambda *_: ({"file": each} for each in asked))
    monkeypatch.setattr(verb, "load", lambda _: SimpleNamespace(task=Classification(CLASSES)))
    for module in (console, spreadsheet):
        monkeypatch.setattr(module, "write_stdout", lambda *_: False)
    verb.run(Predict("run", ("a",), show=show, csv=csv))
    assert len([*asked]) == (0 if show else 3 if csv else 2)  # of CSV, the heading is first
