"""The page tells what the run's files tell, in a real browser too."""

import base64
import contextlib
import dataclasses
import html
import io
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.config.image_options import ImageOptions
from ddp_mnist.data import cache
from ddp_mnist.errors import CheckpointError
from ddp_mnist.run import weights
from ddp_mnist.run.folder import RunFolder, read_json
from ddp_mnist.verbs import plots, report
from ddp_mnist.verbs.flags import Report
from ddp_mnist.verify.watch import just_train, proof_config, train_until
from tests.commands import Typed, require_programs
from tests.data_sets import flat, write_noise

ANYWHERE = Report(())  # the images lie where they lay


def figures(page: str) -> dict[tuple[str, str], tuple[str, str]]:
    """Return value and text of the <data> elements, by the run and the figure's name."""
    data = r'<data value="([^"]*)"\s+data-run="([^"]*)"\s+data-figure="(\w+)">([^<]*)</data>'
    return {(run, name): (value, text) for value, run, name, text in re.findall(data, page)}


def words(page: Path) -> str:
    """Return the page's text, without tags and line breaks."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.read_text())).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that ended, the first of two processes, and one that was stopped."""
    folder = tmp_path_factory.mktemp("report")
    cache.load("digits")
    first = proof_config("first", model="mlp")
    in_float32 = dataclasses.replace(first.distribution, mixed_precision="no")
    run_world(2, just_train, dataclasses.replace(first, distribution=in_float32), folder=folder)
    second = proof_config("second", model="mlp", epochs=1, label_smoothing=0.0)
    run_world(1, just_train, second, folder=folder)
    with pytest.raises(Exception, match="stopped after step 2"):
        run_world(1, train_until, proof_config("stopped", model="mlp"), 20, folder=folder)
    return folder


def write(*runs: Path, **flags: Any) -> list[Path]:
    """Return the files that the verb says it wrote."""
    with contextlib.redirect_stdout(io.StringIO()) as console:
        report.run(Report(tuple(map(str, runs)), **flags))
    _reading, *written = console.getvalue().splitlines()
    return [Path(line.removeprefix("written to ")) for line in written]


def summary_of(run: Path) -> dict[str, Any]:
    return read_json(run / "summary.json")


def read(run: Path) -> report.ReportedRun:
    """Return a run with its mistakes."""
    found = report.read_run(run)
    assert report.find_mistakes(found, ANYWHERE) == ""
    return found


def changed(folder: Path, copy: Path, file: str = "summary.json", **changes: Any) -> Path:
    """Copy a finished run, one of whose files says something else."""
    shutil.copytree(folder / "first", copy, dirs_exist_ok=True)
    (copy / file).write_text(json.dumps(read_json(copy / file) | changes))
    return copy


def test_the_figures_are_those_of_summary_json(folder: Path) -> None:
    [path] = write(folder / "first")
    assert path == folder / "first" / "report.html"
    page, summary = path.read_text(), summary_of(folder / "first")
    wrong = str(round((1 - summary["test_accuracy"]) * 360))
    shown = {
        "test_accuracy": f"{summary['test_accuracy']:.4f}",
        "val_accuracy": f"{summary['val_accuracy']:.4f}",
        "train_seconds": f"{summary['train_seconds']:.1f}",
        "images_per_second": f"{summary['images_per_second']:,.0f}",
        "world_size": "2",
    }
    expected = {("first", name): (str(summary[name]), text) for name, text in shown.items()}
    assert figures(page) == expected | {("first", "wrong"): (wrong, wrong)}
    rows = [[str(n) for n in row] for row in summary["confusion"]]
    cells = re.findall(r'<th scope="row">\d</th>\s*((?:<td class="[cz].*?</td>\s*)+)', page)
    assert [re.findall(r">([\d,]+)</td>", row) for row in cells] == rows
    assert "2 on CPU, precision no" in words(path)
    assert "By rank" in words(path)
    assert "Loss: cross-entropy in nats, with label smoothing in training." in words(path)
    for rank in summary["ranks"]:
        assert f"{rank['images_per_second']:,.0f}" in page


def test_each_class_is_counted_with_its_main_confusion() -> None:
    matrix = np.array([[3, 1, 0], [0, 0, 0], [2, 0, 5]])
    assert list(report.by_class(["a", "b", "c"], matrix)) == [
        ("a", 4, 3, 5, 1, "b"),
        ("b", 0, 0, 1, 0, "a"),
        ("c", 7, 5, 5, 2, "a"),
    ]


