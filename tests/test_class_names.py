"""Names of classes, of any length and script, are shown whole wherever they are shown."""

import html
import json
import re
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from matplotlib.figure import Figure

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.run.folder import read_json
from ddp_mnist.verify.watch import just_train, proof_config
from tests.commands import Typed
from tests.test_sources import cells_of, encoded
from tests.training import with_flags

LONG = "a very long class name of sixty characters, and still more {n:03}"
CHINESE = "第{n}类、名称很长的中文类别、包括「标点符号」"
CLASSES = {
    2: [CHINESE.format(n=2), LONG.format(n=1)],
    120: sorted([*(LONG.format(n=n) for n in range(90)), *map("短{:03}".format, range(30))]),
}


@pytest.mark.parametrize("count", CLASSES)
def test_names_are_shown_whole_everywhere(
    count: int, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = sorted(CLASSES[count])
    for split, images in (("train", 2400 // count), ("test", 2)):
        for number, name in enumerate(names):
            (folder := tmp_path / "own" / split / name).mkdir(parents=True)
            for image in range(images):
                pixel = PIL.Image.new("L", (8, 8), 2 * number)
                pixel.save(folder / f"{image}.png")
    config = proof_config(model="mlp", epochs=1, batch_size=100, val_size=100)
    config = with_flags(config, dataset=str(tmp_path / "own"), mixed_precision="no")
    run_world(1, just_train, config, folder=tmp_path)
    assert read_json(tmp_path / "run" / "summary.json")["classes"] == names
    assert f'"{names[-1]}"' in (tmp_path / "run" / "summary.json").read_text()
    assert f'"{names[-1]}"' in typed("evaluate", "run", "--json").out

    lines = typed("evaluate", "run").out.splitlines()
    if count == 2:
        shown = [re.sub(r"^ *\d+ ", "", line).rsplit(None, 1 + count)[0] for line in lines[4:]]
        assert shown == names
    else:
        assert {re.sub(r"^ *\S+ +\S+ +", "", line) for line in lines[3:13]} < {*names}
        pairs = [re.sub(r"^ *\S+ +", "", line).split(", taken for ") for line in lines[14:]]
        assert len(pairs) == 10 and {name for pair in pairs for name in pair} < {*names}

    assert typed("report", "run").code == 0
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    heads = {
        scope: [h for h in re.findall(rf'<th scope="{scope}">(.*?)</th>', page) if h in names]
        for scope in ("col", "row")
    }
    assert heads["row"][-count:] == names  # the list by class
    if count == 2:  # the matrix
        assert (heads["col"], heads["row"][:count]) == (names, names)
    else:  # the most frequent confusions
        assert (heads["col"], len(heads["row"])) == ([], 24 + count)
    confused = re.findall(r'<td class="words">(\S.*) \(\d+\)</td></tr>', page)
    assert confused or count == 2  # all are right
    assert set(confused) <= set(names)

    assert typed("export", "run").code == 0
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert ", ".join(names) in " ".join(card.split())
    [listed] = re.findall(r"```json\n(.*)\n```", card)
    assert json.loads(listed) == names
    assert f'"{names[-1]}"' in listed

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    file = tmp_path / "own" / "test" / names[-1] / "0.png"
    ended = typed("predict", "run", file, "--top", count, "--show", "seen.png")
    assert (ended.code, ended.err) == (0, "")
    answer = json.loads(ended.out)
    assert f'"{names[-1]}": ' in ended.out
    assert sorted(answer["probabilities"]) == names
    assert answer["label"] in (names[-1:] if count == 2 else names)
    [[axis]] = [figure.axes for figure in figures]
    title = axis.get_title()  # the lines of Chinese have no spaces between them
    assert max(map(len, title.splitlines())) <= 20
    written = f"0.png{answer['label']}({answer['probability']:.2f})"
    assert re.sub(r"\s", "", title) == re.sub(r"\s", "", written)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert typed("predict", "run", file, "--show", "seen.png").err == ""


def test_a_thousand_classes_are_shown_by_the_worst_and_counted_whole(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names, stream = [f"class {n:03}" for n in range(1000)], np.random.default_rng(0)
    (tmp_path / "own").mkdir()
    for split, times in (("train", 2), ("test", 1)):
        pixels = stream.integers(0, 256, (1000 * times, 8, 8), dtype=np.uint8)
        columns = {"image": cells_of([*map(encoded, pixels)]), "label": names * times}
        pq.write_table(pa.table(columns), tmp_path / "own" / f"{split}.parquet")
    config = proof_config(model="mlp", epochs=1, batch_size=100, val_size=0)
    config = with_flags(config, dataset=str(tmp_path / "own"), mixed_precision="no")
    run_world(1, just_train, config, folder=tmp_path)
    summary = read_json(tmp_path / "run" / "summary.json")
    assert (tmp_path / "run" / "summary.json").stat().st_size < 200_000

    whole = json.loads(typed("evaluate", "run", "--json").out)
    cells = np.array(whole["confusion"])
    assert cells.shape == (1000, 1000)
    assert summary["confusion"] == [[*pair, cells[*pair]] for pair in np.argwhere(cells).tolist()]
    assert cells.sum(1).tolist() == [1] * 1000

    printed = typed("evaluate", "run").out
    assert len(printed) < 2000
    lines = printed.splitlines()
    assert (lines[0], lines[2]) == (
        "test split of own: 1,000 images",
        "accuracy   images   the worst of 1,000 classes",
    )
    assert lines[3] == f"  0.0000        1   {names[whole['class_accuracy'].index(0)]}"
    assert len(lines) == 24

    assert typed("report", "run").code == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert len(page) < 400_000
    rows = re.findall(r'<th scope="row">(class \d+)</th><td>1</td>', page)
    assert rows == names
