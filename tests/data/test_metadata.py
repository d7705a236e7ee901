"""A metadata file is read as programs and people write it; what it lacks is told by its line."""

import json
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ddp_mnist.config.image_options import AS_THEY_ARE, ImageOptions
from ddp_mnist.data.listing import Listing
from ddp_mnist.data.sources import find_source
from ddp_mnist.errors import DataError, UsageError
from tests.data_sets import named, read, write_noise, write_split

NAMES = [f"{number}.png" for number in range(4)]
LABELS = ["cat", "dog", "cat", "dog"]
ROWS = [*zip(NAMES, LABELS, strict=True)]
NUMBERS = ImageOptions(numbers=("x",))
NFC, NFD = (unicodedata.normalize(form, "é.png") for form in ("NFC", "NFD"))


def csv(separator: str = ",", heading: str = "file_name,label", rows: Any = ROWS) -> str:
    lines = [heading.split(","), *([str(cell) for cell in row] for row in rows)]
    return "".join(separator.join(line) + "\n" for line in lines)


def jsonl(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


OBJECTS = [{"file_name": name, "label": label} for name, label in ROWS]
TABLE = csv()
CALLED = "a table of the images is called metadata.csv, and has the"


def listed(root: Path, content: Any, name: str, reading: ImageOptions = AS_THEY_ARE) -> Listing:
    """Return what is listed of four images that a file describes; a dict is for parquet."""
    write_noise(root, *NAMES)
    if isinstance(content, dict):
        pq.write_table(pa.table(content), root / name)
    else:
        text = content if isinstance(content, bytes) else content.encode()
        (root / name).write_bytes(text)
    return find_source(str(root)).listing(reading)


LONG = [(*row, "1,2 " * 40_000) for row in ROWS]
TAKEN: dict[str, tuple[str, Any]] = {
    "semicolons": ("metadata.csv", csv(";")),
    "tabs": ("metadata.tsv", csv("\t")),
    "tabs in .csv": ("metadata.csv", csv("\t")),
    "Excel's first line": ("metadata.csv", "sep=;\r\n" + csv(";").replace("\n", "\r\n")),
    "a separator in quotes": ("metadata.csv", csv(";", 'file_name,label,"a, b, c"')),
    "blank lines": ("metadata.csv", "\n\n" + TABLE + "\n,,\n"),
    "a mark of UTF-8": ("metadata.csv", b"\xef\xbb\xbf" + TABLE.encode()),
    "UTF-16": ("metadata.csv", csv("\t").encode("utf-16")),
    "UTF-16 of JSON": ("metadata.jsonl", jsonl(*OBJECTS).encode("utf-16")),
    "blanks": ("metadata.csv", TABLE.replace(",", " , ").replace("png", "png\u00a0")),
    "other case": ("Metadata.CSV", csv(heading="File_Name,LABEL")),
    "labels": ("metadata.csv", csv(heading="file_name,Labels")),
    "a long cell": ("metadata.csv", csv(";", "file_name,label,mask", LONG)),
    "JSON lines": ("metadata.jsonl", "\n".join(json.dumps(row) for row in OBJECTS)),
    "parquet": ("metadata.parquet", {"file_name": NAMES, "label": LABELS}),
}


@pytest.mark.parametrize("how", TAKEN)
def test_a_table_is_read_however_it_was_saved(how: str, tmp_path: Path) -> None:
    name, content = TAKEN[how]
    found = listed(tmp_path, content, name)
    assert (found.classes, found.targets["train"].tolist()) == (["cat", "dog"], [0, 1, 0, 1])
    assert found.notes == []


@pytest.mark.parametrize(
    ("named", "there"),
    [
        (NFC, NFD),
        (NFD, NFC),
        ("a.png ", "a.png"),
        ("a.png ", "a.png "),
        ("{root}/a.png", "a.png"),
        ("../own/a.png", "a.png"),
        ("./b/../a.png", "a.png"),
        (".\\a.png", "a.png"),
    ],
)
def test_a_file_is_found_in_another_spelling(named: str, there: str, tmp_path: Path) -> None:
    own = write_noise(tmp_path / "own", "a.png")
    (own / "a.png").rename(own / there)
    rows = [(f'"{named.format(root=own)}"', "cat"), *ROWS]
    found = listed(own, csv(rows=rows), "metadata.csv")
    assert f"{own}/{there}" in found.images["train"]
    assert len(found) == 5


def test_columns_that_may_name_groups_are_told(tmp_path: Path) -> None:
    heading, more = "file_name,label,Tier,number,site", zip("AABB", "1234", "xxxx", strict=True)
    rows = [(*row, *each) for row, each in zip(ROWS, more, strict=True)]
    found = listed(tmp_path, csv(heading=heading, rows=rows), "metadata.csv")
    which = "if one tells which images belong together, give train --columns group=ITS_NAME"
    assert found.notes == [f"metadata.csv: columns not used: 'Tier'; {which}"]
    grouped = csv(heading="file_name,label,group,number,Tier", rows=rows)
    assert listed(tmp_path, grouped, "metadata.csv").notes == []


OWN_NAMES = "file_name=Datei, label=Art, group=Tier, split=Teil"


def test_a_table_with_column_names_of_its_own_is_read_as_it_is(tmp_path: Path) -> None:
    more = zip(["7,0", "7", "8", "9"], ["train", "train", "test", "Test"], strict=True)
    rows = [(*row, *each) for row, each in zip(ROWS, more, strict=True)]
    table = csv(";", "Datei,Art,Tier,Teil", rows)
    found = listed(tmp_path, table, "metadata.csv", named(OWN_NAMES))
    assert {split: targets.tolist() for split, targets in found.targets.items()} == {
        "train": [0, 1],
        "test": [0, 1],
    }
    assert (found.classes, found.groups, found.notes) == (["cat", "dog"], list("7789"), [])
    numbers = replace(named("file_name=Datei,x=Tier"), numbers=("x",))
    whole = find_source(str(tmp_path)).listing(numbers)
    assert [*np.concatenate([*whole.targets.values()])] == [7, 7, 8, 9]


def test_a_column_that_a_table_lacks_is_an_error(tmp_path: Path) -> None:
    lacks = "^--columns label=Art: metadata.csv has no such column, only 'file_name', 'label'; corr"
    for options in (named("label=Art"), replace(named("label=Art"), test_size=0)):
        with pytest.raises(UsageError, match=lacks):
            listed(tmp_path, TABLE, "metadata.csv", options)
    with pytest.raises(
        UsageError, match=r"^--columns image=b: .* choose from file_name, label, sp"
    ):
        listed(tmp_path, TABLE, "metadata.csv", named("image=b"))
    without = replace(named("group=Tier"), test_size=0)  # evaluated on, it needs no groups
    assert listed(tmp_path, TABLE, "metadata.csv", without).groups == [""] * 4
    with pytest.raises(DataError, match=r"^--dataset .* metadata\.csv has no rows"):
        listed(tmp_path, "file_name,Art\n", "metadata.csv", named("label=Art"))


def test_a_column_has_one_use(tmp_path: Path) -> None:
    """What is a label is no group besides, and no advice would take a number's place."""
    rows = [(*row, group) for row, group in zip(ROWS, "1122", strict=True)]
    table = csv(heading="file_name,label,group", rows=rows)
    found = listed(tmp_path, table, "metadata.csv", named("label=group"))
    assert (found.classes, found.groups) == (["1", "2"], [""] * 4)
    found = listed(tmp_path, table, "metadata.csv", ImageOptions(numbers=("group",)))
    assert (found.notes, found.groups) == ([], [""] * 4)


def test_names_of_columns_as_people_read_them(tmp_path: Path) -> None:
    """And the sign beside them separates, even if another is more frequent."""
    heading = f"Datei;{unicodedata.normalize('NFD', 'Größe')};a,b,c,d"
    table = "\n".join([heading, *(f"{name};{label};" for name, label in ROWS)])
    found = listed(tmp_path, table, "metadata.csv", named("file_name=datei,label=größe"))
    assert found.classes == ["cat", "dog"]


def test_a_table_of_another_name_beside_folders_of_classes_is_told(tmp_path: Path) -> None:
    write_noise(tmp_path, "a/0.png", "a/1.png", "b/2.png")
    (tmp_path / "Fotos.csv").write_text("Datei;Tier\na/0.png;7\n")
    notes = find_source(str(tmp_path)).listing(AS_THEY_ARE).notes
    assert notes == ["Fotos.csv has the columns 'Datei', 'Tier', and was not used"]


@pytest.mark.parametrize("separator", [";", "\t"])
def test_decimal_commas_where_columns_are_not_separated_by_them(
    separator: str, tmp_path: Path
) -> None:
    cells = ["24,9", "-0,25", "7", "1,500"]
    rows = [*zip(NAMES, cells, strict=True)]
    found = listed(tmp_path, csv(separator, "file_name,x", rows), "metadata.csv", NUMBERS)
    assert found.targets["train"].tolist() == [[pytest.approx(x)] for x in (24.9, -0.25, 7, 1.5)]
    assert found.careful == []


POINT = csv(";", "file_name,x", zip(NAMES, ["24,9", "31,5", "24.9", "7"], strict=True))
NO_NUMBER = csv(";", "file_name,x", zip(NAMES, ["24,9", "n.a.", "31,5", "7"], strict=True))
THOUSANDS = csv(";", "file_name,x", zip(NAMES, ["1.000", "12.500", "999,5", "7"], strict=True))
GROUPED = csv(";", "file_name,x", zip(NAMES, ["800", "1.022", "1.044", "90"], strict=True))
NO_COMMA = '{"file_name": "3.png" "label": "dog"}'
AS_NUMBERS = [{"file_name": number, "label": "cat"} for number in range(2)]
SHORT = csv(heading="label,file_name", rows=[("a", "0.png"), ("b",)])
NO_LABELS = csv(";", rows=[("0.png", ""), *ROWS, ("1.png", " ")])
NULLS = {"file_name": [*NAMES, None], "label": [*LABELS, "cat"]}
FLOATS = {"file_name": NAMES, "label": [1.0, None, 2.0, 3.0]}
NAME, LABEL = "no name in column file_name", "no label in column label"
REFUSED: dict[str, tuple[str, Any]] = {  # words of the line, and what is in the file
    "1 of 3 rows has no label in column label: line 4 is 'dog.*3.png,dog'": (
        ".csv",
        'file_name,label\n0.png,cat\n1.png,dog\n0.png,"dog\n2.png,cat\n3.png,dog"\n',
    ),
    "line 2: ',' expected after '\"'; close each quote, and double those within": (
        ".csv",
        'file_name,label\n0.png,"a \\"big\\" cat"\n',
    ),
    "4 is .*Expecting ',' delimiter in column 23.; give": (".jsonl", jsonl(*OBJECTS[:3], NO_COMMA)),
    "line 4 is .*Unterminated string starting at in column": (".jsonl", jsonl(*OBJECTS)[:-4]),
    r"line 1 is '\[{.*it is not an object.; give one {": (".jsonl", jsonl(OBJECTS)),
    """line 1 is '"0.png"' .it is not an object.; give one {""": (".jsonl", jsonl('"0.png"')),
    f"1 of 5 rows has {NAME}: line 1 has none; name": (".jsonl", jsonl({"label": "a"}, *OBJECTS)),
    f"2 of 2 rows have {NAME}: line 1 is 0, line 2 is 1; name": (".jsonl", jsonl(*AS_NUMBERS)),
    f"1 of 2 rows has {NAME}: line 3 has none; name a file": (".csv", SHORT),
    f"1 of 5 rows has {LABEL}: line 6 has none; give": (".csv", csv(rows=[*ROWS, ("0.png",)])),
    f"2 of 6 rows have {LABEL}: line 2 is '', line 7 is '';": (".csv", NO_LABELS),
    "1 of 5 rows has more cells than columns: line 6 is 'b'": (".csv", f"{TABLE}0.png,a,b"),
    "line 6 has letters in another encoding; save": (".csv", f"{TABLE}ä.png,x".encode("cp1252")),
    "line 1 has letters in another encoding; save": (".csv", TABLE.encode("utf-16-le")),
    "has several columns label, label; keep one": (".csv", "file_name,label,label\n0.png,a,b"),
    f"1 of 5 rows has {NAME}: row 4 has none": (".parquet", NULLS),
    "row 0 is b'0.png'": (".parquet", {"file_name": [b"0.png"], "label": ["a"]}),
    f"4 of 4 rows have {LABEL}: row 0 is 1.0, row 1 has none, row 2 is": (".parquet", FLOATS),
    r"which folder .* no column file_name and label, only 'file_name\|label'": (".csv", csv("|")),
    "which folder .* metadata.csv has no rows": (".csv", "file_name,label\n"),
    "0.png has the labels cat and dog; decide on one": (".csv", f"{TABLE}0.png ,dog"),
    "1 of 4 rows has no number in column x: line 4 is '999,5'": (".csv", THOUSANDS),
    "1 of 4 rows has no number in column x: line 3 is 'n.a.'": (".csv", NO_NUMBER),
    "1 of 4 rows has a number with a point in column x, .*: line 4 is '24.9'": (".csv", POINT),
    "2 of 4 rows have a number in column x that may be in thousands .*: line 3": (".csv", GROUPED),
}


def test_a_row_without_a_group_is_not_one_with(tmp_path: Path) -> None:
    rows = [("0.png", "cat", ""), ("0.png", "cat", "A")]
    with pytest.raises(DataError, match=r"line 3: 0\.png has the groups none and A; decide on one"):
        listed(tmp_path, csv(",", "file_name,label,group", rows), "metadata.csv")


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_wrong_is_told_with_file_and_line(words: str, tmp_path: Path) -> None:
    ending, content = REFUSED[words]
    with pytest.raises(DataError, match=f"^--dataset {tmp_path}: .*{words}") as refused:
        options = NUMBERS if "number" in words else AS_THEY_ARE
        listed(tmp_path, content, f"metadata{ending}", options)
    assert f"metadata{ending}" in str(refused.value)
    assert "Error" not in str(refused.value)


def test_all_cells_that_are_no_numbers_are_told_at_once(tmp_path: Path) -> None:
    cells = {1: "", 3: "24,9", 5: "nan", 6: "1e39"}
    rows = [("0.png", 0, cells.get(row, "1.5")) for row in range(9)]
    two = ImageOptions(numbers=("w", "x"))
    line = (
        f"--dataset {tmp_path}: metadata.tsv: 4 of 9 rows have no number in column x: line 3 is '',"
        " line 5 is '24,9', line 7 is 'nan', ...; give numbers below 3e+38, or delete these rows"
    )
    with pytest.raises(DataError) as refused:
        listed(tmp_path, csv("\t", "file_name,w,x", rows), "metadata.tsv", two)
    assert str(refused.value) == line
    (tmp_path / "metadata.tsv").unlink()
    quoted = csv(",", "file_name,w,x", [(*row, f'"{cell}"') for *row, cell in rows])
    with pytest.raises(DataError, match=r"line 3 is '', line 5 is '24,9', line 7 is 'nan', \.\.\."):
        listed(tmp_path, quoted, "metadata.csv", two)


@pytest.mark.parametrize("name", ["train.csv", "labels.tsv", "all.jsonl", "x.parquet"])
def test_images_without_folders_beside_a_table_of_another_name(name: str, tmp_path: Path) -> None:
    contents = {".csv": "id,breed\n0,x\n", ".tsv": "id\tbreed\n", ".jsonl": '{"id": 0, "breed": 1}'}
    content = contents.get(Path(name).suffix, {"id": [1], "breed": ["x"]})
    has = f"{name} has the columns 'id', 'breed'"
    with pytest.raises(DataError, match=f"which folder is the class of 0.png.*; {has}; {CALLED}"):
        listed(tmp_path, content, name)


def test_a_name_with_a_blank_that_is_not_there_is_shown_in_quotes(tmp_path: Path) -> None:
    write_noise(tmp_path, *NAMES)
    (tmp_path / "metadata.csv").write_text(csv(rows=[*ROWS, ("9.png ", "cat")]))
    with pytest.raises(DataError, match=r"1 of 5 images cannot be read: '9.png ' \(No such file"):
        read(tmp_path)


def test_numbers_in_a_table_are_told_in_the_same_way(tmp_path: Path) -> None:
    """And labels, see MISTAKES in test_sources.py."""
    write_split(tmp_path, "train", x=["1", None, "2,5", "nan", *["2"] * 8])
    words = "3 of 12 rows have no number in column x: row 1 has none, row 2 is"
    with pytest.raises(DataError, match=words):
        find_source(str(tmp_path)).listing(NUMBERS)


@pytest.mark.parametrize("first", [1_732_704_000, 20_241_127])
def test_numbers_that_float32_cannot_tell_apart(first: int, tmp_path: Path) -> None:
    rows = [(name, first + 0.25 * number) for number, name in enumerate(NAMES)]
    found = listed(tmp_path, csv(",", "file_name,x", rows), "metadata.csv", NUMBERS)
    said = "column x has 4 different numbers, and 1 in float32: subtract their mean"
    assert found.careful == [said]