def test_the_most_certain_mistakes_are_shown(folder: Path) -> None:
    run, images = read(folder / "first"), cache.load("digits")
    wrong = round((1 - run.summary["test_accuracy"]) * 360)
    assert 0 < len(run.mistakes) == min(report.MOST_WRONG, wrong)
    certainty = [mistake["guess_probability"] for mistake in run.mistakes]
    assert certainty == sorted(certainty, reverse=True)
    for mistake in run.mistakes:
        row = int(mistake["place"].removeprefix("test image "))
        assert mistake["label"] == images.classes[images.test_labels[row]] != mistake["guess"]
        assert mistake["label_probability"] < mistake["guess_probability"]


def test_runs_side_by_side_on_a_page_that_needs_nothing_else(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    runs = [folder / name for name in ("first", "second", "stopped")]
    written = write(*runs, out=str(out), png=True)
    assert written[0] == out
    shown = figures(out.read_text())
    summaries = {name: summary_of(folder / name) for name in ("first", "second")}
    for name, summary in summaries.items():
        assert shown[name, "test_accuracy"][0] == str(summary["test_accuracy"])
    assert ("stopped", "test_accuracy") not in shown
    step = read_json(folder / "stopped" / "status.json")["step"]
    assert f"has no result. It was stopped, at step {step}" in words(out)
    assert [path.name for path in written[1:]] == [f"both-{key}.png" for key in plots.CURVES]
    for path in written[1:]:
        with PIL.Image.open(path) as picture:
            assert picture.size == (880, 532)  # with a line of names
    # one that a link leads to is there once, and several have a page of their own
    (folder / "latest").symlink_to("first")
    [beside] = write(*runs[:2], folder / "latest")
    assert beside == folder / "report.html"
    page = beside.read_text()
    assert list(figures(page)) == list(shown)
    rows = {
        name: (re.findall(r"<td>\s*(.*?)\s*</td>", cells, re.DOTALL), bool(differs))
        for differs, name, cells in re.findall(
            r'<tr( class="differs")?><th scope="row">([-\w ]+)</th>(.*?)</tr>', page, re.DOTALL
        )
    }
    assert rows["test_accuracy"][0] == [f"{s['test_accuracy']:.4g}" for s in summaries.values()]
    assert rows["dataset name"] == (["digits"] * 2, False)
    assert rows["resumed_from"] == (["none"] * 2, False)
    assert rows["--image-size"] == (["not given"] * 2, False)
    assert rows["--epochs"] == (["3", "1"], True)
    assert rows["--label-smoothing"] == (["0.1", "0"], True)
    assert not rows.keys() & set(report.LISTS)
    # and the page needs nothing else
    assert "<script" not in page
    assert "@import" not in page
    places = re.findall(r"url\((.*?)\)", page)
    places += re.findall(r"<(?!a\b)[^>]*(?:src|href)=\"(.*?)\"", page)
    assert [place for place in places if not place.startswith(("#", "data:"))] == []
    ids = re.findall(r'\bid="(.*?)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#(.*?)"', page)) <= set(ids)


def test_curves_are_drawn_from_metrics_jsonl(folder: Path) -> None:
    lines = report.read_run(folder / "first").metrics
    figure = plots.draw("loss", {"first": lines, "none": []})
    assert figure
    line = figure.axes[0].get_lines()[0]
    logged = [each for each in lines if "loss" in each]
    assert np.asarray(line.get_xdata()).tolist() == [each["step"] for each in logged]
    assert np.asarray(line.get_ydata()).tolist() == [each["loss"] for each in logged]
    assert plots.draw("accuracy", {"one epoch": lines[:16]})
    assert plots.draw("val_accuracy", {"one epoch": lines[:16]}) is None  # a point is no curve
    for points, marker in ((plots.DOTS, "o"), (plots.DOTS + 1, "")):  # more would hide the line
        figure = plots.draw("val_f1", {"a": [{"step": n, "val_f1": n / 99} for n in range(points)]})
        assert figure and figure.axes[0].get_lines()[0].get_marker() == marker
        assert figure.axes[0].get_title(loc="left") == "Validation f1"


