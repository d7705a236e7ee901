"""The page tells what the run's files tell, in a real browser too."""

import base64
import contextlib
import html
import io
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import PIL.Image
import pytest
from matplotlib.figure import Figure

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.data import cache
from ddp_mnist.system.files import read_json
from ddp_mnist.system.text import quoted
from ddp_mnist.training.folder import RunFolder
from ddp_mnist.training.scores import share_text
from ddp_mnist.verbs import answers, plots, report, spreadsheet
from ddp_mnist.verbs.flags import Report
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.commands import Typed, require_programs
from tests.data_sets import flat, of, write_noise
from tests.run_checks import rewrite_config, with_flags
from tests.verbs.test_answers import BEETLE, OF_CLASSES, OF_NUMBERS

ANYWHERE = Report("RUN")  # the images lie where they lay


def figures(page: str) -> dict[str, tuple[str, str]]:
    """Return value and text of the <data> elements, by the figure's name."""
    data = r'<data value="([^"]*)"\s+data-figure="(\w+)">([^<]*)</data>'
    return {name: (value, text) for value, name, text in re.findall(data, page)}


def words(page: Path) -> str:
    """Return the page's text, without tags and line breaks."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.read_text())).split())


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ended, of two processes."""
    folder = tmp_path_factory.mktemp("report")
    cache.load("digits")
    config = with_flags(proof_config("first", model="mlp"), mixed_precision="no")
    run_world(2, just_train, config, folder=folder)
    return folder / "first"


def write(run: Path, **flags: Any) -> list[Path]:
    """Return the files that the verb says it wrote."""
    with contextlib.redirect_stdout(io.StringIO()) as console:
        report.run(Report(str(run), **flags))
    _reading, *written = console.getvalue().splitlines()
    return [Path(line.removeprefix("written to ")) for line in written]


def summary_of(run: Path) -> dict[str, Any]:
    return read_json(run / "summary.json")


def read(run: Path) -> tuple[report.ReportedRun, Sequence[dict[str, Any]]]:
    """Return a run and its mistakes."""
    found, changed = report.with_answers(report.read_run(run), ANYWHERE)
    assert found.answered and not changed
    return found, found.answered.mistakes


