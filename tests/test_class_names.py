"""Names of classes, of any length and script, are shown whole wherever they are shown."""

import html
import json
import re
from pathlib import Path

import PIL.Image
import pytest
from matplotlib.figure import Figure

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.run.folder import read_json
from ddp_mnist.verify.watch import just_train, proof_config
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

    lines = typed("evaluate", "run").out.splitlines()[4:]
    shown = [re.sub(r"^ *\d+ ", "", line).rsplit(None, 1 + count)[0] for line in lines]
    assert shown == names

    assert typed("report", "run").code == 0
    page = html.unescape((tmp_path / "run" / "report.html").read_text())
    for scope, times in (("col", 1), ("row", 2)):  # the matrix, and the list by class
        heads = re.findall(rf'<th scope="{scope}">(.*?)</th>', page)
        assert [head for head in heads if head in names] == names * times
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
