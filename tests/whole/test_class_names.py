"""Names of classes, of any length and script, are shown whole wherever they are shown."""

import html
import json
import re
from pathlib import Path

import numpy as np

from ddp_mnist.cluster.local_world import run_world
from ddp_mnist.system.files import read_json
from ddp_mnist.verbs.render import markdown
from ddp_mnist.verbs.verify.watch import just_train, proof_config
from tests.commands import Typed
from tests.data_sets import write_noise
from tests.run_checks import with_flags

LONG = "a very long class name of sixty characters, and still more {n:03}"
CHINESE = "第{n:02}类、名称很长的中文类别、包括「标点符号」"
NAMES = sorted([*(LONG.format(n=n) for n in range(90)), *(CHINESE.format(n=n) for n in range(30))])


def test_names_are_shown_whole_everywhere(here: Path, typed: Typed) -> None:
    """Of many classes the worst alone are shown to people, and all are counted."""
    counts = {"train": 4, "test": 2}
    images = [f"{s}/{name}/{n}.png" for s in counts for name in NAMES for n in range(counts[s])]
    write_noise(here / "own", *images, size=(8, 8))
    config = proof_config(model="mlp", epochs=1, batch_size=100, val_size=100)
    config = with_flags(config, dataset="own", mixed_precision="no")
    run_world(1, just_train, config, folder=here)
    summary = read_json(Path("run/summary.json"))
    assert summary["classes"] == NAMES

    cells = np.array(json.loads(typed("evaluate", "run", "--json").out)["confusion"])
    assert cells.sum(1).tolist() == [2] * 120
    printed = typed("evaluate", "run").out
    lines = printed.splitlines()
    pairs = np.argwhere(cells).tolist()
    assert summary["confusion"] == [[*pair, cells[*pair]] for pair in pairs]
    assert lines[2] == "accuracy   images   the worst of 120 classes"
    assert {re.sub(r"^ *\S+ +\S+ +", "", line) for line in lines[3:13]} < {*NAMES}
    taken = [re.sub(r"^ *\S+ +", "", line).split(", taken for ") for line in lines[14:]]
    assert len(taken) == 10 and {name for pair in taken for name in pair} < {*NAMES}

    assert typed("report", "run").code == 0
    page = html.unescape(Path("run/report.html").read_text())
    heads = re.findall(r'<th scope="row"><bdi>(.*?)</bdi></th>', page)
    heads = [head for head in heads if head in NAMES]
    assert len(heads) == 24 + 120  # the most frequent confusions, and the list by class
    assert heads[24:] == NAMES
    confused = re.findall(r'<td class="words"><bdi>(\S.*)</bdi> \(\d+\)</td>', page)
    assert confused and set(confused) <= {*NAMES}

    assert typed("export", "run", "--format", "safetensors").code == 0
    card = Path("run/export/README.md").read_text()
    assert f"- Classes: {', '.join(map(markdown, NAMES))}\n" in card

    printed = typed("predict", "run", f"own/test/{NAMES[-1]}/0.png", "--top", 120).succeeds()
    answer = json.loads(printed)
    assert f'"{NAMES[-1]}": ' in printed
    assert sorted(answer["probabilities"]) == NAMES
    assert answer["label"] in NAMES
