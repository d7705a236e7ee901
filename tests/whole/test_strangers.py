"""A stranger's files start no program, make no request, and are not written through."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from ddp_mnist.data.decode import DECODED, formats, open_image
from ddp_mnist.errors import DataError, DdpMnistError, StorageError
from ddp_mnist.system.files import write_atomically
from ddp_mnist.training.folder import RunFolder
from tests.commands import Typed
from tests.data_sets import POSTSCRIPT, fake_ghostscript, flat, read, write_noise, write_parquet
from tests.hub import Hub
from tests.run_checks import rewrite_config

UNKNOWN = "damaged, or of no format that is read here: save it as PNG"
NOT_READ = (  # how they begin
    POSTSCRIPT,
    b"\xc5\xd0\xd3\xc6" + bytes(40),
    b"\x89HDF\r\n\x1a\n",
    b"\x01\x00\x09\x00\x00\x03" + bytes(40),
    b"\xd7\xcd\xc6\x9a\x00\x00" + bytes(40),
)


def test_fault_67_no_image_is_a_program(
    here: Path, typed: Typed, alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", fake_ghostscript(here))
    for content in NOT_READ:
        (here / "one.png").write_bytes(content)
        for file in (here / "one.png", content):
            with pytest.raises(DataError) as caught, open_image(file):
                pass
            assert str(caught.value) == UNKNOWN
    write_noise(here / "photos", *flat(120))
    (here / "photos" / "cat" / "one.png").write_bytes(POSTSCRIPT)
    said = typed("prepare", "--dataset", "photos").succeeds()
    assert f"1 of 121 images cannot be read and were left out: cat/one.png ({UNKNOWN})" in said
    assert UNKNOWN in typed("predict", alone, "photos/cat/one.png").err
    assert not (here / "started").exists()
    assert {"EPS", "IPTC", "BUFR", "GRIB", "MPEG"}.isdisjoint(formats())  # IPTC may hold an EPS


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of IM, in Pillow 13
def test_other_formats_are_read_and_those_that_others_register(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = sorted({*DECODED.split()} & PIL.Image.SAVE.keys())
    for kind in kinds:
        mode = {"MSP": "1", "XBM": "1", "SPIDER": "F", "BLP": "P"}.get(kind, "RGB")
        PIL.Image.new(mode, (16, 16)).save(file := tmp_path / f"it.{kind}", kind)
        with open_image(file) as image:
            image.load()
            assert image.format == {"MPO": "JPEG"}.get(kind, kind)
    assert len(kinds) > 15

    def own(*_: Any) -> Any:
        return PIL.Image.new("L", (3, 4))

    monkeypatch.setitem(PIL.Image.OPEN, "OWN", (own, lambda start: start.startswith(b"own")))
    with open_image(b"own format") as image:
        assert image.size == (3, 4)


CARD = "---\nconfigs:\n- config_name: default\n  {}\n---\n"
IN_A_CARD = ["data_files: {}", "data_files: [{{split: train, path: {}}}]", "data_dir: {}"]
IN_A_CARD += ["data_files: 'zip://x.parquet::{}'"]


def test_fault_67_a_card_in_a_folder_makes_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for library in ("datasets.config", "huggingface_hub.constants"):
        monkeypatch.setattr(f"{library}.HF_HUB_OFFLINE", False)
    with Hub("some/one", folder := write_parquet(tmp_path)).running() as hub:
        address = f"{hub.endpoint}/x.parquet"
        cards = [(".huggingface.yaml", CARD.strip("-\n").format(f"data_files: {address}"))]
        escaped = f'data_files: "{address.replace(":", chr(92) + "x3a")}"'
        told = [escaped, *(each.format(address) for each in IN_A_CARD)]
        for name, text in cards + [("README.md", CARD.format(each)) for each in told]:
            (folder / name).write_text(text)
            with pytest.raises(DataError, match=f"{name} names .*{address}, and a folder is read"):
                read(folder)
            (folder / name).unlink()
        assert hub.requests == []


def test_fault_67_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    (mine := tmp_path / "mine").write_text("mine")
    (folder := tmp_path / "shared").mkdir()
    (folder / f".a.html.{os.getpid()}-0.tmp").symlink_to(mine)
    write_atomically(folder / "a.html", b"x")
    (folder / "metrics.jsonl").symlink_to(mine)
    (run := RunFolder()).path = folder
    for write in (lambda: run.log(1, {}), lambda: run.cut_metrics(0)):
        with pytest.raises(StorageError, match=r"metrics\.jsonl: cannot be written"):
            write()
    assert (mine.read_text(), (folder / "a.html").read_text()) == ("mine", "x")
    mine.unlink()
    with pytest.raises(DdpMnistError, match=r"holds files that no run wrote .*metrics\.jsonl"):
        RunFolder().create(str(folder), "digits")


SENSELESS: dict[str, Any] = {"val_size": "x", "lr": [1], "loss": "os:abort", "image_size": "a"}


def test_fault_67_a_strangers_run_writes_nowhere_else_and_calls_nothing_of_pythons(
    alone: Path, here: Path, typed: Typed
) -> None:
    shutil.copytree(alone, here / "run")
    saved = json.loads((here / "run" / "config.json").read_text())
    del saved["sha256"]
    rewrite_config(here / "run", json.dumps(saved | {"run": saved["run"] | {"cache_dir": "by/it"}}))
    assert typed("evaluate", "run").code == typed("report", "run").code == 0
    assert not (here / "by").exists()
    groups = {name: group for group in ("run", "recipe") for name in saved[group]}
    wrong = [(groups[name], name, value) for name, value in SENSELESS.items()]
    for group, name, value in [*wrong, ("left_out", "", 1), ("test_share", "", "x")]:
        text = json.dumps(saved | {group: saved[group] | {name: value} if name else value})
        (here / "run" / "config.json").write_text(text)
        ended = typed("evaluate", "run")
        assert (ended.code, ended.err.count("\n")) == (4 - 2 * (name == "loss"), 1), ended.err
    (here / "run" / "config.json").write_text(json.dumps(saved))
    with (here / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "lr": {}}\n{"step": 2, "lr": "<b>"}\n')
    (here / "run" / "summary.json").unlink()
    (here / "run" / "status.json").write_text('{"state": "failed", "step": 1, "error": "x"}')
    ended = typed("report", "run")
    assert (ended.code, ended.err.count("\n"), "metrics.jsonl" in ended.err) == (4, 1, True)