def test_without_the_images_page_and_terminal_say_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the Hub are not fetched; those that lie here are read."""
    run = report.read_run(folder / "first")
    run.config["run"]["cache_dir"] = str(tmp_path)
    assert not report.find_mistakes(run, ANYWHERE)
    mistakes, run.mistakes = run.mistakes, ()
    assert mistakes or run.no_mistakes == "There are none."
    run.config["run"]["dataset"] = "fashion_mnist"
    assert not report.find_mistakes(run, ANYWHERE)
    assert not run.mistakes
    missing = "the test images are not in the cache of this machine; name their place: --dataset"
    assert run.no_mistakes == f"They cannot be shown: {missing}."
    said = f"ddp-mnist: warning: first: its mistakes are not in the page: {missing}\n"
    assert capsys.readouterr() == ("", said)


def test_what_is_no_run_is_one_line(folder: Path, tmp_path: Path, typed: Typed) -> None:
    for place in (tmp_path, Path("none")):
        ended = typed("report", place)
        [line] = ended.error_lines
        assert (ended.code, ended.err) == (4, f"{line}\n")
        assert f"error: {place}: holds no run to report on (status.json: No such" in line
    summary = summary_of(folder / "first")
    for name in ("ranks", "dataset"):
        run = changed(folder, tmp_path / "run")
        lacking = {key: value for key, value in summary.items() if key != name}
        (run / "summary.json").write_text(json.dumps(lacking))
        with pytest.raises(CheckpointError, match=rf"run: is .* of another version .*{name}'"):
            write(folder / "first", run)
    for name, content in (("summary.json", "[]"), ("metrics.jsonl", "[]\n")):
        (changed(folder, run) / name).write_text(content)
        with pytest.raises(CheckpointError, match=r"run: is damaged, or of another version"):
            write(run)
    changed(folder, run)
    (run / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"run: is .* of another version of .*'run'"):
        write(run)


@pytest.mark.parametrize(
    ("state", "error", "sentence"),
    [
        ("preempted", None, "no result. It was stopped, at step 7."),
        ("failed", "--lr 1: no number", "no result. It failed, at step 7: --lr 1: no number."),
        ("running", None, "no result. It was killed, at step 7."),
        ("running, here", None, "no result yet. It is running, at step 7."),
    ],
)
def test_a_run_without_a_result_says_why(
    state: str,
    error: str | None,
    sentence: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A result from before more epochs is none: its model and summary are of its first end."""
    state, _, here = state.partition(", ")
    run = changed(folder, tmp_path / "run", "status.json", state=state, step=7, error=error)
    (run / "metrics.jsonl").write_text('{"step": 8, "lo')  # torn
    with RunFolder() as writing:
        if here:
            writing.open(run)
        [path] = write(run)
    assert capsys.readouterr().err == ""  # the page says it
    text, accuracy = words(path), f"{summary_of(run)['test_accuracy']:.4f}"
    assert figures(path.read_text()) == {}
    assert sentence in text
    assert f"finished before, after step 45 with test accuracy {accuracy}, and was resumed" in text
    assert "Too few steps were logged for a curve." in text


def test_any_name_is_in_the_legend_and_none_is_html(folder: Path, tmp_path: Path) -> None:
    runs = [changed(folder, tmp_path / name) for name in ("a$^$", "_b", "<b>c")]
    no_utf_8 = changed(folder, tmp_path / os.fsdecode(b"\xe9"))
    config = read_json(runs[0] / "config.json")
    config["run"]["dataset"] = "<script>alert(1)</script>"
    (runs[0] / "config.json").write_text(json.dumps(config))
    [path] = write(*runs, no_utf_8, folder / "second")
    text = path.read_text()
    assert "<script>" not in text
    assert "<b>c" not in text
    assert "&lt;script&gt;alert(1)" in text
    svg = html.unescape(text.partition("<svg")[2])
    for name in (*(run.name for run in runs), "?"):
        assert svg.count(f"\u200b{name}<") == len(plots.CURVES)


def test_names_are_shown_whole_and_what_is_missing_is_not_shown(
    folder: Path, tmp_path: Path
) -> None:
    """Of an older run whose forward passes were not timed; a class without images is not right."""
    names = [f"a class with a long name, number {n}" for n in range(10)]
    summary = summary_of(folder / "first")
    summary["confusion"][0] = [0] * 10
    ranks = [
        {name: rank[name] for name in rank if name != "forward_ms"} for rank in summary["ranks"]
    ]
    more = {"classes": names, "confusion": summary["confusion"], "ranks": ranks}
    [path] = write(changed(folder, tmp_path / "run", **more))
    page = path.read_text()
    assert "Forward pass, ms" in page
    assert page.count('class="cell-right"') == 9
    heads = re.findall(r'<th scope="(col|row)">(a class .*?)</th>', page)
    assert [name for scope, name in heads if scope == "col"] == names
    assert [name for scope, name in heads if scope == "row"] == names * 2  # and the list by class


# --- What to make of it


