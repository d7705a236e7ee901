"""Names of classes, of any length and script, are shown whole wherever they are shown."""

import html
import json
import re
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from matplotlib.figure import Figure

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.render import markdown
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.commands import Typed
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
    """Of many classes the worst alone are shown to people, and all are counted."""
    monkeypatch.chdir(tmp_path)
    names = sorted(CLASSES[count])
    for split, images in (("train", 2400 // count), ("test", 2)):
        for number, name in enumerate(names):
            (folder := tmp_path / "own" / split / name).mkdir(parents=True)
            for image in range(images):
                drawn = PIL.Image.new("L", (8, 8), 2 * number)
                drawn.putpixel((0, 0), 255)
                drawn.save(folder / f"{image}.png")
    config = proof_config(model="mlp", epochs=1, batch_size=100, val_size=100)
    config = with_flags(config, dataset=str(tmp_path / "own"), mixed_precision="no")
    run_world(1, just_train, config, folder=tmp_path)
    summary = read_json(Path("run/summary.json"))
    assert summary["classes"] == names

    cells = np.array(json.loads(typed("evaluate", "run", "--json").out)["confusion"])
    assert cells.sum(1).tolist() == [2] * count
    printed = typed("evaluate", "run").out
    of_split, copied, *lines = printed.splitlines()  # all images of a class are alike
    assert "test images are in train too" in copied
    lines.insert(0, of_split)
    if count == 2:
        assert summary["confusion"] == cells.tolist()
        shown = [re.sub(r"^ *\d+ ", "", line).rsplit(None, 1 + count)[0] for line in lines[4:]]
        assert shown == names
    else:
        pairs = np.argwhere(cells).tolist()
        assert summary["confusion"] == [[*pair, cells[*pair]] for pair in pairs]
        assert lines[2] == "accuracy   images   the worst of 120 classes"
        assert {re.sub(r"^ *\S+ +\S+ +", "", line) for line in lines[3:13]} < {*names}
        taken = [re.sub(r"^ *\S+ +", "", line).split(", taken for ") for line in lines[14:]]
        assert len(taken) == 10 and {name for pair in taken for name in pair} < {*names}

    assert typed("report", "run").code == 0
    page = html.unescape(Path("run/report.html").read_text())
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

    assert typed("export", "run", "--format", "safetensors").code == 0
    card = Path("run/export/README.md").read_text()
    assert f"- Classes: {', '.join(map(markdown, names))}\n" in card

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    file = tmp_path / "own" / "test" / names[-1] / "0.png"
    printed = typed("predict", "run", file, "--top", count, "--show", "seen.png").succeeds()
    answer = json.loads(printed)
    assert f'"{names[-1]}": ' in printed
    assert sorted(answer["probabilities"]) == names
    assert answer["label"] in (names[-1:] if count == 2 else names)
    [[axis]] = [figure.axes for figure in figures]
    title = axis.get_title()  # the lines of Chinese have no spaces between them
    assert max(map(len, title.splitlines())) <= 20
    shown_whole = f"0.png{answer['label']}({answer['probability']:.2f})"
    assert re.sub(r"\s", "", title) == re.sub(r"\s", "", shown_whole)