def test_a_page_has_every_figure_and_setting_and_needs_nothing_else(
    first: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    written = write(first, out=str(out), png=True)
    names = [f"{key}.{form}" for key in [*plots.CURVES, "confusion"] for form in ("png", "svg")]
    names = ["classes.csv", "predictions.csv", *names]
    assert written == [out, *(tmp_path / f"page-{name}" for name in names)]
    with PIL.Image.open(written[3]) as picture:
        assert picture.size == (880, 500)
    page, summary = out.read_text(), summary_of(first)
    wrong = str(round((1 - summary["test_accuracy"]) * 360))
    shown = {
        "test_accuracy": f"{summary['test_accuracy']:.4f}",
        "val_accuracy": f"{summary['val_accuracy']:.4f}",
        "train_seconds": f"{summary['train_seconds']:.1f}",
        "images_per_second": f"{summary['images_per_second']:,.0f}",
        "world_size": "2",
    }
    expected = {name: (str(summary[name]), text) for name, text in shown.items()}
    assert figures(page) == expected | {"wrong": (wrong, wrong)}
    rows = [[str(n) for n in row] for row in summary["confusion"]]
    matrix = page.partition('<th scope="col"><bdi>0</bdi></th>')[2].partition("</tr>")[0]
    assert re.findall(r'<th scope="col"><bdi>(.*?)</bdi></th>', matrix) == [*"123456789"]
    row_of_cells = r'<th scope="row"><bdi>\d</bdi></th>\s*((?:<td class="[cz].*?</td>\s*)+)'
    cells = re.findall(row_of_cells, page)
    assert [re.findall(r">([\d,]+)</td>", row) for row in cells] == rows
    assert "2 on CPU, precision no" in words(out)
    settings = dict(re.findall(r'<th scope="row">([-\w ]+)</th><td>(.*?)</td>', page))
    assert settings["test_accuracy"] == f"{summary['test_accuracy']:.4g}"
    assert (settings["--epochs"], settings["--image-size"]) == ("3", "not given")
    assert not settings.keys() & set(report.LISTS)
    assert "<script" not in page
    places = re.findall(r"url\((.*?)\)", page)
    places += re.findall(r"<(?!a\b)[^>]*(?:src|href)=\"(.*?)\"", page)
    assert [place for place in places if not place.startswith(("#", "data:"))] == []


def test_each_class_is_counted_with_its_main_confusion(first: Path) -> None:
    """On the page as in summary.json; the whole test has its interval too."""
    matrix = np.array([[3, 1, 0], [0, 0, 0], [2, 0, 5]])
    assert [report.main_confusion(matrix, label) for label in range(3)] == [(1, 1), (0, 0), (0, 2)]
    page, summary = (path := write(first)[0]).read_text(), summary_of(first)
    cells = np.array(summary["confusion"])
    for label, right in enumerate(cells.diagonal().tolist()):
        [row] = re.findall(
            rf"<tr>(<th scope=\"row\"><bdi>{label}</bdi>(?:(?!<tr>).)*? to .*?)</tr>",
            page,
            re.DOTALL,
        )
        shown = re.findall(r"<td[^>]*>([^<]*)", row)
        of_class, answered = int(cells[label].sum()), int(cells[:, label].sum())
        assert shown[:2] == [str(of_class), str(right)]
        assert shown[2:4] == [share_text(right, of_class), share_text(right, answered)]
    right = int(cells.diagonal().sum())
    assert f"of the same kind, expect {share_text(right, 360)}, at 95 % confidence" in words(path)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on photos of three classes, one of which looks like a formula, with a validation."""
    place = tmp_path_factory.mktemp("photos")
    write_noise(place / "photos", *flat(90, name="IMG_{n:03}.png", classes="cat =dog Käfer_甲虫"))
    own = proof_config("run", model="mlp", epochs=2, batch_size=12, val_size=15)
    own = with_flags(own, dataset=str(place / "photos"), test_size=30, mixed_precision="no")
    run_world(1, just_train, own, folder=place)
    write(place / "run", png=True)
    return place / "run"


def test_predictions_csv_is_what_predict_and_evaluate_say(photos: Path, typed: Typed) -> None:
    """Cell by cell, for each image of the test and the validation."""
    rows = pandas.read_csv(photos / "predictions.csv", keep_default_na=False)
    names = [name.removeprefix("'") for name in rows.columns[5:]]
    assert names == summary_of(photos)["classes"] == ["=dog", "Käfer_甲虫", "cat"]
    rows.columns = [*rows.columns[:5], *names]
    for column in ("truth", "answer", "file"):
        rows[column] = rows[column].str.removeprefix("'")
    assert set(rows["group"]) == {""}
    assert rows["split"].unique().tolist() == ["test", "validation"]
    files = [str(photos.parent / "photos" / file) for file in rows["file"]]
    assert [Path(file).parent.name for file in files] == rows["truth"].tolist()
    answers = [json.loads(line) for line in typed("predict", photos, *files).out.splitlines()]
    assert [answer["label"] for answer in answers] == rows["answer"].tolist()
    for name in names:
        expected = [answer["probabilities"][name] for answer in answers]
        assert rows[name].tolist() == pytest.approx(expected, abs=2e-6)
    for split, part in rows.groupby("split"):
        counted = json.loads(typed("evaluate", photos, "--split", split, "--json").out)
        pairs = [*zip(part["truth"], part["answer"], strict=True)]
        found = [[pairs.count((truth, answer)) for answer in names] for truth in names]
        assert found == counted["confusion"]


def test_classes_csv_is_what_the_summary_says(photos: Path) -> None:
    rows = pandas.read_csv(photos / "classes.csv").set_index("class")
    summary = summary_of(photos)
    cells = np.array(summary["confusion"])
    assert rows.index.str.removeprefix("'").tolist() == summary["classes"]
    assert rows["n"].tolist() == cells.sum(1).tolist() == summary["images_per_class"]["test"]
    assert rows["right"].tolist() == cells.diagonal().tolist()
    assert rows["answered"].tolist() == cells.sum(0).tolist()
    assert rows["recall"].tolist() == pytest.approx(summary["class_accuracy"])
    assert (rows["recall_low"] <= rows["recall"]).all()
    assert (rows["recall"] < rows["recall_high"].where(rows["recall"] < 1, 2)).all()


def test_the_page_tells_by_the_validation_what_a_limit_costs(photos: Path) -> None:
    rows = pandas.read_csv(photos / "predictions.csv").query("split == 'validation'")
    certainty, right = rows.iloc[:, 5:].max(axis=1), rows["truth"] == rows["answer"]
    text = words(photos / "report.html")
    assert f"Of the {len(rows)} validation images, those whose answer has at least" in text
    assert f"ddp-mnist predict {quoted(photos)} IMAGE ... --sure LIMIT" in text
    for limit in (0.4, 0.5, 0.95):
        sure = certainty >= limit
        share = share_text(int((right & sure).sum()), int(sure.sum()))
        assert f" {limit} {sure.sum()} {100 * sure.mean():.0f} % {share} " in text


def test_the_confusion_matrix_is_a_picture_too(photos: Path) -> None:
    """The SVG's texts can be edited: names of any script, and the number of images in a cell."""
    with PIL.Image.open(photos / "report-confusion.png") as picture:
        assert picture.size == (800, 800)
    svg = (photos / "report-confusion.svg").read_text()
    texts = [html.unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", svg)]
    cells = [str(n) for row in summary_of(photos)["confusion"] for n in row if n]
    names = summary_of(photos)["classes"]
    assert texts == [*names, "taken for", *names, "test images of", *cells]


def test_the_most_certain_mistakes_are_shown(first: Path) -> None:
    (run, mistakes), images = read(first), cache.load("digits")
    wrong = round((1 - run.summary["test_accuracy"]) * 360)
    assert 0 < len(mistakes) == min(report.MOST_WRONG, wrong)
    certainty = [mistake["guess_probability"] for mistake in mistakes]
    assert certainty == sorted(certainty, reverse=True)
    for mistake in mistakes:
        row = int(mistake["place"].removeprefix("test image "))
        label = images.classes[of(images, "test").labels[row]]
        assert mistake["label"] == label != mistake["guess"]
        assert mistake["label_probability"] < mistake["guess_probability"]


def test_curves_are_drawn_from_metrics_jsonl(first: Path) -> None:
    lines = report.read_run(first).metrics
    figure = plots.draw("loss", lines)
    assert figure
    line = figure.axes[0].get_lines()[0]
    logged = [each for each in lines if "loss" in each]
    assert np.asarray(line.get_xdata()).tolist() == [each["step"] for each in logged]
    assert np.asarray(line.get_ydata()).tolist() == [each["loss"] for each in logged]
    assert plots.draw("accuracy", lines[:16])
    assert plots.draw("val_accuracy", lines[:16]) is None  # a point is no curve


def test_without_the_images_page_and_terminal_say_so(
    first: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the Hub are not fetched."""
    run = report.read_run(first)
    run.config["run"] |= {"dataset": "fashion_mnist", "cache_dir": str(tmp_path)}
    run, changed = report.with_answers(run, ANYWHERE)
    assert not changed and not run.answered
    missing = "the test images are not in the cache of this machine; name their place: --dataset"
    assert run.why_not == f"They cannot be shown: {missing}."
    said = f"ddp-mnist: warning: first: its mistakes are not in the page: {missing}\n"
    assert capsys.readouterr() == ("", said)


def test_tables_of_an_earlier_page_do_not_go_in_silence(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(photos, tmp_path / "run")
    told = write(run, dataset="fashion_mnist", cache_dir=str(tmp_path))
    assert told == [run / "report.html", run / "classes.csv"]
    assert not (run / "predictions.csv").exists()
    last = capsys.readouterr().err.splitlines()[-1]
    removed = f"removed {run}/predictions.csv, as this page has no answers for it"
    assert last == f"ddp-mnist: warning: run: {removed}"


def test_a_summary_of_another_program_is_one_line(
    first: Path, tmp_path: Path, typed: Typed
) -> None:
    shutil.copytree(first, run := tmp_path / "run")
    (run / "summary.json").write_text("{}")
    ended = typed("report", run)
    assert (ended.code, ended.err.count("\n")) == (4, 1)
    assert ended.err.startswith(f"ddp-mnist: error: {run}: KeyError: ")


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("preempted", "no result. It was stopped, at step 7."),
        ("failed", "no result. It failed, at step 7: --lr 1: no number."),
        ("running", "no result. It was killed, at step 7."),
        ("running, here", "no result yet. It is running, at step 7."),
    ],
)
def test_a_run_without_a_result_says_why(
    state: str, sentence: str, first: Path, tmp_path: Path
) -> None:
    """A result from before more epochs is none: its model and summary are of its first end."""
    state, _, here = state.partition(", ")
    error = "--lr 1: no number" if state == "failed" else None
    shutil.copytree(first, run := tmp_path / "run")
    (run / "status.json").write_text(json.dumps({"state": state, "step": 7, "error": error}))
    (run / "metrics.jsonl").write_text('{"step": 8, "lo')  # torn
    (run / "classes.csv").write_bytes(spreadsheet.to_bytes([answers.COUNTED]))  # of its first end
    (run / "predictions.csv").write_text("not a report's\n")
    with RunFolder() as writing:
        if here:
            writing.open(run)
        [path] = write(run)
    assert not (run / "classes.csv").exists() and (run / "predictions.csv").exists()
    text, accuracy = words(path), f"{summary_of(run)['test_accuracy']:.4f}"
    assert figures(path.read_text()) == {}
    assert sentence in text
    assert f"finished before, after step 45 with test accuracy {accuracy}, and was resumed" in text


def test_no_name_is_html(first: Path, tmp_path: Path) -> None:
    shutil.copytree(first, run := tmp_path / os.fsdecode(b"<b>c\xe9"))
    config = json.dumps(read_json(run / "config.json"))
    rewrite_config(run, config.replace('"digits"', '"<script>alert(1)</script>"'))
    path, classes = write(run)  # without the images there are no predictions
    assert classes.name == "classes.csv"
    assert str(path) == rf"{tmp_path}/<b>c\udce9/report.html"  # as it is printed
    text = (run / "report.html").read_text()
    assert "<script>" not in text
    assert "<b>c" not in text
    assert "<title>&lt;b&gt;c? " in text


def test_names_from_right_to_left_and_control_characters_turn_nothing_around(first: Path) -> None:
    run, names = report.read_run(first), ("\u202egpj.cat", "חתול")
    run.summary["classes"][:2] = names
    shares = {"label_probability": 0.16, "guess_probability": 0.61, "png": "data:,"}
    mistakes = [{"place": "חתול/4_א.png", "label": names[0], "guess": names[1], **shares}]
    answered = report.Answered(BEETLE, [OF_CLASSES], mistakes, {})
    page = report.render_page(replace(run, answered=answered), {})
    assert "\u202e" not in page and "<bdi>&#39;\\u202egpj.cat&#39;</bdi> (0.16)" in page
    assert "<b><bdi>חתול</bdi></b> (0.61)" in page
    parts = "<bdi>חתול</bdi>/<wbr><bdi>4</bdi>_<wbr><bdi>א.png</bdi><wbr>"
    assert f'<span class="soft" dir="ltr">{parts}</span>' in page.replace("\n", "")
    assert "חתול" not in re.sub(r'<bdi>.*?</bdi>|alt=".*?"', "", page)


def test_a_long_list_of_broken_files_is_folded_and_names_break_at_an_underscore(
    first: Path,
) -> None:
    run = report.read_run(first)
    named = [f"photos/Kopie von {n}.jpg" for n in range(12)]
    run.summary["notes"] = [f"12 of 360 images were left out: {', '.join(named)}", "a short one"]
    run.summary["classes"][0] = "<b>_a_b"
    run.summary["metrics"] = {"balanced_accuracy": 0.5}
    page = report.render_page(run, {})
    assert "<summary>12 of 360 images were left out</summary>" in page
    assert "<p>a short one</p>" in page
    assert "<dt>Test balanced_<wbr>accuracy</dt>" in page
    assert "<bdi>&lt;b&gt;_<wbr>a_<wbr>b</bdi>" in page


def test_of_numbers_the_page_counts_labels_and_names_the_worst_images(first: Path) -> None:
    run = report.read_run(first)
    scores = {"score_name": "error", "test_error": 1.5, "val_error": None}
    run.summary.update(scores, classes=[])
    mistakes = [{"place": "a_1.png", "png": "data:,", "told": ["length_mm 29.12, is 17"]}]
    scatter = {name: Figure() for name in ("a b", "a_b")}
    run = replace(run, answered=report.Answered(BEETLE, [OF_NUMBERS], mistakes, scatter))
    page = report.render_page(run, {})
    assert "<div>length_<wbr>mm 29.12, is 17</div>" in page
    assert "<bdi>a</bdi>_<wbr><bdi>1.png</bdi>" in page.replace("\n", "")
    shown = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())
    assert "Label Images Right Missed False Recall Precision" in shown
    assert f"winged 2 1 1 0 {share_text(1, 2)} {share_text(1, 1)}" in shown
    assert f"spotted 1 0 1 1 {share_text(0, 1)} {share_text(0, 1)}" in shown
    assert {"classes.csv", "predictions.csv"} == report.tables(run).keys()
    assert [*report.pictures(run).values()] == [*scatter.values()]  # none is lost


# --- What to make of it


def test_a_mistake_has_its_file_and_many_classes_their_top_5(tmp_path: Path) -> None:
    classes = " ".join(f"class-{number:02d}" for number in range(20))
    photos = write_noise(tmp_path / "photos", *flat(200, classes=classes))
    own = proof_config("own", model="mlp", epochs=1, batch_size=24, val_size=0)
    own = with_flags(own, dataset=str(photos), test_size=60)
    run_world(1, just_train, own, folder=tmp_path)
    _, mistakes = read(path := tmp_path / "own")
    assert len(mistakes) == report.MOST_WRONG
    for mistake in mistakes:
        file = photos / mistake["place"]
        assert file.parent.name == mistake["label"]
        stored = base64.b64decode(mistake["png"].partition(",")[2])
        with PIL.Image.open(file) as given, PIL.Image.open(io.BytesIO(stored)) as shown:
            assert given.tobytes() == shown.tobytes()
    page = write(path)[0].read_text()
    assert mistakes[0]["place"] in re.sub("</?(wbr|bdi)>", "", page)
    assert mistakes[0]["png"] in page


@pytest.mark.parametrize(
    ("trained", "validated", "recipe", "said"),
    [
        (
            1.0,
            0.56,
            {},
            "images, or --augment, or --model torchvision:regnet_y_400mf --weights DEFAULT.",
        ),
        (1.0, 0.56, {"augment": True, "weights": "x"}, "(overfitting). To try next: more images."),
        (0.5, 0.45, {}, "(underfitting). To try next: more --epochs, or a larger --image-size,"),
        (0.97, 0.96, {}, "neither over- nor underfitting. To try next: more images, or more --e"),
    ],
)
def test_what_train_and_validation_say_together(
    trained: float, validated: float, recipe: dict[str, Any], said: str
) -> None:
    """With --val-size 0 the test takes the validation's place."""
    # each line is the mean of the steps since the one before
    logged = [(0, 26, 0.1), (1, 50, trained - 0.005), (1, 52, trained + 0.06)]
    metrics = [{"epoch": n, "step": step, "accuracy": x} for n, step, x in logged]
    config = {"recipe": {"model": "cnn", "augment": False, "weights": None} | recipe}
    counts = {"dataset": {"val_rows": 200}, "test_count": 200, "test_accuracy": validated}
    counts |= {"classes": ["a", "b"]}
    for val_accuracy, split in ((validated, "validation"), (None, "test")):
        summary = {**counts, "val_accuracy": val_accuracy}
        run = report.ReportedRun(Path("a"), "a", config, metrics, summary, {})
        sentence = str(report.advice(run))
        assert f"{trained:.4f} of the training images" in sentence
        assert f"{validated:.4f} of the {split} images: " in sentence
        assert said in sentence


# --- In a browser


def chromium(page: Path) -> str:
    """The page's DOM after it was loaded without a network; console messages fail the test."""
    program = shutil.which("chromium-browser") or "chromium"
    require_programs(program)
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
    command += ["--dump-dom", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={page.parent / 'profile'}", page.as_uri()]
    short = {**os.environ, "TMPDIR": "/tmp"}  # its socket lies there
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=short)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    return done.stdout


@pytest.mark.system
def test_the_page_in_chromium(first: Path, tmp_path: Path) -> None:
    """Tables scroll within themselves; the page as a whole is not wider than a phone."""
    path, *_ = write(first, out=str(tmp_path / "report.html"))
    assert len(re.findall(r'<img [^>]*alt="test image \d+: ', path.read_text())) > 1
    # frames of these widths, as a headless window is at least 500 wide
    frame = '<iframe src="report.html" style="width:{}px;height:900px"></iframe>'
    (probe := tmp_path / "probe.html").write_text(
        f"{frame.format(360)}{frame.format(1100)}<script>onload = () => {{"
        " for (const f of document.querySelectorAll('iframe')) document.body.append("
        " `wide ${f.contentDocument.documentElement.scrollWidth};`) }</script>"
    )
    shown = chromium(probe)
    narrow, wide = map(int, re.findall(r"wide (\d+);", shown))
    assert narrow <= 360
    assert wide <= 1100


@pytest.mark.system
@pytest.mark.parametrize("classes", [3, 12, 40])
def test_a_confusion_matrix_fits_a_screen_and_a_sheet_of_paper(
    classes: int, first: Path, tmp_path: Path
) -> None:
    """With up to 9,999 images in a cell, and names that are long or run from right to left."""
    run = report.read_run(first)
    names = ["חתול", "a name of more than sixty characters, with many small words in it 1"]
    run.summary["classes"] = [*names, *(f"Coccinella_punctata_{n}" for n in range(classes - 2))]
    run.summary["confusion"] = np.full((classes, classes), 9999).tolist()
    page, frames = report.render_page(run, {}), ""
    for width, css in ((1100, page), (717, page.replace("@media print", "@media all"))):
        (tmp_path / f"{width}.html").write_text(css)
        frames += f'<iframe src="{width}.html" style="width:{width}px;height:900px"></iframe>'
    (probe := tmp_path / "probe.html").write_text(
        f"{frames}<script>onload = () => {{"
        " for (const f of document.querySelectorAll('iframe'))"
        " for (const part of f.contentDocument.querySelectorAll('.scroll'))"
        " document.body.append(` over ${part.scrollWidth - part.clientWidth};`) }</script>"
    )
    over = [int(pixels) for pixels in re.findall(r" over (\d+);", chromium(probe))]
    assert len(over) == 6 and max(over) <= 1