def test_a_mistake_has_its_file_and_many_classes_their_top_5(tmp_path: Path) -> None:
    classes = " ".join(f"class-{number:02d}" for number in range(20))
    photos = write_noise(tmp_path / "photos", *flat(200, classes=classes))
    own = proof_config("own", model="mlp", epochs=1, batch_size=24, val_size=0)
    run_of_photos = dataclasses.replace(own.run, dataset=str(photos), test_size=60)
    run_world(1, just_train, dataclasses.replace(own, run=run_of_photos), folder=tmp_path)
    run = read(path := tmp_path / "own")
    assert len(run.mistakes) == report.MOST_WRONG
    for mistake in run.mistakes:
        file = photos / mistake["place"]
        assert file.parent.name == mistake["label"]
        stored = base64.b64decode(mistake["png"].partition(",")[2])
        with PIL.Image.open(file) as given, PIL.Image.open(io.BytesIO(stored)) as shown:
            assert given.tobytes() == shown.tobytes()
    [page] = write(path)
    assert run.mistakes[0]["place"] in words(page)
    images = cache.load(str(photos), None, ImageOptions(test_size=60))
    trained = weights.from_bytes(weights.read_bytes(str(path)), "")
    with torch.inference_mode():
        five = trained.model(images.test_images).argsort(1, descending=True)[:, :5]
    right = (five == images.test_labels[:, None]).any(1).double().mean().item()
    value, _ = figures(page.read_text())["own", "top_accuracy"]
    assert float(value) == pytest.approx(right, abs=1e-12)
    image = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)  # and one in colour
    encoded = report.as_data_uri(image).removeprefix("data:image/png;base64,")
    with PIL.Image.open(io.BytesIO(base64.b64decode(encoded))) as shown:
        assert np.array_equal(np.asarray(shown), image.permute(1, 2, 0))


@pytest.mark.parametrize(
    ("trained", "validated", "recipe", "said"),
    [
        (1.0, 0.56, {}, "images, or --augment, or --model torchvision:resnet18 --weights DEFAULT."),
        (1.0, 0.56, {"augment": True, "weights": "x"}, "(overfitting). To try next: more images."),
        (0.5, 0.45, {}, "(underfitting). To try next: more --epochs, or a larger --image-size,"),
        (0.97, 0.96, {}, "neither over- nor underfitting. To try next: more images, or more --e"),
    ],
)
def test_what_train_and_validation_say_together(
    trained: float, validated: float, recipe: dict[str, Any], said: str
) -> None:
    metrics = [
        {"epoch": 0, "accuracy": 0.1},
        {"epoch": 1, "accuracy": trained - 0.02},
        {"epoch": 1, "accuracy": trained + 0.02},
        {"epoch": 1, "val_accuracy": validated},
    ]
    config = {"recipe": {"model": "cnn", "augment": False, "weights": None} | recipe}
    summary: dict[str, Any] = {"val_accuracy": validated, "test_accuracy": 0.3}
    summary |= {"dataset": {"val_rows": 200}, "test_count": 200}
    run = report.ReportedRun(Path("a"), "a", config, metrics, summary, {})
    sentence = report.advice(run)
    assert f"{trained:.4f} of the training images" in sentence
    assert f"{validated:.4f} of the validation images: " in sentence
    assert said in sentence
    summary["val_accuracy"] = None  # --val-size 0: the test takes its place
    assert "0.3000 of the test images: the net" in report.advice(run)
    assert report.advice(dataclasses.replace(run, metrics=[])) == ""


# --- In a browser


def chromium(page: Path, *flags: str) -> str:
    """The page's DOM after it was loaded without a network; console messages fail the test."""
    program = shutil.which("chromium-browser") or "chromium"
    require_programs(program)
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
    command += [f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri()]
    short = {**os.environ, "TMPDIR": "/tmp"}  # its socket lies there
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=short)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if ":CONSOLE" in line] == []
    return done.stdout


@pytest.mark.system
def test_the_page_in_chromium(folder: Path, tmp_path: Path) -> None:
    """Tables scroll within themselves; the page as a whole is not wider than a phone."""
    run = folder / "second"
    [path] = write(run, out=str(tmp_path / "report.html"))
    assert "By rank" not in words(path)  # it has one
    assert path.stat().st_size < 1.5e6
    page, accuracy = chromium(path, "--dump-dom"), summary_of(run)["test_accuracy"]
    assert figures(page)["second", "test_accuracy"] == (str(accuracy), f"{accuracy:.4f}")
    assert len(re.findall(r'<img [^>]*alt="test image \d+: ', page)) == report.MOST_WRONG
    # frames of these widths, as a headless window is at least 500 wide
    frame = '<iframe src="report.html" style="width:{}px;height:900px"></iframe>'
    (probe := tmp_path / "probe.html").write_text(
        f"{frame.format(360)}{frame.format(1100)}<script>onload = () => {{"
        " for (const f of document.querySelectorAll('iframe')) document.body.append("
        " `wide ${f.contentDocument.documentElement.scrollWidth};`) }</script>"
    )
    shown = chromium(probe, "--dump-dom", "--allow-file-access-from-files")
    narrow, wide = map(int, re.findall(r"wide (\d+);", shown))
    assert narrow <= 360
    assert wide <= 1100
