"""The notebook in docs/: it runs from its first cell to its last, and says everything twice."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from ddp_mnist.cluster.local_world import free_port
from tests.commands import REPOSITORY

pytestmark = pytest.mark.system
NOTEBOOK = REPOSITORY / "docs" / "notebook.ipynb"


def read() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def shown(cell: Any) -> str:
    """Return what a cell prints, and its value; pictures as the names of their formats."""
    texts = []
    for output in cell.outputs:
        if output.get("name") != "stderr":
            data = output.get("data", {})
            texts += [output.get("text") or data["text/plain"], *(data.keys() - {"text/plain"})]
    return "\n".join(texts)


def test_every_paragraph_is_there_in_english_and_in_chinese() -> None:
    for cell in read().cells:
        if cell.cell_type == "markdown":
            head, english, chinese = ["", *cell.source.split("\n\n")][-3:]
            assert not head or re.fullmatch(r"##? [\w ]+ · [\w ]+", head)
            assert len(english.splitlines()) == len(chinese.splitlines()) == 1
            assert not re.search(r"[\u3000-\uffef]", english)
            assert re.search(r"[\u3000-\uffef]", chinese)
            assert not re.search(r"[\u3000-\uffef] [\u3000-\uffef]", chinese)
            for part in (r"`([^`]+)`", r"\]\(([^)]+)\)"):
                assert set(re.findall(part, english)) == set(re.findall(part, chinese)), english
            for link in re.findall(r"\]\(([^)]+)\)", english):
                assert (NOTEBOOK.parent / link).exists()


def test_the_outputs_that_are_kept_are_small_and_name_no_place_of_a_machine() -> None:
    cells = [cell for cell in read().cells if cell.cell_type == "code"]
    assert 12 <= len(cells) <= 16
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert not re.search(r"(?<![\w.])/\w", shown(cell)), cell.source
        assert len(shown(cell).splitlines()) < 30
    assert NOTEBOOK.stat().st_size < 40_000


def test_it_runs_from_the_first_cell_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("TMPDIR", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("MPLBACKEND", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # waits for no other on busy cores
    notebook, launched = read(), "num_processes=2)"
    for cell in notebook.cells:
        port = f'num_processes=2, use_port="{free_port()}")'
        cell.source = cell.source.replace(launched, port)
        # If a forked process hangs, the other one says so before the cell's time is up.
        patient = '"resume": "auto", "dist_timeout": 30}'
        cell.source = cell.source.replace('"resume": "auto"}', patient)
    at = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=100, resources=at, coalesce_streams=True).execute()

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [shown(cell) for cell in cells]
    train, result, picture, found, answer, photos, pieces, _, own, launcher, apart, *stops = outputs
    assert re.search(r"^epoch 5/5 ", train, re.MULTILINE)
    [accuracy] = re.findall(r"'test_accuracy': ([01]\.\d+)", result)
    assert float(accuracy) > 0.97
    assert picture.endswith("image/png")
    assert found.startswith(f"accuracy {float(accuracy):.4f} on 360 images\n0 [2")
    assert "'label': '7'" in answer
    assert float(photos) > 0.9
    assert all(line.split()[1] == "flower" for line in pieces.splitlines())
    assert float(own) > 0.9
    assert launcher.startswith("Launching training on 2 ")
    assert float(apart) < 1e-9
    assert re.match(r"SIGINT: stopped after step \d+ and saved; to go on, add --resume ", stops[0])
    assert stops[1].endswith("('--target-accuracy', True)")
