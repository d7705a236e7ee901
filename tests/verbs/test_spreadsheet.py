"""What is written for spreadsheets is read alike by them and by pandas, and runs nothing."""

import csv
import io
import math
import sys

import pandas
import pytest

from ddp_mnist.system.console import Console
from ddp_mnist.verbs import spreadsheet

COMPUTED = ["=1+1", "+cat", "-cat", "@cat", "\t=1", "\r=1", "\n=1", "'cat", "''"]
COMPUTED += ["\uff1d1", "\uff0b1"]  # in full width
PLAIN = ["cat", "a=b", "Käfer", "甲虫", 'a,"b"', "a\nb\rc", "חתול", "NA", "👨\u200d👩"]


def test_every_name_comes_back_and_none_is_a_formula() -> None:
    """Excel knows UTF-8 by the mark; what it shows begins with an apostrophe, or is a name."""
    content = spreadsheet.to_bytes(
        [["name", "number"], *([name, -1.5] for name in COMPUTED + PLAIN)]
    )
    assert content.startswith(b"\xef\xbb\xbfname,number\r\n")
    found = pandas.read_csv(io.BytesIO(content), keep_default_na=False)
    assert found["name"].tolist() == [f"'{name}" for name in COMPUTED] + PLAIN
    assert found["name"].str.removeprefix("'").tolist() == COMPUTED + PLAIN
    assert set(found["number"]) == {-1.5}
    cells = [row[0] for row in csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""))]
    assert cells[1:] == found["name"].tolist()


def test_what_is_no_number_or_no_text_is_an_empty_cell_or_escaped() -> None:
    cells = [None, math.nan, math.inf, 0.25, 3, "caf\udce9"]
    assert spreadsheet.to_bytes([cells], is_first=False) == b",,,0.25,3,caf\\udce9\r\n"


def test_a_terminal_is_not_steered(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    def print_both() -> None:
        spreadsheet.print_row(Console(True), ["file"], is_first=True)
        spreadsheet.print_row(Console(True), ["a\x1b[2J"], is_first=False)

    print_both()
    assert capsysbinary.readouterr().out == b"\xef\xbb\xbffile\r\na\x1b[2J\r\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_both()
    assert capsysbinary.readouterr().out == b"file\na\\x1b[2J\n"
